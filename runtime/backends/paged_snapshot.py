"""Rows of a paged cache that are held where they lie, and the state with which a text goes on after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.paging.layout import PAGE, pages_for
from edgeinfer.runtime.paging.pool import PagePool
from edgeinfer.runtime.paging.states import StatePool, StateSnapshot


class PageSnapshot:
    """Implements `CacheSnapshot` by holding the pages that the rows lie in.

    Args:
        pool: that the pages belong to.
        pages: one behind the other; this becomes a holder of each.
        offset: of the first row in the first page.
        length: rows.
        joined: the first page holds rows of another snapshot, which counts it.
        start: of the text, where the first row is.
        behind: of recurrent layers, with which the text goes on after some of the rows; None where there is none.
        states: that such a state lies in; None where there are no such layers.
    """

    in_place = True

    def __init__(
        self,
        pool: PagePool,
        pages: Sequence[int],
        offset: int,
        length: int,
        *,
        joined: bool = False,
        start: int = 0,
        behind: StateSnapshot | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.start = start
        self.behind = behind
        self._states = states
        self.pool = pool
        self.pages = tuple(pages)
        self.offset = offset
        self.length = length
        self._joined = joined
        pool.share(self.pages)

    def __del__(self) -> None:
        self.pool.release(self.pages)

    @property
    def kv(self) -> str:
        """Name of the type of the cache."""
        return self.pool.layout.kv

    @property
    def scales(self) -> str:
        """`ROW_SCALES` where every row has its own; nothing where none are needed."""
        return self.pool.layout.scales

    @property
    def keys(self) -> tuple[NDArray[Any], ...]:  # L of (H, n, width)
        """A copy of the keys of each layer as they are stored."""
        return self.pool.rows.stored_keys(self.places)

    @property
    def values(self) -> tuple[NDArray[Any], ...]:  # L of (H, n, width)
        """A copy of the values of each layer as they are stored."""
        return self.pool.rows.stored_values(self.places)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, and of the state."""
        state = 0 if self.behind is None else self.behind.nbytes
        return (len(self.pages) - self._joined) * self.pool.layout.page_bytes + state

    @property
    def state(self) -> NDArray[np.uint8] | None:
        """A copy of the state behind the last row."""
        state = self._state_at(self.length)
        return None if state is None or state.until < self.start + self.length else state.copy()

    @property
    def places(self) -> Ints:  # (n,)
        """Where the rows lie in the pool."""
        return places_in(np.array(self.pages, np.int64), self.offset, self.offset + self.length)

    def part(self, start: int, stop: int) -> PageSnapshot:
        """Rows start..stop-1, in the same pages."""
        first, last = self.offset + start, self.offset + stop
        pages = self.pages[first // PAGE : pages_for(last)] if start < stop else ()
        joined = self._joined and first < PAGE
        return self._made(pages, first % PAGE, stop - start, joined, start, self._state_at(stop))

    def cut(self, at: int) -> PageSnapshot:
        """No row is copied; a page in which the cut lies is held by both."""
        end = self.offset + at
        pages = self.pages[end // PAGE :]
        rest = self._made(pages, end % PAGE, self.length - at, end % PAGE > 0, at, self.behind)
        self.behind = self._state_at(at)
        mine, others = self.pages[: pages_for(end)], self.pages[pages_for(end) :]
        self.pages, self.length = mine, at
        self.pool.release(others)
        return rest

    def _made(
        self, pages: Sequence[int], offset: int, length: int, joined: bool, at: int, behind: StateSnapshot | None
    ) -> PageSnapshot:
        """One of rows of this, from `at` on."""
        further: dict[str, Any] = {"start": self.start + at, "behind": behind, "states": self._states}
        return PageSnapshot(self.pool, pages, offset, length, joined=joined, **further)

    def _state_at(self, rows: int) -> StateSnapshot | None:
        return None if self.behind is None else self.behind.within(self.start + rows)

    def resumable(self, rows: int) -> int:
        """After how many of the first rows, `rows` at most, a text can go on: of recurrent layers, where a state is."""
        if self._states is None:
            return rows
        state = self._state_at(rows)
        return 0 if state is None else min(rows, state.until - self.start)

    def bytes_for(self, rows: int) -> int:
        """Bytes of the pages that so many rows take where they begin at the end of one, and of a state."""
        state = 0 if self._states is None or not rows else self._states.layout.slot_bytes
        return (pages_for(rows - 1) + 1 if rows else 0) * self.pool.layout.page_bytes + state


def places_in(table: NDArray[Any], start: int, stop: int) -> Ints:  # (P,) -> (n,)
    """Where slots start..stop-1 of a table of pages lie in the pool."""
    slots = np.arange(start, stop)
    places: Ints = table[slots // PAGE].astype(np.int64) * PAGE + slots % PAGE
    return places
