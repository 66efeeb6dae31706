"""The bytes of a quantized matrix, 2, 4 or 8 bits in blocks; knows nothing of how scales were chosen.

Layout of ONNX Runtime's MatMulNBits and GatherBlockQuantized: a matrix (N, K) is cut along K into blocks of
`block_size` values (the last one padded); values are unsigned, `8 / bits` to a byte, first value in the lowest bits;
one float32 scale per block; zero points packed like values, each row of blocks padded to whole bytes. Without zero
points the zero is `2 ** (bits - 1)`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BITS", "BLOCK_SIZES", "blocks_per_row", "dequantize", "midpoint", "pack", "packed_bytes", "unpack"]

BITS = (2, 4, 8)
BLOCK_SIZES = (16, 32, 64, 128)


def midpoint(bits: int) -> int:
    """The zero point of symmetric quantization."""
    return 1 << (bits - 1)


def blocks_per_row(k: int, block_size: int) -> int:
    """Blocks along K, the last one possibly partial."""
    return -(-k // block_size)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` values of `bits` bits take."""
    return -(-count * bits // 8)


def pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:  # (..., C) -> (..., ceil(C * bits / 8))
    """Packs unsigned values along the last axis, first value in the lowest bits; the tail is padded with zeros."""
    if bits == 8:
        return np.ascontiguousarray(values)
    per_byte = 8 // bits
    missing = -values.shape[-1] % per_byte
    if missing:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], missing), np.uint8)], axis=-1)
    packed = values[..., 0::per_byte].copy()
    for i in range(1, per_byte):
        packed |= values[..., i::per_byte] << np.uint8(i * bits)
    return packed


def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:  # (..., B) -> (..., count)
    """Reverses `pack`, dropping the padding."""
    if bits == 8:
        return packed[..., :count]
    per_byte = 8 // bits
    values = np.empty((*packed.shape[:-1], packed.shape[-1] * per_byte), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for i in range(per_byte):
        values[..., i::per_byte] = (packed >> np.uint8(i * bits)) & mask
    return values[..., :count]


def dequantize(
    data: NDArray[np.uint8],  # (N, blocks, block_size * bits / 8)
    scales: NDArray[np.float32],  # (N, blocks)
    zero_points: NDArray[np.uint8] | None,  # (N, ceil(blocks * bits / 8)) or None
    *,
    bits: int,
    block_size: int,
    k: int,
) -> NDArray[np.float32]:  # (N, K)
    """The float matrix that the packed blocks stand for."""
    n, blocks = scales.shape
    values = unpack(data, bits, block_size).astype(np.float32)  # (N, blocks, block_size)
    if zero_points is None:
        values -= np.float32(midpoint(bits))
    else:
        values -= unpack(zero_points, bits, blocks).astype(np.float32)[..., None]
    values *= scales[..., None]
    return values.reshape(n, blocks * block_size)[:, :k]
