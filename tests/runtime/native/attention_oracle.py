"""What edgeinfer.Attention gives, row by row in double precision: knows the contract of pages, and of no kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["PAGE", "TYPES", "Layout", "Shape", "Tables", "attend", "hadamard_size", "stored_rows", "turned"]

PAGE = 64
TYPES = ("float32", "float16", "int8", "int4")

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int32]


@dataclass(frozen=True)
class Shape:
    """The attributes of a node."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    layer: int = 0
    rotary: int = 0
    interleaved: bool = False
    window: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    epsilon: float = 1e-6

    @property
    def width(self) -> int:
        """Values of a row of queries, keys and values."""
        return self.heads * self.key_size + self.kv_heads * (self.key_size + self.value_size)

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return self.scale or 1 / np.sqrt(self.key_size)


@dataclass(frozen=True)
class Tables:
    """Which rows a pass has.

    Attributes:
        pages: (B, P) pages of each sequence; -1 where there is none.
        rows: (S, 4) sequence, prefix, first extra, number of extras.
        extras: (X,) slots.
    """

    pages: Integers
    rows: Integers
    extras: Integers = field(default_factory=lambda: np.zeros(1, np.int32))

    def path(self, row: int) -> NDArray[np.int64]:
        """The slots that a row attends to, its own last."""
        _, prefix, first, count = self.rows[row].tolist()
        return np.concatenate([np.arange(prefix), self.extras[first : first + count].astype(np.int64)])

    def places(self, row: int, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Page of the pool and position within it of slots of a row's sequence."""
        return self.pages[self.rows[row, 0], slots // PAGE].astype(np.int64), slots % PAGE


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


@dataclass(frozen=True)
class Layout:
    """Where the layers lie in a page: by kv heads, key size and value size of each."""

    key_type: int
    value_type: int
    layers: tuple[tuple[int, int, int], ...]

    @property
    def offsets(self) -> list[int]:
        """The beginning of each layer, and the end of the last."""
        ends = [0]
        for heads, key, value in self.layers:
            head = _up(_key_bytes(self.key_type, key), 64) + _up(_value_bytes(self.value_type, value), 64)
            ends.append(ends[-1] + heads * head)
        return ends

    @property
    def page_bytes(self) -> int:
        """Of all layers."""
        return _up(self.offsets[-1], 4096)

    @property
    def array(self) -> NDArray[np.int64]:
        """The operator's input."""
        return np.array([self.key_type, self.value_type, self.page_bytes, *self.offsets[:-1]], np.int64)

    def head(self, pool: NDArray[np.uint8], page: int, layer: int, head: int) -> tuple[Doubles, Doubles]:
        """Keys (64, h) and values (64, v) of a page as they are stored, still turned."""
        _, key, value = self.layers[layer]
        keys = _up(_key_bytes(self.key_type, key), 64)
        start = page * self.page_bytes + self.offsets[layer]
        start += head * (keys + _up(_value_bytes(self.value_type, value), 64))
        return _keys(pool[start:], self.key_type, key), _values(pool[start + keys :], self.value_type, value)


def _key_bytes(kind: int, size: int) -> int:
    per_position = (4 * size, 2 * size, 4 * -(-size // 4) + 4, 4 * -(-size // 8) + 4 * -(-size // 32))
    return PAGE * per_position[kind]


def _value_bytes(kind: int, size: int) -> int:
    padded = _up(size, 16)
    return PAGE * (4 * padded, 2 * padded, padded + 4, padded // 2 + 4 * -(-size // 32))[kind]


def _keys(part: NDArray[np.uint8], kind: int, size: int) -> Doubles:  # (64, size)
    tile, lane = np.divmod(np.arange(PAGE)[:, None], 16)
    c = np.arange(size)
    if kind < 2:
        values = part[: _key_bytes(kind, size)].view(np.float32 if kind == 0 else np.float16)
        return values[(tile * size + c) * 16 + lane].astype(np.float64)
    if kind == 2:
        whole = part[((tile * -(-size // 4) + c // 4) * 16 + lane) * 4 + c % 4].view(np.int8)
        return _scaled(whole, part[PAGE * 4 * -(-size // 4) :])
    bytes_ = part[((tile * -(-size // 8) + c // 8) * 16 + lane) * 4 + c % 4]
    codes: NDArray[np.uint8] = bytes_ >> np.where(c % 8 < 4, 0, 4).astype(np.uint8) & np.uint8(15)
    return _grouped(codes, part[PAGE * 4 * -(-size // 8) :])


def _values(part: NDArray[np.uint8], kind: int, size: int) -> Doubles:  # (64, size)
    padded, c = _up(size, 16), np.arange(size)
    if kind < 2:
        values = part[: _value_bytes(kind, size)].view(np.float32 if kind == 0 else np.float16)
        return values.reshape(PAGE, padded)[:, :size].astype(np.float64)
    if kind == 2:
        whole = part[: PAGE * padded].view(np.int8).reshape(PAGE, padded)[:, :size]
        return _scaled(whole, part[PAGE * padded :])
    run = np.where(c // 32 * 32 + 32 <= padded, 32, 16)
    within = c - c // 32 * 32
    bytes_ = part[: PAGE * padded // 2].reshape(PAGE, padded // 2)[:, c // 32 * 16 + within % (run // 2)]
    codes: NDArray[np.uint8] = bytes_ >> np.where(within < run // 2, 0, 4).astype(np.uint8) & np.uint8(15)
    return _grouped(codes, part[PAGE * padded // 2 :])


def _scaled(codes: NDArray[np.int8], part: NDArray[np.uint8]) -> Doubles:  # (64, size) -> (64, size)
    scaled: Doubles = codes * part[: PAGE * 4].view(np.float32).astype(np.float64)[:, None]
    return scaled


def _grouped(codes: NDArray[np.uint8], part: NDArray[np.uint8]) -> Doubles:  # (64, size) -> (64, size)
    groups = np.arange(codes.shape[1]) // 32
    pairs = part[: PAGE * 4 * (groups[-1] + 1)].view(np.float16).astype(np.float64).reshape(PAGE, -1, 2)
    scaled: Doubles = codes * pairs[:, groups, 0] + pairs[:, groups, 1]
    return scaled


def hadamard_size(size: int) -> int:
    """The block of the transform of a head of that size."""
    return min(size & -size, 128)


def turned(rows: NDArray[np.floating], kind: int) -> Doubles:  # (..., size) -> (..., size)
    """Rows as their type stores them, by the transform's matrix; its own inverse."""
    size = hadamard_size(rows.shape[-1]) if kind >= 2 else 1
    matrix: Doubles = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = rows.astype(np.float64).reshape(*rows.shape[:-1], -1, size)
    result: Doubles = (blocks @ matrix / np.sqrt(size)).reshape(rows.shape)
    return result


def _normed(rows: Doubles, weight: Floats | None, epsilon: float) -> Doubles:  # (heads, h)
    if weight is None:
        return rows
    shaped = rows.reshape(-1, weight.size)
    normed: Doubles = shaped / np.sqrt(np.mean(shaped**2, axis=1, keepdims=True) + epsilon) * weight
    return normed.reshape(rows.shape)


def _rotated(rows: Doubles, shape: Shape, cos: Doubles, sin: Doubles) -> Doubles:  # (heads, h), (rotary / 2,)
    half, out = shape.rotary // 2, rows.copy()
    first = slice(0, shape.rotary, 2) if shape.interleaved else slice(0, half)
    second = slice(1, shape.rotary, 2) if shape.interleaved else slice(half, shape.rotary)
    out[:, first] = rows[:, first] * cos - rows[:, second] * sin
    out[:, second] = rows[:, second] * cos + rows[:, first] * sin
    return out


@dataclass(frozen=True)
class Weights:
    """The optional inputs of a node."""

    cos: Floats | None = None  # (P', rotary / 2)
    sin: Floats | None = None
    q_norm: Floats | None = None  # (h,) or (heads h,)
    k_norm: Floats | None = None
    sinks: Floats | None = None  # (heads,)


def stored_rows(
    shape: Shape, weights: Weights, qkv: Floats, positions: Sequence[int]
) -> Iterator[tuple[Doubles, Doubles, Doubles]]:  # (heads, h), (kv_heads, h), (kv_heads, v)
    """Queries, keys and values of each row (S, width), normed and rotated."""
    ends = np.cumsum([shape.heads * shape.key_size, shape.kv_heads * shape.key_size])
    for row, position in zip(qkv.astype(np.float64), positions, strict=True):
        q, k, v = np.split(row, ends)
        q = _normed(q.reshape(shape.heads, -1), weights.q_norm, shape.epsilon)
        k = _normed(k.reshape(shape.kv_heads, -1), weights.k_norm, shape.epsilon)
        if shape.rotary and weights.cos is not None and weights.sin is not None:
            cos, sin = weights.cos[position].astype(np.float64), weights.sin[position].astype(np.float64)
            q, k = _rotated(q, shape, cos, sin), _rotated(k, shape, cos, sin)
        yield q, k, v.reshape(shape.kv_heads, -1)


def attend(
    shape: Shape,
    weights: Weights,
    layout: Layout,
    pool: NDArray[np.uint8],
    tables: Tables,
    queries: Sequence[Doubles],  # (heads, h) each
) -> Doubles:  # (S, heads v)
    """The attention of every row over what the pool holds after the pass."""
    results = []
    used = sorted(set(tables.pages[tables.pages >= 0].tolist()))
    place = np.full(max(used) + 1, -1)
    place[used] = np.arange(len(used))
    heads = [[layout.head(pool, page, shape.layer, kv) for page in used] for kv in range(shape.kv_heads)]
    held = [(np.stack([k for k, _ in parts]), np.stack([v for _, v in parts])) for parts in heads]
    for row, query in enumerate(queries):
        path = tables.path(row)
        seen = path[max(0, len(path) - shape.window) :] if shape.window else path
        pages, at = tables.places(row, seen)
        for head, q in enumerate(turned(query, layout.key_type)):
            keys, values = (part[place[pages], at] for part in held[head // (shape.heads // shape.kv_heads)])
            scores = keys @ q * shape.factor
            if shape.softcap:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            sink = [] if weights.sinks is None else [float(weights.sinks[head])]
            most = max(scores.max(), *sink) if sink else scores.max()
            odds = np.exp(scores - most)
            total = odds.sum() + sum(np.exp(z - most) for z in sink)
            results.append(turned(odds @ values / total, layout.value_type))
    return np.stack(results).reshape(len(queries), -1)
