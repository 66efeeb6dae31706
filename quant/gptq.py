"""Quantization that lets later columns make good the errors of earlier ones (GPTQ), refined afterwards under the same
Hessian.

With H the mean of x x^T, the squared output error of a row is e H e^T. H is factored as V V^T with V upper triangular,
columns in order of falling input energy; each column is then rounded after adding what the errors before it ask for
through V, which is GPTQ without its inverse. Scales and bases are fixed beforehand by the weighted search of `rtn` or
`block_types`, so that the order of columns is free. `refine` then descends on the same error over scales, bases and
codes.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import UsageError
from edgeinfer.quant import block_types, rtn
from edgeinfer.quant.blocks import Codes, Grid, Solver
from edgeinfer.quant.forms import BlockForm, State, inverse
from edgeinfer.quant.refine import LAZY, Refiner
from edgeinfer.quant.statistics import InputStatistics

Floats = NDArray[np.float32]
# Rows and weights at once at most: with a quarter of the rows numpy's calls take a fifth longer.
_ROWS, _VALUES = 2048, 1 << 22
# Columns up to which there are sweeps of the refinement: in models of half a billion weights, one takes as long as all
# else that rounding does.
_SWEPT = 768
# Columns of a product with the factor, which is half zeros.
_PANEL = 256
# This share of the mean is added to each diagonal element besides, so that the errors of inputs of huge energy are not
# made good by shifts of small inputs that are larger than all weights.
_LEAST_SHARE = np.float32(1e-3)
# Mean squares up to this are those of no input at all.
_TINY = np.float32(1e-30)


@dataclass(frozen=True)
class GptqOptions:
    # Added to each diagonal element of H, as a share of it, times the root of columns over tokens: for what a text of
    # finite length does not show. Relative to each element, so that a few inputs of huge energy do not drown the rest.
    # On layers of 576 to 4864 columns with 2048 to 8192 tokens, the error on other texts is flat around this; with a
    # share of 0.03 it is 8% to 45% larger.
    damping: float = 1.5
    sweeps: int = 1  # of the refinement: the first lowers the error on other texts by 2% to 5%, a second by 1% to 2%

    def __post_init__(self) -> None:
        if not (0 < self.damping < math.inf and self.sweeps >= 0):
            raise UsageError(f"{self} is out of range.", "Choose damping > 0 and sweeps >= 0.")

    def share(self, statistics: InputStatistics) -> float:
        """What is added to each diagonal element, as a share of it."""
        return self.damping * float(np.sqrt(len(statistics.mean_square) / max(statistics.count, 1)))


def solver(grid: Grid, k: int, statistics: InputStatistics | None, options: GptqOptions | None = None) -> Solver:
    """The quantizer of matrices of K columns with these statistics of inputs, which must have a Hessian. Memory: three
    matrices (K, K) of float32 besides the statistics, and about eight of `_VALUES`."""
    if statistics is None or statistics.hessian is None:
        raise UsageError("GPTQ needs the Hessian of a layer's inputs.", "Gather it, or choose the method rtn.")
    return _Gptq(grid, k, statistics, statistics.hessian, options or GptqOptions()).solver


class _Gptq:
    """Everything that is computed once from a Hessian, for all rows."""

    def __init__(self, grid: Grid, k: int, statistics: InputStatistics, hessian: Floats, options: GptqOptions) -> None:
        self._k, self._kind, self._padding = k, grid.kind, -k % grid.size
        self._form = block_types.FORMS[grid.kind] if grid.kind else BlockForm.of(grid)
        if grid.kind:
            self._start = block_types.starter(grid.kind, k, statistics)
        else:
            nearest = rtn.solver(grid, k, statistics)
            self._start = lambda rows: self._form.state(nearest.solve(rows))
        self._hessian = damped(hessian, options.share(statistics), grid.size)
        self._order = np.argsort(-np.diagonal(self._hessian), kind="stable")
        self._upper = upper_factor(self._hessian, self._order)
        self._refiner = Refiner(self._hessian, self._form, options.sweeps) if k <= _SWEPT else None
        # The target of a row w is w + w (C - H) H^-1: what gives, on the quantized model's inputs, the output that
        # the float model's inputs give.
        self._shift = None if statistics.cross is None else padded_square(statistics.cross - hessian, grid.size)

    @property
    def solver(self) -> Solver:
        """Made on demand: if kept, it would keep its owner, whose matrices are large, until a garbage collection."""
        return Solver(max(1, min(_ROWS, _VALUES // self._k)), self._solve)

    def _solve(self, weight: Floats) -> Codes:  # (n, K)
        rows = np.pad(np.asarray(weight, np.float32), [(0, 0), (0, self._padding)])
        if self._shift is not None:
            rows = rows + divide_by(self._upper, self._order, rows @ self._shift)
        few = max(1, block_types.CHUNK_VALUES // self._k)
        state = State.joined([self._start(rows[start : start + few, : self._k]) for start in range(0, len(rows), few)])
        plain = dataclasses.replace(state, scales=state.scales.copy(), bases=state.bases.copy())
        target = np.ascontiguousarray(rows.T)  # (K', n)
        limit = self._errors(target - plain.values())
        state.points = self._round(target, state)
        refiner = self._refiner
        errors = self._errors(target - state.values()) if refiner is None else refiner.refine(target, state)
        state.replace(errors > limit, plain)
        return block_types.codes(self._kind, state) if self._kind else self._form.own_codes(state)

    def _errors(self, errors: Floats) -> NDArray[np.float64]:  # (K', n) -> (n,)
        """Squared output errors of rows, as squares of their products with the factor: half the work of H's."""
        ordered, total = errors[self._order], np.zeros(errors.shape[1])
        for start in range(0, len(ordered), _PANEL):
            stop = min(start + _PANEL, len(ordered))
            fed = self._upper[:stop, start:stop].T @ ordered[:stop]
            total += np.einsum("kn,kn->n", fed, fed, dtype=np.float64)
        return total

    def _round(self, target: Floats, state: State) -> Floats:  # (K', n) -> (K', n)
        """GPTQ's points for the state's scales and bases."""
        order, upper, form = self._order, self._upper, self._form
        points, errors, shares = np.empty_like(target), np.empty_like(target), inverse(state.scales)
        for start in range(0, len(order), LAZY):
            stop = min(start + LAZY, len(order))
            pivots = np.diagonal(upper)[start:stop]
            inside = np.ascontiguousarray(upper[start:stop, start:stop].T) / pivots[:, None]
            fed = (upper[:start, start:stop] / pivots).T @ errors[:start]
            for i, column in enumerate(order[start:stop]):
                block = column // form.size
                plain = target[column] - state.bases[block]
                wanted = np.asarray(inside[i, :i] @ errors[start : start + i], np.float32)
                wanted += fed[i]
                wanted += plain
                wanted *= shares[block]
                form.round(wanted)
                points[column] = wanted
                np.subtract(plain, wanted * state.scales[block], out=errors[start + i])
        return points


