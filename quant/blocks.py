"""What every quantizer works on: rows cut into blocks that share a scale, their codes, and the packing of both; knows
nothing of how codes and scales are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.kinds import read_blocks
from edgeinfer.bundle.packing import (
    VALUE_BITS,
    QuantizedMatrix,
    QuantizedShape,
    blocks_of_file,
    blocks_per_row,
    dense_rows,
    midpoint,
    pack,
    read_vectors,
)
from edgeinfer.core.errors import CheckpointError
from edgeinfer.quant.policy import QuantScheme

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Grid:
    """The values a block may take: `scale * (code - zero)` with codes of `bits` bits. Unlike `QuantScheme` it may have
    widths that no backend runs, for comparisons."""

    bits: int
    size: int
    symmetric: bool
    vectors: bool = False  # codes of 2 bits are fields of codes of vectors
    kind: str = ""  # a type of GGUF, which says all else; codes are bytes of its blocks then

    @classmethod
    def of(cls, scheme: QuantScheme) -> Grid:
        return cls(scheme.bits, scheme.block_size, scheme.symmetric, scheme.vectors, scheme.kind)

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of symmetric grids, and of blocks of zeros."""
        return midpoint(self.bits)


@dataclass(frozen=True)
class Codes:
    """Codes of some rows, with one scale (a bfloat16 by value) and zero point per block."""

    values: NDArray[np.uint8]  # (N, blocks * size)
    scales: Floats  # (N, blocks)
    zeros: NDArray[np.uint8]  # (N, blocks)


@dataclass(frozen=True)
class Solver:
    """A quantizer set up for one matrix, with everything computed that depends on the statistics."""

    rows: int  # rows at a time, which limits its memory
    solve: Callable[[Floats], Codes]  # rows (n, K) to their codes, each row independently


def joined(parts: Sequence[tuple[slice, Solver]]) -> Solver:
    """The solver of rows, each of whose runs of columns one of these solves."""

    def solve(rows: Floats) -> Codes:  # (n, K)
        codes = [part.solve(rows[:, run]) for run, part in parts]
        return Codes(*(np.concatenate([getattr(c, f) for c in codes], axis=1) for f in ("values", "scales", "zeros")))

    return Solver(min(part.rows for _, part in parts), solve)


def packed(solver: Solver, weight: Floats, scheme: QuantScheme) -> QuantizedMatrix:  # (N, K)
    if scheme.kind:
        return blocks_of_file(np.concatenate([codes.values for codes in _solved(solver, weight)]))
    n, blocks = len(weight), blocks_per_row(weight.shape[1], scheme.block_size)
    data = np.empty((n, blocks, scheme.block_size * scheme.bits // 8), np.uint8)
    scales = np.empty((n, blocks), np.float32)
    zeros = np.empty((n, blocks), np.uint8)
    start = 0
    for codes in _solved(solver, weight):
        stop = start + len(codes.values)
        data[start:stop] = pack(codes.values.reshape(stop - start, blocks, -1), scheme.bits)
        scales[start:stop] = codes.scales
        zeros[start:stop] = codes.zeros
        start = stop
    return QuantizedMatrix(data, scales, None if scheme.symmetric else pack(zeros, scheme.bits))


def restored(solver: Solver, weight: Floats, grid: Grid) -> Floats:  # (N, K) -> (N, K)
    """The float matrix of the solver's codes, at any width."""
    n, k = weight.shape
    out = np.empty((n, k), np.float32)
    start = 0
    for codes in _solved(solver, weight):
        stop = start + len(codes.values)
        if grid.kind:
            out[start:stop] = read_blocks(grid.kind, codes.values, k)
            start = stop
            continue
        values, zeros = codes.values.reshape(stop - start, -1, grid.size), codes.zeros[..., None]
        if grid.vectors:
            values, zeros = read_vectors(values), np.full_like(zeros, midpoint(VALUE_BITS))
        dense = (values.astype(np.float32) - zeros) * codes.scales[..., None]
        out[start:stop] = dense.reshape(stop - start, -1)[:, :k]
        start = stop
    return out


def _solved(solver: Solver, weight: Floats) -> Iterator[Codes]:  # (N, K)
    """Codes of all rows, as many at a time as the solver takes."""
    for start in range(0, len(weight), solver.rows):
        rows = weight[start : start + solver.rows]
        check_finite(rows)
        yield solver.solve(rows)


def dequantized(matrix: QuantizedMatrix, scheme: QuantScheme, k: int) -> Floats:  # (N, K)
    if scheme.kind:
        return read_blocks(scheme.kind, matrix.data, k)
    sizes = (len(matrix.data), k, scheme.bits, scheme.block_size, matrix.zero_points is not None)
    return dense_rows(matrix, QuantizedShape(*sizes, e2m1=scheme.e2m1, vectors=scheme.vectors))


def padded(rows: Floats, size: int) -> Floats:  # (..., K) -> (..., blocks * size)
    """Rows with zeros at the end, so that the last block is complete."""
    missing = -rows.shape[-1] % size
    if not missing:
        return rows
    return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])


def check_finite(weight: Floats) -> None:
    if not np.isfinite(weight).all():
        bad = int(np.count_nonzero(~np.isfinite(weight)))
        raise CheckpointError(
            f"{bad} of {weight.size} weights are NaN or infinite.", "Fetch the checkpoint again, or repair it."
        )
