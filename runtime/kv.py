"""The KV buffers of one sequence: growing, cutting, compacting, copying; knows nothing of who fills them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle import Geometry
from edgeinfer.errors import BackendError
from edgeinfer.runtime.contracts import CacheSnapshot, Floats, check_snapshot

__all__ = ["KVBuffers"]

# 256 rows keep the first growth away from short chats; doubling bounds copying to one extra pass over the cache.
_FIRST_ROWS = 256


class KVBuffers:
    """Keys and values of every layer, float32 (1, kv_heads, rows, head_dim), in place for GroupQueryAttention.

    Args:
        geometry: sizes of the model.
        capacity: tokens the cache may hold.
        spare: rows beyond the capacity, for the padding of passes.
    """

    def __init__(self, geometry: Geometry, capacity: int, spare: int = 0) -> None:
        self._geometry = geometry
        self._most = capacity + spare
        self.capacity = capacity
        self.length = 0
        self.rows = 0
        self.keys: list[Floats] = []
        self.values: list[Floats] = []
        self.reserve(min(_FIRST_ROWS, self._most))

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(a.nbytes for a in (*self.keys, *self.values))

    def reserve(self, rows: int) -> bool:
        """Makes room for `rows` rows, doubling what is there; True when the buffers moved."""
        if rows <= self.rows:
            return False
        if rows > self._most:
            raise BackendError(f"{rows} rows do not fit a cache of {self.capacity} tokens.")
        self.rows = min(max(rows, 2 * self.rows), self._most)
        g = self._geometry
        shape = (1, g.num_kv_heads, self.rows, g.head_dim)
        for arrays in (self.keys, self.values):
            for layer in range(g.num_layers):
                # Zeros, not empty: a stray NaN in a row that is masked out would still reach the sum as 0 * NaN.
                grown = np.zeros(shape, np.float32)
                if layer < len(arrays):
                    # All rows, not only those in use: a pass that resumes reads what was written behind the length.
                    grown[:, :, : arrays[layer].shape[2]] = arrays[layer]
                    arrays[layer] = grown
                else:
                    arrays.append(grown)
        return True

    def truncate(self, length: int) -> None:
        """Forgets all rows from `length` on."""
        if not 0 <= length <= self.length:
            raise BackendError(f"Cannot truncate a cache of {self.length} tokens to {length}.")
        self.length = length

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keeps rows `start + r` for r in `rows`, ascending, moved together to `start`."""
        wanted = [start + r for r in rows]
        ordered = all(a < b for a, b in itertools.pairwise(wanted))
        if not ordered or (wanted and not start <= wanted[0] <= wanted[-1] < self.length):
            raise BackendError(f"Cannot keep rows {list(rows)} of a pass that began at {start}.")
        if wanted != list(range(start, start + len(wanted))):
            for array in (*self.keys, *self.values):
                array[:, :, start : start + len(wanted)] = array[:, :, wanted]
        self.length = start + len(wanted)

    def snapshot(self) -> CacheSnapshot:
        """Copies the rows in use."""
        keys = tuple(k[0, :, : self.length].copy() for k in self.keys)
        values = tuple(v[0, :, : self.length].copy() for v in self.values)
        return CacheSnapshot(self.length, keys, values)

    def restore(self, snapshot: CacheSnapshot) -> bool:
        """Puts a copy back; True when the buffers moved."""
        check_snapshot(snapshot, self._geometry, self.capacity)
        self.length = 0
        moved = self.reserve(snapshot.length)
        for mine, copied in zip((*self.keys, *self.values), (*snapshot.keys, *snapshot.values), strict=True):
            mine[0, :, : snapshot.length] = copied
        self.length = snapshot.length
        return moved
