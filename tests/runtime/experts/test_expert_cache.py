"""Which experts stay in memory: never more than the limit, and the least used go first."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.weights.experts import AROUND_BYTES, ExpertCache

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


def test_what_was_used_long_ago_is_worth_less_than_what_is_used_now() -> None:
    cache = Made(layers=1, room=2).make()
    for _ in range(100):
        cache.used(ids([0]))
    for _ in range(400):
        cache.used(ids([1]))
    cache.make_room(range(1), 1)
    assert cache.cached.tolist() == [[False, True, False, False]]


def test_of_equals_those_go_whose_layer_ran_already() -> None:
    cache = Made(room=4).make()
    cache.used(ids([0, 1], [0, 1]))
    cache.make_room(range(1, 2), 2)
    assert cache.cached.sum(axis=1).tolist() == [0, 2]


def test_a_layer_that_may_use_all_keeps_what_it_has() -> None:
    cache = Made(room=4).make()
    cache.used(ids([0, 1], [0, 1]))
    cache.make_room(range(1, 2), 4)
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
