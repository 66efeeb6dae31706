"""Descent on a matrix's squared output error over codes, scales and zero points, block by block.

With the other blocks of a row fixed, the error is quadratic in one block, with the block's part of the Hessian and a
minimum of its own. A sweep visits every block: its scale is fitted to its codes; scales and zero points around that
are tried, each with codes that are rounded one by one with feedback of their errors; then single codes are moved while
that helps. The first sweeps see a Hessian with a larger diagonal: what they find is a better place to descend from.

Everything is transposed: columns of the matrix are rows here, so that arithmetic runs along many matrix rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16
from edgeinfer.quant.blocks import Codes, Grid

Floats = NDArray[np.float32]
# Columns whose changes wait for one matrix product.
LAZY = 128
# Columns of the gradient updated at once: their part stays in a core's cache.
_PANEL = 512
_TINY = np.float32(1e-30)
# Shares by which the diagonal grows in the first sweeps. On matrices of two small Llamas this lowers the error on other
# text by 1.5 to 2% at 2 and 4 bits; starting at 1.0 is worse at 4 bits.
_SMOOTHING = (0.3, 0.1, 0.03)
# Relative steps between the scales tried: about what moves one code of a block.
_STEP = {2: 0.02, 3: 0.015}
_FINE_STEP = 0.01
# Steps to either side in the first sweeps, and in those after.
_REACH, _SHORT_REACH, _LONG_SWEEPS = 4, 1, 2


@dataclass
class State:
    """Codes of n rows while they change."""

    steps: Floats  # (K', n), codes less zero points
    scales: Floats  # (blocks, n)
    zeros: Floats  # (blocks, n)

    @classmethod
    def of(cls, codes: Codes, grid: Grid) -> State:
        zeros = codes.zeros.T.astype(np.float32)
        steps = codes.values.T.astype(np.float32)
        steps.reshape(-1, grid.size, steps.shape[1])[...] -= zeros[:, None]
        return cls(np.ascontiguousarray(steps), np.ascontiguousarray(codes.scales.T), zeros)

    def codes(self) -> Codes:
        blocks, n = self.scales.shape
        values = self.steps.reshape(blocks, -1, n) + self.zeros[:, None]
        return Codes(
            np.ascontiguousarray(values.reshape(-1, n).T.astype(np.uint8)),
            np.ascontiguousarray(self.scales.T),
            np.ascontiguousarray(self.zeros.T.astype(np.uint8)),
        )

    def errors(self, target: Floats) -> Floats:  # (K', n)
        blocks, n = self.scales.shape
        values = self.steps.reshape(blocks, -1, n) * self.scales[:, None]
        return target - values.reshape(-1, n)


def row_errors(errors: Floats, gradient: Floats) -> NDArray[np.float64]:  # (K', n), (K', n) -> (n,)
    """Squared output error of each row; the gradient is the Hessian times the errors."""
    return np.asarray(np.einsum("kn,kn->n", errors, gradient, dtype=np.float64))


@dataclass(frozen=True)
class _Curvature:
    """The diagonal blocks of a Hessian, and values derived from them."""

    blocks: Floats  # (blocks, size, size)
    added: Floats  # (blocks, size), what smoothing added to the diagonals
    inverse: Floats  # (blocks, size, size)
    feedback: Floats  # (blocks, size, size), V / diag V transposed, where V V^T is the block and V upper triangular
    pivots: Floats  # (blocks, size), diag V

    @classmethod
    def of(cls, hessian: Floats, size: int, smoothing: float) -> _Curvature:  # (K', K')
        count = len(hessian) // size
        index = np.arange(count)
        blocks = hessian.reshape(count, size, count, size)[index, :, index]  # a copy, (blocks, size, size)
        diagonal = np.einsum("bkk->bk", blocks)
        added = diagonal * np.float32(smoothing)
        diagonal += added
        upper = np.linalg.cholesky(blocks[:, ::-1, ::-1])[:, ::-1, ::-1]
        pivots = np.ascontiguousarray(np.einsum("bkk->bk", upper))
        feedback = np.ascontiguousarray(upper.transpose(0, 2, 1)) / pivots[..., None]
        return cls(blocks, added, np.linalg.inv(blocks), feedback, pivots)


class Refiner:
    """Refines codes of any rows under one Hessian (K', K'), positive definite, zero outside the diagonal in padding. It
    sweeps until the relative gain is below `tolerance`, once no block is smoothed."""

    def __init__(self, hessian: Floats, grid: Grid, sweeps: int, tolerance: float) -> None:
        self._hessian, self._grid, self._tolerance = hessian, grid, tolerance
        smoothed = _SMOOTHING[: max(sweeps - 1, 0)]
        self._smoothing = smoothed + (0.0,) * (sweeps - len(smoothed))
        self._curvatures = {s: _Curvature.of(hessian, grid.size, s) for s in dict.fromkeys(self._smoothing)}

    def refine(self, target: Floats, state: State) -> None:  # (K', n)
        """Moves the state, in place, towards the least error."""
        if not self._smoothing:
            return
        errors = state.errors(target)
        gradient = self._hessian @ errors
        before = np.inf
        for i, smoothing in enumerate(self._smoothing):
            self._sweep(
                errors, gradient, state, self._curvatures[smoothing], _REACH if i < _LONG_SWEEPS else _SHORT_REACH
            )
            if smoothing == 0:
                after = float(row_errors(errors, gradient).sum())
                if after >= before * (1 - self._tolerance):
                    break
                before = after

    def _sweep(self, errors: Floats, gradient: Floats, state: State, curvature: _Curvature, reach: int) -> None:
        """Visits every block once; errors and gradient (K', n) follow."""
        size, k = self._grid.size, len(errors)
        for start in range(0, k, LAZY):
            stop = min(start + LAZY, k)
            old = errors[start:stop].copy()
            for first in range(start, stop, size):
                rows, done = slice(first, first + size), first - start
                local = gradient[rows] + curvature.added[first // size][:, None] * errors[rows]
                if done:
                    local -= self._hessian[rows, start:first] @ (old[:done] - errors[start:first])
                self._visit(first // size, errors[rows], local, state, curvature, reach)
            old -= errors[start:stop]
            for top in range(0, k, _PANEL):
                gradient[top : top + _PANEL] -= self._hessian[top : top + _PANEL, start:stop] @ old

    def _visit(
        self, block: int, error: Floats, gradient: Floats, state: State, curvature: _Curvature, reach: int
    ) -> None:
        """Improves one block, given its errors and gradient (size, n), and updates the errors."""
        size, n = error.shape
        rows = slice(block * size, (block + 1) * size)
        steps, zero = state.steps[rows], state.zeros[block]
        target = error + steps * state.scales[block]
        # Where the block's error would be least if its values were free.
        wanted = target - error + curvature.inverse[block] @ gradient
        scale = _fitted(steps, state.scales[block], gradient, curvature.blocks[block])
        missing = wanted - steps * scale
        pivots, feedback = curvature.pivots[block], curvature.feedback[block]
        kept = np.square(pivots[:, None] * (feedback @ missing)).sum(axis=0)

        scales, zeros = self._candidates(scale, zero, reach)  # (C, n)
        cost, tried = self._rounded(wanted, scales.reshape(-1), zeros.reshape(-1), feedback, pivots)
        cost = cost.reshape(scales.shape)
        best, columns = cost.argmin(axis=0), np.arange(n)
        better = cost[best, columns] < kept
        scale = np.where(better, scales[best, columns], scale)
        zero = np.where(better, zeros[best, columns], zero)
        steps = np.where(better, tried[:, best * n + columns], steps)
        self._descend(wanted, steps, scale, zero, curvature.blocks[block])
        state.steps[rows], state.scales[block], state.zeros[block] = steps, scale, zero
        np.subtract(target, steps * scale, out=error)

    def _candidates(self, scale: Floats, zero: Floats, reach: int) -> tuple[Floats, Floats]:  # (n,) -> (C, n)
        step = _STEP.get(self._grid.bits, _FINE_STEP)
        factors = 1 + step * np.arange(-reach, reach + 1, dtype=np.float32)
        scales = bfloat16.round_nearest(factors[:, None] * scale)
        zeros = np.broadcast_to(zero, scales.shape)
        if self._grid.symmetric:
            return scales, zeros
        moved = np.clip(zero + np.array([[-1], [1]], np.float32), 0, np.float32(self._grid.top))
        return np.concatenate([scales, scale[None], scale[None]]), np.concatenate([zeros, moved])

    def _rounded(
        self,
        wanted: Floats,  # (size, n)
        scale: Floats,  # (C * n,)
        zero: Floats,  # (C * n,)
        feedback: Floats,  # (size, size)
        pivots: Floats,  # (size,)
    ) -> tuple[Floats, Floats]:  # (C * n,), (size, C * n)
        """Codes less zero points, rounded one by one with feedback, and their errors."""
        copies = len(scale) // wanted.shape[1]
        steps = np.empty((len(wanted), len(scale)), np.float32)
        errors = np.empty_like(steps)
        cost = np.zeros(len(scale), np.float32)
        low, high, inverse = -zero, np.float32(self._grid.top) - zero, np.float32(1) / scale
        for i, row in enumerate(wanted):
            plain = np.tile(row, copies)
            fed = feedback[i, :i] @ errors[:i]
            fed += plain
            chosen = steps[i]
            np.multiply(fed, inverse, out=chosen)
            np.rint(chosen, out=chosen)
            np.maximum(chosen, low, out=chosen)
            np.minimum(chosen, high, out=chosen)
            value = chosen * scale
            np.subtract(plain, value, out=errors[i])
            fed -= value
            fed *= pivots[i]
            fed *= fed
            cost += fed
        return cost, steps

    def _descend(self, wanted: Floats, steps: Floats, scale: Floats, zero: Floats, hessian: Floats) -> None:
        """Sets each code in turn, in place, to the best one given all others."""
        errors = wanted - steps * scale
        weights = hessian / np.diagonal(hessian)[:, None]
        low, high, inverse = -zero, np.float32(self._grid.top) - zero, np.float32(1) / scale
        for i, row in enumerate(wanted):
            best = weights[i] @ errors
            best -= errors[i]
            best += row
            best *= inverse
            np.rint(best, out=best)
            np.maximum(best, low, out=best)
            np.minimum(best, high, out=best)
            steps[i] = best
            np.subtract(row, best * scale, out=errors[i])


def _fitted(steps: Floats, scale: Floats, gradient: Floats, hessian: Floats) -> Floats:  # (size, n), (n,) -> (n,)
    """The scale that suits the codes best, or the present one where rounding to bfloat16 loses the gain."""
    norm = np.einsum("kn,kn->n", steps, hessian @ steps)
    exact = np.einsum("kn,kn->n", steps, gradient) / np.maximum(norm, _TINY)
    fitted = bfloat16.round_nearest(scale + exact)
    change = fitted - scale
    better = (change * (2 * exact - change) > 0) & (np.abs(fitted) > _TINY)
    return np.where(better, fitted, scale)
