"""How a key or a value of one token and head is stored: four types, each row with scales of its own.

This is the definition; the attention kernel stores the same bits. Stored rows are what snapshots and session files
carry: the numbers, then what scales them. Where they lie in a page is `edgeinfer.runtime.paging.page_rows`'s matter.

Integers lose least where a row's channels are alike in size, so rows are turned by a Hadamard matrix first, which
spreads outliers over all channels (QuaRot, Ashkboos et al. 2024). It is its own inverse. Queries are turned as keys
are, so that their products stay what they were.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.packing import pack, unpack
from edgeinfer.errors import UsageError
from edgeinfer.runtime.arrays import Floats

__all__ = ["GROUP", "ROW_CODECS", "ROW_SCALES", "RowCodec", "find_row_codec", "scale_groups", "turn", "turn_width"]

# Channels of an int4 row that share a scale and a zero point. In the same bytes as a half scale and a half minimum for
# each 32, it makes a quarter less error of attention.
GROUP = 16
# The ranges that int4 tries for a group: its ends moved inwards by up to so many steps of so much of its width.
_RANGES, _RANGE_STEP = 3, 0.02
# Of a word, the bits of a half that are its scale: not its sign, not the lowest five. The largest scale, and none.
_SCALE_BITS, _LARGEST_SCALE, _NO_NUMBER = np.uint16(0x7FE0), np.uint16(0x7BE0), np.uint16(0xFFC0)
_LARGEST_STEP = np.float32(65472)
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
    """A scale and a zero point in quarters of a level for each group of 16 channels; two channels to a byte."""

    name, code, dtype, level_dtype = "int4", 3, "uint8", "uint8"
    packed, lanes, scale_dtype, turned = 2, 4, "uint16", True

    def scale_shape(self, size: int) -> tuple[int, ...]:
        return (scale_groups(size),)

    def width(self, size: int) -> int:
        return (size + 1) // 2 + 2 * scale_groups(size)

    def encode(self, rows: Floats) -> NDArray[Any]:
        size, groups = rows.shape[-1], scale_groups(rows.shape[-1])
        filled = np.zeros((*rows.shape[:-1], groups * GROUP), np.float32)
        filled[..., :size] = turn(rows)
        levels, words = _sixteen_levels(filled.reshape(*rows.shape[:-1], groups, GROUP))
        return self.join(levels.reshape(filled.shape)[..., :size], words)

    def decode(self, stored: NDArray[Any], size: int) -> Floats:
        levels, words = self.split(stored, size)
        assert words is not None
        scales, zeros = _scales_and_zeros(words)
        quarters, zeros = (np.repeat(each, GROUP, axis=-1)[..., :size] for each in (scales * np.float32(0.25), zeros))
        return turn((levels.astype(np.float32) * np.float32(4) - zeros) * quarters)

    def split(self, stored: NDArray[Any], size: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        half = (size + 1) // 2
        return unpack(stored[..., :half], 4, size), np.ascontiguousarray(stored[..., half:]).view("<u2")

    def join(self, levels: NDArray[Any], scales: NDArray[Any] | None) -> NDArray[Any]:
        assert scales is not None
        return np.concatenate([pack(levels, 4), np.ascontiguousarray(scales, "<u2").view(np.uint8)], axis=-1)


def _scales_and_zeros(words: NDArray[np.uint16]) -> tuple[Floats, Floats]:
    """What the words of groups say: the size of a level, and quarters of levels below zero."""
    scales = (words >> np.uint16(1) & _SCALE_BITS).view(np.float16).astype(np.float32)
    return scales, (words & np.uint16(63)).astype(np.float32)


def _sixteen_levels(groups: Floats) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:  # (..., 16) -> (..., 16), (...)
    """The levels of groups of channels, and the word of each: of all ranges that with the least squared error."""
    with np.errstate(invalid="ignore", over="ignore"):  # of numbers that are none, and of the largest ones
        low = np.minimum(groups.min(axis=-1, keepdims=True), np.float32(0))
        width = np.maximum(groups.max(axis=-1, keepdims=True), np.float32(0)) - low
    finite = np.isfinite(width)
    groups, low, width = (np.where(finite, each, np.float32(0)) for each in (groups, low, width))
    levels, words, least = _in_range(groups, low, width, 0, 0)
    for up, down in itertools.product(range(_RANGES), repeat=2):
        found, word, error = _in_range(groups, low, width, up, down)
        better = error < least
        levels, words = np.where(better, found, levels), np.where(better, word, words)
        least = np.where(better, error, least)
    levels, words = np.where(finite, levels, np.float32(0)), np.where(finite, words, _NO_NUMBER)
    return levels.astype(np.uint8), words[..., 0]


def _in_range(
    groups: Floats,  # (..., 16)
    low: Floats,  # (..., 1)
    width: Floats,  # (..., 1)
    up: int,
    down: int,
) -> tuple[Floats, NDArray[np.uint16], Floats]:  # (..., 16), (..., 1), (..., 1)
    """The levels of groups in a range whose ends are moved inwards by so many steps, the words, the errors."""
    low = low + width * np.float32(_RANGE_STEP * up)
    step = np.minimum(width * np.float32((1 - _RANGE_STEP * (up + down)) / 15), _LARGEST_STEP)
    bits = step.astype(np.float16).view(np.uint16)
    bits = np.minimum(bits + np.uint16(16), _LARGEST_SCALE) & _SCALE_BITS
    scale = bits.view(np.float16).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    zero = np.clip(np.rint(-low * inverse * np.float32(4)), 0, 63).astype(np.float32)
    quarters = zero * np.float32(0.25)
    levels = np.clip(np.rint(groups * inverse + quarters), 0, 15).astype(np.float32)
    with np.errstate(over="ignore"):  # of numbers far beyond the largest scale: the first range is as good as any
        error: Floats = np.square(groups - (levels - quarters) * scale)
        for half in (8, 4, 2, 1):
            error = error[..., :half] + error[..., half:]
    return levels, bits << np.uint16(1) | zero.astype(np.uint16), error


def _half(x: Floats) -> NDArray[np.float16]:
    """The nearest half, ties to even; what lies beyond the largest is the largest."""
    return np.clip(x, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16)


ROW_CODECS: dict[str, RowCodec] = {codec.name: codec for codec in (_Float32(), _Float16(), _Int8(), _Int4())}


def find_row_codec(name: str) -> RowCodec:
    """A type of stored rows by its name.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in ROW_CODECS:
        raise UsageError(f"There is no KV type {name!r}.", f"Choose one of {', '.join(ROW_CODECS)}.")
    return ROW_CODECS[name]
