"""Continuations of one text: evaluated together if a backend can, else one after the other in its one cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import Backend, ForkingBackend, Pass, PassResult, TogetherBackend
from edgeinfer.runtime.backends.wrapped import uncounted

# Copies that the rows of a text are kept in behind the first; more are made one.
_MOST_PIECES = 8


@dataclass(eq=False)
class _Piece:
    """Rows of a text that follow each other."""

    length: int
    rows: CacheSnapshot | None = None  # a copy; None while they lie in the backend's cache alone


class CopiedFork:
    """Implements `ForkableCache`: a text whose rows lie in the backend's cache when it has its turn, else in copies."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self.pieces = list(pieces)

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def fork(self) -> CopiedFork:
        """Another text with the same rows, of which there is one copy."""
        return CopiedFork(self.pieces)

    def clear(self) -> None:
        self.pieces.clear()


class TurnTaking:
    """Implements `ForkingBackend` for a backend of one text at a time, whose passes the texts take turns in. Every row
    is what it is in a pass of its own text alone, to the last bit, as that is what it is computed in. What a text has
    in common with the one before it stays where it is in the cache."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._there = [_Piece(backend.cache.length)]  # what the backend's cache holds
        self.cache = CopiedFork(self._there)

    def forward_together(self, sequences: Sequence[tuple[CopiedFork, Pass]]) -> list[PassResult]:
        outputs = []
        try:
            for fork, batch in sequences:
                self._put(fork.pieces)
                outputs.append(self._backend.forward(batch).copy())
                self._add(fork, len(batch.tokens))
        finally:
            self._put(self.cache.pieces)
        return outputs

    def _put(self, pieces: Sequence[_Piece]) -> None:
        """Replace the rows in the backend's cache by these."""
        cache, there = self._backend.cache, self._there
        common = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(there, pieces, strict=False)))
        start = end = sum(piece.length for piece in pieces[:common])
        for piece in there[common:]:
            if piece.rows is None:
                piece.rows = cache.snapshot(end, end + piece.length)
            end += piece.length
        cache.trim(start)
        self._there = there[:common]
        for piece in pieces[common:]:
            assert piece.rows is not None, "only what the cache holds has no copy"
            cache.append(piece.rows)
            self._there.append(piece)

    def _add(self, fork: CopiedFork, rows: int) -> None:
        """Add the last rows of the backend's cache to the text."""
        cache = self._backend.cache
        start = cache.length - rows
        if len(fork.pieces) > _MOST_PIECES:
            start = fork.pieces[0].length
            del fork.pieces[1:], self._there[1:]
        fork.pieces.append(_Piece(cache.length - start, cache.snapshot(start)))
        self._there = list(fork.pieces)


def can_fork(backend: Backend) -> bool:
    whole = backend.cache.copyable and backend.capabilities.copies
    return isinstance(uncounted(backend), TogetherBackend) or whole


def copied_bytes(backend: Backend, rows: int) -> int:
    """Bytes of copies of so many rows; none where texts share what holds them."""
    shared = isinstance(uncounted(backend), TogetherBackend)
    return 0 if shared else backend.cache.snapshot(0, 0).bytes_for(rows)


def forking(backend: Backend) -> ForkingBackend[Any]:
    """A backend for several continuations of the text in a backend's cache, if `can_fork` allows it. Experts that their
    passes use are not counted."""
    backend = uncounted(backend)
    return backend if isinstance(backend, TogetherBackend) else TurnTaking(backend)
