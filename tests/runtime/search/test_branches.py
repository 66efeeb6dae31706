"""Branches of one cache: each sees its own text and no other's, whatever was forked, dropped or moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import BackendError
from edgeinfer.runtime.backends.contract import ForwardInput, PassCancelledError
from edgeinfer.runtime.decoding.strategy import SearchStatistics
from edgeinfer.runtime.sampling import LogitsProcessor, Sampler
from edgeinfer.runtime.search import branches as module
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import Passes, SearchParts
from tests.runtime.search.fakes import PROMPT, Letters, LettersBackend, V, letters_logits


def parts_of(backend: LettersBackend, cancelled: bool = False) -> SearchParts:
    config = GenerationConfig()
    sampler = Sampler(LogitsProcessor(config, V, 0), PROMPT)
    given: dict[str, Any] = {"cancelled": lambda: cancelled, "fed": tuple, "chunk": 4, "continues": False}
    return SearchParts(backend, sampler, config, frozenset(), Letters(), **given)


def fed_prompt(capacity: int = 200) -> LettersBackend:
    backend = LettersBackend(capacity)
    backend.forward(ForwardInput(np.array(PROMPT), np.arange(len(PROMPT)), np.array([0])))
    return backend


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_each_branch_is_a_text_of_its_own(data: st.DataObject) -> None:
    few, module._FEW = module._FEW, 3
    try:
        backend, statistics = fed_prompt(60), SearchStatistics()
        branches = Branches(Passes(parts_of(backend), statistics))
        texts: dict[Branch, list[int]] = {branches.begin(): list(PROMPT), branches.begin(apart=True): []}
        for _ in range(data.draw(st.integers(1, 25))):
            act = data.draw(st.sampled_from(["feed", "feed", "feed", "fork", "drop"]))
            some = list(texts)
            if act == "fork" and len(texts) < 6:
                parent = data.draw(st.sampled_from(some))
                texts[branches.fork(parent)] = list(texts[parent])
            elif act == "drop" and len(texts) > 1:
                gone = data.draw(st.sampled_from(some))
                branches.drop(gone)
                del texts[gone]
            elif act == "feed":
                chosen = data.draw(st.lists(st.sampled_from(some), unique=True, min_size=1))
                fed = [(b, data.draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=3))) for b in chosen]
                if branches.room < sum(len(part) for _, part in fed):
                    continue
                logits = branches.feed(fed)
                for (branch, part), row in zip(fed, logits, strict=True):
                    texts[branch] += part
                    assert np.array_equal(row, letters_logits(texts[branch]))
        assert statistics.passes == len(backend.passes) - 1
        assert statistics.rows == sum(backend.passes) - len(PROMPT)
        branches.end()
        assert (backend.held, branches.live) == (PROMPT, ())
    finally:
        module._FEW = few


def test_dead_rows_make_room() -> None:
    backend = fed_prompt(len(PROMPT) + 4)
    branches = Branches(Passes(parts_of(backend), SearchStatistics()))
    one, two = branches.begin(), branches.begin()
    branches.feed([(one, [3, 4]), (two, [5])])
    assert branches.room == 1
    with pytest.raises(BackendError, match="does not fit"):
        branches.feed([(two, [1, 1])])
    branches.drop(one)
    assert branches.room == 3
    (row,) = branches.feed([(two, [6, 0])])
    assert np.array_equal(row, letters_logits([*PROMPT, 5, 6, 0]))


def test_copied_rows_begin_a_branch() -> None:
    backend = fed_prompt()
    backend.forward(ForwardInput(np.array([4, 6]), np.arange(2) + len(PROMPT), np.array([0])))
    piece = backend.cache.snapshot(len(PROMPT))
    backend.cache.trim(len(PROMPT))
    branches = Branches(Passes(parts_of(backend), SearchStatistics()))
    other, copied = branches.begin(), branches.begin(rows=[piece])
    rows = branches.feed([(other, [5]), (copied, [0])])
    assert np.array_equal(rows[0], letters_logits([*PROMPT, 5]))
    assert np.array_equal(rows[1], letters_logits([*PROMPT, 4, 6, 0]))


def test_a_cancelled_reply_runs_no_pass() -> None:
    backend = fed_prompt()
    parts = parts_of(backend, cancelled=True)
    branches = Branches(Passes(parts, SearchStatistics()))
    with pytest.raises(PassCancelledError):
        branches.feed([(branches.begin(), [1])])
    with pytest.raises(PassCancelledError):
        Passes(parts, SearchStatistics()).feed(1)
    assert backend.cache.length == len(PROMPT)


def test_a_chain_is_fed_as_it_is_asked_for() -> None:
    backend, statistics = fed_prompt(), SearchStatistics()
    tokens = [i % V for i in range(40)]
    rows = Passes(parts_of(backend), statistics).chain(tokens)
    for count in range(1, 21):
        assert np.array_equal(next(rows), letters_logits([*PROMPT, *tokens[:count]]))
    assert (statistics.passes, statistics.rows) == (2, 32)
