"""The integer programme: it finds what brute force finds, and never spends more than it has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.core.errors import BudgetError
from edgeinfer.quant.allocation import Choice, PricedOption, allocate, allocate_exactly

OPTIONS = st.builds(PricedOption, st.integers(1, 200), st.floats(0, 10).map(lambda cost: round(cost, 3)))
CHOICES = st.lists(st.lists(OPTIONS, min_size=1, max_size=4).map(tuple).map(Choice), min_size=1, max_size=5)


def brute_force(choices: Sequence[Choice], budget: int) -> float | None:
    """The least cost of all combinations that fit; None where none does."""
    combinations = itertools.product(*(choice.options for choice in choices))
    return min((sum(o.cost for o in c) for c in combinations if sum(o.nbytes for o in c) <= budget), default=None)


@settings(max_examples=60, deadline=None)
@given(CHOICES, st.integers(1, 800))
def test_it_finds_what_brute_force_finds(choices: list[Choice], budget: int) -> None:
    best = brute_force(choices, budget)
    if best is None:
        with pytest.raises(BudgetError) as caught:
            allocate(choices, budget)
        assert caught.value.minimum_bytes == sum(choice.least for choice in choices)
        return
    found = allocate(choices, budget)
    taken = [choice.options[index] for choice, index in zip(choices, found.chosen, strict=True)]
    assert sum(o.nbytes for o in taken) == found.nbytes <= budget
    assert found.cost == pytest.approx(sum(o.cost for o in taken))
    assert found.cost == pytest.approx(best, rel=2e-4, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(CHOICES, st.integers(1, 1500), st.integers(1, 64))
def test_padding_never_exceeds_the_budget(choices: list[Choice], budget: int, page: int) -> None:
    def measure(chosen: Sequence[int]) -> int:
        return sum(-(-c.options[i].nbytes // page) * page for c, i in zip(choices, chosen, strict=True))

    smallest = measure([min(range(len(c.options)), key=lambda i, c=c: c.options[i].nbytes) for c in choices])  # type: ignore[misc]
    if smallest > budget:
        with pytest.raises(BudgetError):
            allocate_exactly(choices, budget, measure)
        return
    found, measured = allocate_exactly(choices, budget, measure)
    assert measured == measure(found.chosen) <= budget


def test_the_budget_is_used_to_its_last_byte_where_no_programme_is_solved_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scipy.optimize.milp", lambda *_, **__: SimpleNamespace(x=None))
    found = allocate([Choice((PricedOption(1, 1.0), PricedOption(2, 0.0)))] * 30, 40)
    assert (found.nbytes, found.cost) == (40, 20)


def test_many_choices_come_close_to_the_budget() -> None:
    def choice(place: int) -> Choice:
        return Choice(tuple(PricedOption(1000 * bits + place, (1 + place) ** 2 / 4**bits) for bits in (2, 4, 8)))

    choices = [choice(place) for place in range(300)]
    found = allocate(choices, 300 * 3500)
    assert 0.995 * 300 * 3500 <= found.nbytes <= 300 * 3500
    # What costs most without bits gets them.
    assert found.chosen[0] < found.chosen[-1]
