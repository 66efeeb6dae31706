"""Evicts the rows with the least attention, head by head, and merges them into similar ones.

EMS (Evict then Merge Similar): a row's score is the attention it got at every context shift so far, older ones counting
less, and from the latest tokens. The lowest rows leave; each is merged into the most similar row that stays if the two
are similar enough, and dropped otherwise. Every head keeps as many rows, each its own, so the cache stays a rectangle.
Scores are sampled at context shifts only: to observe every token's attention would mean a pass of its own for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.records import dataclass
from edgeinfer.nn.arithmetic import rope_tables
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass
from edgeinfer.runtime.kv_cache.context_shift.policy import (
    Indices,
    Removed,
    Rotation,
    cosines,
    merge_rows,
    weigh_rows,
    weights_bytes,
)
from edgeinfer.runtime.kv_cache.context_shift.window import SINKS

# Rows of a projection multiplied out at once, so that a large model's is never there as a whole.
_ROWS = 512
_NO_ROWS = np.zeros(0, np.int64)


class Observer:
    """Queries of the tokens that were fed last, by a backend that can skip layers and resume from hidden states. Its
    passes run at once and alone: each has one layer, where no other sequence's pass has."""

    def __init__(self, bundle: Bundle, backend: Backend, cache: KVCache) -> None:
        assert bundle.manifest.decoder is not None, "whoever makes an observer checks that"
        self._bundle = bundle
        self._spec = bundle.manifest.decoder
        self._backend, self._cache = backend, cache

    @staticmethod
    def planned_bytes(spec: DecoderSpec, tokens: int) -> int:
        """Bytes of the queries of so many tokens in all layers, and of making them."""
        queries = spec.num_layers * tokens * spec.q_size
        weights = 2 * min(_ROWS, spec.q_size) * spec.hidden_size
        return 4 * (queries + 4 * tokens * (spec.q_size + spec.hidden_size) + weights)

    def queries(self, tokens: Sequence[int]) -> list[Floats]:  # L x (H, g, w, h)
        """Rotated queries of the last tokens, grouped by the key head they attend with, of every layer."""
        layers, states = self._spec.num_layers, self._entering(tokens)
        start = self._cache.length - len(tokens)
        tables = rope_tables(self._spec.rope, start + len(tokens), self._cache.capacity)
        cos, sin = (table[start:] for table in tables)  # (w, r/2)
        return [self._query(layer, state, cos, sin) for layer, state in zip(range(layers), states, strict=True)]

    def _entering(self, tokens: Sequence[int]) -> Iterator[Floats]:  # L x (w, D), one at a time
        """The hidden states before each layer. The last layer is not run, but its rows are as they were."""
        layers, start = self._spec.num_layers, self._cache.length - len(tokens)
        ids, places = np.array(tokens, np.int64), np.arange(start, start + len(tokens))
        hidden: Floats | None = None
        for layer in range(layers):
            mask = np.arange(2 * layers) // 2 == layer - 1  # none before the first: what comes out are the embeddings
            self._cache.trim(start)
            layers_pass = Pass(ids, places, _NO_ROWS, layer_mask=mask, hidden=hidden)
            (output,) = self._backend.forward([(self._cache, layers_pass)])
            assert output.hidden is not None, "a backend that resumes gives hidden states"
            hidden = output.hidden.copy()
            yield hidden

    def _query(self, layer: int, state: Floats, cos: Floats, sin: Floats) -> Floats:  # (w, D) -> (H, g, w, h)
        spec, name = self._spec, f"layers.{layer}.attn.qkv"
        q = self._projected(name, self._normed(state, f"layers.{layer}.attn_norm"))
        if spec.qkv_bias:
            q += self._bundle.tensor(f"{name}_bias")[: spec.q_size]
        q = q.reshape(len(state), spec.num_heads, spec.head_dim)
        if spec.qk_norm:
            q = self._normed(q, f"layers.{layer}.attn.q_norm")
        half = spec.rope.dim // 2
        a, b = q[..., :half].copy(), q[..., half : 2 * half]
        q[..., :half] = a * cos[:, None] - b * sin[:, None]
        q[..., half : 2 * half] = b * cos[:, None] + a * sin[:, None]
        group = spec.num_heads // spec.num_kv_heads
        grouped = q.reshape(len(state), spec.num_kv_heads, group, spec.head_dim)
        return np.ascontiguousarray(grouped.transpose(1, 2, 0, 3))

    def _projected(self, name: str, x: Floats) -> Floats:  # (w, D) -> (w, q_size)
        entry, size = self._bundle.manifest.tensor(name), self._spec.q_size
        if entry.bits == 32:
            whole: Floats = x @ self._bundle.tensor(name)[:size].T
            return whole
        out = np.empty((len(x), size), np.float32)
        for start in range(0, size, _ROWS):
            stop = min(start + _ROWS, size)
            out[:, start:stop] = x @ self._bundle.dense(entry, start, stop).T
        return out

    def _normed(self, x: Floats, name: str) -> Floats:  # (..., d) -> (..., d)
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self._spec.norm_eps))
        normed: Floats = x * scale * self._bundle.tensor(name)
        return normed


