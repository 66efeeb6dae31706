"""Quantization to GGUF's types: searched scales and minima of small groups, and the bytes of a file's blocks.

Types ending in K, and IQ4_XS, have scales, some also minima, of a few bits for each group: multiples of float16s for
256 values. Others have float16s for each group of 32, for rows that are not whole blocks of 256. Each group's range is
cut by several factors, each followed by a least-squares fit of scale and minimum to the rounded values; then what
groups share is fitted once more. Where statistics of the inputs are known, the square of each column's error counts by
the mean square of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant.blocks import Codes, Grid, Solver
from edgeinfer.quant.forms import BlockForm, State, half, inverse
from edgeinfer.quant.rtn import column_weights
from edgeinfer.quant.statistics import InputStatistics

_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]
_BOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FORMS: Mapping[str, BlockForm] = {
    "Q2_K": BlockForm(2, 16, "minimum", levels=(0, 15), shared=16, halves=True),
    "Q3_K": BlockForm(3, 16, "middle", 4, (-32, 31), 16, halves=True),
    "IQ4_NL": BlockForm(4, 32, "middle", halves=True, book=_BOOK),
    "IQ4_XS": BlockForm(4, 32, "middle", 0, (-32, 31), 8, halves=True, book=_BOOK),
    "Q4_K": BlockForm(4, 32, "minimum", levels=(0, 63), shared=8, halves=True),
    "Q5_0": BlockForm(5, 32, "middle", 16, halves=True),
    "Q5_1": BlockForm(5, 32, "minimum", halves=True),
    "Q5_K": BlockForm(5, 32, "minimum", levels=(0, 63), shared=8, halves=True),
    "Q6_K": BlockForm(6, 16, "middle", 32, (-128, 127), 16, halves=True),
}
# Cuts of a group's range by bits: finer grids lower the squared error by less than 1%.
_FACTORS = {
    2: tuple(1.0 - 0.1 * i for i in range(6)),
    3: tuple(1.05 - 0.05 * i for i in range(9)),
    4: tuple(1.05 - 0.05 * i for i in range(8)),
    5: tuple(1.05 - 0.05 * i for i in range(5)),
    6: tuple(1.05 - 0.05 * i for i in range(4)),
}
# Values per working array: a handful of float32 arrays of this size stay in a core's second-level cache.
CHUNK_VALUES = 1 << 17
_TINY = np.float32(1e-30)
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
    """Weighted sums over a group's points q and values x, (C,) each."""

    q: _Floats
    qq: _Floats
    xq: _Floats


