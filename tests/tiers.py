"""Which tests are run by default: a covering part of every product of parameters, and a few rows of every long table.

A full product of parameters says little more than its pairs do (most faults depend on one value or on two), so:

- the fast tier, which plain `pytest` runs, takes two cases of each test, or one row of a long table, so that every
  value is met if there are as few values as that; tests of modules marked `matrix` take all pairs of values, the test
  being a value too (all values with `strength=1`), and quick tests marked `every_case` take all of their rows;
- the rest of a set in which every pair of values is met in its module, the test being a value too, and every row of
  every table, has the mark `more_cases`;
- what is left of a product has the mark `exhaustive`, and runs on demand.

The choice is drawn by a fixed seed, so all workers and all runs make the same.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations

import pytest

# Cases that the fast tier takes of a test outside the matrices.
FAST_CASES = 2
# A table of so many rows has one of them in the fast tier: a second one of many alike says little more.
LONG_TABLE = 3
_SEED = 20261123
# Weights of a test with a longer limit, and of one that is slow or drives a browser; others weigh 1.
_LONG, _SLOW = 100, 10

Value = tuple[str, Hashable]


def divide(items: Sequence[pytest.Item]) -> None:
    """Marks the cases of tests that have more of them than their tier needs."""
    modules: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            modules[item.nodeid.partition("::")[0]].append(item)
    for cases in modules.values():
        marks = [mark for item in cases if (mark := item.get_closest_marker("matrix"))]
        values = [{*values_of(item), name_of(item)} for item in cases]
        fast = set(cover(values, marks[0].kwargs.get("strength", 2)) if marks else _fast(cases))
        # What several tests of a module share, such as models and backends, is met in pairs once for all of them.
        pairs = set(cover(values, taken=fast))
        for number, item in enumerate(cases):
            if number not in fast and not item.get_closest_marker("every_case"):
                item.add_marker(pytest.mark.more_cases if number in pairs else pytest.mark.exhaustive)


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Sorted with the slowest files first: a worker that got one of them last would work while the other waits."""
    files: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    ordered = sorted(files.values(), key=lambda tests: sum(map(_weight, tests)), reverse=True)
    return [item for tests in ordered for item in tests]


def _weight(item: pytest.Item) -> int:
    if item.get_closest_marker("timeout"):
        return _LONG
    return _SLOW if item.get_closest_marker("slow") or item.get_closest_marker("browser") else 1


def _fast(cases: Sequence[pytest.Function]) -> Iterator[int]:
    """Numbers of the cases that the fast tier takes outside the matrices."""
    functions: defaultdict[Value, list[int]] = defaultdict(list)
    for number, item in enumerate(cases):
        functions[name_of(item)].append(number)
    for numbers in functions.values():
        if cases[numbers[0]].get_closest_marker("every_case"):
            yield from numbers
            continue
        values = [values_of(cases[number]) for number in numbers]
        yield from (numbers[place] for place in cover(values, strength=1)[: _fast_cases(values)])


def _fast_cases(values: Sequence[set[Value]]) -> int:
    """How many cases the fast tier takes of a test: fewer where all are rows of one long table."""
    one_table = all(len(case) == 1 for case in values)
    return 1 if one_table and len(values) >= LONG_TABLE else FAST_CASES


def name_of(item: pytest.Function) -> Value:
    """The test whose case an item is, as a value among the others."""
    return ("", item.nodeid.partition("[")[0])


def values_of(item: pytest.Function) -> set[Value]:
    """What a case is made of: the rows of its tables, and the parts of its fixtures' parameters."""
    params = item.callspec.params
    found: set[Value] = set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        # Rows of a table are written down on purpose, so a row is one value, however many columns it has.
        found.add((f"{name_of(item)[1]}:{','.join(names)}", tuple(id(params[name]) for name in names)))
        params = {name: value for name, value in params.items() if name not in names}
    for name, value in params.items():
        parts = value if isinstance(value, tuple) else (value,)
        found |= {(f"{name}.{place}", _hashable(part)) for place, part in enumerate(parts)}
    return found


def _hashable(value: object) -> Hashable:
    return value if isinstance(value, str | int | float | bool | None) else id(value)


def cover(rows: Sequence[Iterable[Value]], strength: int = 2, taken: Iterable[int] = ()) -> list[int]:
    """Numbers of rows that together have every combination of `strength` values that any row has; rows that are `taken`
    are in already and not given again. Greedy, as pairwise generators are; ties are broken by a fixed seed."""
    found = [set(_combinations(row, strength)) for row in rows]
    order = random.Random(_SEED).sample(range(len(rows)), len(rows))
    missing = set[frozenset[Value]]().union(*found)
    for number in taken:
        missing -= found[number]
    # What a row adds only ever falls, so a row whose figure is up to date and still the highest is the best.
    queue = [(-len(found[number]), place, number) for place, number in enumerate(order)]
    heapq.heapify(queue)
    chosen: list[int] = []
    while missing:
        _, place, number = queue[0]
        gain = -len(found[number] & missing)
        if gain != queue[0][0]:
            heapq.heapreplace(queue, (gain, place, number))
            continue
        heapq.heappop(queue)
        chosen.append(number)
        missing -= found[number]
    return chosen


def _combinations(row: Iterable[Value], strength: int) -> Iterator[frozenset[Value]]:
    values = sorted(row, key=repr)
    yield from map(frozenset, combinations(values, min(strength, len(values))))
