"""The bytes of a quantized matrix in the portable layout, codes of vectors, and the experts that are stored together.

The portable layout is that of ONNX Runtime's MatMulNBits and GatherBlockQuantized: a matrix (N, K) is cut along K into
blocks of `block_size` values (the last one padded with its zero point); values are unsigned, `8 / bits` to a byte, at 3
bits eight to three bytes, first value in the lowest bits; one float32 scale per block, a bfloat16 by value; zero points
packed like values, each row of blocks padded to whole bytes. Without zero points the zero is `2 ** (bits - 1)`.

ONNX Runtime's operators multiply no 3 bits: a bundle in the portable layout has 4 instead, of the same values.
Experts of 4 bits may be codes of E2M1 in the native layout, as MXFP4 has them: each stands for twice its value, times
the scale.

Codes of vectors are matrices of 2 bits in the native layout: a byte stands for four weights, by a codebook that all
matrices share. Its low half chooses one of 16 magnitudes for each of the four, its high half their signs, so that an
instruction set needs tables of 16 bytes only. Magnitudes are whole and at most 7, so layouts without vectors store the
values exactly as 4 bits. The four lie a quarter of a block apart, as the values of a byte of 2 bits do in the native
layout.

One operator reads all experts of a layer in the portable layout, so there they have one format: the widest bits and the
smallest block of any of them, with zero points where the bits differ. Widening is exact: a value is scale * (q - zero)
with the same q and zero; without zero points q grows by as much as the middle moves. Codes of E2M1 become 8 bits there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.kinds import Segment, read_blocks
from edgeinfer.core.errors import UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.native import binding

Bytes = NDArray[np.uint8]
# Weights of a code, and bits of each value that it stands for.
VECTOR, VALUE_BITS = 4, 4
_FIELD_BITS = 2
MAGNITUDES = binding.MAGNITUDES


def _all_values() -> Bytes:  # (256, 4)
    codes = np.arange(256)
    signs = 1 - 2 * (codes[:, None] >> np.arange(VECTOR, 2 * VECTOR) & 1)
    values: Bytes = ((1 << (VALUE_BITS - 1)) + signs * MAGNITUDES[codes & 15]).astype(np.uint8)
    return values


_VALUES = _all_values()


def split_codes(codes: Bytes) -> Bytes:  # (..., B / 4) -> (..., B)
    """The codes of blocks as values of 2 bits, the form in which bundles carry them."""
    fields = codes[..., None, :] >> _shifts() & np.uint8(3)  # (..., 4, B / 4)
    return fields.reshape(*codes.shape[:-1], -1)


def join_codes(fields: Bytes) -> Bytes:  # (..., B) -> (..., B / 4)
    """Reverses `split_codes`."""
    parts = fields.reshape(*fields.shape[:-1], VECTOR, -1)
    codes: Bytes = np.bitwise_or.reduce(parts << _shifts(), axis=-2)
    return codes


def read_vectors(fields: Bytes) -> Bytes:  # (..., B) -> (..., B)
    """The values of 4 bits, with a zero of 8, of blocks of codes."""
    values = _VALUES[join_codes(fields)]  # (..., B / 4, 4)
    return np.ascontiguousarray(values.swapaxes(-1, -2)).reshape(fields.shape)


def _shifts() -> Bytes:  # (4, 1)
    return np.arange(0, _FIELD_BITS * VECTOR, _FIELD_BITS, dtype=np.uint8)[:, None]


BLOCK_SIZES = (32, 64, 128)
# Twice the values of E2M1 by their codes. Source: OCP Microscaling Formats 1.0.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_PLACES3 = np.arange(3, dtype=np.uint8)

Dtype = Literal["float32", "uint8", "uint16"]
# The arrays a stored tensor consists of, in the order they lie in the file: type and shape by name.
Parts = dict[str, tuple[Dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class QuantizedShape:
    """What a quantized matrix (N, K) is, whatever its layout."""

    n: int
    k: int
    bits: int
    block_size: int
    zero_points: bool  # every block has one of its own; without them the zero is the middle of the range
    paired: bool = False  # two matrices of N / 2 rows each, gate and up, which the native layout puts side by side
    e2m1: bool = False  # values are codes of E2M1
    inline_scales: bool = False  # in the native layout scales lie among the values, see edgeinfer.bundle.layouts
    vectors: bool = False  # values of 2 bits are fields of codes of vectors, see edgeinfer.bundle.packing
    segments: tuple[Segment, ...] = ()  # rows in GGUF's types (edgeinfer.bundle.kinds), which say all else; native only

    @property
    def blocks(self) -> int:
        return blocks_per_row(self.k, self.block_size)

    def kept(self, segment: Segment) -> QuantizedShape:
        """One segment as a matrix of its own."""
        return dataclasses.replace(self, n=segment.rows, segments=(segment,))


@dataclass(frozen=True)
class QuantizedMatrix:
    """Rows of a quantized matrix in the portable layout; those of a segment as a GGUF file's blocks, without scales."""

    data: NDArray[np.uint8]  # (N, blocks, block_size * bits / 8), or (N, bytes of a row)
    scales: NDArray[np.float32]  # (N, blocks)
    zero_points: NDArray[np.uint8] | None  # (N, ceil(blocks * bits / 8))

    def __getitem__(self, rows: slice) -> QuantizedMatrix:
        zeros = None if self.zero_points is None else self.zero_points[rows]
        return QuantizedMatrix(self.data[rows], self.scales[rows], zeros)

    @staticmethod
    def combine(parts: Sequence[QuantizedMatrix], how: Callable[[list[Any]], NDArray[Any]]) -> QuantizedMatrix:
        """Combines the arrays of several matrices of one format."""
        zeros = [part.zero_points for part in parts if part.zero_points is not None]
        combined = (how([part.data for part in parts]), how([part.scales for part in parts]))
        return QuantizedMatrix(*combined, how(zeros) if zeros else None)


