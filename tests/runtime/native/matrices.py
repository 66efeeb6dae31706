"""Random low-bit matrices, packed value by value as lowbit.h says, with the float matrices that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle.packing import MAGNITUDES
from edgeinfer.runtime.native.binding import PackedMatrix

Floats = NDArray[np.float32]
Cells = TypeVar("Cells", np.uint8, np.uint16)
TILE, GROUP = 32, 16
# Twice the values of E2M1, by their codes.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


@dataclass(frozen=True)
class RandomMatrix:
    """A matrix (N, K) in both forms; `high` is what its high plane alone stands for."""

    packed: PackedMatrix
    dense: Floats
    high: Floats


formats = st.tuples(st.sampled_from([2, -2, 3, 4, 8]), st.sampled_from([32, 64, 128]), st.booleans())
# Bits, of which negative ones are codes of vectors, block, zero points.
FORMATS = [(bits, block, zeros) for bits in (2, 3, 4, 8) for block in (32, 64, 128) for zeros in (False, True)]


def make_matrix(
    rng: np.random.Generator,
    n: int,
    k: int,
    *,
    bits: int = 4,
    block: int = 32,
    zeros: bool = False,
    paired: bool = False,
    e2m1: bool = False,
    inline: bool = False,
) -> RandomMatrix:
    """Draws values, scales and zero points of all sizes, and packs them, scales inline or apart."""
    vectors, bits = bits < 0, abs(bits)
    if vectors and k % block:
        raise ValueError("vectors fill whole blocks")
    zeros = zeros and not vectors
    blocks = -(-k // block)
    values = rng.integers(0, 1 << bits, (n, k), np.uint8)
    points = rng.integers(0, 1 << bits, (n, blocks), np.uint8)
    wide = (rng.random((n, blocks), np.float32) * np.float32(0.02) + np.float32(0.001)).view(np.uint32)
    scales = (wide >> 16).astype(np.uint16)
    if not zeros:
        points[:] = 1 << (bits - 1)
    data, cells = (
        _plane(values >> np.uint8(4 if bits == 8 else 0), min(bits, 4), block, paired),
        _cells(scales, paired),
    )
    if inline:
        data = np.hstack([cells.view(np.uint8).reshape(-1, 2 * TILE), data.reshape(cells.size // TILE, -1)]).reshape(-1)
    packed = PackedMatrix(
        n,
        k,
        bits,
        block,
        data,
        None if inline else cells,
        low=_plane(values & np.uint8(15), 4, block, paired) if bits == 8 else None,
        zeros=_cells(points, paired) if zeros else None,
        paired=paired,
        vectors=vectors,
    )
    each = np.arange(k) // block
    scale = (scales.astype(np.uint32) << 16).view(np.float32)[:, each]
    zero = points.astype(np.float32)[:, each]
    high = (values >> 4).astype(np.float32) * 16 + np.float32(7.5)
    read = E2M1_DOUBLED[values] if e2m1 else values - zero
    if vectors:
        read = _vector_values(values.reshape(n, -1, 4, block // 4)).reshape(n, k)
    return RandomMatrix(packed, read * scale, (high - zero) * scale)


def _vector_values(fields: NDArray[np.uint8]) -> Floats:  # (N, blocks, 4, B / 4) -> the same
    """Values of codes whose bits lie two by two in four values a quarter of a block apart."""
    code = (fields << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(2, dtype=np.uint8)
    magnitudes = np.moveaxis(MAGNITUDES[code & 15], -1, 2)
    signs = 1.0 - 2 * (code[:, :, None] >> np.arange(4, 8, dtype=np.uint8)[:, None] & 1)
    values: Floats = (signs * magnitudes).astype(np.float32)
    return values


def _place(n: int, paired: bool) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Tile and column of each row, and how many tiles there are."""
    rows, half = np.arange(n), n // 2
    if not paired:
        return rows // TILE, rows % TILE, -(-n // TILE)
    return rows % half // GROUP, rows // half * GROUP + rows % half % GROUP, -(-half // GROUP)


def _plane(values: NDArray[np.uint8], bits: int, block: int, paired: bool) -> NDArray[np.uint8]:  # (N, K) -> bytes
    n, k = values.shape
    tile, column, tiles = _place(n, paired)
    blocks, span = -(-k // block), block * bits // 8
    b, j = np.arange(k) // block, np.arange(k) % block
    if bits == 3:
        i, plane = j % 32, np.zeros(tiles * blocks * TILE * span, np.uint8)
        h, s = i // 16, i % 16 // 4
        byte = (tile[:, None] * blocks + b) * TILE * span + j // 32 * 384 + column[:, None] * 4 + i % 4
        np.bitwise_or.at(plane, byte + 128 * h, (values & 3) << (2 * s).astype(np.uint8))
        np.bitwise_or.at(plane, byte + 256, (values >> 2) << (s // 2 * 4 + 2 * h + s % 2).astype(np.uint8))
        return plane
    r = j % span
    byte = (tile[:, None] * blocks + b) * TILE * span + r // 4 * 128 + column[:, None] * 4 + r % 4
    plane = np.zeros(tiles * blocks * TILE * span, np.uint8)
    np.bitwise_or.at(plane, byte, values << (j // span * bits).astype(np.uint8))
    return plane


def _cells(cells: NDArray[Cells], paired: bool) -> NDArray[Cells]:  # (N, blocks) -> (tiles * blocks * 32)
    n, blocks = cells.shape
    tile, column, tiles = _place(n, paired)
    out = np.zeros((tiles, blocks, TILE), cells.dtype)
    out[tile[:, None], np.arange(blocks), column[:, None]] = cells
    return out.reshape(-1)


def linear(x: Floats, dense: Floats, block: int) -> Floats:  # (M, K), (N, K) -> (M, N)
    """The product with activations rounded to int8 by block, summed in double precision."""
    m, k = x.shape
    padded = np.zeros((m, -(-k // block), block), np.float32)
    padded.reshape(m, -1)[:, :k] = x
    top = np.abs(padded).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    rounded = np.rint(padded * inverse).astype(np.float64) * (top / np.float32(127))
    product: Floats = (rounded.reshape(m, -1)[:, :k] @ dense.T.astype(np.float64)).astype(np.float32)
    return product


def silu(x: Floats) -> Floats:
    """x times its logistic function."""
    value: Floats = x * (0.5 + 0.5 * np.tanh(0.5 * x))
    return value


def swiglu(gate_up: Floats) -> Floats:  # (M, 2 F) -> (M, F)
    """silu(gate) * up."""
    gate, up = np.split(gate_up, 2, axis=1)
    return silu(gate) * up
