"""Descent on a matrix's squared output error over codes, scales and bases, block by block.

With the other blocks of a row fixed, the error is quadratic in one block, with the block's part of the Hessian and a
minimum of its own. A sweep visits every block: its scale and base are fitted to its codes; scales and bases around
those are tried, each with codes that are rounded one by one with feedback of their errors. Setting each code once more
to the best one given all others gains 0.3% and takes a sixth longer. What scales and bases may be, the form says
(`quant.forms`), whose arrays are transposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant.forms import BlockForm, State, inverse

Floats = NDArray[np.float32]
# Columns whose changes wait for one matrix product.
LAZY = 128
# Columns of the gradient updated at once: their part stays in a core's cache.
_PANEL = 512
_TINY = np.float32(1e-30)
# Relative steps between the scales tried: about what moves one code of a block.
_STEP = {2: 0.02, 3: 0.015}
_FINE_STEP = 0.01
# Steps to either side: with four the error is 0.4% less.
_PLACES = np.arange(-1, 2, dtype=np.float32)[:, None]


@dataclass(frozen=True)
class _Curvature:
    """The diagonal blocks of a Hessian, and values derived from them."""

    blocks: Floats  # (blocks, size, size)
    inverse: Floats  # (blocks, size, size)
    feedback: Floats  # (blocks, size, size), V / diag V transposed, where V V^T is the block and V upper triangular
    pivots: Floats  # (blocks, size), diag V

    @classmethod
    def of(cls, hessian: Floats, size: int) -> _Curvature:  # (K', K')
        count = len(hessian) // size
        index = np.arange(count)
        blocks = hessian.reshape(count, size, count, size)[index, :, index]  # a copy, (blocks, size, size)
        upper = np.linalg.cholesky(blocks[:, ::-1, ::-1])[:, ::-1, ::-1]
        pivots = np.ascontiguousarray(np.einsum("bkk->bk", upper))
        feedback = np.ascontiguousarray(upper.transpose(0, 2, 1)) / pivots[..., None]
        return cls(blocks, np.linalg.inv(blocks), feedback, pivots)


class Refiner:
    """Refines codes of any rows under one Hessian (K', K'), positive definite, zero outside the diagonal in padding."""

    def __init__(self, hessian: Floats, form: BlockForm, sweeps: int) -> None:
        self._hessian, self._form, self._sweeps = hessian, form, sweeps
        self._curvature = _Curvature.of(hessian, form.size)

    def refine(self, target: Floats, state: State) -> NDArray[np.float64]:  # (K', n) -> (n,)
        """Moves the state, in place, towards the least error; returns what each row's is then."""
        errors = target - state.values()
        gradient = self._hessian @ errors
        for _ in range(self._sweeps):
            self._sweep(errors, gradient, state)
        return np.asarray(np.einsum("kn,kn->n", errors, gradient, dtype=np.float64))

    def _sweep(self, errors: Floats, gradient: Floats, state: State) -> None:
        """Visits every block once; errors and gradient (K', n) follow."""
        size, k = self._form.size, len(errors)
        for start in range(0, k, LAZY):
            stop = min(start + LAZY, k)
            old = errors[start:stop].copy()
            for first in range(start, stop, size):
                rows, done = slice(first, first + size), first - start
                local = gradient[rows].copy()
                if done:
                    local -= self._hessian[rows, start:first] @ (old[:done] - errors[start:first])
                self._visit(first // size, errors[rows], local, state)
            old -= errors[start:stop]
            for top in range(0, k, _PANEL):
                gradient[top : top + _PANEL] -= self._hessian[top : top + _PANEL, start:stop] @ old

    def _visit(self, block: int, error: Floats, gradient: Floats, state: State) -> None:
        """Improves one block, given its errors and gradient (size, n), and updates the errors."""
        size, n = error.shape
        curvature = self._curvature
        rows = slice(block * size, (block + 1) * size)
        points = state.points[rows]
        target = error + (points * state.scales[block] + state.bases[block])
        # Where the block's error would be least if its values were free.
        wanted = target - error + curvature.inverse[block] @ gradient
        scale, base = self._fitted(block, state, gradient, curvature.blocks[block])
        missing = wanted - (points * scale + base)
        pivots, feedback = curvature.pivots[block], curvature.feedback[block]
        kept = np.square(pivots[:, None] * (feedback @ missing)).sum(axis=0)

        scales, bases = self._candidates(block, state, scale, base)  # (C, n)
        cost, tried = self._rounded(wanted, scales, bases, feedback, pivots)
        best, columns = cost.argmin(axis=0), np.arange(n)
        better = cost[best, columns] < kept
        scale = np.where(better, scales[best, columns], scale)
        base = np.where(better, bases[best, columns], base)
        points = np.where(better, tried[:, best * n + columns], points)
        state.points[rows], state.scales[block], state.bases[block] = points, scale, base
        np.subtract(target, points * scale + base, out=error)

    def _candidates(self, block: int, state: State, scale: Floats, base: Floats) -> tuple[Floats, Floats]:
        """Scales and bases to try, (C, n) each."""
        form = self._form
        step = np.maximum(_STEP.get(form.bits, _FINE_STEP) * np.abs(scale), form.scale_step(state, block))
        scales = form.scales_near(scale + _PLACES * step, state, block)
        if form.zero == "minimum":
            # The middle of the block stays where it is.
            middle = state.points[block * form.size : (block + 1) * form.size].mean(axis=0)
            bases = base + (scale - scales) * middle
        else:
            bases = base * (scales * inverse(scale))
        bases = form.bases_near(bases, scales, state, block)
        if form.zero == "middle":
            return scales, bases
        moved = base + np.array([[-1], [1]], np.float32) * form.base_step(scale, state, block)
        moved = form.bases_near(moved, scale, state, block)
        return np.concatenate([scales, scale[None], scale[None]]), np.concatenate([bases, moved])

    def _rounded(
        self,
        wanted: Floats,  # (size, n)
        scales: Floats,  # (C, n)
        bases: Floats,  # (C, n)
        feedback: Floats,  # (size, size)
        pivots: Floats,  # (size,)
    ) -> tuple[Floats, Floats]:  # (C, n), (size, C * n)
        """Points that are rounded one by one with feedback, and their errors."""
        scale = scales.reshape(-1)
        points = np.empty((len(wanted), len(scale)), np.float32)
        errors = np.empty_like(points)
        cost = np.zeros(len(scale), np.float32)
        share = inverse(scale)
        for i, row in enumerate(wanted):
            plain = (row - bases).reshape(-1)
            fed = feedback[i, :i] @ errors[:i]
            fed += plain
            chosen = points[i]
            np.multiply(fed, share, out=chosen)
            self._form.round(chosen)
            value = chosen * scale
            np.subtract(plain, value, out=errors[i])
            fed -= value
            fed *= pivots[i]
            fed *= fed
            cost += fed
        return cost.reshape(scales.shape), points

    def _fitted(
        self, block: int, state: State, gradient: Floats, hessian: Floats
    ) -> tuple[Floats, Floats]:  # (size, n) -> (n,), (n,)
        """The scale and base that suit the points best, or the present ones where what a form can have loses the
        gain."""
        form, scale, base = self._form, state.scales[block], state.bases[block]
        points = state.points[block * form.size : (block + 1) * form.size]
        if form.zero != "minimum":
            points = points + base * inverse(scale)
        xx = np.einsum("kn,kn->n", points, hessian @ points)
        gx = np.einsum("kn,kn->n", points, gradient)
        if form.zero != "minimum":
            exact = gx / np.maximum(xx, _TINY)
            fitted = form.scales_near(scale + exact, state, block)
            change = fitted - scale
            better = (change * (2 * exact - change) > 0) & (np.abs(fitted) > _TINY)
            fitted = np.where(better, fitted, scale)
            return fitted, form.bases_near(base * (fitted * inverse(scale)), fitted, state, block)
        sums, gb = hessian.sum(axis=0), gradient.sum(axis=0)
        xb, bb = sums @ points, sums.sum()
        spread = np.maximum(xx - xb * xb / bb, np.float32(1e-4) * xx + _TINY)
        fitted = form.scales_near(scale + (gx - xb * gb / bb) / spread, state, block)
        change = fitted - scale
        shifted = form.bases_near(base + (gb - xb * change) / bb, fitted, state, block)
        moved = shifted - base
        gain = change * (2 * gx - change * xx) + moved * (2 * (gb - change * xb) - moved * bb)
        better = gain > 0
        return np.where(better, fitted, scale), np.where(better, shifted, base)