def blocks_of_file(rows: NDArray[np.uint8]) -> QuantizedMatrix:  # (N, bytes of a row)
    """Rows of a segment, which have no arrays but one."""
    return QuantizedMatrix(rows, np.empty((len(rows), 0), np.float32), None)


def portable_parts(shape: QuantizedShape) -> Parts:
    if shape.segments:
        message = "Weights in a GGUF file's own types have the native layout alone."
        raise UsageError(message, "Use the native layout, or convert a checkpoint of the model.")
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
    return -(-count * bits // 8)


def pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:  # (..., C) -> (..., ceil(C * bits / 8))
    """Packs unsigned values along the last axis, first value in the lowest bits; pads with zeros."""
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
    """The float matrix of packed blocks."""
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
    """The float matrix of rows of a quantized one, all of one segment where it has any."""
    if shape.segments:
        return read_blocks(shape.segments[0].kind, rows.data, shape.k)
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
    """The float matrix of blocks of E2M1 codes."""
    values = E2M1_DOUBLED[unpack(data, 4, 2 * data.shape[-1])].astype(np.float32)
    values *= scales[..., None]
    return values.reshape(len(data), -1)


# Bits of E2M1 values in layouts that only store evenly spaced values.
_WIDENED = 8
_NAME = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate_up|up|down)")


@dataclasses.dataclass(frozen=True)
class Expert:
    """What an expert's tensor is, by its name."""

    layer: int
    expert: int
    part: str  # "gate_up", or "up" where experts are not gated, or "down"


def expert_tensor(layer: int, expert: int, part: str) -> str:
    return f"layers.{layer}.mlp.experts.{expert}.{part}"


def expert_biases(layer: int, part: str) -> str:
    """Name of the vector with a part's biases, of all experts."""
    return f"layers.{layer}.mlp.experts.{part}_bias"


def find_expert(name: str) -> Expert | None:
    """Takes the name of an expert's tensor apart; None for other tensors."""
    found = _NAME.fullmatch(name)
    return None if found is None else Expert(int(found[1]), int(found[2]), found[3])


def common_format(shapes: Sequence[QuantizedShape]) -> tuple[int, int, bool]:
    """Bits, block and whether there are zero points, of the format that holds all these matrices exactly."""
    own = [_WIDENED if s.e2m1 else plain_shape(s).bits for s in shapes]
    bits, block = max(own), min(s.block_size for s in shapes)
    zeros = (s.zero_points or (b != bits and not s.e2m1) for s, b in zip(shapes, own, strict=True))
    return bits, block, any(zeros)


def plain_shape(shape: QuantizedShape) -> QuantizedShape:
    """The shape of a matrix outside the native layout."""
    bits = VALUE_BITS if shape.vectors else portable_bits(shape.bits)
    return dataclasses.replace(shape, bits=bits, vectors=False)


def portable_bits(bits: int) -> int:
    """Bits of stored values outside the native layout."""
    return 4 if bits == 3 else bits


def widen(rows: QuantizedMatrix, source: QuantizedShape, target: QuantizedShape) -> QuantizedMatrix:
    """Converts rows to a format of as many or more bits, as large or smaller blocks, and zero points if any has."""
    before = (source.bits, source.block_size, source.zero_points, source.e2m1, source.vectors)
    if source.segments or before == (target.bits, target.block_size, target.zero_points, target.e2m1, target.vectors):
        return rows
    count, stop = len(rows.data), target.blocks * target.block_size
    fields = unpack(rows.data, source.bits, source.block_size)
    values = (read_vectors(fields) if source.vectors else fields).reshape(count, -1)[:, :stop]  # (N, blocks * block)
    if source.vectors:
        source = dataclasses.replace(source, bits=VALUE_BITS, vectors=False)
    if source.e2m1:
        values = (E2M1_DOUBLED[values] + np.int16(midpoint(_WIDENED))).astype(np.uint8)
        source = dataclasses.replace(source, bits=_WIDENED, e2m1=False)
    elif not source.zero_points and not target.zero_points:
        values = values + np.uint8(midpoint(target.bits) - midpoint(source.bits))
    times = source.block_size // target.block_size
    scales = np.repeat(rows.scales, times, axis=1)[:, : target.blocks]
    zeros = None
    if target.zero_points:
        if rows.zero_points is None:
            points = np.full((count, source.blocks), midpoint(source.bits), np.uint8)
        else:
            points = unpack(rows.zero_points, source.bits, source.blocks)
        zeros = pack(np.repeat(points, times, axis=1)[:, : target.blocks], target.bits)
    blocks = values.reshape(count, target.blocks, target.block_size)
    return QuantizedMatrix(pack(blocks, target.bits), scales, zeros)
