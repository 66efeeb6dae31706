"""The paged KV cache of one sequence: a table of pages, rows shared by reference and copied when written; snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import BackendError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import (
    CacheSnapshot,
    CopiedRows,
    Edit,
    check_edit,
    check_length,
    check_rows,
    check_type,
    kept_rows,
    row_range,
)
from edgeinfer.runtime.backends.contract import KVCache
from edgeinfer.runtime.paging.layout import PAGE, pages_for
from edgeinfer.runtime.paging.pool import PagePool
from edgeinfer.runtime.paging.states import SequenceState, StatePool, StateSnapshot


class PageSnapshot:
    """Implements `CacheSnapshot` by holding the pages that the rows lie in. The first row lies in slot `offset` of the
    first page, which where `joined` holds rows of another snapshot that counts it. `behind` is the state of recurrent
    layers with which the text goes on after some of the rows."""

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
        return self.pool.layout.kv

    @property
    def scales(self) -> str:
        return self.pool.layout.scales

    @property
    def keys(self) -> tuple[NDArray[Any], ...]:  # L of (H, n, width)
        return self.pool.rows.stored_keys(self.places)

    @property
    def values(self) -> tuple[NDArray[Any], ...]:  # L of (H, n, width)
        return self.pool.rows.stored_values(self.places)

    @property
    def nbytes(self) -> int:
        state = 0 if self.behind is None else self.behind.nbytes
        return (len(self.pages) - self._joined) * self.pool.layout.page_bytes + state

    @property
    def state(self) -> NDArray[np.uint8] | None:
        state = self._state_at(self.length)
        return None if state is None or state.until < self.start + self.length else state.copy()

    @property
    def places(self) -> Ints:  # (n,)
        return places_in(np.array(self.pages, np.int64), self.offset, self.offset + self.length)

    def part(self, start: int, stop: int) -> PageSnapshot:
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

    def rewindable_to(self, rows: int) -> int:
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


# Rows of all layers that are copied at a time where they have to be: of a 0.5B some 6 MB in float32.
_PIECE = 4 * PAGE
_NONE = -1  # in the table


class PagedCache(KVCache):
    """Implements `KVCache` over pages of a pool.

    Rows behind the length stay what they are until another pass was prepared, for one that resumes there.

    Args:
        spare: rows beyond the capacity that may be prepared, for the padding of passes.
        states: the pool that the state of recurrent layers is taken from, if the model has any.
        reserves: snapshots leave it the pages for all of its capacity; of other sequences somebody else sees to that.

    Attributes:
        state: the state of recurrent layers; None without any.
        shift: how much less the position of a further row is than its place, as contexts before it lie side by side; 0
            again when all rows are dropped.
        table: the page of each 64 slots, -1 behind the last; it stays where it is. (P,)
    """

    def __init__(
        self, pool: PagePool, capacity: int, spare: int = 0, states: StatePool | None = None, *, reserves: bool = True
    ) -> None:
        self._pages: list[int] = []  # first, as an interrupted program may drop this before the rest is there
        self.pool = pool
        self.capacity = capacity
        self._states = states
        self.state = None if states is None else SequenceState(states)
        self._spare = spare
        self._reserves = reserves
        self.length = self.shift = 0
        self.table: NDArray[np.int32] = np.full(pages_for(capacity + spare), _NONE, np.int32)
        self.observe_clear: Callable[[], None] | None = None
        self._shared = 0  # number of first pages that others may hold too

    def __del__(self) -> None:
        if self._pages:
            self.pool.release(self._pages)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in the table, including shared ones."""
        return len(self._pages) * self.pool.layout.page_bytes

    def prepare(self, rows: int) -> None:
        """Take or copy pages so that no other text holds the next rows' pages, and release pages far behind them."""
        stop = self.length + rows
        if stop > self.capacity + self._spare:
            raise BackendError(f"{stop} rows do not fit a cache of {self.capacity} tokens.")
        room = len(self._pages) * PAGE
        if stop > room:
            self._extend(self.pool.take(pages_for(stop) - len(self._pages)))
        elif stop <= room - 2 * PAGE:
            # One more stays: a pass that resumes may begin with fewer rows than were there.
            self._drop(pages_for(stop) + 1)
        self._own(self.length, stop)

    def pages_for(self, rows: int) -> int:
        """Pages that `prepare` would take for so many rows: new ones, and copies of shared ones."""
        stop = self.length + rows
        written = self._pages[self.length // PAGE : pages_for(stop)]
        copies = sum(self.pool.holders(page) > 1 for page in written)
        return max(0, pages_for(stop) - len(self._pages)) + copies

    def read(self, layer: int, start: int, stop: int) -> tuple[Floats, Floats]:  # (H, n, h), (H, n, v)
        """The floats of rows start..stop-1 of one layer."""
        return self.pool.rows.read(layer, self._places(start, stop))

    def write(self, layer: int, start: int, keys: Floats, values: Floats) -> None:  # (H, n, h), (H, n, v)
        """Stores rows of one layer from `start` on, in use or prepared; the length stays."""
        stop = start + keys.shape[1]
        self._own(start, stop)
        self.pool.rows.write(layer, self._places(start, stop), keys, values)

    def read_keys(self, layer: int, start: int, stop: int) -> Floats:  # (H, n, h)
        """The keys of `read` alone."""
        return self.pool.rows.read_keys(layer, self._places(start, stop))

    def write_keys(self, layer: int, start: int, keys: Floats) -> None:  # (H, n, h)
        """Replaces keys of one layer from `start` on; values and weights stay."""
        stop = start + keys.shape[1]
        self._own(start, stop)
        self.pool.rows.write_keys(layer, self._places(start, stop), keys)

    @property
    def weighed(self) -> bool:
        """Whether rows have weights, which are added to their scores."""
        return self.pool.layout.weighed

    def weigh(self, layer: int, weights: Floats) -> None:  # (H, n)
        """Weighs the first rows of one layer, which were written for this cache alone; 0 is what rows have at first."""
        self.pool.rows.weigh(layer, self._places(0, weights.shape[1]), weights)

    def fork(self) -> PagedCache:
        """Another cache with the same rows, whose pages both hold until one of them writes there."""
        forked = PagedCache(self.pool, self.capacity, self._spare, self._states, reserves=self._reserves)
        pages = self._pages[: pages_for(self.length)]
        self.pool.share(pages)
        forked._extend(pages)
        forked.length, forked.adapter, forked.shift = self.length, self.adapter, self.shift
        forked.observers = self.observers
        forked._shared = len(pages)
        self._shared = max(self._shared, len(pages))
        if self.state is not None and forked.state is not None and (found := self.state.at(self.length)) is not None:
            forked.state.adopt(found)
        return forked

    def advance(self, rows: int) -> None:
        """A pass over so many prepared rows is done: they are in use."""
        self.length += rows
        if self.state is not None:
            self.state.advance(self.length)

    def rewindable_to(self, length: int) -> int:
        return length if self.state is None else self.state.rewindable_to(length)

    def mark(self) -> None:
        if self.state is not None:
            self.state.mark()

    @property
    def marked(self) -> int:
        return 0 if self.state is None else self.state.marked

    def hold(self, length: int | None) -> None:
        if self.state is not None:
            self.state.pinned = length

    def trim(self, length: int) -> None:
        if not 0 <= length <= self.length:
            check_length(length, self.length)
        if self.state is not None:
            self.state.trim(length)
        self.length = length
        if not length:
            self.shift = 0

    def clear(self) -> None:
        self.trim(0)
        self._drop(0)
        self.pool.trim()
        if self.observe_clear is not None:
            self.observe_clear()

    def _keep(self, start: int, rows: Sequence[int]) -> None:
        """Keeps rows `start + r` for r in `rows`, ascending, moved together to `start`."""
        wanted = kept_rows(start, rows, self.length)
        stop = start + len(wanted)
        if wanted and wanted[-1] != stop - 1:
            self._own(start, stop)
            places = self._places(start, wanted[-1] + 1)
            self.pool.rows.copy(places[list(rows)], places[: len(wanted)])
            if self.state is not None:
                self.state.move(np.array(wanted), np.arange(start, stop))
        self.trim(stop)

    def snapshot(self, start: int = 0, stop: int | None = None) -> PageSnapshot | CopiedRows:
        """Holds the pages of the rows in use, or of start..stop-1 of them; copies the rows where the pool has no pages
        left for this cache to be full of others."""
        start, stop = row_range(start, stop, self.length)
        state = None if self.state is None else self.state.at(stop)
        further: dict[str, Any] = {"start": start, "behind": state, "states": self._states}
        if start == stop:
            return PageSnapshot(self.pool, (), 0, 0, **further)
        last = pages_for(stop)
        if self._reserves and not self._can_share(start // PAGE, last):
            rows, places, layout = self.pool.rows, self._places(start, stop), self.pool.layout
            keys, values = rows.stored_keys(places), rows.stored_values(places)
            copied = None if state is None else state.copy()
            size = 0 if self._states is None else self._states.layout.slot_bytes
            return CopiedRows(stop - start, keys, values, layout.kv, layout.scales, copied, size)
        self._shared = max(self._shared, last)
        return PageSnapshot(self.pool, self._pages[start // PAGE : last], start % PAGE, stop - start, **further)

    def append(self, snapshot: CacheSnapshot) -> None:
        """Adds rows behind those in use: pages of this pool are held, other rows are copied."""
        layout, start = self.pool.layout, self.length
        check_type(snapshot, self.capacity - start, layout.kv, layout.scales)
        if not isinstance(snapshot, PageSnapshot) or snapshot.pool is not self.pool:
            check_rows(snapshot, layout.stored)
            self._add_copies(snapshot)
            if self.state is not None:
                self.state.take(snapshot.state, self.length)
            return
        if snapshot.offset != start % PAGE:
            self._add_rows(snapshot.places)
        else:
            self._add_pages(snapshot)
        if self.state is not None and snapshot.behind is not None and snapshot.start == start:
            self.state.adopt(snapshot.behind)

    def rewrite(self, edit: Edit) -> None:
        rows, left = self.length, None
        self.length = 0
        self._own(0, rows)
        for layer, kept in enumerate(self.pool.layout.layers):
            edited = edit(layer, *self.read(layer, 0, rows))
            left = check_edit(kept, layer, edited, rows, left)
            self.write(layer, 0, *edited)
        self.length = left or 0

    def _add_pages(self, snapshot: PageSnapshot) -> None:
        """Hold the pages of rows that begin where the rows in use end; rows of a partly used page are copied."""
        pages, length = list(snapshot.pages), snapshot.length
        if self.length % PAGE and pages:
            here = self.length // PAGE
            head = min(PAGE - snapshot.offset, length)
            if self._pages[here] == pages[0]:
                self.length += head
            else:
                self._add_rows(snapshot.places[:head])
            del pages[0]
            length -= head
        if pages:
            first = pages_for(self.length)
            self.pool.share(pages)
            self._drop(first)
            self._extend(pages)
            self._shared = len(self._pages)
            self.length += length

    def _add_rows(self, sources: Ints) -> None:  # (n,)
        stop = self.length + len(sources)
        self.prepare(len(sources))
        targets = self._places(self.length, stop)
        for at in range(0, len(sources), _PIECE):
            self.pool.rows.copy(sources[at : at + _PIECE], targets[at : at + _PIECE])
        self.length = stop

    def _add_copies(self, snapshot: CacheSnapshot) -> None:
        """Copies rows that lie in arrays, or in another pool."""
        start, keys, values = self.length, snapshot.keys, snapshot.values
        self.prepare(snapshot.length)
        for at in range(0, snapshot.length, _PIECE):
            stop = min(at + _PIECE, snapshot.length)
            both = ([layer[:, at:stop] for layer in rows] for rows in (keys, values))
            self.pool.rows.put_stored(self._places(start + at, start + stop), *both)
        self.length = start + snapshot.length

    def _can_share(self, first: int, last: int) -> bool:
        """Whether the pool has pages for all of this cache's rows without those at these places of the table."""
        own = [page for index, page in enumerate(self._pages) if not first <= index < last]
        kept = sum(self.pool.holders(page) == 1 for page in own)
        return self.pool.free >= len(self.table) - kept

    def _places(self, start: int, stop: int) -> Ints:  # (n,)
        return places_in(self.table, start, stop)

    def _own(self, start: int, stop: int) -> None:
        """Puts copies in the place of pages of these slots that others hold too."""
        first = start // PAGE
        if first >= self._shared:
            return
        last = min(pages_for(stop), self._shared)
        for index in range(first, last):
            self._pages[index] = self.table[index] = self.pool.own(self._pages[index])
        if last == self._shared:
            self._shared = first

    def _extend(self, pages: Sequence[int]) -> None:
        behind = len(self._pages)
        self.table[behind : behind + len(pages)] = pages
        self._pages += pages

    def _drop(self, first: int) -> None:
        self.pool.release(self._pages[first:])
        del self._pages[first:]
        self.table[first:] = _NONE
        self._shared = min(self._shared, first)
