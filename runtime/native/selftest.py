"""Checks that the kernel computes correctly on this machine: tiny cases of every format of weights and of caches.

The portable path is compared with numpy, an instruction set with the portable path, to the last bit: a compiler or a
processor that rounds otherwise is found before anything is computed with it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.native.binding import (
    ACTIVATIONS,
    INLINE_BYTES,
    MAGNITUDES,
    AttentionPass,
    Binding,
    PackedMatrix,
)

_TILE = 32
# No whole tiles, no whole blocks, and as many rows as the paths with the largest panels take at a time.
_N, _K, _M = 34, 100, 8
_EPSILON = 1e-5
# Bits, block, paired, inline scales; of negative bits codes of vectors.
_FORMATS = (
    (2, 32, True, False),
    (4, 32, False, False),
    (4, 64, True, False),
    (4, 128, False, False),
    (2, 128, False, False),
    (8, 64, False, False),
    (8, 32, True, False),
    (4, 32, True, True),
    (3, 64, True, False),
    (3, 128, False, True),
    (-2, 64, False, False),
    (-2, 32, True, True),
)

# Attention: query heads of the one kv head, sizes of a key and a value that fill no vectors, positions before the rows,
# and the bytes of a page, which hold any type.
_HEADS, _KEY, _VALUE, _BEHIND, _PAGE, _PAGE_BYTES = 3, 12, 20, 70, 64, 16384
_ROTARY, _SOFTCAP = 8, 5.0
# What float32, float16, int8 and int4 may lose of a value, which lies between -0.5 and 0.5.
_ROUNDING = (1e-6, 5e-4, 1e-2, 1e-1)
# From values whose exponential is next to nothing to those whose is next to infinite; no whole vectors.
_ACTIVATED = np.linspace(-9, 9, 37, dtype=np.float32)

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _Case:
    matrix: PackedMatrix
    x: Floats  # (M, K)
    norm: Floats | None  # (K,)
    bias: Floats | None  # (N,)


def agrees_with_portable(binding: Binding, isa: str) -> bool:
    """Whether an instruction set gives the bits of the portable path, for every number of rows."""
    if not all(_same(binding, isa, case) for case in _cases()):
        return False
    if not all(_attends_alike(binding, isa, given, pool) for given, pool, _ in _attention_cases()):
        return False
    return all(np.array_equal(_activated(binding, isa, n), _activated(binding, "portable", n)) for n in ACTIVATIONS)


def portable_is_right(binding: Binding) -> bool:
    """Whether the portable path agrees with numpy, up to the rounding of sums."""
    if not all(_close(binding, case) for case in _cases()):
        return False
    if not all(_attends(binding, given, pool, loss) for given, pool, loss in _attention_cases()):
        return False
    wanted = _ACTIVATED / (1 + np.exp(-_ACTIVATED)) * _ACTIVATED[::-1]
    return bool(np.abs(_activated(binding, "portable", "silu") - wanted).max() <= 1e-5)


def _activated(binding: Binding, isa: str, name: str) -> Floats:
    return binding.activate(isa, name, _ACTIVATED, np.ascontiguousarray(_ACTIVATED[::-1]), (0.8, 0.6))


def _same(binding: Binding, isa: str, case: _Case) -> bool:
    def multiply(isa: str, m: int) -> Floats:
        given, fused = case.x[:m], case.matrix.paired
        return binding.multiply(isa, case.matrix, given, norm=case.norm, epsilon=_EPSILON, bias=case.bias, swiglu=fused)

    wanted = multiply("portable", _M)
    return all(np.array_equal(multiply(isa, m), wanted[:m]) for m in range(1, _M + 1))


def _close(binding: Binding, case: _Case) -> bool:
    x = case.x
    if case.norm is not None:
        x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(_EPSILON)) * case.norm
    wanted = _quantized(x, case.matrix.block) @ _dequantized(case.matrix).T  # (M, N)
    if case.bias is not None:
        wanted = wanted + case.bias
    got = binding.multiply("portable", case.matrix, case.x, norm=case.norm, epsilon=_EPSILON, bias=case.bias)
    # Normalised values a rounding apart may be quantized to neighbouring integers.
    tolerance = 2e-2 if case.norm is not None else 1e-5
    return bool(np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max())


def _cases() -> Iterator[_Case]:
    for index, (code, block, paired, inline) in enumerate(_FORMATS):
        blocks, bits, vectors = -(-_K // block), abs(code), code < 0
        k = blocks * block if vectors else _K
        tiles = -(-(_N // 2) // (_TILE // 2)) if paired else -(-_N // _TILE)
        plane, cells = tiles * blocks * block * 4 * min(bits, 4), tiles * blocks * _TILE
        scales = ((_floats(cells) + np.float32(0.5)).view(np.uint32) >> 16).astype(np.uint16)
        zeros = _bytes(cells) >> np.uint8(8 - bits) if index % 2 and not vectors else None
        data, low = _bytes(2 * plane).reshape(2, plane)
        x = _floats(_M * k).reshape(_M, k) - np.float32(0.5)
        norm = _floats(k) if index % 3 == 0 else None
        bias = _floats(_N) if index % 3 == 1 else None
        if inline:
            rows = (scales.view(np.uint8).reshape(-1, INLINE_BYTES), data.reshape(tiles * blocks, -1))
            data = np.concatenate(rows, axis=1).reshape(-1)
        for plane_below in (low, None) if bits == 8 else (None,):
            apart = None if inline else scales
            matrix = PackedMatrix(_N, k, bits, block, data, apart, plane_below, zeros, paired, vectors)
            yield _Case(matrix, x, norm, bias)


def _bytes(count: int) -> NDArray[np.uint8]:
    """Bytes without a pattern that matters, by Knuth's multiplicative hash: numpy.random takes 9 ms to import."""
    mixed = np.arange(1, count + 1, dtype=np.uint32) * np.uint32(2654435761)
    return (mixed >> np.uint32(24)).astype(np.uint8)


