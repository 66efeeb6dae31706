"""Counting experts: sparsity as BlockFFN defines it, of the tokens that stayed in the text and of no others."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle.parts import MoESpec, RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.runtime.backends.wrapped import CHUNKS, ExpertCounter, ExpertCounts, active_experts

EXPERTS, TOP_K, LAYERS, DENSE = 6, 2, 3, 1


def decoder() -> DecoderSpec:
    moe = MoESpec(experts=EXPERTS, top_k=TOP_K, expert_size=8, dense_layers=(DENSE,))
    rope = RopeSpec("default", 1e4, 8)
    return DecoderSpec(32, 16, 16, LAYERS, 2, 2, 8, 64, 1e-6, rope, moe=moe)


def ids_of(tokens: NDArray[np.int64]) -> NDArray[np.int64]:  # (S,) -> (L, S, k)
    """What made-up routers choose for tokens: in each layer something else, in the dense one nothing."""
    found = np.stack([np.stack([(tokens + s) * (layer + 1) % EXPERTS for s in (0, 1)], -1) for layer in range(LAYERS)])
    found[DENSE] = -1
    return found


def expected(texts: list[list[int]]) -> tuple[int, float, dict[int, float]]:
    """Tokens, token-level and chunk-level sparsity, counted one by one."""
    layers = [layer for layer in range(LAYERS) if layer != DENSE]
    sets = [[{*ids_of(np.array([t]))[layer].ravel().tolist()} for t in text] for text in texts for layer in layers]
    shares = [len(s) / EXPERTS for text in sets for s in text]
    chunks = {}
    for chunk in CHUNKS:
        unions = [set().union(*text[i : i + chunk]) for text in sets for i in range(len(text) - chunk + 1)]
        if unions:
            chunks[chunk] = 1 - float(np.mean([len(union) / EXPERTS for union in unions]))
    return sum(map(len, texts)), 1 - float(np.mean(shares)) if shares else 0.0, chunks


def check(counts: ExpertCounts, texts: list[list[int]]) -> None:
    tokens, token, chunks = expected(texts)
    assert counts.tokens == tokens
    assert counts.token_sparsity == pytest.approx(token)
    assert counts.chunk_sparsity == pytest.approx(chunks)


@given(st.lists(st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=90), st.integers(0, 90)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_only_tokens_that_stay_are_counted(passes: list[tuple[list[int], int]]) -> None:
    """Verification passes: of each some first tokens stay, and the next pass begins behind them."""
    counter, text = ExpertCounter(decoder()), [7, 8]
    counter.passed(0, ids_of(np.array(text)))
    for fed, kept in passes:
        counter.passed(len(text), ids_of(np.array(fed)))
        text += fed[:kept]
    check(counter.counts(len(text)), [text])


def test_texts_are_counted_apart() -> None:
    counter = ExpertCounter(decoder())
    counter.passed(0, ids_of(np.arange(5)))
    counter.passed(5, ids_of(np.array([9])))
    counter.passed(6, ids_of(np.array([3])))
    # Another text: of the last pass it is not known what stayed.
    counter.passed(0, ids_of(np.arange(20, 24)))
    check(counter.counts(4), [[0, 1, 2, 3, 4, 9], [20, 21, 22, 23]])


def test_a_jump_forward_begins_a_text() -> None:
    counter = ExpertCounter(decoder())
    counter.passed(0, ids_of(np.arange(3)))
    counter.passed(10, ids_of(np.arange(4)))
    check(counter.counts(14), [[0, 1, 2], [0, 1, 2, 3]])


def test_of_a_tree_the_accepted_path_is_counted() -> None:
    counter = ExpertCounter(decoder())
    counter.passed(0, ids_of(np.arange(3)))
    counter.passed(3, ids_of(np.array([10, 11, 12, 13])))
    counter.kept(3, [0, 2])
    check(counter.counts(5), [[0, 1, 2, 10, 12]])


def test_asking_changes_nothing() -> None:
    counter, text = ExpertCounter(decoder()), list(range(12))
    for token in text:
        counter.passed(token, ids_of(np.array([token])))
        counter.counts(token + 1)
    check(counter.counts(12), [text])


def test_a_reply_is_what_came_since() -> None:
    counter = ExpertCounter(decoder())
    counter.passed(0, ids_of(np.arange(4)))
    before = counter.counts(4)
    counter.passed(4, ids_of(np.array([5, 5])))
    since = counter.counts(6) - before
    assert (since.tokens, before.tokens) == (2, 4)
    assert since.usage.sum() == 2 * TOP_K * (LAYERS - 1)
    assert (before + since).usage.tolist() == counter.counts(6).usage.tolist()


def test_without_tokens_there_is_nothing_to_say() -> None:
    use = ExpertCounter(decoder()).counts(0).summary()
    assert (use.experts, use.top_k, use.tokens, use.token_sparsity, use.chunk_sparsity) == (EXPERTS, TOP_K, 0, 0.0, {})
    json.dumps(vars(use))


def test_usage_names_experts_of_layers_that_have_any() -> None:
    counter = ExpertCounter(decoder())
    counter.passed(0, ids_of(np.array([0, 0, 0])))
    counts = counter.counts(3)
    assert counts.layers == (0, 2)
    assert counts.usage.tolist() == [[3, 3, 0, 0, 0, 0], [3, 0, 0, 3, 0, 0]]


def test_no_expert_is_no_expert() -> None:
    active = active_experts(np.array([[[0, -1], [-1, -1]]]), 3)
    assert active.tolist() == [[[True, False, False]], [[False, False, False]]]
