"""The bytes of a quantized matrix as DequantizeLinear reads them.

A matrix (N, K) is stored as MatMul takes it, (K, N), in blocks of `block_size` values along K, of which K is a
multiple. Values of 4 bits lie two to a byte, the first in the lower bits. With zero points values and zero
points are unsigned (ONNX's uint4, uint8); without, values are signed (int4, int8) and the zero is 0, which is what
neural processors multiply best. Scales are float32, (blocks, N).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.packing import Parts, QuantizedMatrix, QuantizedShape, midpoint, pack, packed_bytes, unpack
from edgeinfer.records import dataclass

STATIC_BITS = (4, 8)


@dataclass(frozen=True)
class StaticMatrix:
    """Columns of a quantized matrix in the static layout, for some or all of its N rows."""

    data: NDArray[np.uint8]  # (K, N * bits / 8)
    scales: NDArray[np.float32]  # (blocks, N)
    zero_points: NDArray[np.uint8] | None  # (blocks, N * bits / 8)


def static_parts(shape: QuantizedShape) -> Parts:
    """The arrays that a matrix is stored as; one with no even number of rows has none at 4 bits."""
    width = packed_bytes(shape.n, shape.bits)
    parts: Parts = {"data": ("uint8", (shape.k, width)), "scales": ("float32", (shape.blocks, shape.n))}
    if shape.zero_points:
        parts["zero_points"] = ("uint8", (shape.blocks, width))
    return parts


def values_dtype(shape: QuantizedShape) -> str:
    """ONNX's type of the stored values, and of zero points where there are any."""
    return f"uint{shape.bits}" if shape.zero_points else f"int{shape.bits}"


def to_static(rows: QuantizedMatrix, shape: QuantizedShape) -> StaticMatrix:
    """Turns rows of a matrix; an even number of them, unless they have 8 bits."""
    n, blocks = rows.scales.shape
    values = unpack(rows.data, shape.bits, shape.block_size).reshape(n, shape.k)
    if rows.zero_points is None:
        return StaticMatrix(pack(_signed(values, shape.bits).T, shape.bits), rows.scales.T, None)
    zeros = pack(unpack(rows.zero_points, shape.bits, blocks).T, shape.bits)
    return StaticMatrix(pack(values.T, shape.bits), rows.scales.T, zeros)


def from_static(columns: StaticMatrix, shape: QuantizedShape) -> QuantizedMatrix:
    """Reverses `to_static`."""
    blocks, n = columns.scales.shape
    values = unpack(columns.data, shape.bits, n).T  # (n, K)
    zeros = None
    if columns.zero_points is None:
        values = _signed(values, shape.bits)
    else:
        zeros = pack(unpack(columns.zero_points, shape.bits, n).T, shape.bits)
    data = pack(values.reshape(n, blocks, shape.block_size), shape.bits)
    return QuantizedMatrix(data, np.ascontiguousarray(columns.scales.T), zeros)


def _signed(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Values around the middle of the range as two's complement of as many bits, or back."""
    return (values + np.uint8(midpoint(bits))) & np.uint8((1 << bits) - 1)
