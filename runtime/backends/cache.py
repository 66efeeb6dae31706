"""What the KV cache of a backend can do: the rows of one sequence, cut, kept, copied out and in, and edited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from edgeinfer.bundle import Geometry
from edgeinfer.bundle.kv_types import FLOAT32, find_kv_type
from edgeinfer.errors import BackendError
from edgeinfer.runtime.arrays import Floats

__all__ = [
    "CacheSnapshot",
    "Edit",
    "KVCache",
    "ObservedCache",
    "check_edit",
    "check_length",
    "check_snapshot",
    "row_range",
]

# Takes a layer's number and float32 copies of its keys and values, (H, n, h); returns as many or fewer rows of each.
Edit = Callable[[int, Floats, Floats], tuple[Floats, Floats]]


@dataclass(frozen=True)
class CacheSnapshot:
    """A copy of the cache: keys and values of each layer as they are stored.

    Attributes:
        keys, values: (kv_heads, length, width) of the type's dtype, see edgeinfer.bundle.kv_types.
        kv: name of the type of the cache.
        scales: `KVScales.digest` of what it is quantized by; empty where it is not.
    """

    length: int
    keys: tuple[NDArray[Any], ...]
    values: tuple[NDArray[Any], ...]
    kv: str = FLOAT32
    scales: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(a.nbytes for a in (*self.keys, *self.values))


class KVCache(Protocol):
    """Keys and values of one sequence in every layer, a row for each token that was evaluated."""

    @property
    def length(self) -> int:
        """Rows in use."""

    @property
    def capacity(self) -> int:
        """Rows there may be."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    @property
    def copyable(self) -> bool:
        """Whether rows can be copied out and in, and rewritten."""

    def trim(self, length: int) -> None:
        """Drops all rows from `length` on. Costs nothing.

        Until they are overwritten they stay what they are, for a pass that starts there and masks the layers that
        wrote them.

        Raises:
            BackendError: there are fewer rows.
        """

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """After a pass that began at row `start`: keeps these of its rows, in this order, and drops the others."""

    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        """Copies all rows, or rows start..stop-1."""

    def append(self, snapshot: CacheSnapshot) -> None:
        """Adds copied rows behind those in use, as the pass that made them had done."""

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Puts a copy in the place of all rows."""

    def rewrite(self, edit: Edit) -> None:
        """Replaces the rows in use: calls `edit` for each layer in order and stores what it returns.

        Keys are as cached, rotated by the position they were fed with. One layer's floats are alive at a time. Where
        `edit` fails, the cache is empty afterwards.

        Raises:
            BackendError: it returned more rows than there were, or not as many in every layer.
        """

    def clear(self) -> None:
        """Drops all rows and gives their memory back, as far as it was not all taken at the beginning."""


class ObservedCache(KVCache, Protocol):
    """A cache that tells which rows it was told to keep.

    Attributes:
        observe_keep: called with the arguments of every `keep`.
    """

    observe_keep: Callable[[int, Sequence[int]], None] | None


def check_snapshot(
    snapshot: CacheSnapshot, geometry: Geometry, capacity: int, kv: str = FLOAT32, scales: str = ""
) -> None:
    """Refuses a snapshot that a cache of this type and with these scales cannot take.

    Raises:
        BackendError: it belongs to another model or type of cache, or is longer than the cache.
    """
    if (snapshot.kv, snapshot.scales) != (kv, scales):
        what = "with other scales" if snapshot.kv == kv else f"of {snapshot.kv}"
        raise BackendError(f"The snapshot is of a cache {what}, this one is of {kv}.")
    kind = find_kv_type(kv)
    shape = (geometry.num_kv_heads, snapshot.length, kind.width(geometry.head_dim))
    arrays = (*snapshot.keys, *snapshot.values)
    fit = all(a.shape == shape and a.dtype == kind.dtype for a in arrays)
    if len(arrays) != 2 * geometry.num_layers or not fit:
        raise BackendError("The snapshot belongs to another model.")
    if snapshot.length > capacity:
        raise BackendError(f"{snapshot.length} rows do not fit a cache of {capacity} tokens.")


def check_length(length: int, rows: int) -> None:
    """Refuses to trim a cache of `rows` rows to more than it has."""
    if not 0 <= length <= rows:
        raise BackendError(f"Cannot trim a cache of {rows} tokens to {length}.")


def row_range(start: int, stop: int | None, rows: int) -> tuple[int, int]:
    """The rows to copy of a cache of `rows` rows; all from `start` on where `stop` is None.

    Raises:
        BackendError: there are fewer.
    """
    stop = rows if stop is None else stop
    if not 0 <= start <= stop <= rows:
        raise BackendError(f"Cannot copy rows {start} to {stop} of a cache of {rows} tokens.")
    return start, stop


def check_edit(
    geometry: Geometry,
    layer: int,
    edited: tuple[Floats, Floats],  # (H, n, h) each
    rows: int,
    left: int | None,
) -> int:
    """How many rows an edit of `rows` rows left in a layer.

    Args:
        left: in the layers before; None in the first.

    Raises:
        BackendError: more than there were, or not `left`.
    """
    keys, values = edited
    found = keys.shape[1] if left is None else left
    if not keys.shape == values.shape == (geometry.num_kv_heads, found, geometry.head_dim) or found > rows:
        message = f"An edit of {rows} rows returned shapes {keys.shape} and {values.shape} in layer {layer}."
        raise BackendError(message)
    return found
