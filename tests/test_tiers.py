"""What the division into tiers promises: all that is to be met is met, always by the same cases, none of them twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import FAST_CASES, Value, cover, divide, longest_first

pytest_plugins = ["pytester"]
Row = set[Value]


def rows_of(table: Sequence[Sequence[int]]) -> list[Row]:
    """A row's values by the column they are in."""
    return [{(f"column {place}", value) for place, value in enumerate(row)} for row in table]


# As many columns in every row, or any number, as the tests of one module have.
TABLES = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 2), min_size=width, max_size=width), max_size=12)
) | st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=12)


def met(rows: Sequence[Row], strength: int) -> set[frozenset[Value]]:
    return {frozenset(some) for row in rows for some in combinations(sorted(row, key=repr), min(strength, len(row)))}


@settings(deadline=None)
@given(TABLES, st.sampled_from([1, 2, 3]), st.data())
def test_what_any_row_has_is_covered_and_nothing_is_taken_twice(
    table: list[list[int]], strength: int, data: st.DataObject
) -> None:
    rows = rows_of(table)
    taken = data.draw(st.sets(st.sampled_from(range(len(rows)))) if rows else st.just(set()))
    chosen = cover(rows, strength, taken)
    assert met([rows[number] for number in {*chosen, *taken}], strength) == met(rows, strength)
    assert len({*chosen}) == len(chosen) and not taken & {*chosen}
    # Each adds something to those before it.
    before = [rows[number] for number in taken]
    for number in chosen:
        assert not met([rows[number]], strength) <= met(before, strength)
        before.append(rows[number])
    assert cover(rows, strength, taken) == chosen


def test_pairs_take_far_fewer_rows_than_the_product() -> None:
    rows = rows_of([*product(range(13), range(3), range(5), range(2))])
    assert 13 * 5 <= len(cover(rows)) <= 13 * 5 * 1.3 < len(rows) / 4
    assert len(cover(rows, strength=1)) == 13


MODULE = """
import pytest

{}

@pytest.fixture(params=[(a, b) for a in range(4) for b in "xyz"], ids=str)
def pair(request):
    return request.param

@pytest.mark.parametrize("number", range(5))
def test_product(pair, number):
    pass

@pytest.mark.parametrize(("left", "right"), [(i, i % 2) for i in range(9)])
def test_table(left, right):
    pass

def test_alone():
    pass
"""


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other plugins there are is of no concern here, and takes long."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def divided(pytester: pytest.Pytester, mark: str = "") -> dict[str, Counter[str]]:
    """How many cases of each test of a module got which mark."""
    pytester.makeini("[pytest]\nmarkers = matrix\n more_cases\n exhaustive")
    items = pytester.getitems(MODULE.format(mark and f"pytestmark = pytest.mark.{mark}"))
    divide(items)
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for item in items:
        marks = [mark.name for mark in item.iter_markers() if mark.name in ("more_cases", "exhaustive")]
        found[item.name.partition("[")[0]]["+".join(marks) or "fast"] += 1
    return found


def test_the_fast_tier_takes_a_few_cases_of_each_test(pytester: pytest.Pytester) -> None:
    found = divided(pytester)
    assert found["test_alone"] == {"fast": 1}
    # Rows of a table are written down on purpose: none is left out of the full tier.
    assert found["test_table"] == {"fast": 1, "more_cases": 8}
    # The two parts of the fixture's parameter are factors as the number is: 5 x 4 pairs at least.
    product = found["test_product"]
    assert product["fast"] == FAST_CASES and product.total() == 60
    assert 5 * 4 <= product["fast"] + product["more_cases"] <= 26


def test_the_fast_tier_takes_all_pairs_of_a_matrix(pytester: pytest.Pytester) -> None:
    found = divided(pytester, "matrix")
    assert found["test_alone"] == {"fast": 1}
    assert found["test_table"] == {"fast": 9}
    assert 5 * 4 <= found["test_product"]["fast"] <= 24 and found["test_product"].total() == 60


def test_a_matrix_of_strength_one_has_every_value_once(pytester: pytest.Pytester) -> None:
    found = divided(pytester, "matrix(strength=1)")
    assert found["test_table"] == {"fast": 9}
    assert 5 <= found["test_product"]["fast"] <= 7
    assert 5 * 4 <= found["test_product"]["fast"] + found["test_product"]["more_cases"] <= 26


def test_files_that_take_longest_come_first_and_stay_whole(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = slow\n timeout")
    one = "import pytest\n@pytest.mark.{}\ndef test_0(): pass"
    many = "\n".join(f"def test_{place}(): pass" for place in range(5))
    pytester.makepyfile(test_many=many, test_slow=one.format("slow"), test_very_slow=one.format("timeout(600)"))
    items, _ = pytester.inline_genitems()
    ordered = [item.nodeid for item in longest_first(items)]
    assert ordered[:2] == ["test_very_slow.py::test_0", "test_slow.py::test_0"]
    assert ordered[2:] == [f"test_many.py::test_{place}" for place in range(5)]
