"""Checkpoints' 8-bit floats (E4M3): the numbers that their bytes are, and the scales of their blocks.

Source: DeepSeek-V3's published weights and transformers' FineGrainedFP8Config: a matrix `NAME` has a `NAME_scale_inv`,
whose numbers multiply blocks of 128 rows and 128 columns, or one number that multiplies all of it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

E4M3 = "F8_E4M3"
BLOCK = 128
Floats = NDArray[np.float32]
Shape = tuple[int, ...]

_MANTISSA_BITS, _BIAS = 3, 7


def _table() -> Floats:  # (256,)
    """The number of every byte; the largest of either sign is none."""
    codes = np.arange(128)
    exponents, mantissas = codes >> _MANTISSA_BITS, (codes & 7).astype(np.float32)
    above = np.where(exponents > 0, np.float32(1 << _MANTISSA_BITS), np.float32(0))
    half = np.ldexp(above + mantissas, np.maximum(exponents, 1) - _BIAS - _MANTISSA_BITS)
    half[-1] = np.nan
    return np.concatenate([half, -half]).astype(np.float32)


_NUMBERS = _table()


def scale_name(name: str) -> str:
    """The tensor with the scales of another."""
    return f"{name}_scale_inv"


def beside(name: str) -> tuple[str, str]:
    """Names of the tensors that belong to one of 8 bits: its scales, and that of what enters a fixed rounding."""
    return scale_name(name), f"{name.removesuffix('weight')}activation_scale"


def scale_shape(shape: Shape) -> Shape:
    """Shape of the scales of a matrix, or of some that are stacked."""
    return (*shape[:-2], *(math.ceil(size / BLOCK) for size in shape[-2:]))


def numbers(codes: NDArray[np.uint8]) -> Floats:
    """The numbers of bytes; those that are none are NaN."""
    return _NUMBERS[codes]


def multiply_blocks(values: Floats, scales: Floats, start: int) -> None:  # (N, K), (blocks of the rows, blocks)
    """Multiplies rows of a matrix by the scales of their blocks."""
    first = start % BLOCK
    places = np.arange(first, first + len(values)) // BLOCK
    for column in range(scales.shape[1]):
        values[:, column * BLOCK : (column + 1) * BLOCK] *= scales[places, column, None]
