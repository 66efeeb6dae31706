"""The states of recurrent layers: slots of a pool, one for each text, and where in its text a slot stands.

A slot has of each layer how many tokens its state has taken in, the state, and a ring of what the latest rows are taken
in by (runtime/native/recurrence.h). A pass takes the state in to where the rows before it end, and its own rows stay in
the ring: whoever cuts them off again has nothing to undo.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import Geometry, StateLayer
from edgeinfer.core.errors import BackendError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.paging.pool import BlockPool

# Rows of a ring: the longest draft, the reach of a convolution, and TAIL.
RING = 32
# Last rows of a long pass that can be cut off again: ends of prompts that the next turn writes in another way.
TAIL = 8
# Slots of a text: its own, and the one of the mark or of what was before a long pass.
SLOTS_IN_USE = 2
_TILE = 16
_HEADER = 64  # bytes before a layer's state
_UNIT = 4096  # bytes: a slot takes a multiple of it, so that the system gets it back whole
_FLOAT = 4
# Addresses of slots, which take no memory until they are used.
_SLOTS = 64


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True)
class StateLayout:
    """The slots of one model's states."""

    layers: tuple[StateLayer, ...]

    @cached_property
    def row_floats(self) -> tuple[int, ...]:
        """Numbers of a row of each layer's ring, padding included."""
        return tuple(
            _up(each.channels + each.key_heads * each.key_size + each.heads * (_up(each.value_size, _TILE) + 1), _TILE)
            for each in self.layers
        )

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each layer begins in a slot, and where the last one ends; layers without a state take nothing."""
        ends = [0]
        for each, row in zip(self.layers, self.row_floats, strict=True):
            floats = each.heads * each.key_size * _up(each.value_size, _TILE) + RING * row
            ends.append(ends[-1] + (_up(_HEADER + _FLOAT * floats, _HEADER) if each.heads else 0))
        return tuple(ends)

    @property
    def slot_bytes(self) -> int:
        return _up(self.offsets[-1], _UNIT)

    @property
    def array(self) -> Ints:
        """The graph's input: (2 + L,) the bytes of a slot, the rows of a ring, the layers' offsets."""
        return np.array([self.slot_bytes, RING, *self.offsets[:-1]], np.int64)

    @property
    def widest(self) -> int:
        """Tokens that the widest convolution reaches over."""
        return max(each.width for each in self.layers)


class StatePool(BlockPool):
    def __init__(self, geometry: Geometry) -> None:
        self.layout = StateLayout(geometry.states)
        self.array = self.layout.array
        super().__init__(_SLOTS, self.layout.slot_bytes, 0)

    def slot(self, index: int) -> NDArray[np.uint8]:  # (slot_bytes,)
        size = self.layout.slot_bytes
        return self.memory[index * size : (index + 1) * size]

    def empty(self, index: int) -> None:
        """Reset a slot to before the first token."""
        slot = self.slot(index)
        for layer, offset in zip(self.layout.layers, self.layout.offsets, strict=False):
            if layer.heads:
                slot[offset : offset + _HEADER] = 0

    def rows(self, index: int, layer: int) -> NDArray[np.float32]:  # (RING, row)
        stop, size = self.layout.offsets[layer + 1], RING * self.layout.row_floats[layer]
        kept = self.layout.layers[layer]
        start = self.layout.offsets[layer] + _HEADER
        start += _FLOAT * kept.heads * kept.key_size * _up(kept.value_size, _TILE)
        ring = self.slot(index)[start:stop].view(np.float32)[:size]
        return ring.reshape(RING, -1)


class StateSnapshot:
    """A slot in use, which this holds, in which a text can go on after `position` to `until` of its tokens."""

    def __init__(self, pool: StatePool, slot: int, position: int, until: int) -> None:
        self.pool = pool
        self.slot = slot
        self.position = position
        self.until = until
        pool.share([slot])

    def __del__(self) -> None:
        self.pool.release([self.slot])

    def within(self, length: int) -> StateSnapshot | None:
        """The state of the text cut to so many tokens; None if it has none there."""
        if length < self.position:
            return None
        return StateSnapshot(self.pool, self.slot, self.position, min(self.until, length))

    def copy(self) -> NDArray[np.uint8]:  # (16 + slot_bytes,)
        """The slot as bytes, after the two positions between which a text can go on."""
        places = np.array([self.position, self.until], "<i8").view(np.uint8)
        return np.concatenate([places, self.pool.slot(self.slot)])

    @property
    def nbytes(self) -> int:
        return self.pool.layout.slot_bytes


class SequenceState:
    """The state of one text, and one to go back to: where a mark was set, or the last long pass began."""

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        # The graph's input: its slot, and after how many tokens the state shall stand; never reallocated. (2,).
        self.row: NDArray[np.int64] = np.zeros(2, np.int64)
        # Passes take the state no further than this many tokens; None as far as rows are there for good.
        self.pinned: int | None = None
        self._slot: int | None = None
        self._position = 0  # of the layer that has taken in most
        self._until = 0  # rows that are there
        self._mark: StateSnapshot | None = None
        self._beyond = False  # a pass began that takes the state beyond the rows before it, and has not ended
        self._before: StateSnapshot | None = None  # that pass, where there was a state

    def __del__(self) -> None:
        self._leave()

    def prepare(self, length: int, size: int, rows: int, *, chain: bool, whole: bool) -> None:
        """Prepare the slot for a pass behind `length` rows, and choose how far the pass takes the state."""
        self._recover()
        if length > self._until or length < self._position:
            raise BackendError(f"The state of recurrent layers is not there after {length} tokens.")
        most, limit = RING - self.pool.layout.widest, length + rows if self.pinned is None else self.pinned
        committed = max(self._position, min(length, limit) if whole or self.pinned is not None else 0)
        if length + rows - committed > most and whole and chain:
            committed = max(committed, min(length + size - TAIL, limit))
        if length + rows - committed > most:
            most = max(0, most - (length - committed))
            raise BackendError(f"A pass of {size} rows that can be cut off again is too long: at most {most}.")
        self._enter(length)
        self._beyond = committed > length
        if self._beyond and length:
            self._mark = self._before = self._hold(length)
        assert self._slot is not None, "a sequence that was entered has a slot"
        self._slot = self.pool.own(self._slot)
        self.row[:] = self._slot, committed
        self._position = max(self._position, committed)

    def advance(self, length: int) -> None:
        self._beyond, self._before, self._until = False, None, length

    def rewindable_to(self, length: int) -> int:
        """After how many of the first tokens, `length` at most, a text can go on."""
        self._recover()
        places = [0, min(length, self._until)] if length >= self._position else [0]
        if self._mark is not None and length >= self._mark.position:
            places.append(min(length, self._mark.until))
        return max(places)

    def trim(self, length: int) -> None:
        """Goes back to where so many tokens were there."""
        self._recover()
        if self._mark is not None and length < self._mark.until:
            self._mark = self._mark.within(length)
        if length >= self._position:
            self._until = min(self._until, length)
        elif length == 0:
            self._leave()
        elif self._mark is not None and self._mark.until >= length:
            self.adopt(self._mark)
        else:
            raise BackendError(f"The state of recurrent layers cannot go back to {length} tokens.")

    @property
    def marked(self) -> int:
        """Tokens after which a text can go on for the mark; 0 where there is none."""
        self._recover()
        return 0 if self._mark is None else self._mark.until

    def mark(self) -> None:
        """Keeps the state that is there to go back to, in the place of the last one kept."""
        self._mark = None if self._slot is None else self._hold(self._until)

    def at(self, length: int) -> StateSnapshot | None:
        """The state in which a text goes on after so many tokens; None where there is none."""
        self._recover()
        if self._slot is not None and self._position <= length <= self._until:
            return self._hold(length)
        return self._mark.within(length) if self._mark is not None and length <= self._mark.until else None

    def adopt(self, state: StateSnapshot) -> None:
        """Goes on from another state of this pool, which is copied when it changes."""
        self.pool.share([state.slot])
        mark = self._mark
        self._leave()
        self._slot, self._position, self._until, self._mark = state.slot, state.position, state.until, mark

    def take(self, copied: NDArray[np.uint8] | None, length: int) -> None:  # (16 + slot_bytes,)
        """Goes on behind so many tokens from a copied state, of this model's sizes; without one not at all."""
        if copied is None:
            return
        size = self.pool.layout.slot_bytes
        position, until = copied[:16].view("<i8").tolist() if len(copied) == 16 + size else (-1, -1)
        if until != length or not 0 <= until - position <= RING:
            raise BackendError("The state of recurrent layers belongs to another model or text.")
        (slot,) = self.pool.take(1)
        self.pool.slot(slot)[:] = copied[16:]
        self.adopt(StateSnapshot(self.pool, slot, position, until))
        self.pool.release([slot])

    def move(self, sources: Ints, targets: Ints) -> None:  # (n,) each
        """Copies what rows are taken in by to other places; all are read before the first is written."""
        assert self._slot is not None, "there are rows"
        for layer, kept in enumerate(self.pool.layout.layers):
            if kept.heads:
                ring = self.pool.rows(self._slot, layer)
                ring[targets % RING] = ring[sources % RING]

    def _hold(self, until: int) -> StateSnapshot:
        assert self._slot is not None, "there is a state"
        return StateSnapshot(self.pool, self._slot, self._position, until)

    def _enter(self, length: int) -> None:
        """Take a slot if there is none, and reset it at the beginning of a text."""
        if self._slot is None:
            (self._slot,) = self.pool.take(1)
        elif length:
            return
        self._slot = self.pool.own(self._slot)
        self.pool.empty(self._slot)

    def _recover(self) -> None:
        """Goes back to before a pass that did not come to its end."""
        if not self._beyond:
            return
        before, mark = self._before, self._mark
        self._leave()
        if before is not None:
            self.adopt(before)
            self._mark = mark

    def _leave(self) -> None:
        if self._slot is not None:
            self.pool.release([self._slot])
        self._slot, self._position, self._until = None, 0, 0
        self._beyond, self._mark, self._before = False, None, None
