"""Rows of conversations other than the current one, stored once per shared prefix under a cap.

A tree of spans: each node holds the tokens that follow its parent's and the keys and values of their rows, so that two
conversations with the same system message keep its rows once. What was used longest ago is dropped first, ends of
conversations before their beginnings.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.backends.cache import CacheSnapshot

__all__ = ["PrefixCache", "planned_bytes"]

_log = logging.getLogger("edgeinfer")

_ID = np.dtype(np.int32)

Ids = NDArray[np.int32]


def planned_bytes(cap: int, layers: int) -> int:
    """Bytes that a prefix cache takes at most: its cap, and one array of a layer while a span is split."""
    return cap + cap // (2 * layers)


class _Span:
    """Tokens that follow those of the parent, and their rows: keys of each layer, then values, (H, n, h) each."""

    def __init__(self, tokens: Ids, arrays: list[NDArray[Any]], parent: _Span | None, used: int) -> None:
        self.tokens = tokens
        self.arrays = arrays
        self.parent = parent
        self.used = used
        self.children: dict[int, _Span] = {}


class PrefixCache:
    """Stores rows by the tokens they and all rows before them belong to.

    Args:
        cap: bytes of rows and token ids kept at most; 0 keeps nothing.

    Attributes:
        cap: the same.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._root = _Span(np.zeros(0, _ID), [], None, 0)
        self._spans: set[_Span] = set()
        self._kind: CacheSnapshot | None = None  # of no rows: what pieces are made after
        self._count = 0
        self._clock = itertools.count(1)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and token ids kept."""
        return self._count * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        if self._kind is None:
            return _ID.itemsize
        arrays = (*self._kind.keys, *self._kind.values)
        return _ID.itemsize + sum(int(a.shape[0] * a.shape[2] * a.itemsize) for a in arrays)

    def match(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens have their rows here."""
        return sum(shared for _, shared in self._path(np.array(tokens, _ID))) if self._spans else 0

    def take(self, tokens: Sequence[int], start: int, stop: int) -> Iterator[CacheSnapshot]:
        """Rows start..stop-1 of these tokens, of which `match` knows at least `stop`, piece by piece.

        The pieces are views of what is stored: copy them before anything else is asked of the cache.
        """
        tick, at = next(self._clock), 0
        for span, shared in self._path(np.array(tokens, _ID)):
            span.used = tick
            low, high = max(start - at, 0), min(stop - at, shared)
            if low < high:
                yield self._piece([array[:, low:high] for array in span.arrays], high - low)
            at += shared

    def offer(
        self, tokens: Sequence[int], copy: Callable[[int, int], CacheSnapshot], wanted: Sequence[int] = ()
    ) -> None:
        """Keeps the rows of these tokens that are not here yet, from the first on as far as they fit.

        Args:
            tokens: what the rows are of.
            copy: rows start..stop-1 of them.
            wanted: tokens whose rows are about to be taken, and are therefore not dropped for those offered.
        """
        if self.cap == 0:
            return
        ids = np.array(tokens, _ID)
        if self._kind is None:
            self._kind = copy(0, 0)
        path = list(self._path(ids))
        cached, tick = sum(shared for _, shared in path), next(self._clock)
        if path and path[-1][1] < len(path[-1][0].tokens) and cached < len(ids):
            self._split(*path[-1])
        spans = [span for span, _ in self._path(ids)]
        for span in spans:
            span.used = tick
        pinned = {*spans, *(span for span, _ in self._path(np.array(wanted, _ID)))}
        room = self.cap // self._token_bytes - sum(len(span.tokens) for span in pinned)
        new = min(len(ids) - cached, room)
        if new < 1:
            return
        self._evict(self.cap - new * self._token_bytes, pinned)
        try:
            rows = copy(cached, cached + new)
        except MemoryError:
            _log.warning("Not enough memory to keep another conversation; the kept ones are dropped.")
            self.evict(0)
            return
        parent = spans[-1] if spans else self._root
        self._add(ids[cached : cached + new].copy(), [*rows.keys, *rows.values], parent, tick)

    def evict(self, keep_bytes: int = 0) -> None:
        """Drops what was used longest ago until no more than this is kept."""
        self._evict(keep_bytes, ())

    def _path(self, ids: Ids) -> Iterator[tuple[_Span, int]]:
        """The spans along these tokens and how many of each one's match: all, but for the last."""
        span, at = self._root, 0
        while at < len(ids):
            child = span.children.get(int(ids[at]))
            if child is None:
                return
            shared = _shared(child.tokens, ids[at:])
            yield child, shared
            if shared < len(child.tokens):
                return
            span, at = child, at + shared

    def _piece(self, arrays: list[NDArray[Any]], length: int) -> CacheSnapshot:
        assert self._kind is not None
        layers = len(arrays) // 2
        return replace(self._kind, length=length, keys=tuple(arrays[:layers]), values=tuple(arrays[layers:]))

    def _add(self, tokens: Ids, arrays: list[NDArray[Any]], parent: _Span, used: int) -> _Span:
        span = _Span(tokens, arrays, parent, used)
        parent.children[int(tokens[0])] = span
        self._spans.add(span)
        self._count += len(tokens)
        return span

    def _split(self, span: _Span, at: int) -> None:
        """Makes two spans of one, copied array by array so that neither keeps the other's rows alive."""
        below = _Span(span.tokens[at:].copy(), [], span, span.used)
        for place, array in enumerate(span.arrays):
            below.arrays.append(array[:, at:].copy())
            span.arrays[place] = array[:, :at].copy()
        span.tokens = span.tokens[:at].copy()
        below.children, span.children = span.children, {int(below.tokens[0]): below}
        for child in below.children.values():
            child.parent = below
        self._spans.add(below)

    def _evict(self, keep_bytes: int, pinned: Collection[_Span]) -> None:
        while self.nbytes > keep_bytes:
            ends = [span for span in self._spans if not span.children and span not in pinned]
            if not ends:
                return
            oldest = min(ends, key=lambda span: span.used)
            assert oldest.parent is not None
            del oldest.parent.children[int(oldest.tokens[0])]
            self._spans.remove(oldest)
            self._count -= len(oldest.tokens)


def _shared(a: Ids, b: Ids) -> int:
    """How many of the first elements are the same."""
    size = min(len(a), len(b))
    differing = np.flatnonzero(a[:size] != b[:size])
    return int(differing[0]) if len(differing) else size
