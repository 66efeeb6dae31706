"""Half-quadratic quantization (HQQ) without data: scales and zero points that fit most weights and let outliers go;
knows nothing of inputs, models or files.

The sum of |w - what|^p with p below one is minimised by turns: outliers take what soft thresholding leaves of the
errors, scales and zero points fit the rest. Everything is in steps of a block's scale, so it works alike for weights of
any size. Unlike in the published form, which moves zero points alone, they are whole in the end, and scales are fitted
too: with whole zero points alone next to nothing is gained.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16
from edgeinfer.bundle.packing import blocks_per_row
from edgeinfer.quant.blocks import Codes, Grid, Solver, padded
from edgeinfer.quant.statistics import InputStatistics

__all__ = ["solver"]

Floats = NDArray[np.float32]
# The published settings: p, the weight of the split and its growth per round, and rounds.
_POWER, _WEIGHT, _GROWTH, _ROUNDS = 0.7, 10.0, 1.01, 20
# Shares of a block's range to start from: turns alone do not get far from the whole one.
_SHARES = (1.0, 0.85, 0.7)
_CHUNK_VALUES = 1 << 17
# A fit to fewer steps than this is no improvement of a range.
_LEAST_SLOPE = np.float32(0.1)
_TINY = np.float32(1e-30)
_SMALLEST_SCALE = np.float32(2.0**-64)


def solver(grid: Grid, k: int, _statistics: InputStatistics | None = None) -> Solver:
    """The quantizer of matrices of K columns; statistics are not looked at."""
    rows = max(1, _CHUNK_VALUES // (blocks_per_row(k, grid.size) * grid.size))
    return Solver(rows, lambda weight: _solve(weight, grid))


def _solve(weight: Floats, grid: Grid) -> Codes:  # (n, K)
    """Codes of a few rows."""
    columns = np.ascontiguousarray(padded(weight, grid.size).reshape(-1, grid.size).T, np.float32)  # (size, C)
    low = np.minimum(columns.min(axis=0), np.float32(0))
    high = np.maximum(columns.max(axis=0), np.float32(0))
    best, scale, zero = np.full(columns.shape[1], np.inf, np.float32), _representable(high - low), np.zeros_like(high)
    for share in np.array(_SHARES, np.float32):
        cost, *found = _improved(columns, *_range(low * share, high * share, grid), grid)
        better = cost < best
        best = np.where(better, cost, best)
        scale, zero = (np.where(better, new, old) for new, old in zip(found, (scale, zero), strict=True))
    values = _steps(columns / scale, zero, grid) + zero
    shape = (len(weight), -1)
    return Codes(
        np.ascontiguousarray(values.T).astype(np.uint8).reshape(shape),
        scale.reshape(shape),
        zero.astype(np.uint8).reshape(shape),
    )


def _range(low: Floats, high: Floats, grid: Grid) -> tuple[Floats, Floats]:  # (C,)
    """Scale and zero point, not whole yet, of a range."""
    if grid.symmetric:
        # The range reaches one step further below zero than above; a negative scale turns it round.
        scale = _representable(np.where(high > -low, -high, -low) / np.float32(grid.middle))
        return scale, np.full_like(scale, grid.middle)
    scale = _representable((high - low) / np.float32(grid.top))
    return scale, np.clip(-low / scale, 0, np.float32(grid.top))


def _improved(columns: Floats, scale: Floats, zero: Floats, grid: Grid) -> tuple[Floats, Floats, Floats]:  # (C,) each
    """The least cost of each column met on the way, with its representable scale and zero point."""
    best = np.full(len(scale), np.inf, np.float32)
    best_scale, best_zero = scale, np.rint(zero)
    weight = _WEIGHT
    for _ in range(_ROUNDS):
        rounded = _representable(scale), np.rint(zero)
        cost = _cost(columns, *rounded, grid)
        better = cost < best
        best = np.where(better, cost, best)
        best_scale, best_zero = (
            np.where(better, new, old) for new, old in zip(rounded, (best_scale, best_zero), strict=True)
        )
        if not better.any():
            break
        scaled = columns / scale
        # With zero points that are not whole yet, codes are what is rounded.
        codes = np.clip(np.rint(scaled + zero), 0, np.float32(grid.top))
        error = scaled - (codes - zero)
        size = np.maximum(np.abs(error), _TINY)
        outliers = np.sign(error) * np.maximum(size - size ** np.float32(_POWER - 1) / np.float32(weight), 0)
        scale, zero = _fitted(scaled - outliers, codes, scale, zero, grid)
        weight *= _GROWTH
    return best, np.asarray(best_scale, np.float32), np.asarray(best_zero, np.float32)


def _fitted(wanted: Floats, codes: Floats, scale: Floats, zero: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """Scale and zero point (C,) that fit `wanted` (size, C), in steps of the old scale, by least squares."""
    centre = zero if grid.symmetric else codes.mean(axis=0)
    steps = codes - centre
    middle = np.float32(0) if grid.symmetric else wanted.mean(axis=0)
    norm = np.einsum("kc,kc->c", steps, steps)
    slope = np.einsum("kc,kc->c", wanted - middle, steps) / np.maximum(norm, _TINY)
    slope = np.where((norm > 0) & (slope > _LEAST_SLOPE), slope, np.float32(1))
    if not grid.symmetric:
        zero = np.clip(centre - middle / slope, 0, np.float32(grid.top))
    return scale * slope, zero


def _cost(columns: Floats, scale: Floats, zero: Floats, grid: Grid) -> Floats:  # (C,)
    """The sum of |w - what|^p of each column, up to a factor that all its scales share."""
    scaled = columns / scale
    error = np.abs(scaled - _steps(scaled, zero, grid))
    return np.asarray((error**_POWER).sum(axis=0) * np.abs(scale) ** _POWER, np.float32)


def _steps(scaled: Floats, zero: Floats, grid: Grid) -> Floats:  # (size, C)
    """The nearest codes less whole zero points."""
    steps = np.rint(scaled)
    np.maximum(steps, -zero, out=steps)
    np.minimum(steps, np.float32(grid.top) - zero, out=steps)
    return np.asarray(steps, np.float32)


def _representable(scale: NDArray[np.floating[Any]]) -> Floats:
    """The nearest bfloat16 of each scale, never zero."""
    rounded = bfloat16.round_nearest(np.asarray(scale, np.float32))
    return np.where(np.abs(rounded) < _TINY, _SMALLEST_SCALE, rounded)
