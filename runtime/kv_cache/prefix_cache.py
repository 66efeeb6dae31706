"""Rows of conversations other than the current one, stored once per shared prefix under a cap.

A tree of spans: each node holds the tokens that follow its parent's and a snapshot of their rows, so that two
conversations with the same system message keep its rows once. The snapshots of a paged cache hold its pages; those of
others are copies. What was used longest ago is dropped first, ends of conversations before their beginnings.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.backends.cache import CacheSnapshot

_log = logging.getLogger("edgeinfer")

_ID = np.dtype(np.int32)

Ids = NDArray[np.int32]


def planned_bytes(cap: int, layers: int) -> int:
    """Bytes that a prefix cache takes at most: its cap, and one array of a layer while a span is split."""
    return cap + cap // (2 * layers)


class _Span:
    """Tokens that follow the parent's, and their rows; the root has none."""

    def __init__(self, tokens: Ids, rows: CacheSnapshot | None, parent: _Span | None, used: int) -> None:
        self.tokens = tokens
        self.rows = rows
        self.parent = parent
        self.used = used
        self.children: dict[int, _Span] = {}

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + (0 if self.rows is None else self.rows.nbytes)


class PrefixCache:
    """Stores up to `cap` bytes of rows by the tokens they and all rows before them belong to; 0 keeps nothing."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._roots: dict[str | None, _Span] = {}  # by adapter
        self._spans: set[_Span] = set()
        self._kind: CacheSnapshot | None = None  # of no rows, which tells what more of them take
        self.nbytes = 0
        self._clock = itertools.count(1)

    @property
    def bytes_in_place(self) -> int:
        """Bytes of them that lie in the memory of the cache they come from."""
        # Of a pool that is nearly used up, snapshots are copies, so spans of both kinds may be here.
        return sum(span.rows.nbytes for span in self._spans if span.rows is not None and span.rows.in_place)

    def match(self, tokens: Sequence[int], adapter: str | None = None) -> int:
        """After how many of the first tokens a text can go on from rows that are here."""
        found = at = 0
        for span, shared in self._path(np.array(tokens, _ID), adapter) if self._spans else ():
            if span.rows is not None and (rows := span.rows.rewindable_to(shared)):
                found = at + rows
            at += shared
        return found

    def take(self, tokens: Sequence[int], start: int, stop: int, adapter: str | None = None) -> Iterator[CacheSnapshot]:
        """Rows start..stop-1 of these tokens, of which `match` knows at least `stop`, piece by piece. The pieces may be
        views of what is stored: add them to a cache before anything else is asked of this one."""
        tick, at = next(self._clock), 0
        for span, shared in self._path(np.array(tokens, _ID), adapter):
            span.used = tick
            low, high = max(start - at, 0), min(stop - at, shared)
            if low < high and span.rows is not None:
                yield span.rows.part(low, high)
            at += shared

    def offer(
        self,
        tokens: Sequence[int],
        copy: Callable[[int, int], CacheSnapshot],
        wanted: Sequence[int] = (),
        adapter: str | None = None,
    ) -> None:
        """Keeps the rows of these tokens that are not here yet, from the first on as far as they fit without dropping
        the `wanted` tokens' rows, which are about to be taken."""
        if self.cap == 0:
            return
        ids = np.array(tokens, _ID)
        if self._kind is None:
            self._kind = copy(0, 0)
        path = list(self._path(ids, adapter))
        cached, tick = sum(shared for _, shared in path), next(self._clock)
        if path and path[-1][1] < len(path[-1][0].tokens) and cached < len(ids):
            self._split(*path[-1])
        spans = [span for span, _ in self._path(ids, adapter)]
        for span in spans:
            span.used = tick
        pinned = {*spans, *(span for span, _ in self._path(np.array(wanted, _ID), adapter))}
        new = self._fitting(len(ids) - cached, self.cap - sum(span.nbytes for span in pinned))
        if new < 1:
            return
        self._evict(self.cap - self._bytes_for(new), pinned)
        try:
            rows = copy(cached, cached + new)
        except MemoryError:
            _log.warning("Not enough memory to keep another conversation; the kept ones are dropped.")
            self.evict(0)
            return
        parent = spans[-1] if spans else self._root(adapter)
        self._add(_Span(ids[cached : cached + new].copy(), rows, parent, tick))

    def _bytes_for(self, rows: int) -> int:
        """Bytes of so many further rows and their tokens, at most."""
        return rows * _ID.itemsize + (0 if self._kind is None else self._kind.bytes_for(rows))

    def _fitting(self, most: int, room: int) -> int:
        """Number of further rows, up to `most`, that fit into so many bytes."""
        return bisect.bisect_right(range(1, most + 1), room, key=self._bytes_for)

    def evict(self, keep_bytes: int = 0) -> None:
        """Drops the least recently used rows until no more than this is kept."""
        self._evict(keep_bytes, ())

    def _root(self, adapter: str | None) -> _Span:
        """The beginning of all texts with an adapter."""
        return self._roots.setdefault(adapter, _Span(np.zeros(0, _ID), None, None, 0))

    def _path(self, ids: Ids, adapter: str | None) -> Iterator[tuple[_Span, int]]:
        """The spans along these tokens and how many of each one's match: all, but for the last."""
        span, at = self._root(adapter), 0
        while at < len(ids):
            child = span.children.get(int(ids[at]))
            if child is None:
                return
            shared = shared_length(child.tokens, ids[at:])
            yield child, shared
            if shared < len(child.tokens):
                return
            span, at = child, at + shared

    def _add(self, span: _Span) -> None:
        assert span.parent is not None
        span.parent.children[int(span.tokens[0])] = span
        self._spans.add(span)
        self.nbytes += span.nbytes

    def _split(self, span: _Span, at: int) -> None:
        assert span.rows is not None
        self.nbytes -= span.nbytes
        below = _Span(span.tokens[at:].copy(), span.rows.cut(at), span, span.used)
        span.tokens = span.tokens[:at].copy()
        below.children, span.children = span.children, {}
        for child in below.children.values():
            child.parent = below
        self.nbytes += span.nbytes
        self._add(below)

    def _evict(self, keep_bytes: int, pinned: Collection[_Span]) -> None:
        while self.nbytes > keep_bytes:
            ends = [span for span in self._spans if not span.children and span not in pinned]
            if not ends:
                return
            oldest = min(ends, key=lambda span: span.used)
            assert oldest.parent is not None
            del oldest.parent.children[int(oldest.tokens[0])]
            self._spans.remove(oldest)
            self.nbytes -= oldest.nbytes


def shared_length(a: NDArray[Any], b: NDArray[Any]) -> int:  # (n,), (m,)
    size = min(len(a), len(b))
    differing = np.flatnonzero(a[:size] != b[:size])
    return int(differing[0]) if len(differing) else size
