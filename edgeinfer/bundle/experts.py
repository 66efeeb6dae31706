"""The experts of a layer as they are stored together: names, common formats, widening.

One operator reads all experts of a layer in the portable layout, so there they have one format: the widest bits and the
smallest block of any of them, with zero points where the bits differ. Widening is exact: a value is scale * (q - zero)
with the same q and zero, or of a matrix alone with as much added to q as the middle moves. Codes of E2M1 become 8 bits,
and 3 bits and vectors become 4, as the portable layout has none of these.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle.packing import E2M1_DOUBLED, QuantizedMatrix, QuantizedShape, midpoint, pack, unpack
from edgeinfer.bundle.vectors import VALUE_BITS, read_vectors

# Bits that codes of E2M1 become where only evenly spaced values are stored.
_WIDENED = 8
_NAME = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate_up|up|down)")


@dataclasses.dataclass(frozen=True)
class Expert:
    """What an expert's tensor is, by its name.

    Attributes:
        part: "gate_up", or "up" where experts are not gated, or "down".
    """

    layer: int
    expert: int
    part: str


def expert_tensor(layer: int, expert: int, part: str) -> str:
    """Name of a tensor of an expert."""
    return f"layers.{layer}.mlp.experts.{expert}.{part}"


def expert_biases(layer: int, part: str) -> str:
    """Name of the vector that holds the biases of a part, of the first expert to the last."""
    return f"layers.{layer}.mlp.experts.{part}_bias"


def find_expert(name: str) -> Expert | None:
    """What a tensor is of which expert; None where it is of none."""
    found = _NAME.fullmatch(name)
    return None if found is None else Expert(int(found[1]), int(found[2]), found[3])


def common_format(shapes: Sequence[QuantizedShape]) -> tuple[int, int, bool]:
    """Bits, block and whether there are zero points, of the format that holds all these matrices exactly."""
    own = [_WIDENED if s.e2m1 else plain_shape(s).bits for s in shapes]
    bits, block = max(own), min(s.block_size for s in shapes)
    zeros = (s.zero_points or (b != bits and not s.e2m1) for s, b in zip(shapes, own, strict=True))
    return bits, block, any(zeros)


def plain_shape(shape: QuantizedShape) -> QuantizedShape:
    """What a matrix is outside the native layout, if no expert of codes of E2M1."""
    bits = VALUE_BITS if shape.vectors else portable_bits(shape.bits)
    return dataclasses.replace(shape, bits=bits, vectors=False)


def portable_bits(bits: int) -> int:
    """What values of so many bits are stored in outside the native layout."""
    return 4 if bits == 3 else bits


def widen(rows: QuantizedMatrix, source: QuantizedShape, target: QuantizedShape) -> QuantizedMatrix:
    """The same values in a format of as many or more bits, as large or smaller blocks, and zero points if any has."""
    before = (source.bits, source.block_size, source.zero_points, source.e2m1, source.vectors)
    if before == (target.bits, target.block_size, target.zero_points, target.e2m1, target.vectors):
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