def attention(queries: Floats, keys: Floats) -> Floats:  # (H, g, w, h), (H, n, h) -> (H, n)
    """Attention of the last w rows to each row: the mean over heads of a group and over the rows that may see it."""
    _, group, size, head_dim = queries.shape
    rows = keys.shape[1]
    seen = np.arange(rows) <= np.arange(rows - size, rows)[:, None]  # (w, n)
    received = np.zeros(keys.shape[:2], np.float32)
    for head, key in enumerate(keys):
        scores = queries[head].reshape(group * size, head_dim) @ key.T / np.float32(np.sqrt(head_dim))
        scores = np.where(seen, scores.reshape(group, size, rows), np.float32(-np.inf))  # (g, w, n)
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        received[head] = (powers / powers.sum(axis=-1, keepdims=True)).sum(axis=(0, 1))
    means: Floats = received / (group * seen.sum(axis=0)).astype(np.float32)
    return means


@dataclass(frozen=True)
class MergeOptions:
    """Options of the choice of rows. Defaults were chosen among some twenty, by docs/log."""

    sinks: int = SINKS  # first rows, which stay and into which nothing is merged
    freed: float = 0.125  # share of the context that each context shift frees
    observed: int = 16  # latest tokens whose attention is observed
    # Share of the context, its latest tokens, that stays whatever is attended to; no fewer than `observed`.
    recent: float = 0.25
    kept_score: float = 0.5  # share of the earlier scores that a context shift keeps
    pooled: int = 5  # a row's score is the highest among so many around it, so that words stay whole; odd
    similar: float = 0.9  # least cosine of two keys, before rotation, that are merged


@dataclass(frozen=True)
class _Past:
    """A layer's rows as the last context shift left them: their attention, and how many tokens they stand for."""

    scores: Floats  # (H, n)
    counts: Floats  # (H, n)