def _floats(count: int) -> Floats:
    return _bytes(count).astype(np.float32) / np.float32(255)


def _quantized(x: Floats, block: int) -> Floats:  # (M, K) -> (M, K)
    """Rows whose blocks were rounded to int8."""
    k = x.shape[1]
    padded = np.zeros((len(x), -(-k // block), block), np.float32)
    padded.reshape(len(x), -1)[:, :k] = x
    scale = np.abs(padded).max(axis=2, keepdims=True) / np.float32(127)
    rounded: Floats = np.rint(padded / scale) * scale
    return rounded.reshape(len(x), -1)[:, :k]


def _dequantized(m: PackedMatrix) -> Floats:  # (N, K), by the formulas of lowbit.h
    n, k = np.arange(m.n)[:, None], np.arange(m.k)
    half = m.n // 2
    tile = n % half // 16 if m.paired else n // _TILE
    column = n // half * 16 + n % half % 16 if m.paired else n % _TILE
    blocks, plane_bits = -(-m.k // m.block), min(m.bits, 4)
    span = m.block * plane_bits // 8
    block, place = k // m.block, k % m.block
    byte = (tile * blocks + block) * _TILE * span + place % span // 4 * 128 + column * 4 + place % span % 4
    shift, mask = (place // span * plane_bits).astype(np.uint8), np.uint8((1 << plane_bits) - 1)
    data, apart = (m.data, m.scales) if m.scales is not None else _split(m.data, _TILE * span)
    values = (data[byte] >> shift & mask).astype(np.float32)
    if m.bits == 3:
        values = _values3(data, (tile * blocks + block) * _TILE * span + column * 4, place)
    if m.bits == 8:
        values = values * 16 + (np.float32(7.5) if m.low is None else m.low[byte] >> shift & mask)
    if m.vectors:
        code, part = data[byte], place // span
        magnitudes = MAGNITUDES[code & 15, part]
        values = (8 + np.where(code >> (4 + part) & 1, -magnitudes, magnitudes)).astype(np.float32)
    cell = (tile * blocks + block) * _TILE + column
    scales = (apart.astype(np.uint32) << 16).view(np.float32)
    zeros = np.float32(8 if m.vectors else 1 << (m.bits - 1)) if m.zeros is None else m.zeros[cell].astype(np.float32)
    dense: Floats = (values - zeros) * scales[cell]
    return dense


def _values3(data: NDArray[np.uint8], start: NDArray[np.int64], place: NDArray[np.int64]) -> Floats:  # (N, K), (K,)
    inner, byte = place % 32, start + place // 32 * 384 + place % 4
    half, slot = inner // 16, inner % 16 // 4
    low = data[byte + 128 * half] >> (2 * slot).astype(np.uint8) & np.uint8(3)
    high = data[byte + 256] >> (slot // 2 * 4 + 2 * half + slot % 2).astype(np.uint8) & np.uint8(1)
    values: Floats = (low + high * np.uint8(4)).astype(np.float32)
    return values


def _split(data: NDArray[np.uint8], step: int) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """Values, `step` bytes of each block, and the scales that lie inline before them."""
    rows = data.reshape(-1, INLINE_BYTES + step)
    return rows[:, INLINE_BYTES:].reshape(-1), rows[:, :INLINE_BYTES].copy().view(np.uint16).reshape(-1)


def _attention_cases() -> Iterator[tuple[AttentionPass, NDArray[np.uint8], float]]:
    """A pass, a pool and what may be lost, for each type: one row sees two pages and a branch, one itself alone."""
    pages, rows = np.array([[1, 0]], np.int32), np.array([[0, _BEHIND, 0, 2], [0, 1, 0, 0]], np.int32)
    qkv = _floats(2 * (_HEADS * _KEY + _KEY + _VALUE)).reshape(2, -1) - np.float32(0.5)
    angles, numbers = _floats(_ROTARY).reshape(2, -1), np.resize(_floats(997) - np.float32(0.5), _PAGE_BYTES // 2)
    # Halves from 0.5 to 1, whose bytes are finite numbers in every type.
    halves = np.resize((_bytes(997).astype(np.uint16) << 2) + np.uint16(0x3800), _PAGE_BYTES)
    cos, sin = np.cos(angles), np.sin(angles)
    for kind, loss in enumerate(_ROUNDING):
        given = AttentionPass(
            *(_HEADS, 1, _KEY, _VALUE, (kind, kind, _PAGE_BYTES, 0), pages, rows, np.array([71, 75], np.int32), qkv),
            *(np.array([1, 0], np.int64), cos, sin, _ROTARY),
            softcap=_SOFTCAP,
        )
        yield given, (halves if kind else numbers).view(np.uint8), loss


def _attend(binding: Binding, isa: str, given: AttentionPass, before: NDArray[np.uint8]) -> tuple[Floats, Floats]:
    """The results (2, _HEADS, _VALUE) of a pass, and the pool after it, which begins as it must in memory."""
    memory = np.empty(before.size + 64, np.uint8)
    pool = memory[-memory.ctypes.data % 64 :][: before.size]
    pool[:] = before
    return binding.attend(isa, given, pool, jobs=2).reshape(2, _HEADS, _VALUE), pool.view(np.float32)


def _attends_alike(binding: Binding, isa: str, given: AttentionPass, pool: NDArray[np.uint8]) -> bool:
    mine, portable = (_attend(binding, name, given, pool) for name in (isa, "portable"))
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(mine, portable, strict=True))


def _attends(binding: Binding, given: AttentionPass, before: NDArray[np.uint8], loss: float) -> bool:
    """Whether a row that sees itself gives its value, and in float32 the other one the softmax of all it sees."""
    results, pool = _attend(binding, "portable", given, before)
    right = bool(np.abs(results[1] - given.qkv[1, -_VALUE:]).max() <= loss)
    if given.layout[0] or not right:
        return right
    numbers = pool.reshape(2, -1)[::-1]  # pages in the order of the sequence
    keys = numbers[:, : _PAGE * _KEY].reshape(2 * _PAGE // 16, _KEY, 16).transpose(0, 2, 1).reshape(-1, _KEY)
    values = numbers[:, _PAGE * _KEY :][:, : _PAGE * 32].reshape(-1, 32)[:, :_VALUE]
    seen = [*range(_BEHIND), *given.extras]
    query = given.qkv[0, : _HEADS * _KEY].reshape(_HEADS, _KEY).copy()
    left, far = query[:, : _ROTARY // 2].copy(), query[:, _ROTARY // 2 : _ROTARY].copy()
    assert given.cos is not None and given.sin is not None
    query[:, : _ROTARY // 2] = left * given.cos[1] - far * given.sin[1]
    query[:, _ROTARY // 2 : _ROTARY] = far * given.cos[1] + left * given.sin[1]
    odds = np.exp(_SOFTCAP * np.tanh(query @ keys[seen].T * np.float32(_KEY**-0.5 / _SOFTCAP)))
    wanted = odds @ values[seen] / odds.sum(axis=1, keepdims=True)
    return bool(np.abs(results[0] - wanted).max() <= 1e-6)
