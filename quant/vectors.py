"""Quantization to codes of vectors: four weights at once by the codebook of `edgeinfer.bundle.packing`.

Where nothing but mean squares of the inputs is known, each block's scale is searched and each vector gets the code
whose values are nearest, an input's error counting by its mean square. With the Hessian H of the inputs, errors are fed
forward as in `gptq`, by whole vectors (GPTVQ, arXiv 2402.15319): with H = V V^T in the order of the vectors and V upper
triangular, a vector's metric is the product of V's part on the diagonal with its transpose. Then scales and codes are
set in turn to the best ones given all others.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16
from edgeinfer.bundle.packing import MAGNITUDES, VECTOR, split_codes
from edgeinfer.quant.blocks import Codes, Grid, Solver
from edgeinfer.quant.gptq import GptqOptions, damped, divide_by, padded_square, upper_factor
from edgeinfer.quant.refine import LAZY
from edgeinfer.quant.rtn import column_weights
from edgeinfer.quant.statistics import InputStatistics

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Number = TypeVar("Number", np.float32, np.intp)
# Rows at once with a Hessian, as of `gptq`; weights at once without, of which each has a row of 16 distances.
_ROWS, _CHUNK_VALUES = 512, 1 << 16
# Scales to try, in units of a block's root mean square: the codebook was found at about 0.31.
_SCALES = np.linspace(0.22, 0.42, 11, dtype=np.float32)
_SWEEPS = 4
_TINY = np.float32(1e-30)
# Scale of a block of zeros: see `rtn`.
_ZERO_SCALE = np.float32(2.0**-64)
_BOOK = MAGNITUDES.astype(np.float32)  # (16, 4)
_SIGN_BITS = np.arange(VECTOR, 2 * VECTOR)
_SIGNS = 1 - 2 * (np.arange(16)[:, None] >> np.arange(VECTOR) & 1).astype(np.float32)  # (16, 4)
_SIGNED = (_SIGNS[:, None] * _BOOK).reshape(-1, VECTOR)  # (16 * 16, 4), by the code


def solver(grid: Grid, k: int, statistics: InputStatistics | None, *, hessian: bool) -> Solver:
    """The quantizer of matrices of K columns, a multiple of the block; with `hessian` errors are fed forward."""
    plain = _Nearest(grid.size, k, statistics)
    if hessian and statistics is not None and statistics.hessian is not None:
        return Solver(_ROWS, _FedForward(plain, statistics, statistics.hessian).solve)
    return Solver(max(1, _CHUNK_VALUES // k), plain.solve)


class _Nearest:
    """Codes of the nearest values, each column's error weighted by its input's mean square."""

    def __init__(self, size: int, k: int, statistics: InputStatistics | None) -> None:
        self.size, self.k = size, k
        squares = np.ones(k, np.float32) if statistics is None else statistics.mean_square
        self._weights = _by_vectors(column_weights(squares, size)[None])  # (1, blocks, size / 4, 4)
        self._norms = self._weights @ np.square(_BOOK).T  # (1, blocks, size / 4, 16)

    def solve(self, weight: Floats) -> Codes:  # (n, K)
        """Codes and scales of rows, in portions."""
        return coded(*self.search(weight), self.size)

    def search(self, weight: Floats) -> tuple[Bytes, Floats]:  # (n, K) -> (n, blocks, size / 4), (n, blocks)
        """The best codes and scales found."""
        rows = max(1, _CHUNK_VALUES // self.k)
        found = [self._search(weight[start : start + rows]) for start in range(0, len(weight), rows)]
        return np.concatenate([codes for codes, _ in found]), np.concatenate([scales for _, scales in found])

    def _search(self, weight: Floats) -> tuple[Bytes, Floats]:
        x = _by_vectors(np.asarray(weight, np.float32).reshape(len(weight), -1, self.size))
        weighted = np.abs(x) * self._weights
        dots = weighted @ _BOOK.T  # (n, blocks, size / 4, 16)
        share = (weighted * np.abs(x)).sum((2, 3)) / self._weights.sum((2, 3))
        root = np.sqrt(share)
        best, best_gain = np.zeros_like(root), np.full_like(root, -1)
        for factor in _SCALES:
            _, scale, gain = self._fit(dots, factor * root)
            better = gain > best_gain
            np.copyto(best, scale, where=better)
            np.copyto(best_gain, gain, where=better)
        np.copyto(best, _ZERO_SCALE, where=best == 0)
        chosen, _, _ = self._fit(dots, best)
        return (chosen | _sign_bits(x)).astype(np.uint8), best

    def _fit(self, dots: Floats, scale: Floats) -> tuple[NDArray[np.intp], Floats, Floats]:
        """Magnitudes that are nearest with a scale (n, blocks), the scale that suits them best, and the error's
        gain."""
        chosen = (scale[..., None, None] * self._norms - 2 * dots).argmin(-1)  # (n, blocks, size / 4)
        chosen_dot = np.take_along_axis(dots, chosen[..., None], -1).sum((2, 3))
        norms = np.broadcast_to(self._norms, dots.shape)
        chosen_norm = np.maximum(np.take_along_axis(norms, chosen[..., None], -1).sum((2, 3)), _TINY)
        fitted = bfloat16.round_nearest(chosen_dot / chosen_norm)
        return chosen, fitted, fitted * (2 * chosen_dot - fitted * chosen_norm)


class _FedForward:
    """Everything that is computed once from a Hessian, for all rows."""

    def __init__(self, plain: _Nearest, statistics: InputStatistics, hessian: Floats) -> None:
        self._plain, size = plain, plain.size
        self._hessian = damped(hessian, GptqOptions().share(statistics), size)
        columns = _by_vectors(np.arange(plain.k).reshape(1, -1, size)).reshape(-1, VECTOR)
        energy = np.diagonal(self._hessian)[columns].sum(1)
        self._order = columns[np.argsort(-energy, kind="stable")]  # (vectors, 4)
        self._upper = upper_factor(self._hessian, self._order.reshape(-1))
        parts = _parts(self._upper, np.arange(plain.k).reshape(-1, VECTOR))
        self._inverse = np.linalg.inv(parts)
        self._metric = parts @ parts.swapaxes(1, 2)
        self._blocks = _parts(self._hessian, columns)
        self._steps = np.linalg.inv(self._blocks)
        self._shift = None if statistics.cross is None else padded_square(statistics.cross - hessian, size)

    def solve(self, weight: Floats) -> Codes:  # (n, K)
        rows = np.ascontiguousarray(weight, np.float32)
        if self._shift is not None:
            rows = rows + divide_by(self._upper, self._order.reshape(-1), rows @ self._shift)
        start, scales = self._plain.search(rows)
        target = np.ascontiguousarray(rows.T)  # (K, n)
        state = _State(start.reshape(len(rows), -1).T.copy(), np.ascontiguousarray(scales.T), self._plain.size)
        limit = self._errors(target, state)
        plain = state.copy()
        self._round(target, state)
        self._sweep_all(target, state)
        worse = self._errors(target, state) > limit
        state.codes[:, worse], state.scales[:, worse] = plain.codes[:, worse], plain.scales[:, worse]
        return coded(state.codes.T.reshape(len(rows), -1, self._plain.size // VECTOR), state.scales.T, self._plain.size)

    def _errors(self, target: Floats, state: _State) -> NDArray[np.float64]:  # (n,)
        errors = target - state.values()
        return np.asarray(np.einsum("kn,kn->n", errors, self._hessian @ errors, dtype=np.float64))

    def _round(self, target: Floats, state: _State) -> None:  # (K, n)
        """Replaces the codes by those that take the errors of the vectors before into account."""
        errors = np.empty_like(target)  # in the order of vectors
        norms = _norms(self._metric)
        for start in range(0, len(self._order), LAZY // VECTOR):
            stop = min(start + LAZY // VECTOR, len(self._order))
            first, last = start * VECTOR, stop * VECTOR
            feedback = self._upper[:first, first:last].T @ errors[:first]
            for i in range(start, stop):
                own = slice(i * VECTOR, (i + 1) * VECTOR)
                sums = feedback[own.start - first : own.stop - first]
                sums = sums + self._upper[first : own.start, own].T @ errors[first : own.start]
                columns = self._order[i]
                corrected = target[columns] + self._inverse[i].T @ sums
                scale = state.scales[columns[0] // state.size]
                code = _nearest(corrected, scale, self._metric[i], norms[i])
                state.codes[state.place(columns[0])] = code
                errors[own] = target[columns] - _SIGNED[code].T * scale

    def _sweep_all(self, target: Floats, state: _State) -> None:
        """Sets scales and codes, one after the other, to the best ones given all others."""
        errors = target - state.values()
        gradient = self._hessian @ errors
        norms = _norms(self._blocks)
        for _ in range(_SWEEPS):
            for start in range(0, len(target), LAZY):
                stop = min(start + LAZY, len(target))
                before, near = errors[start:stop].copy(), gradient[start:stop].copy()
                hessian = self._hessian[start:stop, start:stop]
                for block in range(start // state.size, stop // state.size):
                    self._visit(block, start, errors, near, hessian, state, norms)
                gradient -= self._hessian[:, start:stop] @ (before - errors[start:stop])

    def _visit(
        self,
        block: int,
        start: int,
        errors: Floats,  # (K, n)
        near: Floats,  # (L, n), the gradient from column `start` on
        hessian: Floats,  # (L, L)
        state: _State,
        norms: Floats,  # (vectors, 16 * 16)
    ) -> None:
        """Improves one block, and updates errors and gradient."""
        size, quarter = state.size, state.size // VECTOR
        rows, here = slice(block * size, (block + 1) * size), block * size - start
        inside = slice(here, here + size)
        steps = state.steps(block)
        norm = np.einsum("kn,kn->n", steps, hessian[inside, inside] @ steps)
        exact = np.einsum("kn,kn->n", steps, near[inside]) / np.maximum(norm, _TINY)
        fitted = bfloat16.round_nearest(state.scales[block] + exact)
        change = fitted - state.scales[block]
        change = np.where((change * (2 * exact - change) > 0) & (fitted > _TINY), change, np.float32(0))
        moved = steps * change
        errors[rows] -= moved
        near -= hessian[:, inside] @ moved
        state.scales[block] += change
        scale = state.scales[block]
        for i in range(quarter):
            vector = block * quarter + i
            columns = np.arange(i, size, quarter)
            old = _SIGNED[state.codes[vector]].T * scale
            target = old + self._steps[vector] @ near[here + columns]
            code = _nearest(target, scale, self._blocks[vector], norms[vector])
            moved = _SIGNED[code].T * scale - old
            if not moved.any():
                continue
            state.codes[vector] = code
            errors[rows.start + columns] -= moved
            near -= hessian[:, here + columns] @ moved


class _State:
    """Codes (vectors, n) and scales (blocks, n) of n rows while they change."""

    def __init__(self, codes: Bytes, scales: Floats, size: int) -> None:
        self.codes, self.scales, self.size = codes, scales, size

    def copy(self) -> _State:
        return _State(self.codes.copy(), self.scales.copy(), self.size)

    def place(self, column: int) -> int:
        """Number of the vector that begins at a column."""
        return column // self.size * (self.size // VECTOR) + column % self.size

    def steps(self, block: int) -> Floats:  # (size, n)
        """Values of a block's codes, without its scale."""
        quarter = self.size // VECTOR
        values = _SIGNED[self.codes[block * quarter : (block + 1) * quarter]]  # (size / 4, n, 4)
        return np.ascontiguousarray(values.transpose(2, 0, 1)).reshape(self.size, -1)

    def values(self) -> Floats:  # (K, n)
        return np.concatenate([self.steps(block) * scale for block, scale in enumerate(self.scales)])


