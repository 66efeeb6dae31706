"""The index of a text against a search through all of it, and what holds for every drafter of tables."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.speculation.drafters.contract import Drafter
from edgeinfer.runtime.speculation.drafters.copy import CopyDrafter
from edgeinfer.runtime.speculation.drafters.ngram import NgramDrafter
from edgeinfer.runtime.speculation.drafters.recycle import RecycleDrafter
from edgeinfer.runtime.speculation.drafters.text_index import NONE, SuffixIndex
from tests.runtime.speculation.drafters.rounds import ask, searched, settled

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


V = 40
TOKENS = st.lists(st.integers(0, V - 1) | st.integers(0, 2), max_size=40)
MAKERS: dict[str, Callable[[], Drafter]] = {
    "copy": CopyDrafter,
    "ngram": lambda: NgramDrafter(V, 6),
    "recycle": lambda: RecycleDrafter(V),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", MAKERS)
@settings(deadline=None)
@given(st.lists(st.tuples(TOKENS, TOKENS.filter(bool)), max_size=5), TOKENS, st.integers(1, 9))
def test_guesses_of_tables_are_tokens_and_disturb_nothing(
    name: str, conversations: list[tuple[list[int], list[int]]], path: list[int], width: int
) -> None:
    asked, left_alone, restored = (MAKERS[name]() for _ in range(3))
    for number, (prompt, reply) in enumerate(conversations):
        for drafter in (asked, left_alone):
            drafter.begin(prompt)
        for length in (len(path), 0, len(path) // 2):
            found = ask(asked, path[:length], width)
            assert found == ask(asked, path[:length], width)
            tokens = [guess.token for guess in found]
            assert len(tokens) == len(set(tokens)) <= width
            assert all(0 <= token < V for token in tokens)
            assert name != "copy" or set(tokens) <= {*prompt, *path}
            assert all(0 <= guess.sign < len(asked.priors) for guess in found)
        logits = np.random.default_rng(number).permuted(
            np.tile(np.arange(V, dtype=np.float32), (len(reply), 1)), axis=1
        )
        for drafter in (asked, left_alone):
            drafter.observe(settled(reply, reply, logits))
        assert ask(asked, path, width) == ask(left_alone, path, width)
    for key, array in asked.state().items():
        np.testing.assert_array_equal(array, left_alone.state()[key])
    restored.restore(asked.state())  # what was learnt passes its own checks
