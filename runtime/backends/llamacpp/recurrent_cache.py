"""The cache of a llama.cpp context whose model has recurrent layers, which cannot be cut anywhere.

llama.cpp keeps the states behind the last rows of a pass where it was asked for some and the architecture has them
(`n_rs_seq`): drafted rows are taken back for nothing then. Other places to go back to are copies of the states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BackendError, CapabilityError, Setting
from edgeinfer.records import dataclass
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows, Edit, check_length, row_range
from edgeinfer.runtime.backends.llamacpp.cache import TEXT, LlamaCache, TreePaths
from edgeinfer.runtime.backends.llamacpp.context import LlamaContext
from edgeinfer.runtime.backends.llamacpp.state import StateCodec, state_of


@dataclass(frozen=True)
class _States:
    """The states of all recurrent layers behind so many tokens, in llama.cpp's own format."""

    position: int
    blob: NDArray[np.uint8]


class RecurrentCache(LlamaCache):
    """Implements `KVCache` where some layers, or all, keep a state instead of keys and values.

    Of a pass, the last rows can be cut off again, as many as the context keeps states for, but one row stays. To go
    back further takes a copy of the states: that of the mark, and that of `hold`.

    Args:
        context, codec, capacity, window: as of `LlamaCache`.

    Attributes:
        copyable: there are no sliding windows, of which llama.cpp copies only what they show.
    """

    def __init__(self, context: LlamaContext, codec: StateCodec, capacity: int, window: int) -> None:
        super().__init__(context, codec, capacity, window)
        self.copyable = not window
        self._mark: _States | None = None
        self._base: _States | None = None
        self._wanted: int | None = None
        self._lowest = 0  # that the states can be cut to without a copy
        self._lost = self._cut = False
        self._joined: list[CacheSnapshot] = []  # rows that wait for a state behind them
        self._whole: NDArray[np.uint8] | None = None  # a copy of all, while parts of it are asked for

    @property
    def nbytes(self) -> int:
        """Bytes allocated, as llama.cpp says, and those of copied states."""
        return super().nbytes + sum(each.blob.nbytes for each in self._copies)

    def begin(self, start: int, size: int) -> int:
        """How many rows of a pass behind `start` can be evaluated at once."""
        if self._lost:
            raise BackendError(f"The state of recurrent layers is not there after {start} tokens.")
        self._whole = None
        if self._cut:
            # Only now, as llama.cpp goes back once behind a pass, and a round may go back twice.
            self._context.cut(TEXT, start)
            self._cut = False
        ahead = (self._wanted or 0) - start
        return ahead if 0 < ahead < size else size

    def passed(self, start: int, size: int) -> None:
        """So many rows were evaluated at once."""
        self.length = start + size
        self._lowest = max(start + 1, self.length - self._context.options.rollback)
        if self._wanted == self.length:
            self._base = self._copied()

    def drop_pass(self, start: int, tree: TreePaths | None) -> None:
        """Has what a failed pass left be lost, to the last copy."""
        self.length, self._lost, self._whole = start, True, None

    def resumable(self, length: int) -> int:
        """See `KVCache.resumable`."""
        length = min(length, self.length)
        if not self._lost and length >= self._lowest:
            return length
        return max((each.position for each in self._copies if each.position <= length), default=0)

    def trim(self, length: int) -> None:
        """Goes back to so many rows."""
        check_length(length, self.length)
        self._whole = None
        if length == self.length and not self._lost:
            return
        found = next((each for each in self._copies if each.position == length), None)
        if length == 0:
            self._context.cut(TEXT, 0)
            self._cut = False
        elif not self._lost and length >= self._lowest:
            self._cut = True
        elif found is not None:
            self._context.set_state(TEXT, found.blob, partial=True)
            self._context.cut(TEXT, length)
            self._cut = False
        else:
            raise BackendError(f"The state of recurrent layers cannot go back to {length} tokens.")
        self.length, self._lowest = length, min(self._lowest, length)
        self._lost = False
        self._joined.clear()
        self._mark, self._base = (
            None if each is None or each.position > length else each for each in (self._mark, self._base)
        )

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keeps these rows, the first ones, of the pass that began at `start`."""
        if list(rows) != list(range(len(rows))):
            raise BackendError(f"Rows {list(rows)} of a pass do not follow each other.")
        self.trim(start + len(rows))

    def clear(self) -> None:
        """Drops all rows; their memory was taken at the beginning."""
        super().clear()
        self._mark = self._base = self._wanted = None
        self._lowest, self._lost, self._cut, self._whole = 0, False, False, None
        self._joined.clear()

    def mark(self) -> None:
        """See `KVCache.mark`."""
        if not self._lost and self.length:
            self._mark = self._copied()

    @property
    def marked(self) -> int:
        """See `KVCache.marked`."""
        return 0 if self._mark is None else self._mark.position

    def hold(self, length: int | None) -> None:
        """See `KVCache.hold`; takes a copy of the states."""
        self._wanted = length
        if self._wanted is None:
            self._base = None
        elif self._wanted == self.length and not self._lost:
            self._base = self._copied()

    def snapshot(self, start: int = 0, stop: int | None = None) -> CopiedRows:
        """Copies all rows, or rows start..stop-1, and the state behind them where there is one."""
        start, stop = row_range(start, stop, self.length)
        if start == stop:
            kind = self._codec.nothing()
            kind.state_bytes = self._context.state_bytes(TEXT, partial=True)
            return kind
        if self._whole is None:
            self._cut_now()
            self._whole = self._context.state(TEXT)
        rows = self._codec.decode(self._whole, start, stop)
        found = next((each for each in self._copies if each.position == stop), None)
        if found is not None:
            rows.state = state_of(found.blob)
        elif stop == self.length and not self._lost:
            rows.state = self._codec.state(self._whole)
        if stop == self.length:
            # Whoever copies part after part has come to the end.
            self._whole = None
        return rows

    def append(self, snapshot: CacheSnapshot) -> None:
        """Adds copied rows behind those in use; a text goes on once rows with a state were added."""
        self._codec.check(snapshot, self.capacity - self.length)
        if snapshot.length == 0:
            return
        before = self.length - sum(piece.length for piece in self._joined)
        self._joined.append(snapshot)
        self.length, self._lost, self._whole = self.length + snapshot.length, True, None
        if snapshot.state is None:
            return
        self._codec.check_state(snapshot.state, self.length)
        self._cut_now()
        # llama.cpp replaces a sequence as a whole.
        pieces = [self._codec.decode(self._context.state(TEXT), 0, before)] if before else []
        blob = self._codec.encode([*pieces, *self._joined], 0, TEXT, snapshot.state)
        self._context.set_state(TEXT, blob)
        self._joined.clear()
        self._lowest, self._lost = self.length, False

    def rewrite(self, edit: Edit) -> None:
        """See `KVCache.rewrite`."""
        raise CapabilityError(
            "The states of recurrent layers cannot forget tokens.", "Load it with " + Setting("overflow", "stop") + "."
        )

    @property
    def _copies(self) -> tuple[_States, ...]:
        return tuple(each for each in (self._mark, self._base) if each is not None)

    def _cut_now(self) -> None:
        """Makes a cut that was put off, so that what is copied is where the text ends."""
        if self._cut:
            self._context.cut(TEXT, self.length)
            self._cut, self._lowest = False, self.length

    def _copied(self) -> _States:
        if self._base is not None and self._base.position == self.length:
            return self._base
        self._cut_now()
        return _States(self.length, self._context.state(TEXT, partial=True))
