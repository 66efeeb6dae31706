"""Quantization to GGUF's types of 4, 5 and 6 bits: searched scales and minima of small groups, in a file's blocks.

Q4_K and Q5_K have a scale and a minimum of 6 bits for each group of 32, Q6_K a scale of 8 bits for each of 16:
multiples of a float16 for 256 values. Q5_0 has a scale of float16 for each group of 32, for rows that are not whole
blocks of 256. Each group's range is cut by several factors, each followed by a least-squares fit of scale and minimum
to the rounded values; then what groups share is fitted once more. Where statistics of the inputs are known, the square
of each column's error counts by the mean square of its input.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.kinds import KINDS
from edgeinfer.quant.blocks import Codes, Grid, Solver
from edgeinfer.quant.rtn import column_weights
from edgeinfer.quant.statistics import InputStatistics

_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]
# Cuts of a group's range by bits: finer grids lower the squared error by less than 1%.
_FACTORS = {
    4: tuple(1.05 - 0.05 * i for i in range(8)),
    5: tuple(1.05 - 0.05 * i for i in range(5)),
    6: tuple(1.05 - 0.05 * i for i in range(4)),
}
# Values per working array: a handful of float32 arrays of this size stay in a core's second-level cache.
_CHUNK_VALUES = 1 << 17
_TINY = np.float32(1e-30)
_SYMMETRIC = ("Q5_0", "Q6_K")
_TOP_SCALE, _TOP_SIGNED = 63, 127  # of scales and minima of 6 bits, of scales of 8
# Below this a float16 has steps of a hundredth and more: it is rounded up, so that levels reach the largest scale, and
# not fitted again.
_FINE = np.float32(2.0**-17)


class _Group(NamedTuple):
    """Columns of values, one per group, with the weight of each value's error."""

    values: _Floats  # (size, C)
    counts: _Floats | None  # (size, C); None for ones
    weight: _Floats  # (C,): sum of the counts
    total: _Floats  # (C,): sum of values times counts


class _Sums(NamedTuple):
    """Weighted sums over a group's codes q and values x, (C,) each."""

    q: _Floats
    qq: _Floats
    xq: _Floats


