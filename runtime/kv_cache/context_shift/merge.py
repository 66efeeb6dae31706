"""Evicts what is attended to least, head by head, and merges it into what is like it; knows nothing of text.

EMS (Evict then Merge Similar): a row's score is the attention it got at every overflow so far, older ones counting
less, and from the latest tokens. The lowest rows leave; each is merged into the most similar row that stays if the two
are similar enough, and dropped otherwise. Every head keeps as many rows, each its own, so the cache stays a rectangle.
Scores are sampled at overflows only: to observe every token's attention would mean a pass of its own for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeinfer.bundle import Bundle, DecoderSpec
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.kv_cache.context_shift.contracts import Removed
from edgeinfer.runtime.kv_cache.context_shift.merging import Indices, cosines, merge_rows
from edgeinfer.runtime.kv_cache.context_shift.observation import Observer, attention
from edgeinfer.runtime.kv_cache.context_shift.rotation import Rotation
from edgeinfer.runtime.kv_cache.context_shift.window import SINKS

__all__ = ["MergeOptions", "MergePolicy"]


@dataclass(frozen=True)
class MergeOptions:
    """What decides who leaves. Defaults were chosen among some twenty, by docs/LOG.md.

    Attributes:
        sinks: first rows, which stay and into which nothing is merged.
        freed: share of the context that each overflow frees.
        observed: latest tokens whose attention is observed.
        recent: share of the context, its latest tokens, that stays whatever is attended to; no fewer than `observed`.
        kept_score: what an overflow leaves of the scores before it.
        pooled: a row's score is the highest among so many around it, so that words stay whole; odd.
        similar: least cosine of two keys, before rotation, that are merged.
    """

    sinks: int = SINKS
    freed: float = 0.125
    observed: int = 16
    recent: float = 0.25
    kept_score: float = 0.5
    pooled: int = 5
    similar: float = 0.9


@dataclass(frozen=True)
class _Past:
    """Of a layer's rows as the last overflow left them: what attention they got, and how many tokens they stand for."""

    scores: Floats  # (H, n)
    counts: Floats  # (H, n)


class MergePolicy:
    """Implements `contracts.OverflowPolicy`.

    Args:
        bundle: with a decoder description and a table of its weights.
        backend: whose cache is shortened; must skip layers and resume from hidden states.
        options: what decides who leaves.
    """

    name = "merge"

    def __init__(self, bundle: Bundle, backend: Backend, options: MergeOptions | None = None) -> None:
        assert bundle.manifest.decoder is not None, "whoever makes a policy checks that"
        self._spec = bundle.manifest.decoder
        self._backend = backend
        self._observer = Observer(bundle, backend)
        self._options = options or MergeOptions()
        self._freed, self._observed, self._recent = _sizes(self._options, backend.cache.capacity)
        self._past: dict[int, _Past] = {}

    @staticmethod
    def planned_bytes(spec: DecoderSpec, capacity: int) -> int:
        """What is remembered between overflows, and what one takes while it runs."""
        options = MergeOptions()
        freed, observed, _ = _sizes(options, capacity)
        past = 2 * spec.num_layers * spec.num_kv_heads * (capacity - freed) * 4
        group = spec.num_heads // spec.num_kv_heads
        scores = 4 * group * observed * capacity * 4
        similar = 2 * freed * capacity * 4
        rows = 7 * capacity * spec.kv_size * 4
        tables = Rotation.planned_bytes(spec.rope, capacity)
        return past + Observer.planned_bytes(spec, observed) + tables + max(scores, similar) + rows

    def make_room(self, tokens: Sequence[int]) -> Removed:
        """Evicts and merges rows of every head."""
        queries = self._observer.queries(tokens[-self._observed :])
        rows, merged = self._backend.cache.length, 0
        rotation = Rotation(self._spec.rope, self._backend.cache.capacity)
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

        self._backend.cache.rewrite(edit)
        self._past = past
        return Removed(self._freed, merged / (self._spec.num_layers * self._spec.num_kv_heads))

    def _scored(self, layer: int, received: Floats) -> tuple[Floats, Floats]:  # (H, n) -> 2 x (H, n)
        """Scores and counts of a layer's rows."""
        scores, counts = received.copy(), np.ones_like(received)
        if (past := self._past.get(layer)) is not None:
            known = past.scores.shape[1]
            scores[:, :known] += self._options.kept_score * past.scores
            counts[:, :known] = past.counts
        return scores, counts

    def _kept(self, scores: Floats) -> Indices:  # (n,) -> (n',)
        """The rows that stay, in order."""
        rows, first, last = len(scores), self._options.sinks, len(scores) - self._recent
        middle = _pooled(scores, self._options.pooled)[first:last]
        # Stable: of rows with one score the older leaves.
        leaving = first + np.argsort(middle, kind="stable")[: self._freed]
        return np.delete(np.arange(rows), leaving)

    def _merge(self, rows: Floats, counts: Floats, kept: Indices) -> int:  # (n, 2 h), (n,), (n',)
        """Merges a head's rows that leave into those that stay, in place, and says how many were."""
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
        """Forgets all scores."""
        self._past.clear()


def _sizes(options: MergeOptions, capacity: int) -> tuple[int, int, int]:
    """Rows that an overflow frees, tokens it observes, latest rows that stay, in a cache of so many tokens."""
    freed = max(1, int(options.freed * capacity))
    # No more than came since the last overflow: rows of earlier tokens could not be computed again.
    observed = min(options.observed, freed)
    return freed, observed, max(observed, int(options.recent * capacity))


def _pooled(scores: Floats, width: int) -> Floats:  # (n,) -> (n,)
    padded = np.pad(scores, width // 2, mode="edge")
    pooled: Floats = np.lib.stride_tricks.sliding_window_view(padded, width).max(axis=1)
    return pooled
