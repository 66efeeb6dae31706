"""KV buffers against a list of rows, under any sequence of operations."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeinfer.bundle import Geometry
from edgeinfer.errors import BackendError
from edgeinfer.runtime.contracts import CacheSnapshot
from edgeinfer.runtime.kv import KVBuffers

GEOMETRY = Geometry(vocab_size=8, hidden_size=8, num_layers=2, num_kv_heads=2, head_dim=4, max_positions=1000)
CAPACITY = 600


class CacheMachine(RuleBasedStateMachine):
    """Every row written is filled with a number of its own; the model of the cache is the list of those numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.expected: list[int] = []
        self.copies: list[tuple[CacheSnapshot, list[int]]] = []
        self.start = 0

    @initialize(spare=st.sampled_from([0, 1, 3]))
    def make(self, spare: int) -> None:
        self.cache = KVBuffers(GEOMETRY, CAPACITY, spare)

    @rule(size=st.one_of(st.integers(1, 9), st.integers(1, 300)), padding=st.integers(0, 1))
    def append(self, size: int, padding: int) -> None:
        """What a backend does: room for the pass and its padding, rows in place, then the length."""
        self.start = len(self.expected)
        if self.start + size > CAPACITY:
            return
        before = [array.__array_interface__["data"] for array in (*self.cache.keys, *self.cache.values)]
        wanted = min(self.start + size + padding, CAPACITY)
        moved = self.cache.reserve(wanted)
        after = [array.__array_interface__["data"] for array in (*self.cache.keys, *self.cache.values)]
        assert moved or before == after
        assert self.cache.rows >= wanted
        for _ in range(size):
            self.written += 1
            for sign, arrays in ((1, self.cache.keys), (-1, self.cache.values)):
                for layer, array in enumerate(arrays):
                    array[0, :, len(self.expected)] = sign * (self.written * 2 + layer)
            self.expected.append(self.written)
        self.cache.length = len(self.expected)

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        length = round(share * len(self.expected))
        self.cache.truncate(length)
        del self.expected[length:]
        self.start = min(self.start, length)

    @rule(steps=st.lists(st.integers(1, 4), max_size=6))
    def keep(self, steps: list[int]) -> None:
        """Keeps some rows of the last pass, ascending."""
        rows = [row - 1 for row in accumulate(steps) if self.start + row - 1 < len(self.expected)]
        self.cache.keep(self.start, rows)
        self.expected[self.start :] = [self.expected[self.start + row] for row in rows]

    @rule()
    def snapshot(self) -> None:
        copy = self.cache.snapshot()
        assert copy.length == len(self.expected)
        assert copy.nbytes == len(self.expected) * GEOMETRY.kv_bytes_per_token()
        self.copies = [*self.copies[-3:], (copy, list(self.expected))]

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        copy, rows = data.draw(st.sampled_from(self.copies))
        self.cache.restore(copy)
        self.expected = list(rows)
        self.start = len(rows)

    @invariant()
    def holds_the_rows(self) -> None:
        numbers = np.array(self.expected, np.float32)
        assert self.cache.length == len(numbers)
        for sign, arrays in ((1, self.cache.keys), (-1, self.cache.values)):
            for layer, array in enumerate(arrays):
                assert array.shape == (1, 2, self.cache.rows, 4)
                rows = array[0, :, : len(numbers)]
                assert np.array_equal(rows, np.broadcast_to((sign * (numbers * 2 + layer))[:, None], rows.shape))

    @invariant()
    def counts_its_bytes(self) -> None:
        assert self.cache.nbytes == self.cache.rows * GEOMETRY.kv_bytes_per_token()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def filled(length: int, capacity: int = CAPACITY) -> KVBuffers:
    cache = KVBuffers(GEOMETRY, capacity)
    cache.reserve(length)
    cache.length = length
    return cache


def test_starts_small_and_doubles_up_to_the_capacity() -> None:
    cache = KVBuffers(GEOMETRY, CAPACITY, spare=1)
    assert cache.rows == 256
    assert not cache.reserve(256)
    assert cache.reserve(257)
    assert cache.rows == 512
    assert cache.reserve(513)
    assert cache.rows == CAPACITY + 1


def test_never_larger_than_the_capacity() -> None:
    assert KVBuffers(GEOMETRY, 10, spare=1).rows == 11


def test_new_rows_are_zero_and_old_ones_stay_also_behind_the_length() -> None:
    cache = filled(256)
    for array in (*cache.keys, *cache.values):
        array[:] = 7
    cache.truncate(3)
    cache.reserve(300)
    for array in (*cache.keys, *cache.values):
        assert (array[:, :, :256] == 7).all()
        assert not array[:, :, 256:].any()


def test_refuses_more_rows_than_the_capacity() -> None:
    with pytest.raises(BackendError, match="do not fit"):
        filled(5).reserve(CAPACITY + 1)


@pytest.mark.parametrize("length", [-1, 6])
def test_refuses_to_truncate_to_what_is_not_there(length: int) -> None:
    with pytest.raises(BackendError, match="truncate"):
        filled(5).truncate(length)


@pytest.mark.parametrize("rows", [[1, 0], [1, 1], [-1], [3], [0, 7]])
def test_refuses_to_keep_rows_that_are_not_of_the_pass(rows: list[int]) -> None:
    cache = filled(5)
    with pytest.raises(BackendError, match="Cannot keep"):
        cache.keep(2, rows)
    assert cache.length == 5


def test_refuses_the_snapshot_of_another_model() -> None:
    cache, stranger = filled(5), Geometry(8, 8, 2, 1, 4, 1000)
    with pytest.raises(BackendError, match="another model"):
        cache.restore(KVBuffers(stranger, 10).snapshot())
    assert cache.length == 5


def test_refuses_a_snapshot_larger_than_the_capacity() -> None:
    copy = filled(20).snapshot()
    small = filled(4, capacity=10)
    with pytest.raises(BackendError, match="do not fit"):
        small.restore(copy)
    assert small.length == 4
