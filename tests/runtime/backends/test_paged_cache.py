"""The paged cache against a plain list of rows, through every operation in any order, with forks and snapshots."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgeinfer.bundle.geometry import KVLayer
from edgeinfer.core.errors import BackendError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows
from edgeinfer.runtime.backends.paged_cache import PagedCache, PageSnapshot
from edgeinfer.runtime.paging.codecs import ROW_CODECS, find_row_codec
from edgeinfer.runtime.paging.layout import PAGE, PageLayout
from edgeinfer.runtime.paging.pool import PagePool
from tests.alone import restore
from tests.tables import each_row

LAYERS, HEADS, SIZE = 3, 2, 32
CAPACITY = 5 * PAGE + 20
# Numbers that every type keeps apart; rows of one value come back as the same row, whatever the type.
NUMBERS = np.float32(1.0) + np.arange(64, dtype=np.float32)


def pool_of(kv: str, pages: int = 40) -> PagePool:
    codec = find_row_codec(kv)
    return PagePool(PageLayout((KVLayer(HEADS, SIZE, SIZE),) * LAYERS, codec, codec), pages)


def rows_of(numbers: list[int], layer: int) -> Floats:  # (H, n, h)
    """Rows that tell their number, layer and head by a pattern of their channels."""
    pattern = np.cos(np.arange(SIZE) * (1 + layer))[None, None] + np.arange(HEADS)[:, None, None]
    rows: Floats = (NUMBERS[np.array(numbers, np.int64) % 64][None, :, None] * pattern).astype(np.float32)
    return rows


def feed(cache: PagedCache, numbers: list[int]) -> None:
    """A pass that writes a row for each number."""
    cache.prepare(len(numbers))
    for layer in range(LAYERS):
        rows = rows_of(numbers, layer)
        cache.write(layer, cache.length, rows, -rows)
    cache.length += len(numbers)


def stored(kv: str, numbers: list[int]) -> list[Floats]:
    codec = find_row_codec(kv)
    return [codec.decode(codec.encode(rows_of(numbers, layer)), SIZE) for layer in range(LAYERS)]


def assert_holds(cache: PagedCache, kv: str, numbers: list[int]) -> None:
    assert cache.length == len(numbers)
    codec = find_row_codec(kv)
    for layer, rows in enumerate(stored(kv, numbers)):
        keys, values = cache.read(layer, 0, len(numbers))
        assert np.array_equal(keys, rows)
        assert np.array_equal(values, codec.decode(codec.encode(-rows_of(numbers, layer)), SIZE))


def assert_snapshot(snapshot: CacheSnapshot, kv: str, numbers: list[int]) -> None:
    codec = find_row_codec(kv)
    assert (snapshot.length, snapshot.kv, snapshot.scales) == (len(numbers), kv, codec.scales)
    for layer, (keys, values) in enumerate(zip(snapshot.keys, snapshot.values, strict=True)):
        rows = rows_of(numbers, layer)
        assert np.array_equal(keys, codec.encode(rows))
        assert np.array_equal(values, codec.encode(-rows))


class Model:
    """Caches of one pool and what each must hold, with what was kept of them."""

    def __init__(self, kv: str, seed: int) -> None:
        self.kv = kv
        self.pool = pool_of(kv)
        self.rng = np.random.default_rng(seed)
        self.caches: list[tuple[PagedCache, list[int]]] = [(PagedCache(self.pool, CAPACITY), [])]
        self.kept: list[tuple[CacheSnapshot, list[int]]] = []
        self.counter = 0

    def numbers(self, count: int) -> list[int]:
        self.counter += count
        return list(range(self.counter - count, self.counter))

    def step(self) -> None:
        cache, rows = self.caches[self.rng.integers(len(self.caches))]
        steps: list[Callable[[PagedCache, list[int]], None]] = [
            *[self.feed, self.trim, self.keep] * 2,
            *[self.fork, self.drop, self.snapshot, self.append, self.restore, self.cut, self.rewrite],
        ]
        steps[self.rng.integers(len(steps))](cache, rows)

    def feed(self, cache: PagedCache, rows: list[int]) -> None:
        new = self.numbers(min(int(self.rng.choice([1, 3, 70, 130])), CAPACITY - len(rows)))
        feed(cache, new)
        rows += new

    def trim(self, cache: PagedCache, rows: list[int]) -> None:
        length = int(self.rng.integers(len(rows) + 1))
        cache.trim(length)
        del rows[length:]

    def keep(self, cache: PagedCache, rows: list[int]) -> None:
        start = max(0, len(rows) - int(self.rng.integers(1, 80)))
        wanted = [r for r in range(len(rows) - start) if self.rng.random() < 0.6]
        cache.keep(start, wanted)
        rows[start:] = [rows[start + r] for r in wanted]

    def fork(self, cache: PagedCache, rows: list[int]) -> None:
        if len(self.caches) < 4:
            self.caches.append((cache.fork(), list(rows)))

    def drop(self, cache: PagedCache, rows: list[int]) -> None:
        if len(self.caches) > 1:
            self.caches = [each for each in self.caches if each[0] is not cache]
        else:
            cache.clear()
            rows.clear()

    def snapshot(self, cache: PagedCache, rows: list[int]) -> None:
        start, stop = sorted(int(end) for end in self.rng.integers(0, len(rows) + 1, 2))
        self.kept = [*self.kept[-2:], (cache.snapshot(start, stop), rows[start:stop])]

    def piece(self) -> tuple[CacheSnapshot, list[int]]:
        """Some kept rows, as they are or as arrays."""
        if not self.kept:
            return CopiedRows(0, (), (), self.kv, find_row_codec(self.kv).scales), []
        snapshot, rows = self.kept[self.rng.integers(len(self.kept))]
        start, stop = sorted(int(end) for end in self.rng.integers(0, len(rows) + 1, 2))
        part = snapshot.part(start, stop)
        if self.rng.random() < 0.3:
            part = CopiedRows(part.length, part.keys, part.values, part.kv, part.scales)
        return part, rows[start:stop]

    def append(self, cache: PagedCache, rows: list[int]) -> None:
        piece, more = self.piece()
        if len(more) and len(rows) + len(more) <= CAPACITY:
            cache.append(piece)
            rows += more

    def restore(self, cache: PagedCache, rows: list[int]) -> None:
        piece, more = self.piece()
        if len(more):
            restore(cache, piece)
            rows[:] = more

    def cut(self, cache: PagedCache, rows: list[int]) -> None:
        if self.kept and len(self.kept[0][1]) > 1:
            snapshot, mine = self.kept.pop(0)
            at = int(self.rng.integers(1, len(mine)))
            before = snapshot.nbytes
            rest = snapshot.cut(at)
            assert snapshot.nbytes + rest.nbytes == before
            self.kept += [(snapshot, mine[:at]), (rest, mine[at:])]

    def rewrite(self, cache: PagedCache, rows: list[int]) -> None:
        if rows and self.kv == "float32":
            cache.rewrite(lambda layer, keys, values: (keys[:, 1::2], values[:, 1::2]))
            rows[:] = rows[1::2]

    def check(self) -> None:
        for cache, rows in self.caches:
            assert_holds(cache, self.kv, rows)
            pages = cache.table[: -(-len(rows) // PAGE)]
            assert (pages >= 0).all()
            assert (np.diff(np.flatnonzero(cache.table >= 0)) == 1).all()
        for snapshot, rows in self.kept:
            assert_snapshot(snapshot, self.kv, rows)
        tables = [[int(p) for p in cache.table if p >= 0] for cache, _ in self.caches]
        tables += [list(getattr(snapshot, "pages", ())) for snapshot, _ in self.kept]
        holders = [sum(table.count(page) for table in tables) for page in range(self.pool.pages)]
        assert [self.pool.holders(page) for page in range(self.pool.pages)] == holders


@pytest.mark.parametrize("steps", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_it_is_a_list_of_rows(steps: int) -> None:
    for seed, kv in enumerate(ROW_CODECS):
        model = Model(kv, seed)
        for step in range(steps):
            model.step()
            if step % 3 == 0:
                model.check()
        pool = model.pool
        model.caches.clear()
        model.kept.clear()
        assert pool.used == 0


def assert_rows_behind_the_length_stay_for_a_pass_that_resumes() -> None:
    """A pass that left out layers is trimmed away and gone on with from there."""
    cache = PagedCache(pool_of("float32"), CAPACITY)
    feed(cache, list(range(PAGE)))
    cache.prepare(3)
    first = rows_of([40, 41, 42], 0)
    cache.write(0, PAGE, first, first)
    cache.length += 3
    cache.trim(PAGE)
    cache.prepare(3)
    assert np.array_equal(cache.read(0, PAGE, PAGE + 3)[0], first)
    cache.trim(0)
    held = cache.snapshot()  # of nothing
    cache.prepare(1)
    assert cache.nbytes == 2 * cache.pool.layout.page_bytes
    assert held.nbytes == 0


def test_forks_and_snapshots_copy_nothing_until_one_writes() -> None:
    assert_rows_behind_the_length_stay_for_a_pass_that_resumes()
    pool = pool_of("float16")
    cache = PagedCache(pool, CAPACITY)
    feed(cache, list(range(150)))
    forked, snapshot = cache.fork(), cache.snapshot()
    assert pool.used == 3
    assert forked.table[:3].tolist() == cache.table[:3].tolist()
    feed(forked, [7])
    assert pool.used == 4
    assert forked.table[:2].tolist() == cache.table[:2].tolist()
    assert forked.table[2] != cache.table[2]
    feed(cache, [8])  # the snapshot still holds the page
    assert pool.used == 5
    assert_holds(forked, "float16", [*range(150), 7])
    assert_holds(cache, "float16", [*range(150), 8])
    assert_snapshot(snapshot, "float16", list(range(150)))
    table = cache.table
    feed(cache, list(range(100)))
    assert cache.table is table
    del forked, snapshot
    assert pool.used == 4
    assert cache.nbytes == 4 * pool.layout.page_bytes


@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_keys_are_replaced_alone(kv: str) -> None:
    """Values keep their bits, and rows that another cache shares keep their keys."""
    cache = PagedCache(pool_of(kv), CAPACITY)
    feed(cache, list(range(8)))
    shared, before = cache.fork(), cache.snapshot().values
    for layer in range(LAYERS):
        cache.write_keys(layer, 2, cache.read_keys(layer, 2, 8) + 1)
    codec, wanted = find_row_codec(kv), [*stored(kv, list(range(8)))]
    for layer, rows in enumerate(wanted):
        turned = codec.decode(codec.encode(rows[:, 2:] + 1), SIZE)
        np.testing.assert_array_equal(cache.read_keys(layer, 0, 8), np.concatenate([rows[:, :2], turned], axis=1))
        np.testing.assert_array_equal(cache.snapshot().values[layer], before[layer])
    assert_holds(shared, kv, list(range(8)))


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    pool = pool_of("int8", 3)
    cache, other = PagedCache(pool, CAPACITY), PagedCache(pool_of("float32"), CAPACITY)
    feed(cache, list(range(100)))
    feed(other, [1])
    mine = cache.snapshot()
    foreign = CopiedRows(1, mine.keys[:1], mine.values, mine.kv, mine.scales)
    for refused, match in (
        (lambda: cache.prepare(100), "no 2 pages"),
        (lambda: cache.prepare(CAPACITY), "do not fit a cache"),
        (lambda: cache.append(other.snapshot()), "of float32, this one is of int8"),
        (lambda: cache.append(foreign), "another model"),
        (lambda: cache.append(mine), "no 2 pages"),
        (lambda: cache.keep(90, [3, 2]), "Cannot keep rows"),
        (lambda: cache.trim(101), "Cannot trim"),
        (lambda: cache.snapshot(5, 200), "Cannot copy rows"),
    ):
        with pytest.raises(BackendError, match=match):
            refused()
        assert_holds(cache, "int8", list(range(100)))


@each_row("kv", ["float32", "int4"])
def test_rows_are_copied_where_holding_their_pages_would_leave_none(kv: str) -> None:
    """Twelve texts are kept for readers; the pool has pages of the cache and some more."""
    pool = pool_of(kv, 10)
    cache = PagedCache(pool, CAPACITY)
    kept = []
    for text in range(12):
        cache.trim(0)
        feed(cache, list(range(text, text + 2 * PAGE + 5)))
        kept.append(cache.snapshot())
    assert {type(snapshot) for snapshot in kept} == {PageSnapshot, CopiedRows}
    for text, snapshot in enumerate(kept):
        restore(cache, snapshot)
        assert_holds(cache, kv, list(range(text, text + 2 * PAGE + 5)))
        feed(cache, [1] * (CAPACITY - cache.length))