def divide_by(upper: Floats, order: NDArray[np.intp], rows: Floats) -> Floats:  # (K', K'), (K',), (n, K') -> (n, K')
    """Rows times the inverse of the Hessian that `upper_factor` has factored."""
    from scipy.linalg import solve_triangular  # only here: most conversions need no scipy

    right = np.ascontiguousarray(rows.T[order])
    right = solve_triangular(upper, right, check_finite=False, overwrite_b=True)
    right = solve_triangular(upper, right, trans="T", check_finite=False, overwrite_b=True)
    out = np.empty_like(right)
    out[order] = right
    return np.asarray(out.T, np.float32)


def damped(hessian: Floats, damping: float, size: int) -> Floats:  # (K, K) -> (K', K')
    """H with a larger diagonal, padded to whole blocks; only a diagonal where inputs were always zero."""
    out = padded_square(hessian, size)
    diagonal, k = np.diagonal(hessian), len(hessian)
    seen = diagonal > _TINY
    out[:k, :k] *= np.outer(seen, seen)
    # Errors of columns without inputs count like those of a usual one: another text may use them.
    usual = np.median(diagonal[seen]) if seen.any() else np.float32(1)
    filled = np.full(len(out), usual, np.float32)
    if seen.any():
        floor = _LEAST_SHARE * diagonal.mean()
        filled[:k][seen] = diagonal[seen] * np.float32(1 + damping) + floor
    np.fill_diagonal(out, filled)
    return out


def padded_square(matrix: Floats, size: int) -> Floats:  # (K, K) -> (K', K')
    missing = -len(matrix) % size
    return np.pad(np.asarray(matrix, np.float32), (0, missing))


def upper_factor(hessian: Floats, order: NDArray[np.intp]) -> Floats:  # (K', K'), (K',)
    """V, upper triangular, with V V^T the Hessian in that order of columns."""
    from scipy.linalg.lapack import spotrf  # only here: most conversions need no scipy

    back = order[::-1]
    root = 1 / np.sqrt(np.diagonal(hessian))[back]
    # With a diagonal of ones, float32 can factor it whatever the inputs' energies are.
    scaled = hessian[np.ix_(back, back)]
    scaled *= root
    scaled *= root[:, None]
    # Several times as fast as numpy's.
    lower, failed = spotrf(scaled.T, lower=1, clean=1, overwrite_a=1)
    if failed:
        raise UsageError(
            "The Hessian of a layer's inputs is not positive definite, even with the damping that is added to it.",
            "Gather it again, or choose a larger damping.",
        )
    lower /= root[:, None]
    return np.ascontiguousarray(lower[::-1, ::-1])
