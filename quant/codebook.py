"""Codebooks of groups of rows by weighted k-means, for comparisons: no backend runs them; knows nothing of models.

The training-free form of joint codebooks and mappings: rows are divided by their root mean square, rows of a like
shape are put into one group, and each group has 2 ** bits values that its weights are replaced by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16
from edgeinfer.bundle.packing import packed_bytes
from edgeinfer.errors import UsageError
from edgeinfer.quant.blocks import check_finite
from edgeinfer.quant.statistics import InputStatistics

__all__ = ["CODEBOOK_BITS", "CodebookMatrix", "quantize_codebook"]

Floats = NDArray[np.float32]
CODEBOOK_BITS = (2, 3, 4)
_ROUNDS = 50
# Scales, values of codebooks (bfloat16) and the places of rows take two bytes each; more rows need four for a place.
_SHORT, _LONG = 2, 4
_LEAST_WEIGHT = 1e-3


@dataclass(frozen=True)
class CodebookMatrix:
    """A matrix whose rows, in groups, take their values from codebooks.

    Attributes:
        order: which row of the matrix each row here is.
        codes: of rows in that order.
        scales: of rows in that order, bfloat16 by value.
        codebooks: ascending values of each group, bfloat16 by value.
        bits: per code.
        group: rows that share a codebook; the last group may be smaller.
    """

    order: NDArray[np.intp]  # (N,)
    codes: NDArray[np.uint8]  # (N, K)
    scales: Floats  # (N,)
    codebooks: Floats  # (ceil(N / group), 2 ** bits)
    bits: int
    group: int

    @property
    def nbytes(self) -> int:
        """What it takes in a file."""
        place = _SHORT if len(self.order) <= 1 << 16 else _LONG
        shared = _SHORT * (self.scales.size + self.codebooks.size) + place * self.order.size
        return shared + len(self.codes) * packed_bytes(self.codes.shape[1], self.bits)

    def dequantize(self) -> Floats:  # (N, K)
        """The float matrix it stands for."""
        out = np.empty(self.codes.shape, np.float32)
        for number, codebook in enumerate(self.codebooks):
            rows = slice(number * self.group, (number + 1) * self.group)
            out[self.order[rows]] = codebook[self.codes[rows]] * self.scales[rows, None]
        return out


def quantize_codebook(
    weight: Floats,  # (N, K)
    bits: int,
    group: int = 16,
    statistics: InputStatistics | None = None,
) -> CodebookMatrix:
    """Quantizes a matrix; with statistics, squared errors count by the mean squares of their inputs.

    Args:
        bits: 2, 3 or 4.
        group: rows that share a codebook.

    Raises:
        UsageError: other bits, no rows in a group, or statistics that are not finite or of another matrix.
        CheckpointError: a weight is NaN or infinite.
    """
    if bits not in CODEBOOK_BITS or group < 1:
        raise UsageError(
            f"Codebooks of {bits} bits for {group} rows are not supported.", "Choose 2, 3 or 4 bits and a row at least."
        )
    check_finite(weight)
    n, k = weight.shape
    importance: NDArray[np.float64] = np.ones(k)
    if statistics is not None:
        statistics.check(k)
        mean = float(statistics.mean_square.mean(dtype=np.float64))
        if mean > 0:
            importance = statistics.mean_square.astype(np.float64) / mean + _LEAST_WEIGHT
    # By the largest first, so that squares neither overflow nor vanish.
    largest = np.abs(weight).max(axis=1, initial=0).astype(np.float64)
    relative = weight / np.where(largest > 0, largest, 1)[:, None]
    spread = np.sqrt(np.square(relative).mean(axis=1))
    scales = bfloat16.round_nearest((spread * largest).astype(np.float32))
    scales = np.where(scales == 0, np.float32(1), scales)
    # Rows whose largest weight is as many times their root mean square have about the same shape.
    order = np.argsort(np.where(spread > 0, 1 / np.where(spread > 0, spread, 1), 0), kind="stable")
    codes = np.empty((n, k), np.uint8)
    codebooks = np.zeros((-(-n // group), 2**bits), np.float32)
    for number in range(len(codebooks)):
        rows = order[number * group : (number + 1) * group]
        values = weight[rows] / scales[rows, None]
        # Errors are scaled back with their rows.
        counts = importance * np.square(scales[rows, None].astype(np.float64) / scales[rows].max())
        codebooks[number] = _codebook(values.ravel(), counts.ravel(), bits)
        codes[number * group : number * group + len(rows)] = _nearest(values, codebooks[number])
    return CodebookMatrix(order, codes, scales[order], codebooks, bits, group)


def _codebook(values: Floats, counts: NDArray[np.float64], bits: int) -> Floats:  # (M,), (M,) -> (2 ** bits,)
    """The values that minimise the weighted squared error to the nearest one: Lloyd's algorithm on sorted weights."""
    order = np.argsort(values, kind="stable")
    values, counts = values[order], counts[order]
    total = np.concatenate([[0.0], np.cumsum(counts)])
    moment = np.concatenate([[0.0], np.cumsum(counts * values)])
    centres = _first_centres(values, counts, bits)
    for _ in range(_ROUNDS):
        edges = np.searchsorted(values, (centres[1:] + centres[:-1]) / 2)
        edges = np.concatenate([[0], edges, [len(values)]])
        mass = np.diff(total[edges])
        moved = np.where(mass > 0, np.diff(moment[edges]) / np.where(mass > 0, mass, 1), centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return bfloat16.round_nearest(np.sort(centres).astype(np.float32))


def _first_centres(values: Floats, counts: NDArray[np.float64], bits: int) -> NDArray[np.float64]:
    """Centres whose density is that of the weights to the third: the best for many centres."""
    count = 2**bits
    heights, edges = np.histogram(values, bins=16 * count, weights=counts)
    share = np.cumsum(np.cbrt(heights))
    if share[-1] <= 0:
        return np.full(count, float(values.mean()))
    places = (np.arange(count) + 0.5) / count * share[-1]
    return np.asarray(np.interp(places, np.concatenate([[0.0], share]), edges))


def _nearest(values: Floats, codebook: Floats) -> NDArray[np.uint8]:  # (n, K)
    """The index of the nearest value of the codebook."""
    edges = (codebook[1:] + codebook[:-1]) / 2
    return np.searchsorted(edges, values).astype(np.uint8)
