"""Forgets the middle: keeps the first tokens and the latest ones. StreamingLLM (Xiao et al. 2024): attention rests on
the first tokens whatever they are, so these stay as sinks. Layers with a sliding window of their own lose nothing as
long as it is no longer than what is kept of the latest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import KVCache
from edgeinfer.runtime.kv_cache.context_shift.policy import LayerRotations, Removed

# StreamingLLM's: one may do, four always did.
SINKS = 4
# Share of the context that a context shift frees. What is freed at once is missing from then on: with twice as much,
# stories retold in a context of 256 had a perplexity of 3.6 instead of 2.3 (docs/log). Half as
# much would turn all keys twice as often.
_FREED = 0.125


class WindowPolicy:
    """Implements `ContextShiftPolicy`: the first `sinks` tokens stay, and each shift frees a share of the context."""

    name = "window"

    def __init__(self, spec: DecoderSpec, cache: KVCache, sinks: int = SINKS, freed: float = _FREED) -> None:
        self._spec = spec
        self._cache = cache
        self._sinks = sinks
        self._freed = max(1, int(freed * cache.capacity))

    @staticmethod
    def planned_bytes(spec: DecoderSpec, capacity: int) -> int:
        """Memory of a running context shift: the keys of a layer before, while and after they are turned."""
        return LayerRotations.planned_bytes(spec, capacity) + 7 * capacity * spec.kv_size * 4

    def make_room(self, tokens: Sequence[int]) -> Removed:
        rows = self._cache.length
        if not self._cache.editable:
            self._cache.drop(self._sinks, self._sinks + self._freed)
            return Removed(self._freed)
        kept = np.delete(np.arange(rows), slice(self._sinks, self._sinks + self._freed))
        now = np.arange(len(kept))
        rotations = LayerRotations(self._spec, self._cache.capacity)

        def edit(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:  # (H, n, h) each
            return rotations.moved(layer, keys[:, kept], kept, now), values[:, kept]

        self._cache.rewrite(edit)
        return Removed(self._freed)

    def forget(self) -> None:
        """Nothing is remembered."""
