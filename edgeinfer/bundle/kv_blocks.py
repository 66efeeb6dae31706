"""llama.cpp's blocks of 32 numbers with a scale of their own, q8_0 and q4_0, as cached rows hold them; knows no cache.

A block is a half-precision scale and 32 integers behind it. q8_0 stores them as int8, the largest of a block as 127 or
-127. q4_0 adds 8 and makes the number of largest size -8; a byte holds a number of the first half in its lower bits and
one of the second half in its upper bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "BLOCK_BYTES", "from_blocks", "to_blocks"]

Floats = NDArray[np.float32]

BLOCK = 32
_SCALE_BYTES = 2
# Bytes of a block by the bits of its numbers.
BLOCK_BYTES = {8: _SCALE_BYTES + BLOCK, 4: _SCALE_BYTES + BLOCK // 2}


def to_blocks(values: Floats, bits: int) -> NDArray[np.uint8]:  # (..., h) -> (..., h / 32 * bytes)
    """Rows whose width is a multiple of 32, quantized as llama.cpp does."""
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    stored = np.empty((*blocks.shape[:-1], BLOCK_BYTES[bits]), np.uint8)
    if bits == 8:
        scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
        levels = np.rint(blocks * _inverse(scales))
        stored[..., _SCALE_BYTES:] = levels.astype(np.int8).view(np.uint8)
    else:
        furthest = np.abs(blocks).argmax(axis=-1, keepdims=True)
        scales = np.take_along_axis(blocks, furthest, axis=-1) / np.float32(-8)
        levels = np.minimum(np.floor(blocks * _inverse(scales) + np.float32(8.5)), 15).astype(np.uint8)
        stored[..., _SCALE_BYTES:] = levels[..., : BLOCK // 2] | (levels[..., BLOCK // 2 :] << 4)
    stored[..., :_SCALE_BYTES] = scales.astype("<f2").view(np.uint8)
    return stored.reshape(*values.shape[:-1], -1)


def from_blocks(stored: NDArray[Any], bits: int) -> Floats:  # (..., h / 32 * bytes) -> (..., h)
    """The numbers that rows of blocks stand for."""
    blocks = stored.reshape(*stored.shape[:-1], -1, BLOCK_BYTES[bits])
    scales = np.ascontiguousarray(blocks[..., :_SCALE_BYTES]).view("<f2").astype(np.float32)
    packed = np.ascontiguousarray(blocks[..., _SCALE_BYTES:])
    if bits == 8:
        levels = packed.view(np.int8).astype(np.float32)
    else:
        levels = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32) - np.float32(8)
    floats: Floats = (levels * scales).reshape(*stored.shape[:-1], -1)
    return floats


def _inverse(scales: Floats) -> Floats:
    """One over each; 0 for blocks of zeros."""
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
