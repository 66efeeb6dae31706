"""Which experts stay in memory: never more than the limit, and the least used go first."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.experts.residency import Residency
from edgeinfer.runtime.weights.expert_bytes import AROUND_BYTES

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
    """A residency over made-up weights, 1 MB an expert."""

    layers: int = 2
    experts: int = 4
    room: int = 4
    parts: dict[tuple[int, int], Part] = field(default_factory=dict)

    def make(self) -> Residency:
        self.parts = {(layer, expert): Part() for layer in range(self.layers) for expert in range(self.experts)}
        sizes = np.full((self.layers, self.experts), SIZE)
        return Residency(self.parts, sizes, self.room * (SIZE + AROUND_BYTES))


def ids(*layers: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:  # (L, 1, k)
    return np.array(layers)[:, None, :]


def test_what_was_used_is_resident_and_counts() -> None:
    residency = Made().make()
    assert residency.hit_rate is None
    residency.used(ids([0, 1], [2, -1]))
    assert residency.resident.tolist() == [[True, True, False, False], [False, False, True, False]]
    assert (residency.resident_bytes, residency.expert_bytes) == (3 * SIZE, 8 * SIZE)
    residency.used(ids([0, 1], [3, -1]))
    assert residency.hit_rate == 2 / 6


def test_the_least_used_go_first() -> None:
    made = Made()
    residency = made.make()
    for _ in range(3):
        residency.used(ids([0, 1], [2, -1]))
    residency.used(ids([0, 3], [2, -1]))
    residency.make_room(range(2), 1)
    assert residency.resident_bytes == 2 * SIZE
    assert not residency.resident[0, 3]
    assert made.parts[0, 3].released and not made.parts[0, 0].released
    residency.make_room(range(2), 1)
    assert residency.resident_bytes == 2 * SIZE


def test_what_was_used_long_ago_is_worth_less_than_what_is_used_now() -> None:
    residency = Made(layers=1, room=2).make()
    for _ in range(100):
        residency.used(ids([0]))
    for _ in range(400):
        residency.used(ids([1]))
    residency.make_room(range(1), 1)
    assert residency.resident.tolist() == [[False, True, False, False]]


def test_of_equals_those_go_whose_layer_ran_already() -> None:
    residency = Made(room=4).make()
    residency.used(ids([0, 1], [0, 1]))
    residency.make_room(range(1, 2), 2)
    assert residency.resident.sum(axis=1).tolist() == [0, 2]


def test_a_layer_that_may_use_all_keeps_what_it_has() -> None:
    residency = Made(room=4).make()
    residency.used(ids([0, 1], [0, 1]))
    residency.make_room(range(1, 2), 4)
    assert residency.resident.sum(axis=1).tolist() == [0, 2]


def test_pages_around_one_that_came_are_dropped() -> None:
    made = Made()
    residency = made.make()
    residency.used(ids([0, 2], [-1, -1]))
    # Neighbours in the file are not in memory, though the system may have mapped some of their pages.
    assert [made.parts[0, e].released for e in range(4)] == [0, 2, 0, 1]
    residency.used(ids([0, 2], [-1, -1]))
    assert made.parts[0, 1].released == 2


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 99)), max_size=60), st.integers(4, 8))
@settings(max_examples=40, deadline=None)
def test_never_more_than_the_limit(passes: list[tuple[int, int]], room: int) -> None:
    made = Made(room=room)
    residency = made.make()
    for tokens, seed in passes:
        chosen = np.random.default_rng(seed).integers(0, 4, (2, tokens, 2))
        for layer in range(2):
            residency.make_room(range(layer, layer + 1), tokens * 2)
            window = np.full_like(chosen, -1)
            window[layer] = chosen[layer]
            before = residency.resident_bytes
            residency.used(window)
            came = residency.resident_bytes - before
            assert residency.resident_bytes + AROUND_BYTES * came // SIZE <= residency.limit
            assert residency.resident[layer][np.unique(chosen[layer])].all()
    assert residency.resident_bytes == residency.resident.sum() * SIZE


def test_worth_never_overflows() -> None:
    residency = Made(layers=1, room=2).make()
    for _ in range(50):
        residency.used(np.zeros((1, 4096, 1), np.int64))
    residency.used(ids([1]))
    assert np.isfinite(residency._worth).all()
    residency.make_room(range(1), 1)
    assert residency.resident.tolist() == [[True, False, False, False]]


def test_a_prompt_s_layer_is_fetched_ahead() -> None:
    made = Made()
    residency = made.make()
    residency.used(ids([1], [-1]))
    residency.fetch(0)
    assert [made.parts[0, e].fetched for e in range(4)] == [1, 0, 1, 1]


def test_only_experts_in_memory_may_draft() -> None:
    residency = Made().make()
    assert not residency.bias().any()
    residency.used(ids([0, 2], [-1, -1]))
    bias = residency.bias()
    assert bias[0].tolist() == [0, -1e9, 0, -1e9]
    # A layer without any would have nothing to choose from.
    assert not bias[1].any()
    residency.forget()
    assert not residency.resident.any() and residency.resident_bytes == 0
