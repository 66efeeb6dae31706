"""The ways quantized weights lie in a bundle, the files of each, and the bytes of the native and the static layout.

`weights.bin` holds the native or the portable layout, and `model.onnx` is the graph that reads it. The bundle also has
the graph of the other layout, whose weights file is made from `weights.bin` on the device that needs it
(edgeinfer.bundle.conversion). Weights that are not quantized are the same in both, so a bundle without quantized ones
has one weights file for both graphs and counts as portable.

native: read in place by our own kernel, defined in runtime/native/lowbit.h. The rows of a matrix come in tiles of 32,
those of a paired one in tiles of 16 of each half. A tile holds its blocks of K one after the other; a block holds four
bytes of each row, then the next four. A byte holds as many values as fit, a fixed distance apart. 8-bit values are two
planes of 4 bits. Every 32 values of 3 bits are two runs of their low two bits and one of their high ones. Scales are
bfloat16, zero points bytes. Rows and values that fill up the last tile and block are zero. Inline scales, 64 bytes, lie
before the values of their block, so that a pass reads one run of bytes instead of two: with blocks of 32 and 64 at 4
bits that is the faster order (docs/log/2026-11-25.md, "scales among the weights").

portable: rows of edgeinfer.bundle.packing, read by ONNX Runtime's MatMulNBits and GatherBlockQuantized.

static: read by DequantizeLinear in the graphs of edgeinfer.bundle.static_graph; a static bundle has no other layout and
is not converted. A matrix (N, K) is stored as MatMul takes it, (K, N), in blocks of `block_size` values along K, of
which K is a multiple. Values of 4 bits lie two to a byte, the first in the lower bits. With zero points, they and the
values are unsigned (ONNX's uint4, uint8); without, values are signed (int4, int8) and the zero is 0, which neural
processors multiply best. Scales are float32, (blocks, N).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16
from edgeinfer.bundle.kinds import KINDS
from edgeinfer.bundle.packing import (
    Parts,
    QuantizedMatrix,
    QuantizedShape,
    midpoint,
    pack,
    packed_bytes,
    portable_parts,
    unpack,
)
from edgeinfer.core.records import dataclass

Layout = Literal["native", "portable", "static"]
NATIVE: Layout = "native"
PORTABLE: Layout = "portable"
STATIC: Layout = "static"
# The layouts that are converted to each other.
LAYOUTS: tuple[Layout, ...] = (NATIVE, PORTABLE)
# Raised when the bytes of a layout change; a bundle of another version is exported again.
LAYOUT_VERSIONS: dict[Layout, int] = {NATIVE: 1, PORTABLE: 1, STATIC: 1}

MODEL = "model.onnx"
WEIGHTS = "weights.bin"


def tensor_layout(name: str, layout: Layout) -> Layout:
    """The layout of one tensor: in a static bundle an embedding is stored by rows, as rows are looked up."""
    return PORTABLE if layout == STATIC and name == "embed" else layout


def model_name(stored: Layout, layout: Layout) -> str:
    """Name of the graph that reads `layout`, in a bundle that stores `stored`."""
    return MODEL if layout == stored else f"model.{layout}.onnx"


def weights_name(stored: Layout, layout: Layout, *, quantized: bool = True) -> str:
    """Name of the weights file in `layout`, in a bundle that stores `stored`."""
    return WEIGHTS if layout == stored or not quantized else f"weights.{layout}.bin"


TILE = 32
# Bytes of a row that lie together, as one 32-bit lane of a register.
_LANE_BYTES = 4
# Scales of the 32 rows of a tile and block.
_INLINE_BYTES = 2 * TILE
# At 3 bits, halves of 32 values, groups of four in a half and values of a group, which are a lane's bytes.
_CHUNK = (2, 4, _LANE_BYTES)
# Where the low two bits of a value of each group lie in a byte, and its high one.
_LOW_SHIFTS = np.array([[0], [2], [4], [6]], np.uint8)
_HIGH_SHIFTS = np.array([[[0], [1], [4], [5]], [[2], [3], [6], [7]]], np.uint8)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class NativeTiles:
    """A run of T tiles."""

    data: Bytes  # (T, blocks, 32 * bytes of a row's block), behind 64 bytes of inline scales where there are any
    low: Bytes | None  # (T, blocks, 32 * bytes of a row's block); 8-bit matrices only, whose `data` is the high plane
    scales: NDArray[np.uint16] | None  # (T, blocks, 32), bits of bfloat16; None where they are inline
    zero_points: Bytes | None  # (T, blocks, 32)


def segment_bytes(shape: QuantizedShape) -> int:
    """Bytes of a matrix that is one segment."""
    return tiles_of(shape) * sum(KINDS[shape.segments[0].kind].tile_bytes(shape.k))


def native_parts(shape: QuantizedShape) -> Parts:
    if shape.segments:
        return {"data": ("uint8", (sum(segment_bytes(shape.kept(segment)) for segment in shape.segments),))}
    tiles, blocks = tiles_of(shape), shape.blocks
    plane, before = TILE * _span(shape), _INLINE_BYTES if shape.inline_scales else 0
    parts: Parts = {"data": ("uint8", (tiles, blocks, before + plane))}
    if shape.bits == 8:
        parts["low"] = ("uint8", (tiles, blocks, plane))
    if not shape.inline_scales:
        parts["scales"] = ("uint16", (tiles, blocks, TILE))
    if shape.zero_points:
        parts["zero_points"] = ("uint8", (tiles, blocks, TILE))
    return parts


def tiles_of(shape: QuantizedShape) -> int:
    """Tiles of a matrix, the last one possibly partial."""
    halves = _halves(shape)
    return -(-(shape.n // halves) // (TILE // halves))


def tile_rows(shape: QuantizedShape, first: int, last: int) -> list[tuple[int, int]]:
    """Runs of rows (start, stop) in tiles first..last-1: one, or one of each half of a paired matrix."""
    halves = _halves(shape)
    count, lanes = shape.n // halves, TILE // halves
    start, stop = first * lanes, min(last * lanes, count)
    return [(half * count + start, half * count + stop) for half in range(halves)]


def covering_tiles(shape: QuantizedShape, start: int, stop: int) -> tuple[int, int]:
    """Tiles (first, last + 1) that hold rows start..stop-1, which are all of one half of a paired matrix."""
    halves = _halves(shape)
    count, lanes = shape.n // halves, TILE // halves
    before = start // count * count
    return (start - before) // lanes, -(-(stop - before) // lanes)


def pack_tiles(rows: QuantizedMatrix, shape: QuantizedShape) -> NativeTiles:
    """Packs the rows of whole tiles, in the order of `tile_rows`; their scales must be representable in bfloat16."""
    values = unpack(rows.data, shape.bits, shape.block_size)  # (R, blocks, block_size)
    padding = _padding(shape)
    if padding.start < shape.block_size:
        values = values.copy() if shape.bits == 8 else values  # 8 bits unpack to the caller's own bytes
        values[:, -1, padding] = 0
    zeros = None if rows.zero_points is None else unpack(rows.zero_points, shape.bits, shape.blocks)
    data = _pack_plane(values >> np.uint8(4) if shape.bits == 8 else values, shape)
    scales = _rows_last(_to_tiles(bfloat16.to_bits(rows.scales), shape))
    if shape.inline_scales:
        data = np.concatenate([scales.view(np.uint8), data], axis=2)
    return NativeTiles(
        data,
        _pack_plane(values & np.uint8(15), shape) if shape.bits == 8 else None,
        None if shape.inline_scales else scales,
        None if zeros is None else _rows_last(_to_tiles(zeros, shape)),
    )


def unpack_tiles(tiles: NativeTiles, shape: QuantizedShape, first: int) -> QuantizedMatrix:
    """Reverses `pack_tiles` for tiles from `first` on; rows in the order of `tile_rows`."""
    start, stop = tile_rows(shape, first, first + len(tiles.data))[0]
    count, data, own = stop - start, tiles.data, tiles.scales
    if own is None:
        data, own = data[..., _INLINE_BYTES:], np.ascontiguousarray(data[..., :_INLINE_BYTES]).view(np.uint16)
    values = _unpack_plane(data, shape, count)  # (R, blocks, block_size)
    if tiles.low is not None:
        values <<= np.uint8(4)
        values |= _unpack_plane(tiles.low, shape, count)
    scales = _from_tiles(own.swapaxes(1, 2), shape, count)  # (R, blocks)
    zeros = None
    if tiles.zero_points is not None:
        zeros = _from_tiles(tiles.zero_points.swapaxes(1, 2), shape, count)  # (R, blocks)
    values[:, -1, _padding(shape)] = midpoint(shape.bits) if zeros is None else zeros[:, -1:]
    packed_zeros = None if zeros is None else pack(zeros, shape.bits)
    return QuantizedMatrix(pack(values, shape.bits), bfloat16.from_bits(scales), packed_zeros)


def _halves(shape: QuantizedShape) -> int:
    return 2 if shape.paired else 1


def _plane_bits(shape: QuantizedShape) -> int:
    return min(shape.bits, 4)


def _span(shape: QuantizedShape) -> int:
    """Bytes of a block of one row, in one plane; but for 3 bits also how far the values of a byte are apart."""
    return shape.block_size * _plane_bits(shape) // 8


def _padding(shape: QuantizedShape) -> slice:
    """The values of the last block that lie past the end of the row."""
    return slice(shape.k - (shape.blocks - 1) * shape.block_size, shape.block_size)


def _to_tiles(rows: NDArray[Any], shape: QuantizedShape) -> NDArray[Any]:  # (R, ...) -> (T, 32, ...)
    """Puts each row into its tile, zeros where there is none."""
    halves = _halves(shape)
    count, lanes, rest = len(rows) // halves, TILE // halves, rows.shape[1:]
    tiles = -(-count // lanes)
    parts = rows.reshape(halves, count, *rest)
    if tiles * lanes != count:
        parts = np.concatenate([parts, np.zeros((halves, tiles * lanes - count, *rest), rows.dtype)], axis=1)
    return parts.reshape(halves, tiles, lanes, *rest).swapaxes(0, 1).reshape(tiles, TILE, *rest)


def _from_tiles(tiles: NDArray[Any], shape: QuantizedShape, count: int) -> NDArray[Any]:  # (T, 32, ...) -> (R, ...)
    """Reverses `_to_tiles`; `count` rows of each half are no padding."""
    halves, rest = _halves(shape), tiles.shape[2:]
    parts = tiles.reshape(len(tiles), halves, TILE // halves, *rest).swapaxes(0, 1)
    return np.ascontiguousarray(parts.reshape(halves, -1, *rest)[:, :count]).reshape(halves * count, *rest)


def _rows_last(tiles: NDArray[Any]) -> NDArray[Any]:  # (T, 32, blocks) -> (T, blocks, 32)
    return np.ascontiguousarray(tiles.swapaxes(1, 2))


def _pack_plane(values: Bytes, shape: QuantizedShape) -> Bytes:  # (R, blocks, block_size) -> (T, blocks, 32 * span)
    packed = _pack_chunks(values) if shape.bits == 3 else _pack_spans(values, shape)
    lanes = _to_tiles(packed.view(np.uint32), shape)  # (T, 32, blocks, span / 4)
    ordered = np.ascontiguousarray(lanes.transpose(0, 2, 3, 1))  # (T, blocks, span / 4, 32)
    return ordered.reshape(len(lanes), shape.blocks, -1).view(np.uint8)


def _unpack_plane(
    plane: Bytes,  # (T, blocks, 32 * span)
    shape: QuantizedShape,
    count: int,
) -> Bytes:  # (R, blocks, block_size)
    span = _span(shape)
    ordered = np.ascontiguousarray(plane).view(np.uint32)
    lanes = ordered.reshape(len(plane), shape.blocks, span // _LANE_BYTES, TILE).transpose(0, 3, 1, 2)
    packed = _from_tiles(lanes, shape, count).view(np.uint8)  # (R, blocks, span)
    return _unpack_chunks(packed) if shape.bits == 3 else _unpack_spans(packed, shape)


def _pack_spans(values: Bytes, shape: QuantizedShape) -> Bytes:  # (R, blocks, block_size) -> (R, blocks, span)
    bits, span = _plane_bits(shape), _span(shape)
    packed = values[..., :span].copy()
    for i in range(1, 8 // bits):
        packed |= values[..., i * span : (i + 1) * span] << np.uint8(i * bits)
    return packed


def _unpack_spans(packed: Bytes, shape: QuantizedShape) -> Bytes:  # (R, blocks, span) -> (R, blocks, block_size)
    bits, span = _plane_bits(shape), _span(shape)
    values = np.empty((len(packed), shape.blocks, shape.block_size), np.uint8)
    for i in range(8 // bits):
        part = values[..., i * span : (i + 1) * span]
        np.right_shift(packed, np.uint8(i * bits), out=part)
        part &= np.uint8((1 << bits) - 1)
    return values


def _pack_chunks(values: Bytes) -> Bytes:  # (R, blocks, block_size) -> (R, blocks, span), of 3 bits
    chunks = values.reshape(*values.shape[:2], -1, *_CHUNK)  # (R, blocks, chunks, 2, 4, 4)
    low = np.bitwise_or.reduce((chunks & np.uint8(3)) << _LOW_SHIFTS, axis=-2)  # (R, blocks, chunks, 2, 4)
    high = np.bitwise_or.reduce(chunks >> np.uint8(2) << _HIGH_SHIFTS, axis=(-3, -2))  # (R, blocks, chunks, 4)
    return np.concatenate([low, high[..., None, :]], axis=-2).reshape(*values.shape[:2], -1)


def _unpack_chunks(packed: Bytes) -> Bytes:  # (R, blocks, span) -> (R, blocks, block_size), of 3 bits
    runs = packed.reshape(*packed.shape[:2], -1, 3, 1, _LANE_BYTES)
    low = runs[..., :2, :, :] >> _LOW_SHIFTS & np.uint8(3)  # (R, blocks, chunks, 2, 4, 4)
    high = runs[..., 2:, :, :] >> _HIGH_SHIFTS & np.uint8(1)
    return (low | high << np.uint8(2)).reshape(*packed.shape[:2], -1)


STATIC_BITS = (4, 8)


@dataclass(frozen=True)
class StaticMatrix:
    """Columns of a quantized matrix in the static layout, for some or all of its N rows."""

    data: NDArray[np.uint8]  # (K, N * bits / 8)
    scales: NDArray[np.float32]  # (blocks, N)
    zero_points: NDArray[np.uint8] | None  # (blocks, N * bits / 8)


def static_parts(shape: QuantizedShape) -> Parts:
    if shape.segments:
        return portable_parts(shape)
    width = packed_bytes(shape.n, shape.bits)
    parts: Parts = {"data": ("uint8", (shape.k, width)), "scales": ("float32", (shape.blocks, shape.n))}
    if shape.zero_points:
        parts["zero_points"] = ("uint8", (shape.blocks, width))
    return parts


def values_dtype(shape: QuantizedShape) -> str:
    """ONNX's type of the stored values and zero points."""
    return f"uint{shape.bits}" if shape.zero_points else f"int{shape.bits}"


def to_static(rows: QuantizedMatrix, shape: QuantizedShape) -> StaticMatrix:
    """Transposes rows of a matrix; an even number of them, unless they have 8 bits."""
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
