"""KV buffers against a list of rows, under any sequence of operations."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.layouts import PORTABLE
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BackendError
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows
from edgeinfer.runtime.backends.kv_buffers import KVBuffers
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from tests.alone import Alone, restore
from tests.runtime.models import bundle_of, feed
from tests.tables import each_row

GEOMETRY = Geometry(vocab_size=8, hidden_size=8, num_layers=2, num_kv_heads=2, head_dim=4, max_positions=1000)
CAPACITY = 600


@contextlib.contextmanager
def running_out(allowed: int) -> Iterator[None]:
    """Lets so many arrays be made, and refuses memory for more."""
    left, zeros = itertools.repeat(True, allowed), np.zeros

    def scarce(*args: Any, **options: Any) -> Any:
        if next(left, False):
            return zeros(*args, **options)
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "zeros", scarce)
        yield


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

    def number(self, written: int, layer: int, sign: int) -> int:
        """The channels of a row."""
        return sign * (1 + written * 2 + layer)

    @rule(size=st.one_of(st.integers(1, 9), st.integers(1, 300)), padding=st.integers(0, 1))
    def append(self, size: int, padding: int) -> None:
        """As a backend does: room for the pass and its padding, rows in place, then the length."""
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
            for layer in range(GEOMETRY.num_layers):
                keys, values = (np.full((2, 1, 4), self.number(self.written, layer, s), np.float32) for s in (1, -1))
                self.cache.write(layer, len(self.expected), keys, values)
            self.expected.append(self.written)
        self.cache.length = len(self.expected)

    @rule(share=st.floats(0, 1))
    def trim(self, share: float) -> None:
        length = round(share * len(self.expected))
        self.cache.trim(length)
        del self.expected[length:]
        self.start = min(self.start, length)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.expected.clear()
        self.start = 0
        assert self.cache.nbytes == 0

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
        assert copy.kv == "float32"
        assert copy.nbytes == len(self.expected) * GEOMETRY.kv_bytes_per_token()
        self.copies = [*self.copies[-3:], (copy, list(self.expected))]

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        copy, rows = data.draw(st.sampled_from(self.copies))
        restore(self.cache, copy)
        self.expected = list(rows)
        self.start = len(rows)

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Rows leave and come back in two pieces."""
        stop = len(self.expected)
        start = data.draw(st.integers(0, stop))
        middle = data.draw(st.integers(start, stop))
        pieces = self.cache.snapshot(start, middle), self.cache.snapshot(middle, stop)
        self.cache.trim(start)
        for piece in pieces:
            self.cache.append(piece)
        self.start = stop

    @rule(drop=st.integers(1, 4))
    def rewrite(self, drop: int) -> None:
        """Drops some rows and moves the others together."""
        self.cache.rewrite(lambda layer, keys, values: (keys[:, ::drop], values[:, ::drop]))
        self.expected = self.expected[::drop]
        self.start = len(self.expected)

    @precondition(lambda self: self.cache.rows < CAPACITY)
    @rule(allowed=st.integers(0, 3))
    def run_out_of_memory(self, allowed: int) -> None:
        """Growth that fails after some arrays have grown changes nothing."""
        with running_out(allowed), pytest.raises(MemoryError):
            self.cache.reserve(self.cache.rows + 1)

    @invariant()
    def holds_the_rows(self) -> None:
        assert self.cache.length == len(self.expected)
        assert {a.shape for a in (*self.cache.keys, *self.cache.values)} == {(1, 2, self.cache.rows, 4)}
        for layer in range(GEOMETRY.num_layers):
            for sign, rows in zip((1, -1), self.cache.read(layer, 0, self.cache.length), strict=True):
                numbers = np.array([self.number(written, layer, sign) for written in self.expected], np.float32)
                assert np.array_equal(rows, np.broadcast_to(numbers[:, None], rows.shape))

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


def test_it_grows_by_doubling_and_refuses_what_does_not_fit() -> None:
    cache = KVBuffers(GEOMETRY, CAPACITY, spare=1)
    assert cache.rows == 256 and not cache.reserve(256)
    assert cache.reserve(257) and cache.rows == 512
    assert cache.reserve(513) and cache.rows == CAPACITY + 1
    with pytest.raises(BackendError, match="do not fit"):
        cache.reserve(CAPACITY + 2)


HALF = [np.zeros((2, 1, 4), np.float16)] * 2


@each_row(
    ("act", "match"),
    [
        (lambda cache: cache.trim(-1), "trim"),
        (lambda cache: cache.trim(6), "trim"),
        *(
            (lambda cache, rows=rows: cache.keep(2, rows), "Cannot keep")
            for rows in ([1, 0], [1, 1], [-1], [3], [0, 7])
        ),
        (lambda cache: cache.append(KVBuffers(Geometry(8, 8, 2, 1, 4, 1000), 10).snapshot()), "another model"),
        (lambda cache: cache.append(filled(20).snapshot()), "do not fit"),
        (lambda cache: cache.append(CopiedRows(1, HALF, HALF, "float16")), "of float16, this one is of float32"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(act: Callable[[KVBuffers], None], match: str) -> None:
    cache = filled(5, capacity=10)
    with pytest.raises(BackendError, match=match):
        act(cache)
    assert cache.length == 5


def test_new_rows_are_zero_and_old_ones_stay_also_behind_the_length() -> None:
    cache = filled(256)
    for array in (*cache.keys, *cache.values):
        array[:] = 7
    cache.trim(3)
    cache.reserve(300)
    for array in (*cache.keys, *cache.values):
        assert (array[:, :, :256] == 7).all()
        assert not array[:, :, 256:].any()


@each_row("failing", [0, 1])
def test_an_edit_that_fails_leaves_an_empty_cache(failing: int) -> None:
    for rows in ((6, 6), (3, 2)):
        cache = filled(5)
        with pytest.raises(BackendError, match="An edit of 5 rows"):
            cache.rewrite(lambda layer, keys, values, rows=rows: (np.zeros((2, rows[layer], 4), np.float32),) * 2)  # type: ignore[misc]
        assert cache.length == 0
    cache = filled(5)

    def edit(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        if layer == failing:
            raise ZeroDivisionError
        return keys[:, :3], values[:, :3]

    with pytest.raises(ZeroDivisionError):
        cache.rewrite(edit)
    assert cache.length == 0


def test_an_edit_sees_copies() -> None:
    cache = filled(5)
    seen = []

    def edit(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        kept = keys.copy(), values.copy()
        keys[:], values[:] = 9, 9
        seen.append(layer)
        return kept

    cache.rewrite(edit)
    assert seen == [0, 1] and not any(rows.any() for layer in seen for rows in cache.read(layer, 0, 5))


TEXT = np.random.default_rng(1).integers(0, 320, 300)


@pytest.fixture
def bundle() -> Bundle:
    return bundle_of(
        "qwen2", ExportConfig(4, 32, keep_small=False, layout=PORTABLE, calibration="none"), hidden_size=128
    )


def test_a_grown_cache_keeps_its_rows(bundle: Bundle) -> None:
    whole, parts = (Alone(OnnxBackend(bundle, 600), 600) for _ in range(2))
    expected = feed(whole, TEXT)
    assert np.array_equal(
        np.concatenate([feed(parts, part) for part in np.split(TEXT, [250, 251, 256, 257])]), expected
    )
    assert parts.nbytes()["kv"] == 512 * bundle.manifest.geometry.kv_bytes_per_token()
