"""Counts which experts tokens use, as an observer of a backend's passes.

BlockFFN's measures (arXiv:2507.08771): token-level sparsity is 1 less the mean share of a layer's experts that a token
uses, chunk-level sparsity is 1 less the mean share that a run of consecutive tokens uses. Only tokens that stayed in
the text are counted: a pass is counted when the next one has shown which of its rows were kept.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import ExpertUse
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass, PassResult
from edgeinfer.runtime.weights.experts import ExpertCache

# Lengths of the runs of tokens whose union is counted.
CHUNKS = (2, 4, 8)
# Rows that are counted together: one by one would take as long as a small model's layer.
_TOGETHER = 64
_LONGEST = max(CHUNKS)


def active_experts(ids: Ints, experts: int) -> NDArray[np.bool_]:  # (L, S, k) -> (S, L, E)
    """Mask of the experts that each token uses; ids of -1 are none."""
    layers, size, _ = ids.shape
    active = np.zeros((size, layers, experts + 1), np.bool_)
    # What is no expert lands in a column that is cut off.
    active[np.arange(size)[None, :, None], np.arange(layers)[:, None, None], ids] = True
    return active[:, :, :experts]


@dataclass(frozen=True)
class ExpertCounts:
    """Counts of used experts; counts of different times can be added and subtracted."""

    layers: tuple[int, ...]  # the layers that have experts, ascending
    top_k: int
    tokens: int
    usage: Ints  # tokens that used each expert. (L', E)
    runs: Ints  # number of runs of each length of CHUNKS. (3,)
    unions: Ints  # experts that the rows of such runs used together, summed over runs and layers. (3,)

    def __add__(self, other: ExpertCounts) -> ExpertCounts:
        return self._with(other, 1)

    def __sub__(self, other: ExpertCounts) -> ExpertCounts:
        return self._with(other, -1)

    def _with(self, other: ExpertCounts, sign: int) -> ExpertCounts:
        return ExpertCounts(
            self.layers,
            self.top_k,
            self.tokens + sign * other.tokens,
            self.usage + sign * other.usage,
            self.runs + sign * other.runs,
            self.unions + sign * other.unions,
        )

    @property
    def token_sparsity(self) -> float:
        """1 less the mean share of a layer's experts that a token uses; 0 without tokens."""
        return 1 - float(self.usage.sum()) / (self.tokens * self.usage.size) if self.tokens else 0.0

    @property
    def chunk_sparsity(self) -> dict[int, float]:
        """1 less the mean share that runs of tokens use, by their length; without lengths that did not occur."""
        counted = zip(CHUNKS, self.runs.tolist(), self.unions.tolist(), strict=True)
        return {chunk: 1 - union / (runs * self.usage.size) for chunk, runs, union in counted if runs}

    def summary(self) -> ExpertUse:
        experts = self.usage.shape[1]
        return ExpertUse(experts, self.top_k, self.tokens, self.token_sparsity, self.chunk_sparsity)