def coded(codes: Bytes, scales: Floats, size: int) -> Codes:  # (n, blocks, size / 4), (n, blocks)
    """Codes in fields of 2 bits, with zero points that are not read."""
    fields = split_codes(codes).reshape(len(codes), -1)
    return Codes(fields, np.ascontiguousarray(scales), np.zeros(scales.shape, np.uint8))


def _by_vectors(blocks: NDArray[Number]) -> NDArray[Number]:  # (n, blocks, size) -> (n, blocks, size / 4, 4)
    """Blocks as vectors, whose four values lie a quarter apart."""
    return np.ascontiguousarray(blocks.reshape(*blocks.shape[:2], VECTOR, -1).swapaxes(2, 3))


def _parts(matrix: Floats, columns: NDArray[np.intp]) -> Floats:  # (K, K), (vectors, 4) -> (vectors, 4, 4)
    """The diagonal block of a square matrix for each vector."""
    return matrix[columns[:, :, None], columns[:, None, :]]


def _norms(metrics: Floats) -> Floats:  # (vectors, 4, 4) -> (vectors, 16, 16)
    """The square of each signed entry of the codebook by each metric: by signs, then by magnitudes."""
    products = (_SIGNED @ metrics) * _SIGNED  # (vectors, 16 * 16, 4)
    squares: Floats = products.sum(-1).reshape(-1, 16, 16)
    return squares


def _sign_bits(x: Floats) -> NDArray[np.intp]:  # (..., 4) -> (...)
    """The high half of the codes of vectors, by their signs."""
    bits: NDArray[np.intp] = ((x < 0) << _SIGN_BITS).sum(-1)
    return bits


def _nearest(target: Floats, scale: Floats, metric: Floats, norms: Floats) -> Bytes:  # (4, n), (n,), (4, 4), (16, 16)
    """The code (n,) nearest to the targets by a metric, with the signs of the targets."""
    below = target < 0
    signs = (below << np.arange(VECTOR)[:, None]).sum(0)
    dots = metric @ target
    np.negative(dots, out=dots, where=below)
    chosen = (scale[:, None] * norms[signs] - 2 * (dots.T @ _BOOK.T)).argmin(1)
    codes: Bytes = (signs << VECTOR | chosen).astype(np.uint8)
    return codes
