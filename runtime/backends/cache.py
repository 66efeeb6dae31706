"""Snapshots of rows of a KV cache, and what every cache checks before it takes or gives any."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import FLOAT32, Geometry, KVLayer
from edgeinfer.core.errors import BackendError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats

# Takes a layer's number and float32 copies of its keys and values, (H, n, h); returns as many or fewer rows of each.
Edit = Callable[[int, Floats, Floats], tuple[Floats, Floats]]


class CacheSnapshot(Protocol):
    """Rows of a cache as they were when it was asked for them: copied, or held where they lie."""

    @property
    def length(self) -> int:
        """Rows."""

    @property
    def kv(self) -> str:
        """Name of the type of the cache."""

    @property
    def scales(self) -> str:
        """Kind of scales of quantized rows: `ROW_SCALES` where each row has its own, else ""."""

    @property
    def keys(self) -> Sequence[NDArray[Any]]:
        """Keys of each layer as they are stored, (heads, length, width); copied each time where they are held."""

    @property
    def values(self) -> Sequence[NDArray[Any]]:
        """Values of each layer, alike."""

    @property
    def nbytes(self) -> int:
        """Bytes kept for these rows, including other rows in the same pages."""

    @property
    def in_place(self) -> bool:
        """Whether they lie in the memory of the cache itself."""

    @property
    def state(self) -> NDArray[np.uint8] | None:
        """Bytes by which recurrent layers go on behind the last row; None where there are none, or they cannot."""

    def part(self, start: int, stop: int) -> CacheSnapshot:
        """Rows start..stop-1 of these, which are not copied: copied rows change with these, held ones are held too."""

    def cut(self, at: int) -> CacheSnapshot:
        """Takes the rows from `at` on out of these and gives them apart."""

    def bytes_for(self, rows: int) -> int:
        """Bytes that are kept for so many rows of this kind, wherever they lie, at most."""

    def rewindable_to(self, rows: int) -> int:
        """After how many of the first rows, `rows` at most, a text can go on: all, but with recurrent layers."""


@dataclass(eq=False)
class CopiedRows:
    """Implements `CacheSnapshot` by arrays of its own."""

    length: int
    # `keys`, `values`: each layer's rows in the type's dtype and width, see edgeinfer.bundle.geometry. (kv_heads,
    # length, width).
    keys: Sequence[NDArray[Any]]
    values: Sequence[NDArray[Any]]
    kv: str = FLOAT32
    scales: str = ""
    state: NDArray[np.uint8] | None = None
    state_bytes: int = 0  # size of one recurrent state; 0 without recurrent layers
    in_place: ClassVar[bool] = False

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self.keys, *self.values)) + (0 if self.state is None else self.state.nbytes)

    def part(self, start: int, stop: int) -> CopiedRows:
        keys, values = ([a[:, start:stop] for a in arrays] for arrays in (self.keys, self.values))
        state = self.state if stop == self.length else None
        return CopiedRows(stop - start, keys, values, self.kv, self.scales, state, self.state_bytes)

    def cut(self, at: int) -> CopiedRows:
        """Both are copied, array by array, so that neither keeps the other's rows alive."""
        keys, values = list(self.keys), list(self.values)
        self.keys, self.values, length, self.length = keys, values, self.length, at
        state, self.state = self.state, None
        return CopiedRows(length - at, _cut(keys, at), _cut(values, at), self.kv, self.scales, state, self.state_bytes)

    def rewindable_to(self, rows: int) -> int:
        there = not self.state_bytes or (self.state is not None and rows == self.length)
        return rows if there else 0

    def bytes_for(self, rows: int) -> int:
        state = self.state_bytes if rows else 0
        return rows * sum(int(a.shape[0] * a.shape[2] * a.itemsize) for a in (*self.keys, *self.values)) + state


def _cut(arrays: list[NDArray[Any]], at: int) -> list[NDArray[Any]]:  # L of (H, n, w) each
    rest = []
    for place, array in enumerate(arrays):
        rest.append(array[:, at:].copy())
        arrays[place] = array[:, :at].copy()
    return rest


class RowBlob(NamedTuple):
    """What an engine keeps of the rows start..stop-1 of a text, in its own format."""

    start: int
    stop: int
    data: NDArray[np.uint8]  # (bytes,)


