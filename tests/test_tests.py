"""What holds of the tests themselves: nothing goes by the clock outside the `clock` mark, and every wait ends."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CLOCKS = {
    *("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"),
    *("process_time", "process_time_ns", "thread_time", "thread_time_ns", "times", "cpu_times", "getrusage"),
}
# What stops a test until something happens; without an argument, for ever.
WAITS = {"communicate", "join", "wait"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(TESTS.rglob("*.py")):
        yield path.relative_to(TESTS).as_posix(), ast.parse(path.read_text("utf-8"))


def is_marked(node: ast.AST) -> bool:
    """Whether a decorator, or a module's `pytestmark`, is the mark `clock`."""
    return any(isinstance(n, ast.Attribute) and n.attr == "clock" for n in ast.walk(node))


def unmarked(tree: ast.Module) -> Iterator[Function]:
    """Functions outside the `clock` mark."""
    for statement in tree.body:
        if (
            isinstance(statement, ast.Assign)
            and is_marked(statement)
            and "pytestmark" in ast.dump(statement.targets[0])
        ):
            return
    for node in ast.walk(tree):
        if isinstance(node, Function) and not any(map(is_marked, node.decorator_list)):
            yield node


def called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def reads_a_clock(node: ast.AST, names: set[str]) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in names:
            return True
        if called(inner) in CLOCKS and not (called(inner) == "time" and not is_module_call(inner)):
            return True
    return False


def is_module_call(node: ast.AST) -> bool:
    """Whether a call is `time.time()`, and not a method of that name."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "time"
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
    for name, tree in files():
        for function in unmarked(tree):
            names = measured_names(function)
            found += [
                f"{name}:{node.lineno} in {function.name}"
                for node in ast.walk(function)
                if isinstance(node, ast.Assert) and reads_a_clock(node.test, names)
            ]
    assert found == [], "give these the mark `clock`, or wait on an event and assert what happened"


def test_nothing_sleeps_for_less_than_a_second() -> None:
    found = []
    for name, tree in files():
        for function in unmarked(tree):
            for node in ast.walk(function):
                if called(node) == "sleep" and isinstance(node, ast.Call) and not sleeps_long(node):
                    found.append(f"{name}:{node.lineno} in {function.name}")
    assert found == [], "wait on an event, or with tests.waiting.wait_until"


def sleeps_long(node: ast.Call) -> bool:
    """Whether a sleep takes a second or more, or none at all, which lets other tasks run."""
    (length,) = node.args
    value = length.value if isinstance(length, ast.Constant) else None
    return isinstance(value, int | float) and (value >= 1 or value == 0)


def test_every_wait_has_a_limit() -> None:
    found = []
    for name, tree in files():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
                limits = [k for k in node.keywords if k.arg in {"timeout", "limit"}]
                if not limits and not node.args:
                    found.append(f"{name}:{node.lineno} {node.func.attr}()")
    assert found == [], "say how long at most"
