"""Merges neighbours that are alike, chunk by chunk and head by head.

Chelsea: within a chunk of rows every second one is matched to the most similar of the others, and the most similar
pairs of all chunks are merged, weighted by how many tokens each row stands for. A merged row gets the share of
attention of all its tokens: the logarithm of their number is added to its scores, where the cache has weights. A mean
of keys is shorter than they are, which takes from its share besides: merged keys are therefore as long as those that
they stand for are on average.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import KVCache
from edgeinfer.runtime.kv_cache.context_shift.policy import (
    Indices,
    LayerRotations,
    Removed,
    cosines,
    merge_rows,
    weigh_rows,
    weights_bytes,
)
from edgeinfer.runtime.kv_cache.context_shift.window import SINKS


@dataclass(frozen=True)
class ClusterOptions:
    """Options of merging. Defaults were chosen among some twenty, by docs/log."""

    sinks: int = SINKS  # first rows, which stay as they are
    freed: float = 0.0625  # share of the context that each context shift frees
    recent: float = 0.1  # share of the context, its latest tokens, that stays as it is
    chunk: int = 64  # rows among which alike ones are looked for


class ClusterPolicy:
    """Implements `ContextShiftPolicy`."""

    name = "cluster"

    def __init__(self, spec: DecoderSpec, cache: KVCache, options: ClusterOptions | None = None) -> None:
        self._spec = spec
        self._cache = cache
        self._options = options or ClusterOptions()
        self._freed, self._recent = _sizes(self._options, cache.capacity)
        self._counts: dict[int, Floats] = {}  # by layer: tokens that its rows stood for after the last context shift

    @staticmethod
    def planned_bytes(spec: DecoderSpec, capacity: int) -> int:
        """Memory kept between context shifts, and the memory of a running one."""
        freed, _ = _sizes(ClusterOptions(), capacity)
        counts = spec.num_layers * spec.num_kv_heads * (capacity - freed) * 4
        rows = 8 * capacity * spec.kv_size * 4 + 2 * capacity * spec.num_kv_heads * 4
        return counts + LayerRotations.planned_bytes(spec, capacity) + rows + weights_bytes(spec, capacity)

    def make_room(self, tokens: Sequence[int]) -> Removed:
        rows = self._cache.length
        rotations = LayerRotations(self._spec, self._cache.capacity)
        old, new, zero = np.arange(rows), np.arange(rows - self._freed), np.zeros(1, np.intp)
        remembered: dict[int, Floats] = {}

        def edit(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:  # (H, n, h) each
            counts = np.ones(keys.shape[:2], np.float32)
            if (known := self._counts.get(layer)) is not None:
                counts[:, : known.shape[1]] = known
            moved = rotations.moved(layer, keys, old, zero)
            lengths = np.linalg.norm(moved, axis=-1, keepdims=True)
            both = np.concatenate([moved, values, lengths], axis=-1)  # (H, n, 2 h + 1)
            kept = np.stack([self._merge(b, c) for b, c in zip(both, counts, strict=True)])  # (H, n')
            heads = np.arange(len(kept))[:, None]
            remembered[layer], both = counts[heads, kept], both[heads, kept]
            size = keys.shape[-1]
            return rotations.moved(layer, both[..., :size], zero, new), both[..., size:-1]

        self._cache.rewrite(edit)
        weigh_rows(self._cache, remembered)
        self._counts = remembered
        return Removed(self._freed, self._freed)

    def _merge(self, rows: Floats, counts: Floats) -> Indices:  # (n, 2 h + 1), (n,) -> (n',)
        """Merges a head's most similar pairs, in place, and gives the rows that stay, in order."""
        options, size = self._options, rows.shape[1] // 2
        middle = np.arange(options.sinks, len(rows) - self._recent)
        sources, targets, likeness = [], [], []
        for start in range(0, len(middle), options.chunk):
            chunk = middle[start : start + options.chunk]
            a, b = chunk[1::2], chunk[::2]
            if not len(a):
                continue
            similar = cosines(rows[a, :size], rows[b, :size])
            best = similar.argmax(axis=1)
            sources.append(a)
            targets.append(b[best])
            likeness.append(similar[np.arange(len(a)), best])
        most = np.argsort(-np.concatenate(likeness), kind="stable")[: self._freed]
        leaving, into = np.concatenate(sources)[most], np.concatenate(targets)[most]
        merge_rows(rows, counts, leaving, into)
        merged = np.unique(into)
        keys = rows[merged, :size]
        means = np.maximum(np.linalg.norm(keys, axis=-1), np.float32(1e-20))
        rows[merged, :size] = keys * (rows[merged, -1] / means)[:, None]
        return np.delete(np.arange(len(rows)), leaving)

    def forget(self) -> None:
        self._counts.clear()


def _sizes(options: ClusterOptions, capacity: int) -> tuple[int, int]:
    """Rows that a context shift frees and latest rows that stay, in a cache of so many tokens."""
    freed, recent = max(1, int(options.freed * capacity)), int(options.recent * capacity)
    # Every second row between sinks and recent ones can leave.
    return min(freed, (capacity - recent - options.sinks) // 2), recent
