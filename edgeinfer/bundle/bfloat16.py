"""float32 arrays on the grid of bfloat16, which scales are stored in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_LOWER_HALF = np.uint32(0xFFFF)
_SHIFT = np.uint32(16)


def round_nearest(values: Floats) -> Floats:
    """The nearest bfloat16 of each finite value, ties to even; magnitudes past the largest become infinite."""
    words = np.ascontiguousarray(values).view(np.uint32)
    rounded = words + np.uint32(0x7FFF) + (words >> _SHIFT & np.uint32(1))
    return (rounded & ~_LOWER_HALF).view(np.float32)


def step(values: Floats, count: int) -> Floats:
    """The bfloat16 that lies `count` places further from zero (nearer to it, if negative) than each bfloat16 given."""
    return (np.ascontiguousarray(values).view(np.int32) + np.int32(count << 16)).view(np.float32)


def is_representable(values: Floats) -> bool:
    return not (np.ascontiguousarray(values).view(np.uint32) & _LOWER_HALF).any()


def to_bits(values: Floats) -> NDArray[np.uint16]:
    """The upper halves of representable values: their bfloat16 bits."""
    return (np.ascontiguousarray(values).view(np.uint32) >> _SHIFT).astype(np.uint16)


def from_bits(bits: NDArray[np.uint16]) -> Floats:
    """Reverses `to_bits`."""
    return (bits.astype(np.uint32) << _SHIFT).view(np.float32)
