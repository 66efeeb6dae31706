"""Backends whose memory holds one sequence, in which its forks take turns."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from edgeinfer.core.errors import BackendError
from edgeinfer.runtime.backends.cache import CacheSnapshot, Edit, check_length
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass, PassResult, check_pass

# Copies that the rows of a fork are kept in; more are made one.
_MOST_PIECES = 8


class CopiedFork(KVCache):
    """Implements `KVCache`: a text whose first rows are those of another cache, where copies of its further ones lie
    while it has its turn. Forks of it share the copies."""

    def __init__(self, origin: KVCache, trunk: int, pieces: Sequence[CacheSnapshot] = ()) -> None:
        self.origin = origin
        self._trunk = trunk  # first rows of the origin
        self._pieces = list(pieces)
        self.capacity, self.adapter = origin.capacity, origin.adapter
        self.length = trunk + sum(piece.length for piece in pieces)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def fork(self) -> CopiedFork:
        return CopiedFork(self.origin, self._trunk, self._pieces)

    def trim(self, length: int) -> None:
        check_length(length, self.length)
        while self._pieces and length < self.length:
            last = self._pieces.pop()
            start = self.length - last.length
            if length > start:
                self._pieces.append(last.part(0, length - start))
            self.length = max(start, length)
        self._trunk, self.length = min(self._trunk, length), length

    def clear(self) -> None:
        self.trim(0)

    def _keep(self, start: int, rows: Sequence[int]) -> None:
        if list(rows) != list(range(len(rows))):
            raise BackendError(f"Rows {list(rows)} of a fork do not follow each other.")
        self.trim(start + len(rows))

    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        with self.entered():
            return self.origin.snapshot(start, stop)

    def append(self, snapshot: CacheSnapshot) -> None:
        self._pieces.append(snapshot)
        self.length += snapshot.length

    def rewrite(self, edit: Edit) -> None:
        raise BackendError("The rows of a fork cannot be rewritten.")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Has all rows lie in the origin, and afterwards those again that were there."""
        origin, trunk = self.origin, self._trunk
        behind = origin.snapshot(trunk) if origin.length > trunk else None
        origin.trim(trunk)
        try:
            for piece in self._pieces:
                origin.append(piece)
            yield
        finally:
            origin.trim(trunk)
            if behind is not None:
                origin.append(behind)

    def take(self, start: int) -> None:
        """Copies the origin's rows from `start` on, which a pass over this text appended."""
        if len(self._pieces) > _MOST_PIECES:
            start = self._trunk
            self._pieces.clear()
        self._pieces.append(self.origin.snapshot(start))
        self.length = self.origin.length


class OneSequenceBackend(Backend):
    """The base of backends that hold one sequence at a time, as plans have the memory of one. What a fork has in common
    with the sequence stays where it is; every row is what it is in a pass of its own text alone, as that is what it is
    computed in."""

    _capacity: int
    _current: weakref.ref[KVCache] | None = None

    def new_sequence(self, capacity: int) -> KVCache:
        if capacity > self._capacity:
            raise BackendError(f"A sequence of {capacity} tokens is longer than a context of {self._capacity}.")
        if self._current is not None and self._current() is not None:
            raise BackendError(f"The {self.name} backend holds one sequence at a time.")
        cache = self._new_cache(capacity)
        cache.observers = self.observers
        self._current = weakref.ref(cache)
        return cache

    def forward(self, passes: Sequence[tuple[KVCache, Pass]]) -> list[PassResult]:
        if len(passes) == 1:
            return [self._evaluated(*passes[0])]
        return [self._evaluated(cache, batch).copy() for cache, batch in passes]

    def _evaluated(self, cache: KVCache, batch: Pass) -> PassResult:
        check_pass(self, cache, batch)
        start = cache.length
        if isinstance(cache, CopiedFork):
            with cache.entered():
                result = self._run(cache.origin, batch).copy()
                cache.take(start)
        else:
            result = self._run(cache, batch)
        for observer in self.observers:
            observer.passed(cache, start, batch, result)
        return result

    @abstractmethod
    def _new_cache(self, capacity: int) -> KVCache:
        """An empty cache for the sequence."""

    @abstractmethod
    def _run(self, cache: KVCache, batch: Pass) -> PassResult:
        """A checked pass of the sequence."""

    @property
    def _kv_bytes(self) -> int:
        cache = None if self._current is None else self._current()
        return 0 if cache is None else cache.nbytes
