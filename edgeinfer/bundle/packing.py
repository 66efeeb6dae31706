"""The bytes of a quantized matrix in the portable layout.

Layout of ONNX Runtime's MatMulNBits and GatherBlockQuantized: a matrix (N, K) is cut along K into blocks of
`block_size` values (the last one padded with its zero point); values are unsigned, `8 / bits` to a byte, at 3 bits
eight to three bytes, first value in the lowest bits; one float32 scale per block, a bfloat16 by value; zero points
packed like values, each row of blocks padded to whole bytes. Without zero points the zero is `2 ** (bits - 1)`.

ONNX Runtime's operators multiply no 3 bits: a bundle in the portable layout has 4 instead, of the same values.
In the native layout matrices of 2 bits may be codes of vectors (edgeinfer.bundle.vectors), which are 4 bits in others.
Experts of 4 bits may be codes of E2M1 there, as MXFP4 has them: each stands for twice its value, times the scale.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.vectors import VALUE_BITS, read_vectors
from edgeinfer.records import dataclass

BLOCK_SIZES = (32, 64, 128)
# Twice the values of E2M1 by their codes. Source: OCP Microscaling Formats 1.0.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_PLACES3 = np.arange(3, dtype=np.uint8)

Dtype = Literal["float32", "uint8", "uint16"]
# The arrays a stored tensor consists of, in the order they lie in the file: type and shape by name.
Parts = dict[str, tuple[Dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class QuantizedShape:
    """What a quantized matrix (N, K) is, whatever its layout.

    Attributes:
        zero_points: every block has one of its own; without them the zero is the middle of the range.
        paired: two matrices of N / 2 rows each, gate and up, which the native layout puts side by side.
        e2m1: values are codes of E2M1.
        inline_scales: in the native layout scales lie among the values, see edgeinfer.bundle.native_layout.
        vectors: values of 2 bits are fields of codes of vectors, see edgeinfer.bundle.vectors.
    """

    n: int
    k: int
    bits: int
    block_size: int
    zero_points: bool
    paired: bool = False
    e2m1: bool = False
    inline_scales: bool = False
    vectors: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return blocks_per_row(self.k, self.block_size)


@dataclass(frozen=True)
class QuantizedMatrix:
    """Rows of a quantized matrix in the portable layout."""

    data: NDArray[np.uint8]  # (N, blocks, block_size * bits / 8)
    scales: NDArray[np.float32]  # (N, blocks)
    zero_points: NDArray[np.uint8] | None  # (N, ceil(blocks * bits / 8))


def portable_parts(shape: QuantizedShape) -> Parts:
    """The arrays that a matrix is stored as in this layout."""
    parts: Parts = {
        "data": ("uint8", (shape.n, shape.blocks, packed_bytes(shape.block_size, shape.bits))),
        "scales": ("float32", (shape.n, shape.blocks)),
    }
    if shape.zero_points:
        parts["zero_points"] = ("uint8", (shape.n, packed_bytes(shape.blocks, shape.bits)))
    return parts


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
    if bits == 3:
        each = values[..., None] >> _PLACES3 & np.uint8(1)  # (..., C, 3)
        return np.packbits(each.reshape(*values.shape[:-1], 3 * values.shape[-1]), axis=-1, bitorder="little")
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
    if bits == 3:
        each = np.unpackbits(packed, axis=-1, count=3 * count, bitorder="little").reshape(*packed.shape[:-1], count, 3)
        joined: NDArray[np.uint8] = np.bitwise_or.reduce(each << _PLACES3, axis=-1)
        return joined
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
    vectors: bool = False,
) -> NDArray[np.float32]:  # (N, K)
    """The float matrix that the packed blocks stand for."""
    n, blocks = scales.shape
    codes = unpack(data, bits, block_size)  # (N, blocks, block_size)
    values = (read_vectors(codes) if vectors else codes).astype(np.float32)
    if zero_points is None:
        values -= np.float32(midpoint(VALUE_BITS if vectors else bits))
    else:
        values -= unpack(zero_points, bits, blocks).astype(np.float32)[..., None]
    values *= scales[..., None]
    return values.reshape(n, blocks * block_size)[:, :k]


def dense_rows(rows: QuantizedMatrix, shape: QuantizedShape) -> NDArray[np.float32]:  # (N, K)
    """The float matrix that rows of a quantized one stand for."""
    if shape.e2m1:
        return dequantize_e2m1(rows.data, rows.scales)
    return dequantize(
        rows.data,
        rows.scales,
        rows.zero_points,
        bits=shape.bits,
        block_size=shape.block_size,
        k=shape.k,
        vectors=shape.vectors,
    )


def dequantize_e2m1(
    data: NDArray[np.uint8],  # (N, blocks, B)
    scales: NDArray[np.float32],  # (N, blocks)
) -> NDArray[np.float32]:  # (N, blocks * 2 B)
    """The float matrix that blocks of codes of E2M1 stand for."""
    values = E2M1_DOUBLED[unpack(data, 4, 2 * data.shape[-1])].astype(np.float32)
    values *= scales[..., None]
    return values.reshape(len(data), -1)
