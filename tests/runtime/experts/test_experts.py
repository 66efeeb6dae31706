"""Experts: what passes need of them, which stay in memory, and how tokens that stayed in the text used them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle.parts import MoESpec, RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.runtime.backends.expert_use import CHUNKS, ExpertCounter, ExpertCounts
from edgeinfer.runtime.planning.speed_model import guessed_passes
from edgeinfer.runtime.profile.costs import Prospect, decoding_rate
from edgeinfer.runtime.weights.experts import AROUND_BYTES, ExpertBytes, ExpertCache, expected_experts
from tests.tables import each_row


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (32, 4), (60, 4)])
@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
def test_the_union_of_independent_choices(experts: int, top_k: int, tokens: int) -> None:
    chance = np.random.default_rng(0)
    unions = [
        len(set(np.concatenate([chance.permutation(experts)[:top_k] for _ in range(tokens)]).tolist()))
        for _ in range(800)
    ]
    assert expected_experts(experts, top_k, tokens) == pytest.approx(np.mean(unions), rel=0.03)


def test_experts_that_passes_need_at_least_and_at_most() -> None:
    assert expected_experts(32, 4, 1) == pytest.approx(4)
    assert expected_experts(32, 4, 1000) == pytest.approx(32)
    assert expected_experts(8, 8, 1) == 8
    none = ExpertBytes.of(None, [])
    assert (none.total, none.least, none.needed(5)) == (0, 0, 0.0)


def test_passes_over_experts_are_guessed_by_the_bytes_they_read() -> None:
    dense = guessed_passes(240_000_000)
    moe = guessed_passes(120_000_000, lambda rows: 120_000_000 * min(rows, 4) / 4)
    assert moe.ms(1) < dense.ms(1)
    assert moe.ms(8) / moe.ms(1) > dense.ms(8) / dense.ms(1)


@pytest.mark.parametrize("accepted", [0.5, 0.8, 0.95])
def test_plans_foresee_the_speed_up_that_moesd_defines(accepted: float) -> None:
    """sigma (g + 1) T(1) / (g Td + T(g + 1)) at the best g, where T(1) / T(m) is the target efficiency."""
    most, draft_ms = 7, 0.4
    takes = ExpertBytes(MoESpec(experts=32, top_k=4, expert_size=64), 400_000_000, 0)
    dense, mixture = guessed_passes(80_000_000), guessed_passes(30_000_000, takes.needed)
    found = []
    for passes in (dense, mixture):
        costs = [passes.ms(rows) for rows in range(1, most + 2)]
        speed_ups = [
            (1 - accepted ** (g + 1)) / (1 - accepted) * costs[0] / (g * draft_ms + costs[g]) for g in range(most + 1)
        ]
        rate = decoding_rate([Prospect("any", 1.0, accepted, draft_ms)], costs, 0.0)
        assert rate * costs[0] == pytest.approx(max(speed_ups), rel=1e-4)
        found.append(max(speed_ups))
    # One row takes as long in both, but the experts that further rows meet are the mixture's alone.
    assert dense.ms(1) == pytest.approx(mixture.ms(1), rel=0.01)
    assert found[0] > found[1] >= 1


SIZE = 1 << 20


@dataclass
class Part:
    """Counts what is asked of it."""

    released: int = 0
    fetched: int = 0

    def release(self) -> None:
        self.released += 1

    def prefetch(self) -> None:
        self.fetched += 1


@dataclass
class Made:
    """An expert cache over made-up weights, 1 MB an expert."""

    layers: int = 2
    experts: int = 4
    room: int = 4
    parts: dict[tuple[int, int], Part] = field(default_factory=dict)

    def make(self) -> ExpertCache:
        self.parts = {(layer, expert): Part() for layer in range(self.layers) for expert in range(self.experts)}
        sizes = np.full((self.layers, self.experts), SIZE)
        return ExpertCache(self.parts, sizes, self.room * (SIZE + AROUND_BYTES))


def ids(*layers: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:  # (L, 1, k)
    return np.array(layers)[:, None, :]


def test_what_was_used_is_cached_and_counts() -> None:
    cache = Made().make()
    assert cache.hit_rate is None
    cache.used(ids([0, 1], [2, -1]))
    assert cache.cached.tolist() == [[True, True, False, False], [False, False, True, False]]
    assert (cache.cached_bytes, cache.expert_bytes) == (3 * SIZE, 8 * SIZE)
    cache.used(ids([0, 1], [3, -1]))
    assert cache.hit_rate == 2 / 6


def test_the_least_used_go_first() -> None:
    made = Made()
    cache = made.make()
    for _ in range(3):
        cache.used(ids([0, 1], [2, -1]))
    cache.used(ids([0, 3], [2, -1]))
    cache.make_room(range(2), 1)
    assert cache.cached_bytes == 2 * SIZE
    assert not cache.cached[0, 3]
    assert made.parts[0, 3].released and not made.parts[0, 0].released
    cache.make_room(range(2), 1)
    assert cache.cached_bytes == 2 * SIZE


def test_old_uses_count_less_than_recent_ones() -> None:
    cache = Made(layers=1, room=2).make()
    for _ in range(100):
        cache.used(ids([0]))
    for _ in range(400):
        cache.used(ids([1]))
    cache.make_room(range(1), 1)
    assert cache.cached.tolist() == [[False, True, False, False]]


@each_row("more", [2, 4])
def test_experts_of_layers_that_ran_already_go_first(more: int) -> None:
    cache = Made(room=4).make()
    cache.used(ids([0, 1], [0, 1]))
    cache.make_room(range(1, 2), more)
    assert cache.cached.sum(axis=1).tolist() == [0, 2]


def test_pages_around_one_that_came_are_dropped() -> None:
    made = Made()
    cache = made.make()
    cache.used(ids([0, 2], [-1, -1]))
    # Neighbours in the file are not in memory, though the system may have mapped some of their pages.
    assert [made.parts[0, e].released for e in range(4)] == [0, 2, 0, 1]
    cache.used(ids([0, 2], [-1, -1]))
    assert made.parts[0, 1].released == 2


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 99)), max_size=60), st.integers(4, 8))
@settings(max_examples=40, deadline=None)
def test_never_more_than_the_limit(passes: list[tuple[int, int]], room: int) -> None:
    made = Made(room=room)
    cache = made.make()
    for tokens, seed in passes:
        chosen = np.random.default_rng(seed).integers(0, 4, (2, tokens, 2))
        for layer in range(2):
            cache.make_room(range(layer, layer + 1), tokens * 2)
            window = np.full_like(chosen, -1)
            window[layer] = chosen[layer]
            before = cache.cached_bytes
            cache.used(window)
            came = cache.cached_bytes - before
            assert cache.cached_bytes + AROUND_BYTES * came // SIZE <= cache.limit
            assert cache.cached[layer][np.unique(chosen[layer])].all()
    assert cache.cached_bytes == cache.cached.sum() * SIZE


def test_worth_never_overflows() -> None:
    cache = Made(layers=1, room=2).make()
    for _ in range(50):
        cache.used(np.zeros((1, 4096, 1), np.int64))
    cache.used(ids([1]))
    assert np.isfinite(cache._worth).all()
    cache.make_room(range(1), 1)
    assert cache.cached.tolist() == [[True, False, False, False]]


def test_a_prompt_s_layer_is_fetched_ahead() -> None:
    made = Made()
    cache = made.make()
    cache.used(ids([1], [-1]))
    cache.fetch(0)
    assert [made.parts[0, e].fetched for e in range(4)] == [1, 0, 1, 1]


def test_only_experts_in_memory_may_draft() -> None:
    cache = Made().make()
    assert not cache.bias().any()
    cache.used(ids([0, 2], [-1, -1]))
    bias = cache.bias()
    assert bias[0].tolist() == [0, -1e9, 0, -1e9]
    # A layer without any would have nothing to choose from.
    assert not bias[1].any()
    cache.forget()
    assert not cache.cached.any() and cache.cached_bytes == 0


EXPERTS, TOP_K, LAYERS, DENSE = 6, 2, 3, 1


def decoder() -> DecoderSpec:
    moe = MoESpec(experts=EXPERTS, top_k=TOP_K, expert_size=8, dense_layers=(DENSE,))
    rope = RopeSpec("default", 1e4, 8)
    return DecoderSpec(32, 16, 16, LAYERS, 2, 2, 8, 64, 1e-6, rope, moe=moe)


def ids_of(tokens: NDArray[np.int64]) -> NDArray[np.int64]:  # (S,) -> (L, S, k)
    """Choices of made-up routers: different in each layer, none in the dense one."""
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


@each_row(
    ("passes", "kept", "length", "texts"),
    [
        # Another text: of the last pass it is not known what stayed.
        ([(0, range(5)), (5, [9]), (6, [3]), (0, range(20, 24))], None, 4, [[*range(5), 9], [*range(20, 24)]]),
        ([(0, range(3)), (10, range(4))], None, 14, [[0, 1, 2], [0, 1, 2, 3]]),  # a jump forward
        ([(0, range(3)), (3, range(10, 14))], [0, 2], 5, [[0, 1, 2, 10, 12]]),  # the accepted path of a tree
    ],
)
def test_texts_are_counted_apart(
    passes: list[tuple[int, Sequence[int]]], kept: list[int] | None, length: int, texts: list[list[int]]
) -> None:
    counter = ExpertCounter(decoder())
    for start, tokens in passes:
        counter.passed(start, ids_of(np.array(tokens)))
    if kept is not None:
        counter.kept(3, kept)
    check(counter.counts(length), texts)


def test_a_reply_counts_only_its_own_tokens() -> None:
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
