"""Put faults of one line into copies of the product, and report which of them the tests find.

    python -m tests.tools.faults --fast FAST_DATA --full FAST_DATA REST_DATA [--count 30] [--seed 1] [--workers 2]

The data is coverage.py's, of `pytest --cov --cov-context=test --cov-report=` and `coverage combine`. Faults are drawn
from lines that a test executes, evenly over the rooms. Left out is `strict=` of `zip`, which decides nothing where
lengths are equal, as they always are in a product without faults; of other changes that decide nothing (a clock that
starts at 2) only a reader of the line can tell. For each, the tests that execute its line run in a copy of the
checkout: first those of the fast tier, then, where these find nothing, the others. `--tests` bounds how many of each;
those that execute the fewest files come first, so a bound leaves out what is least likely to look at the line.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("edgeinfer", "export", "quant", "runtime", "apps")
COMPARISONS = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
}
PATIENCE = 1800  # seconds that the tests of one fault may take
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+"}


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
class Job:
    """A fault and the tests of its line by tier, in order."""

    fault: Fault
    fast: list[str]
    rest: list[str]


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
    """Expressions that functions compute: no annotations, defaults, decorators, text, or `strict=` of zip."""
    left_out = {
        keyword.value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "zip"
        for keyword in call.keywords
    }
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.AnnAssign):
                    found = (node for node in ast.walk(statement) if isinstance(node, ast.expr))
                    yield from (node for node in found if node not in left_out)


def broken(node: ast.expr, row: bytes) -> str | None:
    """The expression with a fault, or None if none fits."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            return str(not node.value)
        return str(node.value + 1) if isinstance(node.value, int) else None
    # A node's own parentheses are no part of it.
    parts = [
        text if isinstance(part, ast.Name | ast.Constant | ast.Attribute | ast.Call | ast.Subscript) else f"({text})"
        for part in ast.iter_child_nodes(node)
        if isinstance(part, ast.expr) and (text := row[part.col_offset : part.end_col_offset].decode())
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
    """Faults on lines that a test executes, equally many for each room."""
    chance = random.Random(seed)
    executed = executed_lines(data)
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
    """A copy of the checkout for tests; its sources come before installed ones."""
    leave = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".pytest_cache", ".coverage*", ".hypothesis")
    return Path(shutil.copytree(ROOT, folder, symlinks=True, ignore=leave))


def jobs(drawn: Sequence[Fault], fast: Sequence[Path], full: Sequence[Path], limit: int | None) -> list[Job]:
    """Faults with their tests."""
    sizes = breadth(full)
    made: list[Job] = []
    for fault in drawn:
        first = by_test(fast, fault.file).get(fault.line, set())
        rest = by_test(full, fault.file)[fault.line] - first
        made.append(Job(fault, in_order(first, sizes)[:limit], in_order(rest, sizes)[:limit]))
    return made


def in_order(tests: set[str], sizes: Mapping[str, int]) -> list[str]:
    """Tests in the order of files, beginning with files whose tests execute little else."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    for test in sorted(tests):
        files[test.partition("::")[0]].append(test)
    ordered = sorted(files.values(), key=lambda group: sum(sizes[test] for test in group) / len(group))
    return [test for group in ordered for test in sorted(group, key=sizes.__getitem__)]


def executed_lines(paths: Iterable[Path]) -> dict[str, set[int]]:
    """Executed lines by file, over all tests, imports and child processes."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for data in map(_read, paths):
        for file in data.measured_files():
            found[_name(file)] |= set(data.lines(file) or ())
    return dict(found)


def by_test(paths: Iterable[Path], wanted: str) -> dict[int, set[str]]:
    """Ids of the tests that execute a file's lines, by line."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    for data in map(_read, paths):
        for file in data.measured_files():
            if _name(file) == wanted:
                for line, contexts in data.contexts_by_lineno(file).items():
                    # "tests/test_x.py::test_y|run"; what is imported and what a child executes has no test.
                    found[line] |= {context.rpartition("|")[0] for context in contexts if "|" in context}
    return found


def breadth(paths: Iterable[Path]) -> Counter[str]:
    """How many files each test executes lines of."""
    found: Counter[str] = Counter()
    counted = "select context, count(*) from line_bits join context on context.id = context_id group by context"
    for path in paths:
        with closing(sqlite3.connect(path)) as database:
            for context, files in database.execute(counted):
                found[context.rpartition("|")[0]] += files
    return found


@cache
def _read(path: Path) -> CoverageData:
    data = CoverageData(str(path))
    data.read()
    return data


@cache
def _name(file: str) -> str:
    """The path of a file in the repository, independent of the checkout and of links."""
    parts = Path(file).parts
    # The last of them: a checkout may itself be called `edgeinfer`, and rooms are linked below edgeinfer/.
    start = max((n for n, part in enumerate(parts[:-1]) if part in ROOMS and _is_file(parts[n:])), default=0)
    return Path(*parts[start:]).as_posix()


def _is_file(parts: tuple[str, ...]) -> bool:
    return (ROOT / Path(*parts)).is_file()


def fails(checkout: Path, tests: Sequence[str]) -> bool:
    """Whether one of these tests fails; one that hangs or ends the process has failed too."""
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-m",
        "",
        f"--basetemp={checkout}-temp",
        *tests,
    ]
    if not tests:
        return False
    try:
        done = subprocess.run(
            [*command, *tests], cwd=checkout, capture_output=True, stdin=subprocess.DEVNULL, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def run(checkout: Path, work: Sequence[Job]) -> list[str]:
    """Run the tests of some faults in a checkout; the tier that found each, or ""."""
    found = []
    for job in work:
        file = checkout / job.fault.file
        original = file.read_text("utf-8")
        file.write_text(job.fault.text(original), "utf-8")
        try:
            tiers = (tier for tier, tests in (("fast", job.fast), ("full", job.rest)) if fails(checkout, tests))
            found.append(next(tiers, ""))
        finally:
            file.write_text(original, "utf-8")
        print(f"{found[-1] or 'SURVIVED':8} {job.fault}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", nargs="+", type=Path, required=True, metavar="DATA")
    parser.add_argument("--full", nargs="+", type=Path, required=True, metavar="DATA")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tests", type=int, help="of each tier, for each fault")
    args = parser.parse_args()
    drawn = draw(args.count, args.seed, args.full)
    work = jobs(drawn, args.fast, args.full, args.tests)
    with tempfile.TemporaryDirectory(prefix="edgeinfer-faults-") as folder:
        if (shared := ROOT.parent / "shared").is_dir():
            Path(folder, "shared").symlink_to(shared)
        checkouts = [copy_checkout(Path(folder, str(number))) for number in range(args.workers)]
        with ThreadPoolExecutor(args.workers) as pool:
            shares = [work[number :: args.workers] for number in range(args.workers)]
            found = [tier for part in pool.map(run, checkouts, shares) for tier in part]
    by_fast = sum(tier == "fast" for tier in found)
    print(f"{len(found)} faults: the fast tier finds {by_fast}, the full tier {sum(map(bool, found))}.")


if __name__ == "__main__":
    main()
