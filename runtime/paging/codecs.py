"""How a key or a value of one token and head is stored: four types, each row with scales of its own.

This is the definition; the attention kernel stores the same bits. Stored rows are what snapshots and session files
carry: the numbers, then what scales them. Where they lie in a page is `edgeinfer.runtime.paging.page_rows`'s matter.

Integers lose least where a row's channels are alike in size, so rows are turned by a Hadamard matrix first, which
spreads outliers over all channels (QuaRot, Ashkboos et al. 2024). It is its own inverse. Queries are turned as keys
are, so that their products stay what they were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.packing import pack, unpack
from edgeinfer.errors import UsageError
from edgeinfer.runtime.arrays import Floats

__all__ = ["GROUP", "ROW_CODECS", "ROW_SCALES", "RowCodec", "find_row_codec", "scale_groups", "turn", "turn_width"]

# Channels of an int4 row that share a scale and a minimum.
GROUP = 32
# The largest block that rows are turned in: beyond it outliers are spread well enough.
_WIDEST_TURN = 128
_LARGEST_HALF = np.float32(65504)
# Rows whose largest channel is below this are zero: one over their scale would not be a number.
_LEAST = np.float32(1e-35)
# What `CacheSnapshot.scales` says where every row holds its own.
ROW_SCALES = "rows"


def turn_width(size: int) -> int:
    """Channels of a block that is turned: the largest power of two that divides the size of a head, at most 128."""
    return min(size & -size, _WIDEST_TURN)


def turn(rows: Floats) -> Floats:  # (..., h) -> (..., h)
    """Rows turned by the Hadamard transform, block by block; turning twice gives them back."""
    size = rows.shape[-1]
    width = turn_width(size)
    turned, span = np.array(rows, np.float32, order="C"), 1
    with np.errstate(invalid="ignore", over="ignore"):  # infinities become what they become
        while span < width:
            pairs = turned.reshape(*rows.shape[:-1], size // (2 * span), 2, span)
            a, b = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
            np.add(a, b, out=pairs[..., 0, :])
            np.subtract(a, b, out=pairs[..., 1, :])
            span *= 2
        turned *= np.float32(1 / np.sqrt(width))
    return turned


def scale_groups(size: int) -> int:
    """Groups of channels of an int4 row."""
    return -(-size // GROUP)


class RowCodec(ABC):
    """A type of stored rows.

    Attributes:
        name: as users say it.
        code: as the graph's layout says it.
        dtype: of stored rows.
        level_dtype: of the number that a channel is stored as, before two are put into a byte.
        packed: such numbers in one item of a page.
        lanes: of a key's channels, those that lie side by side in a tile.
        scale_dtype: of what scales a row; "" where nothing does.
        turned: rows are turned before they are stored.
    """

    name: ClassVar[str]
    code: ClassVar[int]
    dtype: ClassVar[str]
    level_dtype: ClassVar[str]
    packed: ClassVar[int] = 1
    lanes: ClassVar[int] = 1
    scale_dtype: ClassVar[str] = ""
    turned: ClassVar[bool] = False

    @property
    def scales(self) -> str:
        """What a snapshot says of the scales of such rows."""
        return ROW_SCALES if self.scale_dtype else ""

    def scale_shape(self, size: int) -> tuple[int, ...]:
        """Of what scales one row of so many channels."""
        return ()

    def width(self, size: int) -> int:
        """Items of a stored row of so many channels."""
        return size

    @abstractmethod
    def encode(self, rows: Floats) -> NDArray[Any]:  # (..., h) -> (..., width)
        """Rows as they are stored."""

    @abstractmethod
    def decode(self, stored: NDArray[Any], size: int) -> Floats:  # (..., width) -> (..., size)
        """What stored rows stand for."""

    def split(self, stored: NDArray[Any], size: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """The number of every channel, and what scales the rows: (..., width) -> (..., size), (..., *scale_shape)."""
        return stored, None

    def join(self, levels: NDArray[Any], scales: NDArray[Any] | None) -> NDArray[Any]:
        """Stored rows of what `split` gives."""
        return levels


class _Float32(RowCodec):
    name, code, dtype, level_dtype = "float32", 0, "float32", "float32"

    def encode(self, rows: Floats) -> NDArray[Any]:
        return rows

    def decode(self, stored: NDArray[Any], size: int) -> Floats:
        return stored.astype(np.float32)


class _Float16(RowCodec):
    name, code, dtype, level_dtype = "float16", 1, "float16", "float16"

    def encode(self, rows: Floats) -> NDArray[Any]:
        return _half(rows)

    def decode(self, stored: NDArray[Any], size: int) -> Floats:
        return stored.astype(np.float32)


class _Int8(RowCodec):
    """One scale for a row."""

    name, code, dtype, level_dtype = "int8", 2, "uint8", "int8"
    lanes, scale_dtype, turned = 4, "float32", True

    def width(self, size: int) -> int:
        return size + 4

    def encode(self, rows: Floats) -> NDArray[Any]:
        turned = turn(rows)
        largest = np.abs(turned).max(axis=-1)
        finite = np.isfinite(largest)
        used = finite & (largest >= _LEAST)
        inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=used)
        scales = np.where(finite, np.where(used, largest / np.float32(127), np.float32(0)), np.float32(np.nan))
        levels = np.rint(np.where(used[..., None], turned, np.float32(0)) * inverse[..., None])
        return self.join(levels.astype(np.int8), scales.astype(np.float32))

    def decode(self, stored: NDArray[Any], size: int) -> Floats:
        levels, scales = self.split(stored, size)
        assert scales is not None
        return turn(levels.astype(np.float32) * scales[..., None])

    def split(self, stored: NDArray[Any], size: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        scales = np.ascontiguousarray(stored[..., size:]).view("<f4")[..., 0]
        return stored[..., :size].view(np.int8), scales

    def join(self, levels: NDArray[Any], scales: NDArray[Any] | None) -> NDArray[Any]:
        assert scales is not None
        tail = np.ascontiguousarray(scales, "<f4")[..., None].view(np.uint8)
        return np.concatenate([levels.view(np.uint8), tail], axis=-1)


class _Int4(RowCodec):
    """A scale and a minimum for each group of 32 channels; two channels to a byte."""

    name, code, dtype, level_dtype = "int4", 3, "uint8", "uint8"
    packed, lanes, scale_dtype, turned = 2, 4, "float16", True

    def scale_shape(self, size: int) -> tuple[int, ...]:
        return (scale_groups(size), 2)

    def width(self, size: int) -> int:
        return (size + 1) // 2 + 4 * scale_groups(size)

    def encode(self, rows: Floats) -> NDArray[Any]:
        turned = turn(rows)
        size = turned.shape[-1]
        levels = np.empty(turned.shape, np.uint8)
        scales = np.empty((*turned.shape[:-1], *self.scale_shape(size)), np.float16)
        for group in range(scale_groups(size)):
            channels = slice(group * GROUP, (group + 1) * GROUP)
            levels[..., channels], scales[..., group, :] = _sixteen(turned[..., channels])
        return self.join(levels, scales)

    def decode(self, stored: NDArray[Any], size: int) -> Floats:
        levels, scales = self.split(stored, size)
        assert scales is not None
        wide = np.repeat(scales.astype(np.float32), GROUP, axis=-2)[..., :size, :]
        # The product of four bits and eleven is exact, so that this is a fused multiply-add.
        return turn(levels.astype(np.float32) * wide[..., 0] + wide[..., 1])

    def split(self, stored: NDArray[Any], size: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        half = (size + 1) // 2
        scales = np.ascontiguousarray(stored[..., half:]).view("<f2")
        return unpack(stored[..., :half], 4, size), scales.reshape(*stored.shape[:-1], *self.scale_shape(size))

    def join(self, levels: NDArray[Any], scales: NDArray[Any] | None) -> NDArray[Any]:
        assert scales is not None
        tail = np.ascontiguousarray(scales, "<f2").reshape(*levels.shape[:-1], 2 * scales.shape[-2])
        tail = tail.view(np.uint8)
        return np.concatenate([pack(levels, 4), tail], axis=-1)


def _half(x: Floats) -> NDArray[np.float16]:
    """The nearest half, ties to even; what lies beyond the largest is the largest."""
    return np.clip(x, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16)


def _sixteen(rows: Floats) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:  # (..., n) -> (..., n), (..., 2)
    """The levels of one group of channels, and its scale and minimum."""
    finite = np.logical_and.reduce(np.isfinite(rows), axis=-1, keepdims=True)
    rows = np.where(finite, rows, np.float32(0))
    low: Floats = rows.min(axis=-1)
    with np.errstate(over="ignore"):  # of the largest floats; the half is the largest one then
        minima, steps = _half(low), _half((rows.max(axis=-1) - low) / np.float32(15))
    minimum, step = minima.astype(np.float32)[..., None], steps.astype(np.float32)[..., None]
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    levels = np.rint((rows - minimum) * inverse)
    levels = np.where(step > 0, np.clip(levels, 0, 15), np.float32(0)).astype(np.uint8)
    return levels, np.stack([steps, np.where(finite[..., 0], minima, np.float16(np.nan))], axis=-1)


ROW_CODECS: dict[str, RowCodec] = {codec.name: codec for codec in (_Float32(), _Float16(), _Int8(), _Int4())}


def find_row_codec(name: str) -> RowCodec:
    """A type of stored rows by its name.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in ROW_CODECS:
        raise UsageError(f"There is no KV type {name!r}.", f"Choose one of {', '.join(ROW_CODECS)}.")
    return ROW_CODECS[name]