def solver(grid: Grid, k: int, statistics: InputStatistics | None = None) -> Solver:
    """The quantizer of matrices of K columns, whose codes are bytes of a file's blocks."""
    block, size = KINDS[grid.kind].values, 16 if grid.kind == "Q6_K" else 32
    counts = None if statistics is None else column_weights(statistics.mean_square, block).reshape(-1, size)

    def solve(weight: _Floats) -> Codes:  # (n, K)
        n = len(weight)
        values = np.ascontiguousarray(weight.reshape(-1, size).T, np.float32)
        blocks = _solve(grid.kind, grid.bits, _group(values, None if counts is None else np.tile(counts.T, n)))
        return Codes(blocks.reshape(n, -1), np.empty((n, 0), np.float32), np.empty((n, 0), np.uint8))

    return Solver(max(1, _CHUNK_VALUES // k), solve)


def _group(values: _Floats, counts: _Floats | None) -> _Group:
    if counts is None:
        return _Group(values, None, np.full(values.shape[1], len(values), np.float32), values.sum(axis=0))
    return _Group(values, counts, counts.sum(axis=0), np.einsum("kc,kc->c", values, counts))


def _solve(kind: str, bits: int, group: _Group) -> _Bytes:  # (blocks, bytes of a block)
    scale, minimum = _search(group, bits, symmetric=kind in _SYMMETRIC)
    if kind == "Q6_K":
        return _pack_q6_k(group, scale)
    if kind in ("Q4_K", "Q5_K"):
        return _pack_two_level(group, bits, scale, minimum)
    scale = _half(scale)
    codes = _round(group.values, scale, scale * 16, 31).astype(np.uint8).T  # (C, 32)
    low, high = codes & np.uint8(15), np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")
    return np.concatenate([_half_bytes(scale), high, low[:, :16] | low[:, 16:] << np.uint8(4)], axis=1)


def _search(group: _Group, bits: int, *, symmetric: bool) -> tuple[_Floats, _Floats]:  # (C,), (C,)
    """Scale and minimum of each group, of 0 or more; values are about scale times code less minimum."""
    top, middle = float((1 << bits) - 1), float(1 << (bits - 1))
    low, high = np.minimum(group.values.min(axis=0), 0), np.maximum(group.values.max(axis=0), 0)
    # The range of symmetric groups reaches one step further below zero than above; a negative scale turns it round.
    plain = np.where(high > -low, -high, -low) / middle if symmetric else (high - low) / top
    best = [np.zeros_like(plain), np.zeros_like(plain), np.zeros_like(plain)]  # gain, scale, minimum
    for factor in _FACTORS[bits]:
        step = plain * np.float32(factor)
        # The range is cut alike at both ends.
        offset = step * middle if symmetric else -low + (step - plain) * (top / 2)
        codes = _round(group.values, step, offset, top)
        if symmetric:
            codes -= middle
        sums = _sums(group, codes)
        scale = sums.xq / np.maximum(sums.qq, _TINY)
        minimum = np.zeros_like(scale)
        if not symmetric:
            spread = group.weight * sums.qq - sums.q * sums.q
            both = (group.weight * sums.xq - group.total * sums.q) / np.maximum(spread, _TINY)
            least = (both * sums.q - group.total) / group.weight
            apart = spread > 1e-6 * group.weight * sums.qq
            scale = np.where(apart, np.where(least > 0, both, scale), step)
            # Codes that are all alike say nothing of the scale.
            minimum = np.maximum(np.where(apart, least, (step * sums.q - group.total) / group.weight), 0)
        gain = scale * (2 * (sums.xq + minimum * sums.q) - scale * sums.qq) - minimum * (
            2 * group.total + minimum * group.weight
        )
        better = gain > best[0]
        for kept, found in zip(best, (gain, scale, minimum), strict=True):
            np.copyto(kept, found, where=better)
    return best[1], best[2]


def _round(values: _Floats, scale: _Floats, offset: _Floats, top: float) -> _Floats:  # (size, C), (C,), (C,)
    """The nearest codes of values plus offset; zeros where a scale is zero."""
    codes = values + offset
    codes *= np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    np.rint(codes, out=codes)
    np.maximum(codes, 0, out=codes)
    np.minimum(codes, np.float32(top), out=codes)
    return codes


def _sums(group: _Group, codes: _Floats) -> _Sums:
    counted = codes if group.counts is None else codes * group.counts
    dots = (np.einsum("kc,kc->c", counted, other) for other in (codes, group.values))
    return _Sums(counted.sum(axis=0), *dots)


def _half(values: _Floats) -> _Floats:
    """Values as float16 has them."""
    return values.astype(np.float16).astype(np.float32)


def _unit(largest: _Floats, top: int) -> _Floats:
    """The smallest number of float16 whose multiples by up to `top` reach the largest."""
    wanted = largest / np.float32(top)
    unit = wanted.astype(np.float16)
    return np.where(unit < wanted, np.nextafter(unit, np.float16(np.inf)), unit).astype(np.float32)


def _half_bytes(values: _Floats) -> _Bytes:  # (C,) -> (C, 2)
    return values.astype("<f2")[:, None].view(np.uint8)


def _levels(values: _Floats, unit: _Floats, least: int, top: int) -> _Floats:  # (B, groups), (B,)
    steps = np.divide(values, unit[:, None], out=np.zeros_like(values), where=unit[:, None] != 0)
    return np.clip(np.rint(steps), least, top)


def _pack_two_level(group: _Group, bits: int, scale: _Floats, minimum: _Floats) -> _Bytes:
    scales, minima = scale.reshape(-1, 8), minimum.reshape(-1, 8)  # (B, 8)
    units = [_unit(each.max(axis=1), _TOP_SCALE) for each in (scales, minima)]  # (B,) each
    ls, lm = (_levels(each, unit, 0, _TOP_SCALE) for each, unit in zip((scales, minima), units, strict=True))

    def rounded() -> _Floats:
        step, offset = ((level * unit[:, None]).reshape(-1) for level, unit in zip((ls, lm), units, strict=True))
        return _round(group.values, step, offset, (1 << bits) - 1)

    units = _fitted(group, rounded(), ls, lm, units)
    codes = rounded().astype(np.uint8).T.reshape(-1, 8, 32)
    s, m = ls.astype(np.uint8), lm.astype(np.uint8)
    # Levels of the first four groups have their upper bits free for those of the last four.
    levels = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    high = [np.bitwise_or.reduce(codes >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)] if bits == 5 else []
    low = codes & np.uint8(15)
    nibbles = (low[:, 0::2] | low[:, 1::2] << 4).reshape(len(codes), -1)
    return np.concatenate([*map(_half_bytes, units), *levels, *high, nibbles], axis=1)


def _fitted(group: _Group, codes: _Floats, ls: _Floats, lm: _Floats, units: list[_Floats]) -> list[_Floats]:
    """The units of scales and minima that suit codes and levels best, where both are determined and fine."""
    sums = _Sums(*(each.reshape(ls.shape) for each in _sums(group, codes)))
    weight, total = group.weight.reshape(ls.shape), group.total.reshape(ls.shape)
    aa, ab, bb = ((f * g * s).sum(axis=1) for f, g, s in ((ls, ls, sums.qq), (ls, lm, sums.q), (lm, lm, weight)))
    xa, xb = (ls * sums.xq).sum(axis=1), (lm * total).sum(axis=1)
    spread = aa * bb - ab * ab
    sound = spread > 1e-4 * aa * bb
    spread = np.where(sound, spread, 1)
    first, second = (bb * xa - ab * xb) / spread, (ab * xa - aa * xb) / spread
    sound &= (first > _FINE) & (second > _FINE)
    return [_half(np.where(sound, new, old)) for new, old in zip((first, second), units, strict=True)]


def _pack_q6_k(group: _Group, scale: _Floats) -> _Bytes:
    scales = scale.reshape(-1, 16)  # (B, 16)
    unit = _unit(np.abs(scales).max(axis=1), _TOP_SIGNED)
    levels = _levels(scales, unit, -_TOP_SIGNED, _TOP_SIGNED)

    def rounded() -> _Floats:
        steps = (levels * unit[:, None]).reshape(-1)
        return _round(group.values, steps, 32 * steps, 63)

    sums = _sums(group, rounded() - 32)
    fitted = (levels * sums.xq.reshape(levels.shape)).sum(axis=1)
    fitted /= np.maximum((levels**2 * sums.qq.reshape(levels.shape)).sum(axis=1), _TINY)
    unit = np.where(fitted > _FINE, _half(fitted), unit)
    codes = rounded().astype(np.uint8).T.reshape(-1, 2, 4, 32)
    low, high = codes & np.uint8(15), codes >> np.uint8(4)
    nibbles = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(len(codes), -1)
    pairs = np.bitwise_or.reduce(high << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2).reshape(len(codes), -1)
    return np.concatenate([nibbles, pairs, levels.astype(np.int8).view(np.uint8), _half_bytes(unit)], axis=1)