class ExpertCounter:
    """Counts what passes over one cache used."""

    def __init__(self, decoder: DecoderSpec) -> None:
        assert decoder.moe is not None, "only models with experts have any to count"
        self._experts = decoder.moe.experts
        with_experts = [decoder.experts_of(layer) is not None for layer in range(decoder.num_layers)]
        self._layers = np.flatnonzero(with_experts)
        shape = len(self._layers), self._experts
        nothing = np.zeros(len(CHUNKS), np.int64)
        layers = tuple(self._layers.tolist())
        self._counts = ExpertCounts(layers, decoder.moe.top_k, 0, np.zeros(shape, np.int64), nothing, nothing)
        self._kept: list[Ints] = []  # (L, n, k) each, consecutive rows
        self._last: Ints | None = None  # (L, S, k)
        self._start = 0
        self._before = np.zeros((0, len(self._layers), self._experts), np.bool_)  # rows before the kept ones

    def passed(self, start: int, ids: Ints) -> None:  # (L, S, k)
        """A pass of the whole model over new tokens used these, at rows start.. of the cache."""
        follows = self._keep_last_pass(start)
        if not follows:
            self._count()
            self._before = self._before[:0]
        elif sum(each.shape[1] for each in self._kept) >= _TOGETHER:
            self._count()
        self._last, self._start = ids.copy(), start

    def kept(self, start: int, rows: Sequence[int]) -> None:
        """Keep only these rows of the pass at `start`, in this order."""
        if self._last is not None and start == self._start:
            self._last = self._last[:, list(rows)]

    def counts(self, length: int) -> ExpertCounts:
        """All that was counted so far, with the cache at this length."""
        self._keep_last_pass(length)
        self._count()
        return self._counts

    def _keep_last_pass(self, length: int) -> bool:
        """Takes over the rows of the last pass that the cache still holds; whether `length` follows them."""
        if self._last is None:
            return False
        cached = length - self._start
        # A shorter cache is another text's: what the last pass was of is not known to have stayed.
        if cached > 0:
            self._kept.append(self._last[:, :cached])
        follows = bool(0 <= cached <= self._last.shape[1])
        self._last, self._start = (None, 0) if not follows else (self._last[:, :0], length)
        return follows

    def _count(self) -> None:
        if not self._kept:
            return
        ids = np.concatenate(self._kept, axis=1)[self._layers]  # (L', n, k)
        self._kept.clear()
        active = active_experts(ids, self._experts)  # (n, L', E)
        text, new = np.concatenate([self._before, active]), len(active)
        runs, unions = np.zeros(len(CHUNKS), np.int64), np.zeros(len(CHUNKS), np.int64)
        for place, chunk in enumerate(CHUNKS):
            # Every run of so many tokens that ends in a new one.
            ends = min(new, max(0, len(text) - chunk + 1))
            union = np.zeros((ends, *text.shape[1:]), np.bool_)
            for back in range(chunk):
                union |= text[len(text) - back - ends : len(text) - back]
            runs[place], unions[place] = ends, union.sum()
        self._before = text[-(_LONGEST - 1) :]
        used = active.sum(axis=0, dtype=np.int64)  # (L', E)
        self._counts += ExpertCounts(self._counts.layers, self._counts.top_k, new, used, runs, unions)


class ExpertUseObserver:
    """Counts the experts that the passes over one cache use; those over other caches are not counted. `expert_cache` is
    that of experts that do not all stay in memory."""

    def __init__(self, decoder: DecoderSpec, expert_cache: ExpertCache | None = None) -> None:
        self._counter = ExpertCounter(decoder)
        self.expert_cache = expert_cache
        self._followed: weakref.ref[KVCache] | None = None

    def follow(self, cache: KVCache) -> None:
        self._followed = weakref.ref(cache)

    @property
    def counts(self) -> ExpertCounts:
        """Use of experts by the tokens so far, without rejected drafts."""
        cache = None if self._followed is None else self._followed()
        return self._counter.counts(0 if cache is None else cache.length)

    def use(self, since: ExpertCounts | None = None) -> ExpertUse:
        counts = self.counts if since is None else self.counts - since
        found = counts.summary()
        cache = self.expert_cache
        if cache is None:
            return found
        return dataclasses.replace(
            found, expert_bytes=cache.expert_bytes, resident_bytes=cache.cached_bytes, hit_rate=cache.hit_rate
        )

    def passed(self, cache: KVCache, start: int, batch: Pass, result: PassResult) -> None:
        if self._followed is None or cache is not self._followed():
            return
        # Drafts of cheaper passes are not what the model's tokens use, and passes that go on after one know not all.
        whole = batch.planes == 2 and batch.experts is None and batch.layer_mask is None and batch.hidden is None
        if whole and result.experts is not None:
            self._counter.passed(start, result.experts)

    def kept(self, cache: KVCache, start: int, rows: Sequence[int]) -> None:
        if self._followed is not None and cache is self._followed():
            self._counter.kept(start, rows)


def experts_observer(backend: Backend) -> ExpertUseObserver | None:
    """What counts a backend's use of experts; None where the model has none."""
    return next((each for each in backend.observers if isinstance(each, ExpertUseObserver)), None)
