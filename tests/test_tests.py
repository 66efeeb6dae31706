"""What holds of the tests themselves: nothing goes by the clock outside the `clock` mark, and every wait ends."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CLOCKS = {
    *("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"),
    *("process_time", "process_time_ns", "thread_time", "thread_time_ns", "times", "cpu_times", "getrusage"),
}
# What stops a test until something happens; without an argument, for ever.
WAITS = {"communicate", "join", "wait"}
# Parsing all files takes seconds. Waits that matter have no argument but named ones.
MAY_WAIT = re.compile(rf"\b({'|'.join(CLOCKS)}|sleep)\(|\.({'|'.join(WAITS)})\(\s*(\w+=|\))")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def files() -> list[tuple[str, ast.Module]]:
    """Every file of the tests that may go by a clock or wait, with its syntax tree."""
    texts = {path.relative_to(TESTS).as_posix(): path.read_text("utf-8") for path in sorted(TESTS.rglob("*.py"))}
    return [(name, ast.parse(text)) for name, text in texts.items() if MAY_WAIT.search(text)]


def is_marked(node: ast.AST) -> bool:
    """Whether a decorator, or a module's `pytestmark`, is the mark `clock`."""
    return any(isinstance(n, ast.Attribute) and n.attr == "clock" for n in ast.walk(node))


def functions(tree: ast.Module) -> Iterator[tuple[Function, bool]]:
    """Functions and methods, and whether they are outside the `clock` mark. What they hold belongs to them."""
    whole = any(
        isinstance(statement, ast.Assign)
        and is_marked(statement)
        and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in statement.targets)
        for statement in tree.body
    )
    for statement in tree.body:
        for node in statement.body if isinstance(statement, ast.ClassDef) else (statement,):
            if isinstance(node, Function):
                yield node, not whole and not any(map(is_marked, node.decorator_list))


@cache
def calls() -> list[tuple[str, Function, ast.Call]]:
    """Every call in a function outside the `clock` mark, with its file."""
    return [
        (name, function, node)
        for name, tree in files()
        for function, unmarked in functions(tree)
        if unmarked
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
    ]


def called(node: ast.Call) -> str:
    """The last name of what a call calls."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def is_clock(call: ast.Call) -> bool:
    """Whether a call says what time it is; a method that happens to be called `time` does not."""
    return called(call) in CLOCKS and (called(call) != "time" or is_module_call(call))


def reads_a_clock(node: ast.AST, names: set[str]) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in names:
            return True
        if isinstance(inner, ast.Call) and is_clock(inner):
            return True
    return False


def is_module_call(call: ast.Call) -> bool:
    """Whether a call is `time.time()`."""
    return (
        isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id == "time"
    )


def measured_names(function: Function) -> set[str]:
    """Names that hold what a clock said, or what was reckoned from it."""
    names: set[str] = set()
    for _ in range(3):  # through as many assignments
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and reads_a_clock(node.value, names):
                names |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return names


def test_no_assertion_goes_by_the_clock() -> None:
    found = []
    clocked = {(name, function.lineno): function for name, function, call in calls() if is_clock(call)}
    for (name, _), function in clocked.items():
        names = measured_names(function)
        found += [
            f"{name}:{node.lineno} in {function.name}"
            for node in ast.walk(function)
            if isinstance(node, ast.Assert) and reads_a_clock(node.test, names)
        ]
    assert found == [], "give these the mark `clock`, or wait on an event and assert what happened"


def test_nothing_sleeps_for_less_than_a_second() -> None:
    found = [
        f"{name}:{node.lineno} in {function.name}"
        for name, function, node in calls()
        if called(node) == "sleep" and not sleeps_long(node)
    ]
    assert found == [], "wait on an event, or with tests.waiting.wait_until"


def sleeps_long(node: ast.Call) -> bool:
    """Whether a sleep takes a second or more, or none at all, which lets other tasks run."""
    (length,) = node.args
    value = length.value if isinstance(length, ast.Constant) else None
    return isinstance(value, int | float) and (value >= 1 or value == 0)


def endless_waits(tree: ast.Module) -> list[str]:
    """Waits that nothing ends, wherever they are in a file: line and name."""
    return [
        f"{node.lineno} {node.func.attr}()"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
        if not node.args and not any(keyword.arg in {"timeout", "limit"} for keyword in node.keywords)
    ]


def test_every_wait_has_a_limit() -> None:
    found = [f"{name}:{wait}" for name, tree in files() for wait in endless_waits(tree)]
    assert found == [], "say how long at most"


def test_waits_are_found_wherever_they_are() -> None:
    for text in (
        "process.wait()",
        "if True:\n    def f():\n        p.wait(\n        )",
        "p.communicate(\n  input=b'',\n)",
    ):
        assert MAY_WAIT.search(text) and len(endless_waits(ast.parse(text))) == 1
    assert endless_waits(ast.parse("p.wait(timeout=5), ', '.join(names)")) == []
