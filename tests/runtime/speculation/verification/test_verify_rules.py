"""What holds for every rule of verification, and finding them by name."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.core.errors import UsageError
from edgeinfer.runtime.speculation.drafters.contract import Draft, Probabilities
from edgeinfer.runtime.speculation.verification.rule import find_verification
from tests.methods import all_methods
from tests.runtime.speculation.verification.enumeration import TableTarget, make_draft, settle

RULES = all_methods("verifiers")
SIZE = 5
weights = st.lists(st.just(0.0) | st.floats(1e-12, 1) | st.just(1e-300), min_size=SIZE, max_size=SIZE).filter(
    lambda row: sum(row) > 0
)


@st.composite
def distributions(draw: st.DrawFn) -> Probabilities:
    row = np.array(draw(weights))
    row /= row.sum()
    row.flags.writeable = False
    return row


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    """Any draft at all: repeated siblings, distributions that rule their token out, certain guesses."""
    some = draw(st.lists(distributions(), min_size=1, max_size=3))
    nodes = [
        (draw(st.integers(-1, n - 1)), draw(st.integers(0, SIZE - 1)), draw(st.sampled_from([*some, None])))
        for n in range(draw(st.integers(0, 9)))
    ]
    return make_draft(*nodes)


def number(seed: int, depth: int, draw: int) -> float:
    """Any number in [0, 1), its ends among the likelier ones."""
    digest = hashlib.blake2b(f"{seed} {depth} {draw}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    return (0.0, 1 - 2.0**-53, (value >> 11) * 2.0**-53)[min(value % 8, 2)]


@settings(deadline=None)
@given(
    name=st.sampled_from(RULES),
    draft=trees(),
    table=st.lists(distributions(), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_a_verdict_is_a_path_of_possible_tokens(name: str, draft: Draft, table: list[Probabilities], seed: int) -> None:
    def after(path: tuple[int, ...]) -> Probabilities:
        return table[(len(path) + sum(path)) % len(table)]

    view = TableTarget(draft, after, lambda depth, draw: number(seed, depth, draw))
    rule = find_verification(name)
    verdict = settle(rule.verify(draft, view))
    assert verdict == settle(rule.verify(draft, view))
    parent = -1
    for node in verdict.accepted:
        assert draft.parents[node] == parent
        assert after(tuple(draft.path(parent)))[draft.guesses[node].token] > 0
        parent = node
    assert after(tuple(draft.path(parent)))[verdict.token] > 0
    assert verdict.bonus == (not draft.children(parent))


@settings(deadline=None)
@given(
    name=st.sampled_from(RULES),
    draft=trees(),
    choice=st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_greedy_text_is_the_same_by_every_rule(name: str, draft: Draft, choice: list[int], seed: int) -> None:
    def after(path: tuple[int, ...]) -> Probabilities:
        probabilities = np.zeros(SIZE)
        probabilities[choice[(len(path) + sum(path)) % len(choice)]] = 1
        return probabilities

    verdict = settle(
        find_verification(name).verify(draft, TableTarget(draft, after, lambda depth, draw: number(seed, depth, draw)))
    )
    text = [*(draft.guesses[node].token for node in verdict.accepted), verdict.token]
    for depth, token in enumerate(text):
        assert token == int(after(tuple(text[:depth])).argmax())


def test_rules_are_found_by_name() -> None:
    rules = [find_verification(name) for name in all_methods("verifiers")]
    assert [rule.name for rule in rules] == ["keyed", "rejection"] and all(rule.lossless for rule in rules)
    assert [rule.name for rule in rules if rule.stochastic] == ["rejection"]
    assert [rule.name for rule in rules if rule.exact] == ["keyed"]
    with pytest.raises(UsageError, match=r"Unknown verification 'exact'") as caught:
        find_verification("exact")
    assert "keyed, rejection" in str(caught.value.hint)