@dataclass(eq=False)
class OpaqueRows:
    """Implements `CacheSnapshot` by bytes that only the engine that gave them reads: rows from `start` on, which lie in
    blobs that may have others too. `scales` names the engine and the sizes of what it keeps. `state` is that of
    recurrent layers behind the last row where the blobs have a later one, `state_bytes` its size; 0 without any."""

    start: int
    length: int
    blobs: Sequence[RowBlob]
    kv: str
    scales: str
    row_bytes: int
    state: NDArray[np.uint8] | None = None
    state_bytes: int = 0
    keys: ClassVar[Sequence[NDArray[Any]]] = ()
    values: ClassVar[Sequence[NDArray[Any]]] = ()
    in_place: ClassVar[bool] = False

    @property
    def nbytes(self) -> int:
        return sum(blob.data.nbytes for blob in self.blobs) + (0 if self.state is None else self.state.nbytes)

    def part(self, start: int, stop: int) -> OpaqueRows:
        first, last = self.start + start, self.start + stop
        blobs = [blob for blob in self.blobs if blob.stop > first and blob.start < last]
        state = self.state if stop == self.length else None
        return dataclasses.replace(self, start=first, length=stop - start, blobs=blobs, state=state)

    def cut(self, at: int) -> OpaqueRows:
        """Both keep a blob that has rows of both."""
        rest, mine = self.part(at, self.length), self.part(0, at)
        self.length, self.blobs, self.state = at, mine.blobs, None
        return rest

    def rewindable_to(self, rows: int) -> int:
        behind = self.state is not None or (bool(self.blobs) and self.blobs[-1].stop == self.start + self.length)
        return rows if not self.state_bytes or (behind and rows == self.length) else 0

    def bytes_for(self, rows: int) -> int:
        return rows * self.row_bytes + (self.state_bytes if rows else 0)


def check_snapshot(snapshot: CacheSnapshot, geometry: Geometry, capacity: int) -> None:
    """Refuses a snapshot that a float32 cache cannot take."""
    check_type(snapshot, capacity, FLOAT32, "")
    kept = geometry.kept
    heads = [each.heads for each in kept] * 2
    sizes = [each.key_size for each in kept] + [each.value_size for each in kept]
    check_rows(snapshot, [(*each, FLOAT32) for each in zip(heads, sizes, strict=True)])


def check_type(snapshot: CacheSnapshot, capacity: int, kv: str, scales: str) -> None:
    """Refuses rows of another type than a cache's, and more than it holds."""
    if (snapshot.kv, snapshot.scales) != (kv, scales):
        what = "with other scales" if snapshot.kv == kv else f"of {snapshot.kv}"
        raise BackendError(f"The snapshot is of a cache {what}, this one is of {kv}.")
    if snapshot.length > capacity:
        raise BackendError(f"{snapshot.length} rows do not fit a cache of {capacity} tokens.")


def check_rows(snapshot: CacheSnapshot, stored: Sequence[tuple[int, int, str]]) -> None:
    """Refuses rows of other shapes than a model's."""
    found = [(a.shape, str(a.dtype)) for a in (*snapshot.keys, *snapshot.values)]
    if found != [((heads, snapshot.length, width), dtype) for heads, width, dtype in stored]:
        raise BackendError("The snapshot belongs to another model.")


def kept_rows(start: int, rows: Sequence[int], length: int) -> list[int]:
    """The rows of a cache that `KVCache.keep` names."""
    wanted = [start + r for r in rows]
    ordered = all(a < b for a, b in itertools.pairwise(wanted))
    if not ordered or (wanted and not start <= wanted[0] <= wanted[-1] < length):
        raise BackendError(f"Cannot keep rows {list(rows)} of a pass that began at {start}.")
    return wanted


def check_length(length: int, rows: int) -> None:
    """Refuses to trim a cache of `rows` rows to more than it has."""
    if not 0 <= length <= rows:
        raise BackendError(f"Cannot trim a cache of {rows} tokens to {length}.")


def row_range(start: int, stop: int | None, rows: int) -> tuple[int, int]:
    """The rows to copy of a cache of `rows` rows; all from `start` on where `stop` is None."""
    stop = rows if stop is None else stop
    if not 0 <= start <= stop <= rows:
        raise BackendError(f"Cannot copy rows {start} to {stop} of a cache of {rows} tokens.")
    return start, stop


def check_edit(
    kept: KVLayer,
    layer: int,
    edited: tuple[Floats, Floats],  # (H, n, h), (H, n, v)
    rows: int,
    left: int | None,
) -> int:
    """Number of rows that an edit of `rows` rows left in a layer, as in the layers before."""
    keys, values = edited
    found = keys.shape[1] if left is None else left
    fit = keys.shape == (kept.heads, found, kept.key_size) and values.shape == (kept.heads, found, kept.value_size)
    if not fit or found > rows:
        message = f"An edit of {rows} rows returned shapes {keys.shape} and {values.shape} in layer {layer}."
        raise BackendError(message)
    return found
