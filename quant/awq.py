"""Activation-aware quantization (AWQ): ranges cut where the output error is least, and scales of input channels that
protect those with large inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16
from edgeinfer.bundle.packing import blocks_per_row
from edgeinfer.errors import UsageError
from edgeinfer.quant import block_types, rtn
from edgeinfer.quant.blocks import Codes, Grid, Solver, padded, restored
from edgeinfer.quant.policy import QuantScheme
from edgeinfer.quant.statistics import InputStatistics, output_error

Floats = NDArray[np.float32]
# Shares of a block's range that are tried: the published search goes down to a half in steps of 5%; ranges slightly
# too wide pay where rounding the extremes inwards costs more than coarser steps.
_SHARES = tuple(1.05 - 0.05 * i for i in range(12))
# Powers of the inputs' size that are tried as channel scales.
_POWERS = tuple(i / 20 for i in range(21))
# Rows of each matrix that the search of channel scales looks at, evenly spread.
_SAMPLE = 256
_CHUNK_VALUES = 1 << 17
_TINY = np.float32(1e-30)
_SMALLEST_SCALE = np.float32(2.0**-64)


def solver(grid: Grid, k: int, statistics: InputStatistics | None = None) -> Solver:
    """The quantizer of matrices of K columns by the search of clipped ranges. A block's error is weighted by its part
    of the Hessian, or by mean squares."""
    if statistics is None:
        raise UsageError("AWQ needs statistics of a layer's inputs.", "Gather them, or choose the method rtn.")
    blocks = blocks_per_row(k, grid.size)
    rows = max(1, _CHUNK_VALUES // (blocks * grid.size))
    weights = rtn.column_weights(statistics.mean_square, grid.size)
    moments = np.zeros((blocks, grid.size, grid.size), np.float32)
    for block in range(blocks):
        start, stop = block * grid.size, min((block + 1) * grid.size, k)
        if statistics.hessian is not None:
            square = statistics.hessian[start:stop, start:stop]
            # In units of the block's mean, like the weights of columns, which have a floor.
            mean = np.maximum(np.diagonal(square).mean(), _TINY)
            moments[block, : stop - start, : stop - start] = square / mean
        np.fill_diagonal(moments[block], weights[block])
    return Solver(rows, lambda weight: _solve(weight, grid, moments))


def _solve(weight: Floats, grid: Grid, moments: Floats) -> Codes:  # (n, K), (blocks, size, size)
    n, blocks = len(weight), len(moments)
    rows = padded(weight, grid.size).reshape(n, blocks, grid.size).transpose(1, 2, 0)
    columns = np.ascontiguousarray(rows, np.float32)  # (blocks, size, n)
    best = np.full((blocks, n), np.inf, np.float32)
    scales = np.full((blocks, n), _SMALLEST_SCALE)
    zeros = np.full((blocks, n), grid.middle, np.float32)
    for scale, zero in _ranges(columns, grid):
        errors = columns - _rounded(columns, scale, zero, grid) * scale[:, None]
        cost = np.einsum("bkn,bkn->bn", errors, moments @ errors)
        better = cost < best
        np.copyto(best, cost, where=better)
        np.copyto(scales, scale, where=better)
        np.copyto(zeros, zero, where=better)
    values = _rounded(columns, scales, zeros, grid) + zeros[:, None]
    return Codes(
        np.ascontiguousarray(values.transpose(2, 0, 1).reshape(n, -1).astype(np.uint8)),
        np.ascontiguousarray(scales.T),
        np.ascontiguousarray(zeros.T.astype(np.uint8)),
    )


def _ranges(columns: Floats, grid: Grid) -> list[tuple[Floats, Floats]]:  # (blocks, size, n)
    """Pairs of scale and zero point, (blocks, n) each: the block's range cut by the same share at both ends."""
    low = np.minimum(columns.min(axis=1), np.float32(0))
    high = np.maximum(columns.max(axis=1), np.float32(0))
    pairs = []
    for share in _SHARES:
        if grid.symmetric:
            # The range reaches one step further below zero than above; a negative scale turns it round.
            exact = np.where(high > -low, -high, -low) * np.float32(share) / np.float32(grid.middle)
        else:
            exact = (high - low) * np.float32(share) / np.float32(grid.top)
        scale = bfloat16.round_nearest(exact.astype(np.float32))
        scale = np.where(np.abs(scale) < _TINY, _SMALLEST_SCALE, scale)
        zero = np.full_like(scale, grid.middle)
        if not grid.symmetric:
            zero = np.clip(np.rint(-low * np.float32(share) / scale), 0, np.float32(grid.top))
        pairs.append((scale, zero))
    return pairs


def _rounded(columns: Floats, scale: Floats, zero: Floats, grid: Grid) -> Floats:  # (blocks, size, n), (blocks, n)
    """The nearest codes less zero points."""
    steps = np.rint(columns / scale[:, None])
    np.maximum(steps, -zero[:, None], out=steps)
    np.minimum(steps, np.float32(grid.top) - zero[:, None], out=steps)
    return np.asarray(steps, np.float32)


def scale_search(weights: Sequence[Floats], statistics: InputStatistics, scheme: QuantScheme) -> Floats:  # (K,)
    """Scales s of the input channels of matrices (N, K) that share their inputs. The error of x W^T is least when W * s
    is quantized and x / s goes in, among s = (root mean square of x) ^ a with a from 0 to 1, of geometric mean one.
    Power zero gives ones, so the error is never worse than without scales."""
    if not weights:
        raise UsageError("There are no matrices to find scales for.", "Pass those that read the same inputs.")
    k, grid = weights[0].shape[1], Grid.of(scheme)
    statistics.check(k)
    ones = np.ones(k, np.float32)
    size = np.sqrt(statistics.mean_square)
    if statistics.count == 0 or not size.any():
        return ones
    # Channels that were hardly seen are scaled like the smallest ones that count.
    size = np.maximum(size, size.max() * np.float32(1e-4))
    sample = np.concatenate([w[:: max(1, len(w) // _SAMPLE)] for w in weights])
    best, chosen = np.inf, ones
    for power in _POWERS:
        scale = size ** np.float32(power)
        scale /= np.exp(np.log(scale).mean())
        entering = InputStatistics(statistics.count, statistics.mean_square / scale**2, statistics.mean / scale)
        rounding = (block_types if grid.kind else rtn).solver(grid, k, entering)
        error = output_error(sample, restored(rounding, sample * scale, grid) / scale, statistics)
        if error < best:
            best, chosen = error, np.asarray(scale, np.float32)
    return chosen
