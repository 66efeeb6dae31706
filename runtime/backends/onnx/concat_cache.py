"""The KV cache of graphs that concatenate past and new keys themselves: kept twice, as the copies take turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.errors import CapabilityError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import (
    CacheSnapshot,
    CopiedRows,
    Edit,
    TrimmedCache,
    check_edit,
    check_length,
    check_snapshot,
    row_range,
)


class ConcatCache(TrimmedCache):
    """Implements `KVCache` by two copies, float32 (1, kv_heads, rows, head_dim), each array packed at the
    start of its memory.

    Memory beyond the packed rows is never touched, so the system gives it none until the cache grows into it.
    """

    copyable = True

    def __init__(self, geometry: Geometry, capacity: int) -> None:
        self._geometry = geometry
        self.capacity = capacity
        self._row = geometry.num_kv_heads * geometry.head_dim
        arrays = 2 * geometry.num_layers
        self._read, self._write = (
            [np.empty(self._row * capacity, np.float32) for _ in range(arrays)] for _ in range(2)
        )
        self._packed = 0
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(a.nbytes for a in (*self._read, *self._write))

    def _views(self, arrays: list[Floats], rows: int) -> list[Floats]:
        shape = (1, self._geometry.num_kv_heads, rows, self._geometry.head_dim)
        return [a[: self._row * rows].reshape(shape) for a in arrays]

    def past(self) -> list[Floats]:  # 2 L of (1, H, P, h)
        """What the cache holds, packed: keys and values of each layer in turn."""
        if self.length != self._packed:
            cached, packed = self._views(self._read, self._packed), self._views(self._write, self.length)
            for old, new in zip(cached, packed, strict=True):
                new[...] = old[:, :, : self.length]
            self.swap(self.length)
        return self._views(self._read, self.length)

    def room(self, rows: int) -> list[Floats]:  # 2 L of (1, H, rows, h)
        """Where the next pass writes; call `swap` when it has."""
        return self._views(self._write, rows)

    def swap(self, rows: int) -> None:
        """Makes what was written, with this many rows, the cache."""
        self._read, self._write = self._write, self._read
        self._packed = self.length = rows

    def trim(self, length: int) -> None:
        """Forgets all rows from `length` on; the next pass pays for it with a copy of the cache."""
        check_length(length, self.length)
        self.length = length

    def clear(self) -> None:
        """Forgets all rows; their memory was taken at the beginning."""
        self.length = 0

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keeps the first rows of the pass that began at `start`."""
        if list(rows) != list(range(len(rows))):
            message = f"The onnx-optimum backend cannot keep rows {list(rows)} of a pass."
            raise CapabilityError(message, "Use a natively exported bundle.")
        self.trim(start + len(rows))

    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        """Copies the rows in use, or start..stop-1 of them."""
        start, stop = row_range(start, stop, self.length)
        arrays = [a[0, :, start:stop].copy() for a in self._views(self._read, self._packed)]
        return CopiedRows(stop - start, tuple(arrays[::2]), tuple(arrays[1::2]))

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Puts a copy in the place of all rows."""
        check_snapshot(snapshot, self._geometry, self.capacity)
        self.length = 0
        self.append(snapshot)

    def append(self, snapshot: CacheSnapshot) -> None:
        """Adds copied rows behind those in use, at the price of a copy of the cache."""
        start, stop = self.length, self.length + snapshot.length
        check_snapshot(snapshot, self._geometry, self.capacity - start)
        copies = [a for pair in zip(snapshot.keys, snapshot.values, strict=True) for a in pair]
        cached = self._views(self._read, self._packed)
        for mine, old, copied in zip(self._views(self._write, stop), cached, copies, strict=True):
            mine[0, :, :start] = old[0, :, :start]
            mine[0, :, start:] = copied
        self.swap(stop)

    def rewrite(self, edit: Edit) -> None:
        """Replaces the rows in use."""
        rows, left = self.length, None
        read = self._views(self._read, self._packed)
        self.length = 0
        for layer in range(self._geometry.num_layers):
            keys, values = (a[0, :, :rows].copy() for a in read[2 * layer : 2 * layer + 2])
            edited = edit(layer, keys, values)
            left = check_edit(self._geometry.kept[layer], layer, edited, rows, left)
            for mine, new in zip(self._views(self._write[2 * layer : 2 * layer + 2], left), edited, strict=True):
                mine[0] = new
        self.swap(left or 0)
