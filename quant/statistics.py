"""What a linear layer's inputs look like on a calibration text, and the output error that follows from it; knows
nothing of models, texts or how weights are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import UsageError

Floats = NDArray[np.float32]
# Tokens per product: short enough that float32 sums stay exact to 1e-6, long enough for matrix kernels.
_TOKENS = 1024
_ROWS = 1024
# Inputs that are related to each other at most, and what all blocks divide: wider ones are cut into runs.
_RELATED, _WHOLE_BLOCKS = 5120, 256
# What an embedding's errors count, in units of the mean square of the inputs of a head that shares its matrix.
_LOOKUPS = 0.1
_HINT = "Calibrate with another text, or quantize without one."


@dataclass(frozen=True)
class InputStatistics:
    """Moments of the inputs x (K) of a linear layer, over tokens."""

    count: int  # tokens; with 0 all moments are zero
    mean_square: Floats  # (K,)
    mean: Floats  # (K,)
    # Mean of x x^T, if gathered, zero between inputs of different `runs_of`; half the Hessian of a row's squared output
    # error.
    hessian: Floats | None = None  # (K, K)
    # Mean of x_float x^T, likewise, with the inputs x_float of the float model for inputs x of the quantized one.
    cross: Floats | None = None  # (K, K)

    def check(self, k: int) -> None:
        """Refuses moments that do not fit a matrix of K columns or are not finite."""
        vectors, squares = (self.mean_square, self.mean), (self.hessian, self.cross)
        if any(v.shape != (k,) for v in vectors) or any(m is not None and m.shape != (k, k) for m in squares):
            raise UsageError(
                f"Statistics of {self.mean_square.shape[0]} inputs do not fit a matrix of {k} columns.",
                "Gather them at the layer that is quantized.",
            )
        diagonals = [self.mean_square] if self.hessian is None else [self.mean_square, np.diagonal(self.hessian)]
        finite = all(np.isfinite(m).all() for m in (*vectors, *squares) if m is not None)
        if not finite or any((d < 0).any() for d in diagonals):
            raise UsageError("The statistics of a layer's inputs are not finite numbers.", _HINT)

    def part(self, run: slice) -> InputStatistics:
        """The statistics of a run of inputs."""
        hessian, cross = (None if each is None else each[run, run] for each in (self.hessian, self.cross))
        return InputStatistics(self.count, self.mean_square[run], self.mean[run], hessian, cross)

    def shared_with_lookups(self) -> InputStatistics:
        """The statistics of a head whose matrix is the embedding, too, where errors of all columns count alike."""
        share = _LOOKUPS * float(self.mean_square.mean())
        hessian = (
            None
            if self.hessian is None
            else self.hessian + np.float32(share) * np.eye(len(self.mean), dtype=np.float32)
        )
        return InputStatistics(self.count, self.mean_square + np.float32(share), self.mean, hessian)


def runs_of(k: int) -> list[slice]:
    """Runs of K inputs that are related to each other: all of them, or so many that time and memory do not grow with
    the square of what the widest matrices have."""
    count = -(-k // _RELATED)
    ends = [round(k * place / count / _WHOLE_BLOCKS) * _WHOLE_BLOCKS for place in range(count)]
    return [slice(*run) for run in pairwise((*ends, k))]


class StatisticsAccumulator:
    """Adds up moments portion by portion: with `hessian` the mean of x x^T, which takes 8 K^2 bytes while running, with
    `cross` that of x_float x^T, as much again."""

    def __init__(self, k: int, hessian: bool, cross: bool = False) -> None:
        self.count = 0
        self._runs = runs_of(k)
        self._sum = np.zeros(k)
        self._squares = np.zeros(k)
        self._hessian = np.zeros((k, k), np.float32) if hessian else None
        self._cross = np.zeros((k, k), np.float32) if cross else None

    def add(self, x: Floats, x_float: Floats | None = None) -> None:  # (T, K), (T, K)
        """Counts inputs; `x_float` are those of the float model, by default x."""
        x = np.asarray(x, np.float32)
        other = x if x_float is None else np.asarray(x_float, np.float32)
        if not (np.isfinite(x).all() and np.isfinite(other).all()):
            raise UsageError("The model's activations on the calibration text are not finite.", _HINT)
        for start in range(0, len(x), _TOKENS):
            part = x[start : start + _TOKENS]
            self.count += len(part)
            self._sum += part.sum(axis=0, dtype=np.float64)
            self._squares += np.einsum("tk,tk->k", part, part, dtype=np.float64)
            for run in self._runs:
                if self._hessian is not None:
                    self._hessian[run, run] += part[:, run].T @ part[:, run]
                if self._cross is not None:
                    self._cross[run, run] += other[start : start + _TOKENS, run].T @ part[:, run]

    def result(self) -> InputStatistics:
        """The moments so far, in float32."""
        share = 1 / max(self.count, 1)

        def means(total: Floats | None) -> Floats | None:  # (K, K)
            if total is None:
                return None
            found = np.zeros_like(total)
            for run in self._runs:
                np.multiply(total[run, run], share, out=found[run, run], dtype=np.float32)
            return found

        squares, mean = ((total * share).astype(np.float32) for total in (self._squares, self._sum))
        return InputStatistics(self.count, squares, mean, means(self._hessian), means(self._cross))


def output_error(weight: Floats, approximation: Floats, statistics: InputStatistics | None = None) -> float:  # (N, K)
    """Mean over tokens of |(W - What) x|^2: exact with a Hessian, for uncorrelated inputs without one. Without
    statistics every input has a mean square of one, so it is |W - What|^2."""
    if statistics is not None:
        statistics.check(weight.shape[1])
    total = 0.0
    for start in range(0, len(weight), _ROWS):
        error = weight[start : start + _ROWS] - approximation[start : start + _ROWS]
        if statistics is None:
            scaled = error
        elif statistics.hessian is None:
            scaled = error * statistics.mean_square
        else:
            scaled = error @ statistics.hessian
        total += float(np.einsum("nk,nk->", error, scaled, dtype=np.float64))
    return max(total, 0.0)
