"""GGUF's types as they lie in a bundle, bit for bit: what their tiles take, and rows of a file's blocks in and out.

A kind is a type that the kernel multiplies as a file has it; its name and number are ggml's. Its tiles are defined in
runtime/native/spans.h, or are those of edgeinfer.bundle.layouts with scales of float16: values, low plane and scales
one after the other. What moves blocks into tiles and back is the kernel's library (runtime/native/gguf.c).

A matrix may have rows of several kinds, as a file stores what is one matrix here in tensors of their own: a segment of
rows for each, with tiles of its own, one after the other in one array. Numbers of 16 bits are kept as they are, too:
tiles of 32 rows one after the other, for a product of floats (runtime/native/floats.h).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16
from edgeinfer.core.errors import BundleError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.native.library import library

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
# Most segments of a matrix: queries, keys and values.
MOST_SEGMENTS = 3
_LINE = 64
# Bits of an exponent that says infinite, or no number.
_NOT_FINITE = {"F16": np.uint16(0x7C00), "BF16": np.uint16(0x7F80)}


@dataclass(frozen=True)
class Kind:
    """A type of GGUF files: its blocks there, and its tiles."""

    number: int  # in files and in graphs
    # `values`, `nbytes`: of a block of a file.
    values: int
    nbytes: int
    bits: int  # of a value's code in a tile
    block: int = 32  # values of 32 rows that take the bytes of `runs`
    runs: tuple[int, ...] = ()  # bytes of values with their heads; or of values, low plane and scales

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of a file."""
        return k // self.values * self.nbytes

    def tile_bytes(self, k: int) -> tuple[int, ...]:
        """Bytes of a tile in each of the runs."""
        return tuple(-(-run * k // self.block // _LINE) * _LINE for run in self.runs)

    @property
    def floats(self) -> bool:
        """Whether values are floats of 16 bits."""
        return self.values == 1

    def fits(self, k: int) -> bool:
        """Whether rows of K values are whole blocks."""
        return k % self.values == 0


# Heads of a block of 32 take 64 bytes as one float16, 128 as two; 512 for eight blocks with scales of 6 bits.
KINDS: Mapping[str, Kind] = {
    "F16": Kind(1, 1, 2, 16, 1, (64,)),
    "Q4_0": Kind(2, 32, 18, 4, runs=(512 + 64,)),
    "Q4_1": Kind(3, 32, 20, 4, runs=(512 + 128,)),
    "Q5_0": Kind(6, 32, 22, 5, runs=(640 + 64,)),
    "Q5_1": Kind(7, 32, 24, 5, runs=(640 + 128,)),
    "Q8_0": Kind(8, 32, 34, 8, runs=(512, 512, 64)),
    "Q2_K": Kind(10, 256, 84, 2, runs=(256 + 80,)),
    "Q3_K": Kind(11, 256, 110, 3, runs=(384 + 72,)),
    "Q4_K": Kind(12, 256, 144, 4, runs=(512 + 64,)),
    "Q5_K": Kind(13, 256, 176, 5, runs=(640 + 64,)),
    "Q6_K": Kind(14, 256, 210, 6, runs=(768 + 72,)),
    "IQ4_NL": Kind(20, 32, 18, 4, runs=(512 + 64,)),
    "IQ4_XS": Kind(23, 256, 136, 4, runs=(512 + 40,)),
    "BF16": Kind(30, 1, 2, 16, 1, (64,)),
    "TQ1_0": Kind(34, 256, 54, 2, 128, (1024, 64)),
    "TQ2_0": Kind(35, 256, 66, 2, 128, (1024, 64)),
    "MXFP4": Kind(39, 32, 17, 4, runs=(512 + 32,)),
    "NVFP4": Kind(40, 64, 36, 4, runs=(512 + 64,)),
    "Q1_0": Kind(41, 128, 18, 2, 128, (1024, 64)),
    "Q2_0": Kind(42, 64, 18, 2, 64, (512, 64)),
}


@dataclass(frozen=True)
class Segment:
    """Rows of a matrix that are of one kind."""

    kind: str  # of KINDS, by name
    rows: int


def join_segments(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Segments in order, neighbours of one kind as one."""
    joined: list[Segment] = []
    for segment in segments:
        same = bool(joined) and joined[-1].kind == segment.kind
        before = joined.pop().rows if same else 0
        joined.append(Segment(segment.kind, before + segment.rows))
    return tuple(joined)


def pack_blocks(kind: str, rows: Bytes, k: int, *, paired: bool, name: str) -> list[Bytes]:
    """Moves whole tiles' rows (N, bytes of a row), gate before up where they are paired, into tiles.

    Args:
        name: of the tensor, for the error where scales are not finite.

    Returns:
        the tiles' bytes of each run, (tiles, bytes)
    """
    of = KINDS[kind]
    tiles = -(-len(rows) // 32)
    sizes = of.tile_bytes(k)
    packed = np.zeros(tiles * sum(sizes), np.uint8)
    if of.floats:
        if (rows.view("<u2") & _NOT_FINITE[kind] == _NOT_FINITE[kind]).any():
            raise _not_finite(name)
        packed[: rows.size] = rows.reshape(-1)
    elif not library().pack(of.number, np.ascontiguousarray(rows), k, packed, paired=paired):
        raise _not_finite(name)
    ends = np.cumsum([tiles * size for size in sizes])[:-1]
    return [run.reshape(tiles, -1) for run in np.split(packed, ends)]


def unpack_blocks(kind: str, tiles: list[Bytes], count: int, k: int, *, paired: bool) -> Bytes:  # (count, row bytes)
    """Reverses `pack_blocks`; `count` rows are no padding."""
    of = KINDS[kind]
    if of.floats:
        return np.concatenate(tiles).reshape(-1, of.row_bytes(k))[:count]
    rows = np.zeros((count, of.row_bytes(k)), np.uint8)
    library().unpack(of.number, np.concatenate([run.reshape(-1) for run in tiles]), k, rows, paired=paired)
    return rows


def read_blocks(kind: str, rows: Bytes, k: int, name: str = "A tensor") -> Floats:  # (N, bytes of a row) -> (N, K)
    """The values of rows of a file's blocks."""
    if kind == "F16":
        return rows.view("<f2").astype(np.float32)
    if kind == "BF16":
        return bfloat16.from_bits(rows.view("<u2"))
    values = np.empty((len(rows), k), np.float32)
    if not library().dequantize(KINDS[kind].number, np.ascontiguousarray(rows), values):
        raise _not_finite(name)
    return values


def _not_finite(name: str) -> BundleError:
    return BundleError(
        f"{name} has scales or values that are not finite numbers.", "The file is damaged: download it again."
    )
