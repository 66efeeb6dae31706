"""The cache of a llama.cpp context whose model has recurrent layers, which cannot be cut anywhere.

llama.cpp keeps the states behind the last rows of a pass where it was asked for some and the architecture has them
(`n_rs_seq`): drafted rows are taken back for nothing then. Other places to go back to are copies of the states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Geometry
from edgeinfer.errors import BackendError, CapabilityError
from edgeinfer.records import dataclass
from edgeinfer.runtime.backends.cache import CacheSnapshot, check_length
from edgeinfer.runtime.backends.llamacpp.cache import TEXT, LlamaCache, TreePaths
from edgeinfer.runtime.backends.llamacpp.context import LlamaContext

__all__ = ["RecurrentCache"]


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
        context, geometry, capacity, kv: as of `LlamaCache`.
    """

    def __init__(self, context: LlamaContext, geometry: Geometry, capacity: int, kv: str) -> None:
        super().__init__(context, geometry, capacity, kv, copyable=False)
        self._mark: _States | None = None
        self._base: _States | None = None
        self._wanted: int | None = None
        self._lowest = 0  # that the states can be cut to without a copy
        self._lost = self._cut = False

    def begin(self, start: int, size: int) -> int:
        """How many rows of a pass behind `start` can be evaluated at once.

        Raises:
            BackendError: the states are not there.
        """
        if self._lost:
            raise BackendError(f"The state of recurrent layers is not there after {start} tokens.")
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
        self.length, self._lost = start, True

    def resumable(self, length: int) -> int:
        """See `KVCache.resumable`."""
        length = min(length, self.length)
        if not self._lost and length >= self._lowest:
            return length
        return max((each.position for each in self._copies if each.position <= length), default=0)

    def trim(self, length: int) -> None:
        """Goes back to so many rows.

        Raises:
            BackendError: there are fewer rows, or no states to go on from.
        """
        check_length(length, self.length)
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
        self._mark, self._base = (
            None if each is None or each.position > length else each for each in (self._mark, self._base)
        )

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keeps these rows, the first ones, of the pass that began at `start`.

        Raises:
            BackendError: they are others.
        """
        if list(rows) != list(range(len(rows))):
            raise BackendError(f"Rows {list(rows)} of a pass do not follow each other.")
        self.trim(start + len(rows))

    def clear(self) -> None:
        """Drops all rows; their memory was taken at the beginning."""
        super().clear()
        self._mark = self._base = self._wanted = None
        self._lowest, self._lost, self._cut = 0, False, False

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

    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        """See `KVCache.snapshot`.

        Raises:
            CapabilityError: always, as the states behind other rows than the last are not there.
        """
        raise CapabilityError(
            "The cache of a GGUF model with recurrent layers cannot be copied.",
            "Load it without a prefix cache, and do not save its sessions; or export the checkpoint to ONNX.",
        )

    @property
    def _copies(self) -> tuple[_States, ...]:
        return tuple(each for each in (self._mark, self._base) if each is not None)

    def _copied(self) -> _States:
        if self._base is not None and self._base.position == self.length:
            return self._base
        if self._cut:
            self._context.cut(TEXT, self.length)
            self._cut, self._lowest = False, self.length
        return _States(self.length, self._context.state(TEXT, partial=True))
