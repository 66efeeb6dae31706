"""Puts faults into copies of the product, one line each, and tells which of them the tests find.

    python -m tests.tools.faults --fast FAST_DATA --full FAST_DATA REST_DATA [--count 30] [--seed 1] [--workers 2]

The data is coverage.py's, taken as tests.tools.coverage_data says; faults are drawn from lines that a test executes,
evenly over the rooms. For each, the tests that execute its line run in a copy of the checkout: first those of the fast
tier, then, where these find nothing, the others.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import Queue

from tests.tools.coverage_data import ROOMS, ROOT, by_test, lines_of

__all__ = ["main"]

COMPARISONS = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+"}
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
TIME_LIMIT = 600  # seconds for the tests of a fault; a fault that makes them hang has been found


@dataclass(frozen=True)
class Fault:
    """One expression of one line, replaced."""

    file: str
    line: int
    columns: tuple[int, int]
    replacement: str

    def text(self, source: str) -> str:
        """The file's text with the fault."""
        lines = source.splitlines(keepends=True)
        row = lines[self.line - 1].encode()
        start, end = self.columns
        lines[self.line - 1] = (row[:start] + self.replacement.encode() + row[end:]).decode()
        return "".join(lines)

    def __str__(self) -> str:
        row = (ROOT / self.file).read_text("utf-8").splitlines()[self.line - 1]
        was = row.encode()[slice(*self.columns)].decode()
        return f"{self.file}:{self.line}: `{was}` became `{self.replacement}`"


@dataclass(frozen=True)
class Outcome:
    """Which tier found a fault; `found_by` is empty where neither did."""

    fault: Fault
    found_by: str
    tests: tuple[int, int]  # of the fast tier, of the rest


def faults_of(file: str) -> Iterator[Fault]:
    """Every fault that can be put into a file."""
    source = (ROOT / file).read_text("utf-8")
    rows = source.encode().splitlines()
    for node in expressions(ast.parse(source)):
        if node.lineno != node.end_lineno or node.end_col_offset is None:
            continue
        replacement = broken(node, rows[node.lineno - 1])
        if replacement is not None:
            yield Fault(file, node.lineno, (node.col_offset, node.end_col_offset), replacement)


def expressions(tree: ast.Module) -> Iterator[ast.expr]:
    """What functions compute: no annotations, no defaults, no decorators, no text."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.AnnAssign):
                    yield from (node for node in ast.walk(statement) if isinstance(node, ast.expr))


def broken(node: ast.expr, row: bytes) -> str | None:
    """The expression of a row with a fault, or None where there is none to put in."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            return str(not node.value)
        return str(node.value + 1) if isinstance(node.value, int) else None
    parts = [
        row[part.col_offset : part.end_col_offset].decode()
        for part in ast.iter_child_nodes(node)
        if isinstance(part, ast.expr)
    ]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return f"{parts[0]} {COMPARISONS[type(node.ops[0])]} {parts[1]}"
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not isinstance(node.left, ast.JoinedStr):
        return f"({parts[0]} {OPERATORS[type(node.op)]} {parts[1]})"
    if isinstance(node, ast.BoolOp):
        return "(" + (" or " if isinstance(node.op, ast.And) else " and ").join(map(str, parts)) + ")"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"bool({parts[0]})"
    return None


def draw(count: int, seed: int, data: Sequence[Path]) -> list[Fault]:
    """Faults on lines that some test executes, as many of each room as of any other."""
    chance = random.Random(seed)
    executed = lines_of(data)
    drawn: list[Fault] = []
    for number, room in enumerate(ROOMS):
        files = sorted(file for file in executed if file.startswith(f"{room}/"))
        possible = [fault for file in files for fault in faults_of(file) if fault.line in executed[file]]
        chance.shuffle(possible)
        # What only an import or a child process executes has no tests to run.
        tested = (fault for fault in possible if by_test(data, fault.file).get(fault.line))
        drawn += islice(tested, count // len(ROOMS) + (number < count % len(ROOMS)))
    return drawn


def copy_checkout(folder: Path) -> Path:
    """A copy that tests run in; its sources come before those that are installed."""
    leave = shutil.ignore_patterns(
        ".git", ".venv*", "__pycache__", "docs", ".pytest_cache", ".coverage*", ".hypothesis"
    )
    return Path(shutil.copytree(ROOT, folder, symlinks=True, ignore=leave))


def first_failure(checkout: Path, tests: Sequence[str]) -> str | None:
    """The first of these tests that fails in a checkout, "" where a run ends without saying which."""
    if not tests:
        return None
    listed = checkout / "tests.txt"
    listed.write_text("\n".join(tests), "utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-n", "0", "-m", "", f"@{listed}"]
    try:
        done = subprocess.run(
            command, cwd=checkout, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIME_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    if done.returncode in {0, 5}:  # all passed, or none was left to run
        return None
    failed = FAILED.search(done.stdout.decode("utf-8", "replace"))
    return failed.group(1) if failed else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", nargs="+", type=Path, required=True, metavar="DATA")
    parser.add_argument("--full", nargs="+", type=Path, required=True, metavar="DATA")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    drawn = draw(args.count, args.seed, args.full)
    with tempfile.TemporaryDirectory(prefix="edgeinfer-faults-") as folder:
        free: Queue[Path] = Queue()
        for number in range(args.workers):
            free.put(copy_checkout(Path(folder, str(number))))
        if (shared := ROOT.parent / "shared").is_dir():
            Path(folder, "shared").symlink_to(shared)

        def attempt(fault: Fault) -> Outcome:
            checkout = free.get(timeout=len(drawn) * 2 * TIME_LIMIT)
            try:
                return outcome(checkout, fault, args.fast, args.full)
            finally:
                free.put(checkout)

        with ThreadPoolExecutor(args.workers) as pool:
            outcomes = []
            for found in pool.map(attempt, drawn):
                outcomes.append(found)
                print(f"{found.found_by or 'SURVIVED':8} {found.tests} {found.fault}", flush=True)
    by_fast = sum(found.found_by == "fast" for found in outcomes)
    in_all = sum(bool(found.found_by) for found in outcomes)
    print(f"{len(outcomes)} faults: the fast tier finds {by_fast}, the full tier {in_all}.")


def outcome(checkout: Path, fault: Fault, fast: Sequence[Path], full: Sequence[Path]) -> Outcome:
    """Runs the tests of a fault's line in a checkout, and leaves the checkout as it was."""
    first = sorted(by_test(fast, fault.file).get(fault.line, ()))
    rest = sorted(by_test(full, fault.file)[fault.line] - set(first))
    found = "fast" if found_by(checkout, fault, first) else "full" if found_by(checkout, fault, rest) else ""
    return Outcome(fault, found, (len(first), len(rest)))


def found_by(checkout: Path, fault: Fault, tests: Sequence[str]) -> bool:
    """Whether one of these tests fails with a fault and passes without."""
    path = checkout / fault.file
    original, left = path.read_text("utf-8"), list(tests)
    while left:
        path.write_text(fault.text(original), "utf-8")
        try:
            failed = first_failure(checkout, left)
        finally:
            path.write_text(original, "utf-8")
        if failed is None:
            return False
        # No test, or one that is not among them, where not even collecting them ended well.
        if failed not in left or first_failure(checkout, [failed]) is None:
            return True
        left.remove(failed)
    return False


if __name__ == "__main__":
    main()
