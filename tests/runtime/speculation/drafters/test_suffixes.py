"""The index against a search through the whole text."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.speculation.drafters.text_index import NONE, SuffixIndex
from tests.runtime.speculation.drafters.rounds import searched

TEXT = st.lists(st.integers(0, 2), max_size=30)


def index_of(tokens: Sequence[int]) -> SuffixIndex:
    index = SuffixIndex()
    index.replace(tokens)
    return index


@settings(deadline=None)
@given(TEXT, st.lists(st.integers(0, 2), max_size=8))
def test_finds_the_longest_and_then_the_latest_match(tokens: list[int], drafted: list[int]) -> None:
    assert index_of(tokens).longest(drafted) == searched(tokens, drafted)


@settings(deadline=None)
@given(TEXT, st.integers(0, 30), TEXT, st.lists(st.integers(0, 2), max_size=4))
def test_a_shortened_text_leaves_nothing_behind(
    tokens: list[int], cut: int, further: list[int], drafted: list[int]
) -> None:
    index = index_of(tokens)
    index.truncate(cut)
    new = tokens[:cut] + further
    assert index.replace(new) == len(tokens[:cut])
    fresh = index_of(new)
    assert index.tokens == new
    assert index.longest(drafted) == fresh.longest(drafted)
    for token in range(3):
        for twice in (False, True):
            assert index.only_successor(token, twice=twice) == fresh.only_successor(token, twice=twice)
    index.truncate(0)
    assert index.longest([0, 0, 0]) == (NONE, 0)
    assert index.only_successor(0) == NONE


@settings(deadline=None)
@given(TEXT)
def test_knows_what_always_follows(tokens: list[int]) -> None:
    index = index_of(tokens)
    for token in range(3):
        after = [b for a, b in pairwise(tokens) if a == token]
        assert index.only_successor(token) == (after[0] if len(set(after)) == 1 else NONE)
        assert index.only_successor(token, twice=True) == (after[0] if len(set(after)) == 1 < len(after) else NONE)


@settings(deadline=None)
@given(st.integers(3, 4000))
def test_a_look_up_in_a_monotonous_text_is_bounded(length: int) -> None:
    position, matched = index_of([7] * length).longest()
    assert position == length - 1
    assert matched == min(length - 1, 32)


def test_tells_what_it_holds_and_plans_for_no_less() -> None:
    tokens = np.random.default_rng(0).integers(1000, 50000, 3000).tolist()
    tracemalloc.start()
    try:
        index = index_of(tokens)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.8 * held < index.nbytes() < 1.25 * held
    assert index.nbytes() < SuffixIndex.planned_bytes(3000)