class MergePolicy:
    """Implements `ContextShiftPolicy`."""

    name = "merge"

    def __init__(self, bundle: Bundle, backend: Backend, cache: KVCache, options: MergeOptions | None = None) -> None:
        assert bundle.manifest.decoder is not None, "whoever makes a policy checks that"
        self._spec = bundle.manifest.decoder
        self._cache = cache
        self._observer = Observer(bundle, backend, cache)
        self._options = options or MergeOptions()
        self._freed, self._observed, self._recent = _sizes(self._options, cache.capacity)
        self._past: dict[int, _Past] = {}

    @staticmethod
    def planned_bytes(spec: DecoderSpec, capacity: int) -> int:
        options = MergeOptions()
        freed, observed, _ = _sizes(options, capacity)
        past = 2 * spec.num_layers * spec.num_kv_heads * (capacity - freed) * 4
        group = spec.num_heads // spec.num_kv_heads
        scores = 4 * group * observed * capacity * 4
        similar = 2 * freed * capacity * 4
        rows = 7 * capacity * spec.kv_size * 4
        tables = Rotation.planned_bytes(spec.rope, capacity)
        shift = Observer.planned_bytes(spec, observed) + tables + max(scores, similar) + rows
        return past + shift + weights_bytes(spec, capacity)

    def make_room(self, tokens: Sequence[int]) -> Removed:
        queries = self._observer.queries(tokens[-self._observed :])
        rows, merged = self._cache.length, 0
        rotation = Rotation(self._spec.rope, self._cache.capacity)
        old, new, zero = np.arange(rows), np.arange(rows - self._freed), np.zeros(1, np.intp)
        past: dict[int, _Past] = {}

        def edit(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:  # (H, n, h) each
            nonlocal merged
            scores, counts = self._scored(layer, attention(queries[layer], keys))
            both = np.concatenate([rotation.moved(keys, old, zero), values], axis=-1)  # (H, n, 2 h)
            kept = np.stack([self._kept(s) for s in scores])  # (H, n')
            for head in range(len(kept)):
                merged += self._merge(both[head], counts[head], kept[head])
            heads = np.arange(len(kept))[:, None]
            past[layer], both = _Past(scores[heads, kept], counts[heads, kept]), both[heads, kept]
            size = keys.shape[-1]
            return rotation.moved(both[..., :size], zero, new), both[..., size:]

        self._cache.rewrite(edit)
        weigh_rows(self._cache, {layer: each.counts for layer, each in past.items()})
        self._past = past
        return Removed(self._freed, merged / (self._spec.num_layers * self._spec.num_kv_heads))

    def _scored(self, layer: int, received: Floats) -> tuple[Floats, Floats]:  # (H, n) -> 2 x (H, n)
        scores, counts = received.copy(), np.ones_like(received)
        if (past := self._past.get(layer)) is not None:
            known = past.scores.shape[1]
            scores[:, :known] += self._options.kept_score * past.scores
            counts[:, :known] = past.counts
        return scores, counts

    def _kept(self, scores: Floats) -> Indices:  # (n,) -> (n',)
        rows, first, last = len(scores), self._options.sinks, len(scores) - self._recent
        padded = np.pad(scores, self._options.pooled // 2, mode="edge")
        pooled = np.lib.stride_tricks.sliding_window_view(padded, self._options.pooled).max(axis=1)
        middle = pooled[first:last]
        # Stable: of rows with one score the older leaves.
        leaving = first + np.argsort(middle, kind="stable")[: self._freed]
        return np.delete(np.arange(rows), leaving)

    def _merge(self, rows: Floats, counts: Floats, kept: Indices) -> int:  # (n, 2 h), (n,), (n',)
        """Merges a head's evicted rows into the remaining ones, in place, and returns how many were merged."""
        leaving = np.delete(np.arange(len(rows)), kept)
        into = kept[self._options.sinks :]
        size = rows.shape[1] // 2
        similar = cosines(rows[leaving, :size], rows[into, :size])  # (e, n' - sinks)
        best = similar.argmax(axis=1)
        close = similar[np.arange(len(leaving)), best] >= self._options.similar
        sources, targets = leaving[close], into[best[close]]
        merge_rows(rows, counts, sources, targets)
        return len(sources)

    def forget(self) -> None:
        self._past.clear()


def _sizes(options: MergeOptions, capacity: int) -> tuple[int, int, int]:
    """Rows that a context shift frees, tokens it observes, latest rows that stay, in a cache of so many tokens."""
    freed = max(1, int(options.freed * capacity))
    # No more than came since the last context shift: rows of earlier tokens could not be computed again.
    observed = min(options.observed, freed)
    return freed, observed, max(observed, int(options.recent * capacity))
