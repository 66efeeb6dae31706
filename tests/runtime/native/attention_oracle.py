"""Output of edgeinfer.Attention, row by row in double precision, from the contract of pages, without any kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import KVLayer
from edgeinfer.runtime.paging.codecs import ROW_CODECS, find_row_codec
from edgeinfer.runtime.paging.layout import PAGE, PageLayout, PageRows

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
    shared: bool = False  # rows bring queries alone
    still: int = 0  # the first rotated pair that hardly turns

    @property
    def width(self) -> int:
        """Values of a row of queries, keys and values."""
        made = 0 if self.shared else self.kv_heads * (self.key_size + self.value_size)
        return self.heads * self.key_size + made

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return self.scale or 1 / np.sqrt(self.key_size)


@dataclass(frozen=True)
class Tables:
    """Rows of a pass."""

    pages: Integers  # (B, P) pages of each sequence; -1 where there is none
    rows: Integers  # (S, 4) sequence, prefix, first extra, number of extras
    extras: Integers = field(default_factory=lambda: np.zeros(1, np.int32))  # (X,) slots

    def path(self, row: int) -> NDArray[np.int64]:
        """The slots that a row attends to, its own last."""
        _, prefix, first, count = self.rows[row].tolist()
        return np.concatenate([np.arange(prefix), self.extras[first : first + count].astype(np.int64)])

    def places(self, row: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:  # (n,) -> (n,)
        """Places in the pool of slots of a row's sequence."""
        pages: NDArray[np.int64] = self.pages[self.rows[row, 0], slots // PAGE].astype(np.int64)
        return pages * PAGE + slots % PAGE


def make_layout(shape: Shape, keys: str, values: str, layers: int = 1, *, weighed: bool = False) -> PageLayout:
    """Pages for layers of a shape."""
    codecs = (find_row_codec(keys), find_row_codec(values))
    return PageLayout((KVLayer(shape.kv_heads, shape.key_size, shape.value_size),) * layers, *codecs, weighed)


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
    qkv_bias: Floats | None = None  # (width,)


def prepared(
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
    layout: PageLayout,
    pool: NDArray[np.uint8],
    tables: Tables,
    queries: Sequence[Doubles],  # (heads, h) each
) -> Doubles:  # (S, heads v)
    """The attention of every row over what the pool holds after the pass."""
    results = []
    places = np.arange(len(pool) // layout.page_bytes * PAGE)
    held = [part.astype(np.float64) for part in PageRows(layout, pool).read(shape.layer, places)]
    weights_of = layout.groups[0].weights(pool.reshape(-1, layout.page_bytes))[:, shape.layer]  # (pages, H, 64 or 0)
    for row, query in enumerate(queries):
        path = tables.path(row)
        seen = path[max(0, len(path) - shape.window) :] if shape.window else path
        parts = [part[:, tables.places(row, seen)] for part in held]
        for head, q in enumerate(_as_stored(query) if layout.keys.name == "int8" else query):
            keys, values = (part[head // (shape.heads // shape.kv_heads)] for part in parts)
            scores = keys @ q * shape.factor
            if shape.softcap:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            if layout.weighed:
                at = tables.places(row, seen)
                scores = scores + weights_of[at // PAGE, head // (shape.heads // shape.kv_heads), at % PAGE]
            sink = [] if weights.sinks is None else [float(weights.sinks[head])]
            most = max(scores.max(), *sink) if sink else scores.max()
            odds = np.exp(scores - most)
            results.append(odds @ values / (odds.sum() + sum(np.exp(z - most) for z in sink)))
    return np.stack(results).reshape(len(queries), -1)


def _as_stored(query: Doubles) -> Doubles:  # (heads, h) -> (heads, h)
    """Queries of int8 keys are rounded as keys are, so that integers meet."""
    codec = ROW_CODECS["int8"]
    return codec.decode(codec.encode(query.astype(np.float32)), query.shape[1]).astype(np.float64)
