"""Experts as a basis they share and factors of their own, with bits for each direction of the basis.

As BitsMoE has it ("Efficient Spectral Energy-Guided Bit Allocation for MoE LLM Quantization"): what the experts of a
layer share is the space that their gates and ups read and that their downs write. Gates and ups are stacked by rows,
downs by columns, and the singular vectors of the shared side are the basis, which is not quantized: bfloat16. What an
expert has of each direction is quantized with bits of its own, which one price per byte chooses, or left out; a
direction that is in no expert takes no bytes. No backend runs this form: comparisons multiply it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16
from edgeinfer.errors import BudgetError, UsageError
from edgeinfer.quant.blocks import Grid, padded
from edgeinfer.quant.methods import approximate

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
# bfloat16.
_BASIS_BYTES = 2
# The widths of the authors' kernels but 6 and 16, and values that share a scale there; of shorter factors fewer do.
_BITS = (1, 2, 3, 4, 8)
_BLOCK, _SHORT_BLOCK = 128, 32
_SCALE_BYTES = 2
# Shares of all directions that are tried as the basis: the fewer it has, the more bytes are left for factors.
_SHARES = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
# Of an interval of prices, which end well below any error that shows.
_HALVINGS = 60


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
    mean_square: Floats | None = None,  # (C,), or (E, C) of experts that write one space
    *,
    writes: bool = False,
) -> SpectralExperts:
    """Quantizes one projection of a layer's experts to at most `budget` bytes, the basis included.

    Args:
        importance: what a squared error of each expert's output counts, its mean squared router weight perhaps.
        mean_square: of the inputs, which decides the directions too.
        writes: the experts share the space that they write, not the one that they read.

    Raises:
        BudgetError: the basis alone takes more.
        UsageError: the experts have different shapes, or the weights are not finite.
    """
    stacked = _stacked(experts).swapaxes(1, 2) if writes else _stacked(experts)  # (E, own, shared)
    counts = np.ones(len(stacked)) if importance is None else np.asarray(importance, np.float64)
    shape = (len(experts), stacked.shape[1], 1) if writes else (1, 1, stacked.shape[2])
    root = np.ones((1, 1, 1), np.float32)
    if mean_square is not None:
        squares = np.broadcast_to(mean_square, (shape[0], experts[0].shape[1])).reshape(shape)
        root = np.sqrt(np.maximum(squares, 1e-12)).astype(np.float32)
    # Directions are orthogonal for the outputs: errors of factors then add up as errors of outputs.
    flat = (stacked * root).reshape(-1, stacked.shape[2]).astype(np.float64)
    u, s, basis = np.linalg.svd(flat, full_matrices=False)
    factors = np.ascontiguousarray((u * s).astype(np.float32).reshape(*stacked.shape[:2], -1).swapaxes(1, 2))
    own = root.swapaxes(1, 2) if writes else np.ones((1, 1, 1), np.float32)  # what a factor's values are larger by
    variants = {bits: _approximated(np.asarray(factors / own, np.float32), bits) * own for bits in (0, *_BITS)}
    errors = {
        bits: ((variant - factors) ** 2).sum(axis=2, dtype=np.float64) * counts[:, None]
        for bits, variant in variants.items()
    }
    found = _best_basis(errors, stacked.shape, budget)
    kept = sum(np.where(found.bits[..., None] == bits, variant, np.float32(0)) for bits, variant in variants.items())
    rounded = bfloat16.round_nearest(basis.astype(np.float32))
    weights = (np.einsum("ekr,kc->erc", kept, rounded, optimize=True) / root).astype(np.float32)
    return replace(found, weights=tuple(weights.swapaxes(1, 2) if writes else weights))


def _best_basis(errors: Mapping[int, NDArray[np.float64]], shape: tuple[int, ...], budget: int) -> SpectralExperts:
    """The bits of each expert's part of each direction, with as many directions as lose least; no weights yet.

    Args:
        errors: by bits, (E, directions), most energetic direction first.
        shape: experts, values of a factor, values of a direction.
    """
    count, rows, columns = shape
    directions = errors[0].shape[1]
    sizes = np.array([_matrix_bytes(1, rows, bits) if bits else 0 for bits in errors])
    every = np.stack(list(errors.values()))  # (widths, E, directions)

    def basis(rank: int) -> tuple[int, int]:
        # Three bits say which of six widths a factor has.
        return rank * columns * _BASIS_BYTES, -(-count * rank * 3 // 8)

    def lost(rank: int) -> float:
        chosen = _cheapest(every[:, :, :rank], sizes, budget - sum(basis(rank)))
        if chosen is None:
            return np.inf
        kept = np.take_along_axis(every[:, :, :rank], chosen[None], axis=0)
        return float(kept.sum()) + float(every[0, :, rank:].sum())

    rank = min((max(1, round(directions * share)) for share in _SHARES), key=lost)
    chosen = _cheapest(every[:, :, :rank], sizes, budget - sum(basis(rank)))
    if chosen is None:
        least = sum(basis(1))
        hint = f"Allow {least:,} bytes at least."
        raise BudgetError(f"A basis does not fit {budget:,} bytes.", hint, minimum_bytes=least)
    widths = np.zeros((count, directions), np.int64)
    widths[:, :rank] = np.array(list(errors))[chosen]
    return SpectralExperts((), int(sizes[chosen].sum()) + sum(basis(rank)), basis(rank)[0], widths)


def _cheapest(errors: NDArray[np.float64], sizes: Ints, budget: int) -> Ints | None:  # (widths, E, K), (widths,)
    """The width of each factor, (E, K), by one price per byte, the lowest that fits; None where none does.

    With thousands of factors of one size that is the integer programme's solution but for a few bytes.
    """
    low, high = 0.0, float(errors.max()) + 1e-300
    for _ in range(_HALVINGS):
        price = (low + high) / 2
        fits = sizes[(errors + price * sizes[:, None, None]).argmin(axis=0)].sum() <= budget
        low, high = (low, price) if fits else (price, high)
    chosen: Ints = (errors + high * sizes[:, None, None]).argmin(axis=0)
    return chosen if sizes[chosen].sum() <= budget else None


def share_space(experts: Sequence[Floats], directions: int, *, writes: bool) -> list[Floats]:  # (R, C) each
    """The experts with nothing outside the space of so many directions that holds most of all of them.

    Args:
        writes: it is the space that they write, not the one that they read.

    Raises:
        UsageError: they have different shapes, or are not finite.
    """
    stacked = _stacked(experts).swapaxes(1, 2) if writes else _stacked(experts)  # (E, own, shared)
    flat = stacked.reshape(-1, stacked.shape[2]).astype(np.float64)
    basis = np.linalg.eigh(flat.T @ flat)[1][:, -directions:].astype(np.float32)  # (shared, directions)
    projected = stacked @ (basis @ basis.T)
    return list(projected.swapaxes(1, 2) if writes else projected)


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
    flat, size = columns.reshape(-1, columns.shape[2]), _block(columns.shape[2])
    if bits > 1:
        return approximate(flat, Grid(bits, size, symmetric=True)).reshape(columns.shape)
    blocks = padded(flat, size).reshape(len(flat), -1, size)
    sizes = padded(np.ones_like(flat[:1]), size).reshape(1, -1, size).sum(axis=2, keepdims=True)
    scales = bfloat16.round_nearest(np.abs(blocks).sum(axis=2, keepdims=True) / sizes)
    signs = np.where(blocks < 0, -scales, scales).reshape(len(flat), -1)
    return signs[:, : flat.shape[1]].reshape(columns.shape)


def _matrix_bytes(rows: int, columns: int, bits: int) -> int:
    """Bytes of symmetric values in blocks, each with a bfloat16 scale."""
    size = _block(columns)
    return rows * -(-columns // size) * (size * bits // 8 + _SCALE_BYTES)


def _block(columns: int) -> int:
    return _BLOCK if columns >= _BLOCK else _SHORT_BLOCK
