"""Experts as a basis they share and factors of their own, with bits for each direction of the basis.

The matrices of one projection of a layer's experts, stacked, are U S V^T. The rows of V^T are the shared basis, kept at
8 bits; what an expert has of each, a column of its part of U S, is quantized with bits of its own, which the integer
programme chooses, or left out. No backend runs this form: comparisons multiply it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UsageError
from edgeinfer.quant.allocation import Choice, PricedOption, allocate
from edgeinfer.quant.blocks import Grid
from edgeinfer.quant.methods import approximate

__all__ = ["Heterogeneity", "SpectralExperts", "heterogeneity", "quantize_spectral"]

Floats = NDArray[np.float32]
_BASIS_BITS = 8
_BITS = (2, 4, 8)
_BLOCK = 32
_SCALE_BYTES = 2


@dataclass(frozen=True)
class SpectralExperts:
    """Experts quantized so, multiplied out again.

    Attributes:
        weights: of each expert, (R, C).
        nbytes: of the basis, all factors and the bits of each.
        basis_bytes: of the basis alone.
        bits: of each expert's part of each direction; 0 where it is left out.
    """

    weights: tuple[Floats, ...]
    nbytes: int
    basis_bytes: int
    bits: NDArray[np.int64]  # (E, directions)


@dataclass(frozen=True)
class Heterogeneity:
    """How much experts differ, as standard deviations in units of the mean: what bits per expert can gain from.

    Attributes:
        energy: of the squared norm of the experts' matrices.
        spectrum: of the squared norm of the experts' parts of one direction, the mean over directions by their energy.
        usage: of what the tokens use of each.
    """

    energy: float
    spectrum: float
    usage: float


def quantize_spectral(
    experts: Sequence[Floats],  # (R, C) each
    budget: int,
    importance: Floats | None = None,  # (E,)
    mean_square: Floats | None = None,  # (C,)
) -> SpectralExperts:
    """Quantizes one projection of a layer's experts to at most `budget` bytes, the basis included.

    Args:
        importance: what a squared error of each expert's output counts, its mean squared router weight perhaps.
        mean_square: of the inputs that all of them read, which decides the directions too.

    Raises:
        BudgetError: the basis alone takes more.
        UsageError: the experts have different shapes, or the weights are not finite.
    """
    stacked = _stacked(experts)
    count, rows, columns = stacked.shape
    counts = np.ones(count) if importance is None else np.asarray(importance, np.float64)
    # Directions are orthogonal for the inputs: errors of factors then add up as errors of outputs.
    root = np.ones(columns) if mean_square is None else np.sqrt(np.maximum(mean_square, 1e-12))
    u, s, basis = np.linalg.svd((stacked * root).reshape(-1, columns).astype(np.float64), full_matrices=False)
    factors = (u * s).astype(np.float32).reshape(count, rows, -1)
    rounded = approximate(basis.astype(np.float32), Grid(_BASIS_BITS, _BLOCK, symmetric=True))  # (directions, C)
    directions = len(basis)
    basis_bytes = _matrix_bytes(directions, columns, _BASIS_BITS)
    columns_of = np.ascontiguousarray(factors.transpose(0, 2, 1))  # (E, directions, R)
    variants = {bits: _approximated(columns_of, bits) for bits in (0, *_BITS)}
    errors = {
        bits: ((variant - columns_of) ** 2).sum(axis=2, dtype=np.float64) * counts[:, None]
        for bits, variant in variants.items()
    }
    # Two bits say which of four widths a column has.
    overhead = basis_bytes + -(-count * directions * 2 // 8)
    sizes = {bits: _matrix_bytes(1, rows, bits) if bits else 0 for bits in variants}
    choices = [
        Choice(tuple(PricedOption(sizes[bits], float(errors[bits][expert, place])) for bits in variants))
        for expert in range(count)
        for place in range(directions)
    ]
    found = allocate(choices, budget - overhead)
    widths = np.array(list(variants))[np.array(found.chosen).reshape(count, directions)]  # (E, directions)
    kept = sum(np.where(widths[..., None] == bits, variant, np.float32(0)) for bits, variant in variants.items())
    weights = np.einsum("edr,dc->erc", kept, rounded, optimize=True) / root
    return SpectralExperts(tuple(weights.astype(np.float32)), found.nbytes + overhead, basis_bytes, widths)


def heterogeneity(
    experts: Sequence[Floats],  # (R, C) each
    usage: Floats,  # (E,)
) -> Heterogeneity:
    """How much the experts of a layer differ.

    Raises:
        UsageError: they have different shapes, or are not finite.
    """
    stacked = _stacked(experts).astype(np.float64)
    count, rows, columns = stacked.shape
    u, s, _ = np.linalg.svd(stacked.reshape(-1, columns), full_matrices=False)
    parts = ((u * s).reshape(count, rows, -1) ** 2).sum(axis=1)  # (E, directions)
    weighing = parts.sum(axis=0)
    varying = parts.std(axis=0) / np.maximum(parts.mean(axis=0), 1e-300)
    spectrum = float((varying * weighing).sum() / max(weighing.sum(), 1e-300))
    return Heterogeneity(_variation(parts.sum(axis=1)), spectrum, _variation(np.asarray(usage, np.float64)))


def _variation(values: NDArray[np.float64]) -> float:
    mean = float(values.mean())
    return float(values.std()) / mean if mean else 0.0


def _stacked(experts: Sequence[Floats]) -> Floats:  # (E, R, C)
    if len({expert.shape for expert in experts}) != 1:
        raise UsageError("The experts have different shapes, or there are none.", "Give one projection of one layer.")
    stacked = np.stack(list(experts)).astype(np.float32)
    if not np.isfinite(stacked).all():
        raise UsageError("A weight of the experts is NaN or infinite.", "Fetch the checkpoint again, or repair it.")
    return stacked


def _approximated(columns: Floats, bits: int) -> Floats:  # (E, directions, R)
    if not bits:
        return np.zeros_like(columns)
    flat = columns.reshape(-1, columns.shape[2])
    return approximate(flat, Grid(bits, _BLOCK, symmetric=True)).reshape(columns.shape)


def _matrix_bytes(rows: int, columns: int, bits: int) -> int:
    """Bytes of symmetric values in blocks, each with a bfloat16 scale."""
    blocks = -(-columns // _BLOCK)
    return rows * blocks * (_BLOCK * bits // 8 + _SCALE_BYTES)
