"""Quantization by rounding to nearest with searched scales.

For every block the scale and zero point are chosen to minimise the squared error, from a small grid of scaled ranges,
each followed by a least-squares fit of the scale to the rounded values. The search follows the idea of llama.cpp's
`make_qx_quants` / `make_qkx2_quants`, with integer zero points as MatMulNBits has them. Scales are bfloat16 by value,
fixed before values are rounded for good. Where statistics of the inputs are known, the square of each column's error
counts by the mean square of its input.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16
from edgeinfer.bundle.packing import blocks_per_row
from edgeinfer.quant.blocks import Codes, Grid, Solver, padded
from edgeinfer.quant.statistics import InputStatistics

# Factors that scale a block's range before rounding: clipping the extremes pays more the fewer levels there are. On the
# matrices of four small Llama checkpoints, grids five times as fine lower the squared error by less than 1% at 2 and 4
# bits.
_FACTORS: dict[int, tuple[float, ...]] = {
    2: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5),
    3: tuple(1.05 - 0.05 * i for i in range(9)),
    4: tuple(1.05 - 0.025 * i for i in range(11)),
}
# At 8 bits the steps of bfloat16, 0.4 to 0.8% apart, are the grid: fitting a scale and then rounding it costs 3 to 7%
# of squared error, these seven places around the plain step gain 2 to 4% over seven fitted float32 scales.
_PLACES = range(-1, 6)
# Values per working array: a handful of float32 arrays of this size stay in a core's second-level cache.
_CHUNK_VALUES = 1 << 17
_TINY = np.float32(1e-30)
# Columns whose input was never seen still count this share of their block's mean, so that their weights are kept.
_LEAST_WEIGHT = np.float32(1e-3)

_Floats = NDArray[np.float32]


def solver(grid: Grid, k: int, statistics: InputStatistics | None = None) -> Solver:
    """The quantizer of matrices of K columns, with a few MB of scratch memory."""
    rows = max(1, _CHUNK_VALUES // (blocks_per_row(k, grid.size) * grid.size))
    importance = None if statistics is None else column_weights(statistics.mean_square, grid.size)
    return Solver(rows, lambda weight: _solve(weight, grid, importance))


def column_weights(mean_square: _Floats, size: int) -> _Floats:  # (K,) -> (blocks, size)
    """Weights of each column's squared error: means of one in every block, never zero except in the padding."""
    blocks = padded(mean_square, size).reshape(-1, size)
    counted = padded(np.ones_like(mean_square), size).reshape(-1, size)
    # The largest comes first out of the sums, which would overflow or vanish with it.
    blocks = blocks / np.maximum(blocks.max(axis=1, keepdims=True), _TINY)
    mean = blocks.sum(axis=1, keepdims=True) / counted.sum(axis=1, keepdims=True)
    blocks = np.where(mean > 0, blocks / np.where(mean > 0, mean, 1), 1)
    return np.asarray((blocks + _LEAST_WEIGHT) * counted, np.float32)


def _solve(weight: _Floats, grid: Grid, importance: _Floats | None) -> Codes:  # (n, K), (blocks, size)
    # One column per block: arithmetic on a block's scale then runs along contiguous rows.
    columns = np.ascontiguousarray(padded(weight, grid.size).reshape(-1, grid.size).T, np.float32)  # (size, C)
    counts = None if importance is None else np.tile(importance.T, len(weight))  # (size, C)
    values, scale, zero = _search(columns, grid, counts)
    shape = (len(weight), -1)
    return Codes(
        np.ascontiguousarray(values.T).reshape(shape), scale.reshape(shape), zero.astype(np.uint8).reshape(shape)
    )


def _search(
    columns: _Floats,  # (size, C)
    grid: Grid,
    counts: _Floats | None,  # (size, C)
) -> tuple[NDArray[np.uint8], _Floats, _Floats]:  # (size, C), (C,), (C,)
    best_scale = np.zeros(columns.shape[1], np.float32)
    best_zero = np.full(columns.shape[1], grid.middle, np.float32)
    best_gain = np.full(columns.shape[1], -1, np.float32)
    work = np.empty_like(columns)
    target = columns if counts is None else columns * counts
    squares = work if counts is None else np.empty_like(columns)
    for step, zero in _candidates(columns, grid):
        _round(columns, step, zero, grid, work)
        if counts is not None:
            np.multiply(work, counts, out=squares)
        # The error with the scale s is |w|^2 - s (2 w·q - s q·q), so the largest second term wins.
        dot = np.einsum("kc,kc->c", target, work)
        norm = np.maximum(np.einsum("kc,kc->c", squares, work), _TINY)
        scale = bfloat16.round_nearest(dot / norm)
        gain = scale * (2 * dot - scale * norm)
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best_scale, scale, where=better)
        np.copyto(best_zero, zero, where=better)
    # An all-zero block has no direction to fit. A tiny scale keeps it zero also where an operator takes the zero point
    # out by a subtraction in float32, which leaves a rounding error times the scale.
    np.copyto(best_scale, np.float32(2.0**-64), where=best_scale == 0)
    _round(columns, best_scale, best_zero, grid, work)
    work += best_zero
    return work.astype(np.uint8), best_scale, best_zero


def _round(columns: _Floats, step: _Floats, zero: _Floats, grid: Grid, out: _Floats) -> None:
    """Writes the nearest representable `value - zero` of each weight."""
    np.multiply(columns, np.float32(1) / step, out=out)
    np.rint(out, out=out)
    np.maximum(out, -zero, out=out)
    np.minimum(out, np.float32(grid.top) - zero, out=out)


def _candidates(columns: _Floats, grid: Grid) -> list[tuple[_Floats, _Floats]]:  # (size, C)
    """Pairs of step and zero point to try, (C,) each."""
    levels = np.float32(grid.top)
    middle = np.float32(grid.middle)
    # Zero is always representable: weights are centred on it, and padding must stay exact.
    low = np.minimum(columns.min(axis=0), np.float32(0))
    high = np.maximum(columns.max(axis=0), np.float32(0))
    if grid.symmetric:
        # The range reaches one step further below zero than above; a negative step turns it round.
        plain = np.where(high > -low, -high, -low) / middle
        plain = np.where(plain == 0, _TINY, plain).astype(np.float32)
        return [(step, np.full_like(step, middle)) for step in _steps(plain, grid.bits)]
    plain = np.maximum(high - low, _TINY) / levels
    pairs = []
    for step in _steps(plain, grid.bits):
        # The scaled range is cut alike at both ends, so its lower end in steps is:
        exact = -low / step - (plain / step - 1) * levels / 2
        exact = np.clip(exact, 0, levels)
        lower = np.floor(exact)
        if grid.bits == 8:
            pairs.append((step, np.rint(exact)))
        else:
            pairs += [(step, lower), (step, np.minimum(lower + 1, levels))]
    return pairs


def _steps(plain: _Floats, bits: int) -> list[_Floats]:
    """Steps to try around the one that spans a block's range exactly, (C,) each."""
    if bits == 8:
        nearest = bfloat16.round_nearest(plain)
        return [bfloat16.step(nearest, places) for places in _PLACES]
    return [plain * np.float32(factor) for factor in _FACTORS[bits]]
