"""Float32 keys and values of one sequence, in buffers or as a graph gives them; and which of their rows a pass sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.core.errors import BackendError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import (
    CacheSnapshot,
    CopiedRows,
    Edit,
    check_edit,
    check_length,
    check_snapshot,
    kept_rows,
    row_range,
)
from edgeinfer.runtime.backends.contract import KVCache
from edgeinfer.runtime.backends.forks import CopiedFork

# 256 rows keep the first growth away from short chats; doubling bounds copying to one extra pass over the cache.
_FIRST_ROWS = 256


class FloatCache(KVCache):
    """The common part of caches of float32 keys and values of every layer, (1, heads, rows, width) each, of whose rows
    `length` are in use."""

    def __init__(self, geometry: Geometry, capacity: int) -> None:
        self._geometry = geometry
        self.capacity = capacity
        self.length = 0
        self.keys: list[Any] = []
        self.values: list[Any] = []

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self.keys, *self.values))

    def write(self, layer: int, start: int, keys: Floats, values: Floats) -> None:  # (H, n, h) each
        """Stores rows of one layer from `start` on, for which there must be room; the length stays."""
        stop = start + keys.shape[1]
        self.keys[layer][0, :, start:stop] = keys
        self.values[layer][0, :, start:stop] = values

    def read(self, layer: int, start: int, stop: int) -> tuple[Floats, Floats]:  # (H, n, h) each
        return self.keys[layer][0, :, start:stop], self.values[layer][0, :, start:stop]

    def trim(self, length: int) -> None:
        check_length(length, self.length)
        self.length = length

    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        start, stop = row_range(start, stop, self.length)
        keys, values = ([a[0, :, start:stop].copy() for a in arrays] for arrays in (self.keys, self.values))
        return CopiedRows(stop - start, keys, values)

    def fork(self) -> CopiedFork:
        return CopiedFork(self, self.length)

    def rewrite(self, edit: Edit) -> None:
        rows, left = self.length, None
        self.length = 0
        for layer in range(self._geometry.num_layers):
            edited = edit(layer, *(floats.copy() for floats in self.read(layer, 0, rows)))
            left = check_edit(self._geometry.kept[layer], layer, edited, rows, left)
            self.write(layer, 0, *edited)
        self.length = left or 0


class KVBuffers(FloatCache):
    """Implements `KVCache`: float32 keys and values of every layer, (1, heads, rows, width), for GroupQueryAttention.
    `spare` rows beyond the capacity hold the padding of passes. `zeros` makes arrays elsewhere than in the memory of
    the process, all rows at once; where `fixed`, that memory is taken at once too and stays where it is."""

    def __init__(
        self,
        geometry: Geometry,
        capacity: int,
        spare: int = 0,
        zeros: Callable[[tuple[int, ...], Any], Any] | None = None,
        fixed: bool = False,
    ) -> None:
        super().__init__(geometry, capacity)
        self._most = capacity + spare
        self._zeros = zeros
        # Growing elsewhere would need room for both arrays, and a copy through this process.
        self._least = self._most if fixed or zeros is not None else 0
        self._fixed = fixed
        # Called before memory moves or is freed; nothing may be bound to the buffers afterwards.
        self.unbind: Callable[[], None] | None = None
        self.rows = 0
        self.reserve(min(_FIRST_ROWS, self._most))

    def prepare(self, rows: int) -> None:
        self.reserve(self.length + rows)

    def reserve(self, rows: int) -> bool:
        """Makes room for `rows` rows by doubling the buffers; True if they were too small and moved."""
        if rows <= self.rows:
            return False
        if rows > self._most:
            raise BackendError(f"{rows} rows do not fit a cache of {self.capacity} tokens.")
        if self.unbind is not None:
            self.unbind()
        wanted = min(max(rows, 2 * self.rows, self._least), self._most)
        # Zeros, not empty: a stray NaN in a row that is masked out would still reach the sum as 0 * NaN. They take
        # memory as they are filled, so that copying array by array needs room for one more.
        kept, zeros = self._geometry.kept, self._zeros or np.zeros
        keys = [zeros((1, each.heads, wanted, each.key_size), np.float32) for each in kept]
        values = [zeros((1, each.heads, wanted, each.value_size), np.float32) for each in kept]
        for arrays, grown in ((self.keys, keys), (self.values, values)):
            if self.rows:
                for layer, old in enumerate(arrays):
                    # All rows, not only those in use: a pass that resumes reads what was written behind the length.
                    grown[layer][:, :, : self.rows] = old
                    arrays[layer] = grown[layer]
            arrays[:] = grown
        self.rows = wanted
        return True

    def clear(self) -> None:
        self.length = 0
        if self._fixed:
            return
        if self.unbind is not None:
            self.unbind()
        self.rows = 0
        for arrays in (self.keys, self.values):
            arrays[:] = [_empty(array) for array in arrays]

    def _keep(self, start: int, rows: Sequence[int]) -> None:
        """Keeps rows `start + r` for r in `rows`, ascending, moved together to `start`."""
        wanted = kept_rows(start, rows, self.length)
        if wanted != list(range(start, start + len(wanted))):
            for array in (*self.keys, *self.values):
                array[:, :, start : start + len(wanted)] = array[:, :, wanted]
        self.length = start + len(wanted)

    def append(self, snapshot: CacheSnapshot) -> None:
        check_snapshot(snapshot, self._geometry, self.capacity - self.length)
        start, stop = self.length, self.length + snapshot.length
        self.reserve(stop)
        for mine, copied in zip((*self.keys, *self.values), (*snapshot.keys, *snapshot.values), strict=True):
            mine[0, :, start:stop] = copied
        self.length = stop


def _empty(array: Any) -> NDArray[Any]:  # (1, H, C, w) -> (1, H, 0, w)
    return np.empty((*array.shape[:2], 0, array.shape[3]), array.dtype)


def visible_rows(start: int, size: int, tree: Ints | None, window: int = 0) -> NDArray[np.bool_]:  # (S, T)
    """Mask of the T cached and new rows that each of the S new ones sees: all before it without a tree, `window` places
    up to its own at most; 0 is all."""
    seen = np.ones((size, start + size), np.bool_)
    seen[:, start:] = np.tri(size, dtype=np.bool_) if tree is None else ancestors(tree)
    if window:
        # A row is as deep as it has rows of the pass above it, or is one of those.
        places = np.concatenate([np.arange(start), start - 1 + seen[:, start:].sum(axis=1)])  # (T,)
        seen &= places[start:, None] - places < window
    return seen


def ancestors(tree: Ints) -> NDArray[np.bool_]:  # (S,) -> (S, S)
    """Mask of the rows that each row of a draft tree may attend to: itself and its ancestors."""
    size = len(tree)
    sees = np.eye(size, dtype=np.bool_)
    for row, parent in enumerate(tree):
        if parent >= 0:
            sees[row] |= sees[parent]
    return sees
