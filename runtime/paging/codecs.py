"""Storage of a key or a value of one token and head: four types, each row with scales of its own.

This is the definition; the attention kernel stores the same bits. Stored rows are what snapshots and session files
carry: the numbers, then what scales them. Where they lie in a page is `edgeinfer.runtime.paging.layout`'s matter.

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
from edgeinfer.core.errors import UsageError
from edgeinfer.runtime.arrays import Floats

# Channels of an int4 row that share a scale and a zero point. In the same bytes as a half scale and a half minimum for
# each 32, it makes a quarter less error of attention.
GROUP = 16
# The ranges that int4 tries for a group: its ends moved inwards by up to so many steps of so much of its width.
_RANGES, _RANGE_STEP = 3, 0.02
# Of a word, the bits of a half that are its scale: not its sign, not the lowest five. The largest scale, and none.
_SCALE_BITS, _LARGEST_SCALE, _NO_NUMBER = np.uint16(0x7FE0), np.uint16(0x7BE0), np.uint16(0xFFC0)
_LARGEST_STEP = np.float32(65472)
# Rows of which int4 tries the ranges at a time, so that they stay in the processor's cache.
_AT_ONCE = 2048
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
    return _rows(_turned(_channels(rows)), rows.shape)


def _channels(rows: NDArray[Any]) -> NDArray[Any]:  # (..., h) -> (h, n)
    """All rows channel by channel, so that operations on a channel touch long runs of memory."""
    return np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]).T)


def _rows(channels: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:  # (h, n) -> (..., h)
    """Undoes `_channels`."""
    return np.ascontiguousarray(channels.T).reshape(shape)


def _turned(channels: Floats) -> Floats:  # (h, n) -> (h, n)
    size, count = channels.shape
    width, span = turn_width(size), 1
    turned, other = channels.astype(np.float32), np.empty((size, count), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # infinities become what they become
        while span < width:
            pairs = turned.reshape(size // (2 * span), 2, span, count)
            made = other.reshape(pairs.shape)
            np.add(pairs[:, 0], pairs[:, 1], out=made[:, 0])
            np.subtract(pairs[:, 0], pairs[:, 1], out=made[:, 1])
            turned, other, span = other, turned, 2 * span
        turned *= np.float32(1 / np.sqrt(width))
    return turned


def _groups(size: int) -> int:
    return -(-size // GROUP)


class RowCodec(ABC):
    """A type of stored rows."""

    name: ClassVar[str]
    code: ClassVar[int]  # the type's number in the graph's layout
    dtype: ClassVar[str]  # numpy type of stored rows
    level_dtype: ClassVar[str]  # numpy type of a channel's level, before two are put into a byte
    packed: ClassVar[int] = 1  # levels in one item of a page
    lanes: ClassVar[int] = 1  # channels of a key that lie side by side in a tile
    order: ClassVar[tuple[int, ...]] = (0,)  # places of the positions whose values lie side by side, channel by channel
    scale_dtype: ClassVar[str] = ""  # numpy type of a row's scale; "" without one
    turned: ClassVar[bool] = False  # rows are turned before they are stored

    @property
    def scales(self) -> str:
        return ROW_SCALES if self.scale_dtype else ""

    def scale_shape(self, size: int) -> tuple[int, ...]:
        return ()

    def width(self, size: int) -> int:
        return size

    @abstractmethod
    def encode(self, rows: Floats) -> NDArray[Any]:  # (..., h) -> (..., width)
        """Rows as they are stored."""

    @abstractmethod
    def decode(self, stored: NDArray[Any], size: int) -> Floats:  # (..., width) -> (..., size)
        """The floats of stored rows."""

    def split(self, stored: NDArray[Any], size: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """The number of every channel, and the rows' scales: (..., width) -> (..., size), (..., *scale_shape)."""
        return stored, None

    def join(self, levels: NDArray[Any], scales: NDArray[Any] | None) -> NDArray[Any]:
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
    lanes, order, scale_dtype, turned = 4, (0, 2, 1, 3), "float32", True

    def width(self, size: int) -> int:
        return size + 4

    def encode(self, rows: Floats) -> NDArray[Any]:
        turned = _turned(_channels(rows))
        largest = np.maximum(turned.max(axis=0), -turned.min(axis=0))
        finite = np.isfinite(largest)
        used = finite & (largest >= _LEAST)
        inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=used)
        scales = np.where(finite, np.where(used, largest / np.float32(127), np.float32(0)), np.float32(np.nan))
        if not used.all():
            turned = np.where(used, turned, np.float32(0))
        turned *= inverse
        levels = np.rint(turned, out=turned).astype(np.int8)
        return self.join(_rows(levels, rows.shape), scales.astype(np.float32).reshape(rows.shape[:-1]))

    def decode(self, stored: NDArray[Any], size: int) -> Floats:
        levels, scales = self.split(stored, size)
        assert scales is not None
        return _rows(_turned(_channels(levels).astype(np.float32) * scales.ravel()), levels.shape)

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
        return (_groups(size),)

    def width(self, size: int) -> int:
        return (size + 1) // 2 + 2 * _groups(size)

    def encode(self, rows: Floats) -> NDArray[Any]:
        size, groups = rows.shape[-1], _groups(rows.shape[-1])
        turned = _turned(_channels(rows))
        filled = np.zeros((groups * GROUP, turned.shape[1]), np.float32)
        filled[:size] = turned
        words = np.empty((groups, turned.shape[1]), np.uint16)
        levels = np.empty(filled.shape, np.uint8)
        for group in range(groups):
            channels = slice(group * GROUP, (group + 1) * GROUP)
            for start in range(0, turned.shape[1], _AT_ONCE):
                part = slice(start, start + _AT_ONCE)
                levels[channels, part], words[group, part] = _sixteen_levels(filled[channels, part])
        shape = rows.shape[:-1]
        return self.join(_rows(levels[:size], rows.shape), _rows(words, (*shape, groups)))

    def decode(self, stored: NDArray[Any], size: int) -> Floats:
        levels, words = self.split(stored, size)
        assert words is not None
        scales, zeros = (_channels(each)[:, None] for each in _scales_and_zeros(words))  # (groups, 1, n)
        channels = np.zeros((scales.shape[0] * GROUP, scales.shape[2]), np.float32)
        channels[:size] = _channels(levels)
        groups = channels.reshape(len(scales), GROUP, scales.shape[2])
        groups *= np.float32(4)
        groups -= zeros
        groups *= scales * np.float32(0.25)
        return _rows(_turned(channels[:size]), levels.shape)

    def split(self, stored: NDArray[Any], size: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        half = (size + 1) // 2
        return unpack(stored[..., :half], 4, size), np.ascontiguousarray(stored[..., half:]).view("<u2")

    def join(self, levels: NDArray[Any], scales: NDArray[Any] | None) -> NDArray[Any]:
        assert scales is not None
        return np.concatenate([pack(levels, 4), np.ascontiguousarray(scales, "<u2").view(np.uint8)], axis=-1)


def _scales_and_zeros(words: NDArray[np.uint16]) -> tuple[Floats, Floats]:
    """Scale (size of a level) and zero point (quarters of levels below zero) of the groups' words."""
    scales = (words >> np.uint16(1) & _SCALE_BITS).view(np.float16).astype(np.float32)
    return scales, (words & np.uint16(63)).astype(np.float32)


def _sixteen_levels(group: Floats) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:  # (16, n) -> (16, n), (n,)
    """The levels of a group of channels, and the words: of all ranges the one with the least squared error."""
    with np.errstate(invalid="ignore", over="ignore"):  # of numbers that are none, and of the largest ones
        low = np.minimum(group.min(axis=0), np.float32(0))
        width = np.maximum(group.max(axis=0), np.float32(0)) - low
    finite = np.isfinite(width)
    group, low, width = (np.where(finite, each, np.float32(0)) for each in (group, low, width))
    steps = [_Step(group, width, narrower) for narrower in range(2 * _RANGES - 1)]
    levels, words = np.empty_like(group), np.zeros(len(low), np.uint16)
    least = np.empty_like(low)
    for up, down in itertools.product(range(_RANGES), repeat=2):
        step = steps[up + down]
        zeros = step.zeros(low + width * np.float32(_RANGE_STEP * up))
        error = step.error(group, zeros, levels)
        better = error < least if up + down else np.ones(len(low), np.bool_)
        words = np.where(better, step.bits << np.uint16(1) | zeros.astype(np.uint16), words)
        least = np.where(better, error, least)
    scales, zeros = _scales_and_zeros(words)
    _levels(group * _inverse(scales), zeros, levels)
    return np.where(finite, levels, np.float32(0)).astype(np.uint8), np.where(finite, words, _NO_NUMBER)


class _Step:
    """A size of levels that is tried for a group: its range, narrowed by so many steps."""

    def __init__(self, group: Floats, width: Floats, narrower: int) -> None:  # (16, n), (n,)
        step = np.minimum(width * np.float32((1 - _RANGE_STEP * narrower) / 15), _LARGEST_STEP)
        bits = step.astype(np.float16).view(np.uint16)
        self.bits = np.minimum(bits + np.uint16(16), _LARGEST_SCALE) & _SCALE_BITS
        self._scale = self.bits.view(np.float16).astype(np.float32)
        self._inverse = _inverse(self._scale)
        self._levels = group * self._inverse

    def zeros(self, low: Floats) -> Floats:  # (n,) -> (n,)
        """Quarters of levels below zero for a range that begins there."""
        zeros: Floats = np.rint(-low * self._inverse * np.float32(4))
        return np.minimum(np.maximum(zeros, np.float32(0)), np.float32(63))

    def error(self, group: Floats, zeros: Floats, levels: Floats) -> Floats:  # (16, n), (n,), (16, n) -> (n,)
        """The squared error of each group; overwrites `levels`."""
        _levels(self._levels, zeros, levels)
        levels -= zeros * np.float32(0.25)
        levels *= self._scale
        np.subtract(group, levels, out=levels)
        with np.errstate(over="ignore"):  # of numbers far beyond the largest scale: the first range is as good as any
            levels *= levels
            for half in (8, 4, 2, 1):
                levels[:half] += levels[half : 2 * half]
        error: Floats = levels[0].copy()
        return error


def _levels(scaled: Floats, zeros: Floats, out: Floats) -> None:  # (16, n), (n,), (16, n)
    """The nearest levels to numbers in units of them."""
    np.add(scaled, zeros * np.float32(0.25), out=out)
    np.rint(out, out=out)
    np.maximum(out, np.float32(0), out=out)
    np.minimum(out, np.float32(15), out=out)


def _inverse(scales: Floats) -> Floats:
    """One over each; 0 for none."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)


def _half(x: Floats) -> NDArray[np.float16]:
    """The nearest half, ties to even; what lies beyond the largest is the largest."""
    return np.clip(x, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16)


ROW_CODECS: dict[str, RowCodec] = {codec.name: codec for codec in (_Float32(), _Float16(), _Int8(), _Int4())}


def find_row_codec(name: str) -> RowCodec:
    if name not in ROW_CODECS:
        raise UsageError(f"There is no KV type {name!r}.", f"Choose one of {', '.join(ROW_CODECS)}.")
    return ROW_CODECS[name]