def solver(grid: Grid, k: int, statistics: InputStatistics | None = None) -> Solver:
    """The quantizer of matrices of K columns, whose codes are bytes of a file's blocks."""
    start = starter(grid.kind, k, statistics)
    return Solver(max(1, CHUNK_VALUES // k), lambda weight: codes(grid.kind, start(weight)))


def starter(kind: str, k: int, statistics: InputStatistics | None) -> Callable[[_Floats], State]:
    """What rounds rows (n, K) to a type, each by itself."""
    form = FORMS[kind]
    counts = None if statistics is None else column_weights(statistics.mean_square, form.size * form.shared)

    def start(weight: _Floats) -> State:  # (n, K)
        values = np.ascontiguousarray(weight.reshape(-1, form.size).T, np.float32)
        tiled = None if counts is None else np.tile(counts.reshape(-1, form.size).T, len(weight))
        return _solve(form, _group(values, tiled), len(weight))

    return start


def codes(kind: str, state: State) -> Codes:
    """The rows' bytes."""
    form, n = FORMS[kind], state.points.shape[1]
    whole = form.size * form.shared
    points = form.codes(np.ascontiguousarray(state.points.T)).reshape(-1, whole)  # (B, values of a block)
    scales, minima = ((sign * each).T.reshape(-1, form.shared) for sign, each in ((1, state.scales), (-1, state.bases)))
    if form.levels is None:
        heads = [scales, -minima] if form.zero == "minimum" else [scales]
        rows = _pack_small(form.bits, points, [_half_bytes(head[:, 0]) for head in heads])
    else:
        units = [unit.T.reshape(-1) for unit in state.units]  # (B,) each
        levels = [np.rint(each * inverse(unit)[:, None]) for each, unit in zip((scales, minima), units, strict=False)]
        rows = _PACKERS[kind](points, [level.astype(np.int8).view(np.uint8) for level in levels], units)
    return Codes(rows.reshape(n, -1), np.empty((n, 0), np.float32), np.empty((n, 0), np.uint8))


def _group(values: _Floats, counts: _Floats | None) -> _Group:
    if counts is None:
        return _Group(values, None, np.full(values.shape[1], len(values), np.float32), values.sum(axis=0))
    return _Group(values, counts, counts.sum(axis=0), np.einsum("kc,kc->c", values, counts))


def _solve(form: BlockForm, group: _Group, n: int) -> State:
    scale, minimum = _search(form, group)
    units: list[_Floats] = []  # (B,) each
    if form.levels is None:
        scale, minimum = half(scale), half(minimum)
    else:
        scale, minimum, units = _shared(form, group, scale, minimum)
    if form.zero == "middle":
        minimum = np.float32(form.middle) * scale
    points = _round(form, group.values, scale, minimum)

    def columns(values: _Floats) -> _Floats:  # (n * m,) -> (m, n)
        return np.ascontiguousarray(values.reshape(n, -1).T)

    wide = points.reshape(form.size, n, -1).transpose(2, 0, 1).reshape(-1, n)
    count = len(scale) // n // form.shared
    unit = np.array([columns(each) for each in units], np.float32).reshape(len(units), count, n)
    return State(np.ascontiguousarray(wide), columns(scale), -columns(minimum), unit)


def _search(form: BlockForm, group: _Group) -> tuple[_Floats, _Floats]:  # (C,), (C,)
    """Scale and minimum of each group, of 0 or more; values are about scale times point less minimum."""
    symmetric, top = form.zero == "middle", float(form.top)
    middle = float(form.middle if form.book is None else -form.book[0])
    low, high = np.minimum(group.values.min(axis=0), 0), np.maximum(group.values.max(axis=0), 0)
    # The range of symmetric groups reaches further below zero than above; a negative scale turns it round.
    plain = np.where(high > -low, -high, -low) / middle if symmetric else (high - low) / top
    best = [np.zeros_like(plain), np.zeros_like(plain), np.zeros_like(plain)]  # gain, scale, minimum
    for factor in _FACTORS[form.bits]:
        step = plain * np.float32(factor)
        # The range is cut alike at both ends.
        offset = step * np.float32(form.middle) if symmetric else -low + (step - plain) * (top / 2)
        points = _round(form, group.values, step, offset)
        if symmetric:
            points -= np.float32(form.middle)
        sums = _sums(group, points)
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


def _round(form: BlockForm, values: _Floats, scale: _Floats, offset: _Floats) -> _Floats:  # (size, C), (C,), (C,)
    """The nearest points of values plus offset; those of zero where a scale is zero."""
    points = values + offset
    points *= inverse(scale)
    form.round(points)
    return points


def _sums(group: _Group, points: _Floats) -> _Sums:
    counted = points if group.counts is None else points * group.counts
    dots = (np.einsum("kc,kc->c", counted, other) for other in (points, group.values))
    return _Sums(counted.sum(axis=0), *dots)


def _shared(
    form: BlockForm, group: _Group, scale: _Floats, minimum: _Floats
) -> tuple[_Floats, _Floats, list[_Floats]]:  # (C,), (C,)
    """Scales and minima as multiples of units, (B,) each, that suit the points."""
    assert form.levels is not None, "only then units are shared"
    least, most = form.levels
    wanted = [each.reshape(-1, form.shared) for each in (scale, minimum)[: 2 if form.zero == "minimum" else 1]]
    units = [_unit(each, form.levels) for each in wanted]
    levels = [
        np.clip(np.rint(each * inverse(unit)[:, None]), least, most) for each, unit in zip(wanted, units, strict=True)
    ]

    def spread() -> tuple[_Floats, _Floats]:
        made = [(level * unit[:, None]).reshape(-1) for level, unit in zip(levels, units, strict=True)]
        return made[0], made[1] if len(made) > 1 else np.float32(form.middle) * made[0]

    points = _round(form, group.values, *spread())
    if len(levels) == 2:
        units = _fitted_pair(group, points, levels, units)
    else:
        sums = _sums(group, points - np.float32(form.middle))
        fitted = (levels[0] * sums.xq.reshape(levels[0].shape)).sum(axis=1)
        fitted /= np.maximum((levels[0] ** 2 * sums.qq.reshape(levels[0].shape)).sum(axis=1), _TINY)
        units = [np.where(fitted > _FINE, half(fitted), units[0])]
    return *spread(), units


def _unit(wanted: _Floats, levels: tuple[int, int]) -> _Floats:  # (B, groups) -> (B,)
    """The smallest number of float16 whose multiples reach all of them; of signed ones the largest by magnitude."""
    least, most = levels
    largest = (np.abs(wanted).max(axis=1) if least < 0 else wanted.max(axis=1)) / np.float32(most)
    unit = largest.astype(np.float16)
    return np.asarray(np.where(unit < largest, np.nextafter(unit, np.float16(np.inf)), unit), np.float32)


def _fitted_pair(group: _Group, points: _Floats, levels: list[_Floats], units: list[_Floats]) -> list[_Floats]:
    """The units of scales and minima that suit points and levels best, where both are determined and fine."""
    ls, lm = levels
    sums = _Sums(*(each.reshape(ls.shape) for each in _sums(group, points)))
    weight, total = group.weight.reshape(ls.shape), group.total.reshape(ls.shape)
    aa, ab, bb = ((f * g * s).sum(axis=1) for f, g, s in ((ls, ls, sums.qq), (ls, lm, sums.q), (lm, lm, weight)))
    xa, xb = (ls * sums.xq).sum(axis=1), (lm * total).sum(axis=1)
    spread = aa * bb - ab * ab
    sound = spread > 1e-4 * aa * bb
    spread = np.where(sound, spread, 1)
    first, second = (bb * xa - ab * xb) / spread, (ab * xa - aa * xb) / spread
    sound &= (first > _FINE) & (second > _FINE)
    return [half(np.where(sound, new, old)) for new, old in zip((first, second), units, strict=True)]


def _half_bytes(values: _Floats) -> _Bytes:  # (B,) -> (B, 2)
    return values.astype("<f2")[:, None].view(np.uint8)


def _fields(codes: _Bytes, bits: int) -> _Bytes:  # (..., fields, m) -> (..., m)
    """Small codes in fields of bytes, the first in the lowest."""
    shifts = np.arange(0, codes.shape[-2] * bits, bits, dtype=np.uint8)[:, None]
    packed: _Bytes = np.bitwise_or.reduce(codes << shifts, axis=-2)
    return packed


def _pack_small(bits: int, codes: _Bytes, heads: list[_Bytes]) -> _Bytes:  # (B, 32)
    high = [np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")] if bits == 5 else []
    return np.concatenate([*heads, *high, _fields((codes & np.uint8(15)).reshape(-1, 2, 16), 4)], axis=1)


# Bytes of blocks: from codes (B, 256), levels (B, groups) of scales, and minima, and units (B,).
_Packer = Callable[[_Bytes, list[_Bytes], list[_Floats]], _Bytes]


def _pack_two_level(bits: int, codes: _Bytes, levels: list[_Bytes], units: list[_Floats]) -> _Bytes:
    codes, (s, m) = codes.reshape(-1, 8, 32), levels
    # Levels of the first four groups have their upper bits free for those of the last four.
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    high = [_fields(codes >> np.uint8(4), 1)] if bits == 5 else []
    nibbles = _fields((codes & np.uint8(15)).reshape(-1, 4, 2, 32), 4).reshape(len(codes), -1)
    return np.concatenate([*map(_half_bytes, units), *packed, *high, nibbles], axis=1)


def _pack_q2_k(codes: _Bytes, levels: list[_Bytes], units: list[_Floats]) -> _Bytes:
    s, m = levels
    pairs = _fields(codes.reshape(-1, 2, 4, 32), 2).reshape(len(codes), -1)
    return np.concatenate([s | m << 4, pairs, *map(_half_bytes, units)], axis=1)


def _pack_q3_k(codes: _Bytes, levels: list[_Bytes], units: list[_Floats]) -> _Bytes:
    s = levels[0] + np.uint8(32)
    high = _fields((codes >> np.uint8(2)).reshape(-1, 8, 32), 1)
    pairs = _fields((codes & np.uint8(3)).reshape(-1, 2, 4, 32), 2).reshape(len(codes), -1)
    packed = [_fields((s & np.uint8(15)).reshape(-1, 2, 8), 4), _fields((s >> np.uint8(4)).reshape(-1, 4, 4), 2)]
    return np.concatenate([high, pairs, *packed, _half_bytes(units[0])], axis=1)


def _pack_iq4_xs(codes: _Bytes, levels: list[_Bytes], units: list[_Floats]) -> _Bytes:
    s = levels[0] + np.uint8(32)
    high = _fields((s >> np.uint8(4)).reshape(-1, 2, 4).swapaxes(1, 2), 2)
    low = _fields((s & np.uint8(15)).reshape(-1, 4, 2).swapaxes(1, 2), 4)
    nibbles = _fields(codes.reshape(-1, 8, 2, 16), 4).reshape(len(codes), -1)
    return np.concatenate([_half_bytes(units[0]), high, low, nibbles], axis=1)


def _pack_q6_k(codes: _Bytes, levels: list[_Bytes], units: list[_Floats]) -> _Bytes:
    codes = codes.reshape(-1, 2, 4, 32)
    nibbles = _fields((codes & np.uint8(15)).reshape(-1, 2, 2, 64), 4).reshape(len(codes), -1)
    pairs = _fields(codes >> np.uint8(4), 2).reshape(len(codes), -1)
    return np.concatenate([nibbles, pairs, levels[0], _half_bytes(units[0])], axis=1)


_PACKERS: Mapping[str, _Packer] = {
    "Q2_K": _pack_q2_k,
    "Q3_K": _pack_q3_k,
    "IQ4_XS": _pack_iq4_xs,
    "Q4_K": partial(_pack_two_level, 4),
    "Q5_K": partial(_pack_two_level, 5),
    "Q6_K": _pack_q6_k,
}
