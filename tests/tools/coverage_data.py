"""Read the records of coverage.py: the lines of the product that each test executed.

Data comes from `pytest --cov --cov-context=test --cov-report=`, followed by `coverage combine`.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from functools import cache
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("edgeinfer", "export", "quant", "runtime", "apps")

Lines = dict[str, set[int]]


def lines_of(paths: Iterable[Path]) -> Lines:
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
