"""Finds the blocks that replies can skip, how unsure a small model is, and the layer that drafting can leave after.

An exit is scored as SWIFT does: one pass of the first layers over text of the target's tells their match rate, the
share of positions where their most likely token is the whole model's. What counts is tokens per second, worked out from
match rate and measured costs instead of by generating.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import CapabilityError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass
from edgeinfer.runtime.decoding.sequence import run_alone
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts, measure_costs
from edgeinfer.runtime.layer_skip.calibrated import SKIP_LEVELS, SkipLevels, kept_layers, layers_mask
from edgeinfer.runtime.layer_skip.entropy import ENTROPY, Entropies, rolling_means
from edgeinfer.runtime.layer_skip.reduced_compute import ReducedComputeStrategies
from edgeinfer.runtime.layer_skip.strategy import Mask, entropy_bits
from edgeinfer.runtime.profile.drafting import TunedDrafting

Progress = Callable[[int, int], None]

# Tokens of each reply that are read: logits of as many rows are in memory at once.
_READ = 48
# Likeliest tokens by which predictions are compared; all others count as one.
_TOP = 256
# Units that are tried at each step where trying all would take too long, and exchanges tried after it.
_TRIED, _EXCHANGED = 8, 4
# Speed-ups of the evenly spaced sets that take part.
_EVEN = (1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
# Tokens of a prompt per pass.
_CHUNK = 64


def search_skip_levels(
    backend: Backend,
    cache: KVCache,
    samples: Sequence[Sample],
    costs: BlockCosts,
    *,
    granularity: int = 1,
    evaluations: int = 400,
    progress: Progress | None = None,
) -> SkipLevels:
    """Search sets of blocks to skip, by texts of the model's own; empties the cache."""
    units = skip_units(backend.geometry.num_layers, granularity, evaluations)
    search = _SkipSearch(_LossScorer(backend, cache, samples), costs, units, evaluations, progress)
    search.run()
    cache.trim(0)
    return search.ladder()


def calibrate_skips(
    reduced: ReducedComputeStrategies,
    samples: Sequence[Sample],
    *,
    granularity: int,
    evaluations: int,
    progress: Progress | None,
) -> tuple[SkipLevels, BlockCosts]:
    """Searches the sets of blocks of "calibrated", keeps and uses them; errors as `search_skip_levels`."""
    costs, sequence = reduced.block_costs(), reduced.sequence
    try:
        levels = search_skip_levels(
            sequence.backend,
            sequence.cache,
            samples,
            costs,
            granularity=granularity,
            evaluations=evaluations,
            progress=progress,
        )
    finally:
        sequence.forget()
    reduced.keep(SKIP_LEVELS, levels)
    return levels, costs


def calibrate_entropy(reduced: ReducedComputeStrategies, samples: Sequence[Sample]) -> Entropies:
    """Measure how unsure the small model is on replies of the large one, and keep that."""
    small, means = reduced.require_small(), list[float]()
    for sample in samples:
        text: list[int] = [*sample.prompt]
        small.begin(text)
        bits: list[float] = []
        for token in sample.reply:
            logits = run_alone(small.after(text))
            if logits is None:
                break
            bits.append(entropy_bits(logits))
            text.append(token)
        means += rolling_means(bits)
    entropies = Entropies(means)
    reduced.keep(ENTROPY, entropies)
    return entropies


def skip_units(num_layers: int, granularity: int, evaluations: int) -> NDArray[np.bool_]:  # (U, 2 L)
    """Blocks that are skipped together: attention blocks of a group of layers, and its MLP blocks."""
    if min(granularity, evaluations) < 1:
        raise UsageError("A search needs a granularity and a number of evaluations.", "Give numbers of at least 1.")
    layer, is_mlp = np.arange(2 * num_layers) // 2, np.arange(2 * num_layers) % 2
    groups = range(-(-num_layers // granularity))
    return np.array([(layer // granularity == group) & (is_mlp == kind) for group in groups for kind in (0, 1)])


class _LossScorer:
    """Loss of any mask: divergence from the whole model, over its likeliest tokens and all others together."""

    def __init__(self, backend: Backend, cache: KVCache, samples: Sequence[Sample]) -> None:
        self._texts = SampleTexts(backend, cache, samples, _READ)
        self._whole: list[
            tuple[NDArray[np.int64], NDArray[np.float64]]
        ] = []  # tokens and probabilities (S, K), (S, K + 1)
        for logits in self._texts.read(np.ones(2 * backend.geometry.num_layers, np.bool_)):
            top = min(_TOP, logits.shape[1] - 1)
            likeliest = np.argpartition(-logits, top, axis=1)[:, :top]
            self._whole.append((likeliest, _probabilities(logits, likeliest)))

    def __call__(self, layer_mask: Mask) -> float:
        """Mean over all tokens, in nats; a little less than by all tokens apart."""
        total = 0.0
        for logits, (likeliest, whole) in zip(self._texts.read(layer_mask), self._whole, strict=True):
            total += float((whole * (np.log(whole) - np.log(_probabilities(logits, likeliest)))).sum())
        return total / self._texts.positions


def _probabilities(logits: Floats, tokens: NDArray[np.int64]) -> NDArray[np.float64]:  # (S, V), (S, K) -> (S, K + 1)
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = np.take_along_axis(shifted, tokens, axis=1).astype(np.float64)
    probabilities /= shifted.sum(axis=1, dtype=np.float64)[:, None]
    rest = 1 - probabilities.sum(axis=1, keepdims=True)
    # What rounds to nothing is still possible.
    possible: NDArray[np.float64] = np.maximum(np.concatenate([probabilities, rest], axis=1), 1e-12)
    return possible


class _SkipSearch:
    """Sets of units that were scored, by which units run. (U,)"""

    def __init__(
        self,
        scorer: _LossScorer,
        costs: BlockCosts,
        units: NDArray[np.bool_],  # (U, 2 L), attention and MLP of a group of layers in turn
        evaluations: int,
        progress: Progress | None,
    ) -> None:
        self._scorer = scorer
        self._costs = costs
        self._units = units
        self._most = evaluations
        self._progress = progress
        # Noise must not make a block cost nothing.
        self._saves = np.maximum(units @ np.array(costs.blocks), 1e-9)
        self._scores: dict[bytes, float] = {np.ones(len(units), np.bool_).tobytes(): 0.0}

    def run(self) -> None:
        """Scores sets until all but one unit are left out, or as many were scored as may be."""
        groups = len(self._units) // 2
        for speedup in _EVEN:
            self._score(layers_mask(groups, kept_layers(groups, speedup)))
        running = np.ones(len(self._units), np.bool_)
        alone = {unit: self._score(_without(running, unit)) for unit in range(len(running))}
        while running.sum() > 1 and len(self._scores) < self._most:
            order = sorted(np.flatnonzero(running).tolist(), key=lambda unit: alone[unit] / self._saves[unit])
            loss = self._score(running)
            # All of them while there is time for it: each step looks at most units again.
            left = self._most - len(self._scores)
            tried = order if left > len(running) ** 2 // 2 else order[:_TRIED]
            gains = [(self._score(_without(running, unit)) - loss) / float(self._saves[unit]) for unit in tried]
            running = self._exchanged(_without(running, tried[int(np.argmin(gains))]), order)

    def _exchanged(self, running: NDArray[np.bool_], order: Sequence[int]) -> NDArray[np.bool_]:
        """The set, or the best with one unit back and another of its kind left out in its place."""
        best, best_loss = running, self._score(running)
        for back in np.flatnonzero(~running).tolist():
            others = [unit for unit in order if running[unit] and unit % 2 == back % 2][:_EXCHANGED]
            for out in others:
                changed = _without(running, out)
                changed[back] = True
                loss = self._score(changed)
                if loss < best_loss:
                    best, best_loss = changed, loss
        return best

    def _score(self, running: NDArray[np.bool_]) -> float:
        key = running.tobytes()
        if key not in self._scores:
            if len(self._scores) >= self._most:
                return float("inf")
            self._scores[key] = self._scorer(self._mask(running))
            if self._progress is not None:
                self._progress(len(self._scores), self._most)
        return self._scores[key]

    def _mask(self, running: NDArray[np.bool_]) -> Mask:
        mask: Mask = np.logical_not(self._units[~running].any(axis=0))
        return mask

    def ladder(self) -> SkipLevels:
        """The sets that no other set beats."""
        masks = [(self._mask(np.frombuffer(key, np.bool_)), loss) for key, loss in self._scores.items()]
        best: list[tuple[float, Mask]] = []
        # From the fastest on; of equally fast ones the better first.
        for mask, loss in sorted(masks, key=lambda each: (self._costs.ms(each[0]), each[1])):
            if not best or loss < best[-1][0]:
                best.append((loss, mask))
        if not best[-1][1].all():
            # Where leaving out some blocks costs nothing, the whole model is still a choice.
            best.append((0.0, np.ones(self._units.shape[1], np.bool_)))
        best.reverse()
        return SkipLevels(np.array([mask for _, mask in best]), np.array([loss for loss, _ in best], np.float64))


def _without(running: NDArray[np.bool_], unit: int) -> NDArray[np.bool_]:
    smaller = running.copy()
    smaller[unit] = False
    return smaller


@dataclass(frozen=True)
class Sample:
    """A text to score by: what the model was given and what it answered, or any two parts of a text; neither empty."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]


class SampleTexts:
    """Replies of the model's own, read with any blocks left out behind the whole model's cache of the prompt. Up to
    `window` tokens of each reply are read in one pass. The backend must skip layers; its cache is emptied."""

    def __init__(self, backend: Backend, cache: KVCache, samples: Sequence[Sample], window: int) -> None:
        if not backend.capabilities.layer_skip:
            message = f"The {backend.name} backend cannot skip layers."
            raise CapabilityError(message, "Use a natively exported bundle.")
        if not samples or not all(sample.prompt and sample.reply for sample in samples):
            raise UsageError("There is no text to score.", "Give samples with a prompt and a reply each.")
        self._backend, self._cache = backend, cache
        self._texts: list[tuple[CacheSnapshot, Ints]] = []  # cache before, tokens fed (S,)
        for sample in samples:
            self._prefill(sample.prompt[:-1])
            fed = np.array([sample.prompt[-1], *sample.reply[: window - 1]], np.int64)
            self._texts.append((cache.snapshot(), fed))

    @property
    def positions(self) -> int:
        return sum(len(fed) for _, fed in self._texts)

    def read(self, layer_mask: NDArray[np.bool_]) -> Iterator[Floats]:  # (2 L,)
        """Logits (S, V) of the blocks that run, after each token of each text in turn; views that the next
        overwrites."""
        for before, fed in self._texts:
            self._cache.trim(0)
            self._cache.append(before)
            rows = np.arange(len(fed))
            read = Pass(fed, rows + self._cache.length, rows, layer_mask=layer_mask)
            yield self._backend.forward([(self._cache, read)])[0].logits

    def _prefill(self, tokens: Sequence[int]) -> None:
        self._cache.trim(0)
        for start in range(0, len(tokens), _CHUNK):
            ids = np.array(tokens[start : start + _CHUNK], np.int64)
            read = Pass(ids, np.arange(start, start + len(ids)), np.zeros(0, np.int64))
            self._backend.forward([(self._cache, read)])


# Most tokens of each reply that are scored. SWIFT scores 33; logits of that many rows fit anywhere.
_WINDOW = 32
# A prediction that is off by this much must not make decoding slower.
_PAYS = 1.05


@dataclass(frozen=True)
class DraftingExit:
    """The first layers, as a draft would run them."""

    layers: int
    match_rate: float  # share of positions where they choose the whole model's token
    length: int  # draft length that pays best
    speedup: float  # predicted over plain decoding at that length; below 1 nothing pays
    evaluations: int  # exits that were scored


class _MatchScorer:
    """Match rate of any mask."""

    def __init__(self, backend: Backend, cache: KVCache, samples: Sequence[Sample]) -> None:
        self._texts = SampleTexts(backend, cache, samples, _WINDOW)
        everything = np.ones(2 * backend.geometry.num_layers, np.bool_)
        self._best = self._likeliest(everything)

    def __call__(self, layer_mask: Mask) -> float:
        """Share of positions where the blocks that run choose as all blocks do."""
        return float((self._likeliest(layer_mask) == self._best).mean())

    def _likeliest(self, layer_mask: Mask) -> Ints:  # (N,)
        return np.concatenate([logits.argmax(axis=1) for logits in self._texts.read(layer_mask)])


def best_exit(
    backend: Backend,
    cache: KVCache,
    samples: Sequence[Sample],
    costs: BlockCosts,
    *,
    granularity: int = 1,
    progress: Progress | None = None,
) -> DraftingExit:
    """The exit layer that drafts fastest by its match rate. Empties the cache."""
    layers = backend.geometry.num_layers
    if not 0 < granularity < layers:
        message = f"A model of {layers} layers has no exit after every {granularity} of them."
        raise UsageError(
            message, f"Give a granularity from 1 to {layers - 1}." if layers > 1 else "Choose another drafter."
        )
    scorer, exits = _MatchScorer(backend, cache, samples), range(granularity, layers, granularity)
    found: list[DraftingExit] = []
    for tried, exit_layer in enumerate(exits, 1):
        match_rate = scorer(np.arange(2 * layers) < 2 * exit_layer)
        gain = costs.exit_gain(exit_layer, match_rate)
        found.append(DraftingExit(exit_layer, match_rate, gain.length, gain.speedup, len(exits)))
        if progress is not None:
            progress(tried, len(exits))
    cache.trim(0)
    return max(found, key=lambda each: each.speedup)


@dataclass(frozen=True)
class TuneResult:
    """The early exit that drafts best, which is kept where it is predicted to pay."""

    exit: DraftingExit
    tuning: TunedDrafting


def tune(
    backend: Backend,
    cache: KVCache,
    samples: Sequence[Sample],
    *,
    granularity: int = 1,
    progress: Progress | None = None,
) -> TuneResult:
    """Measure costs and search; empties the cache. Exits are tried after every `granularity` layers."""
    costs = measure_costs(backend, cache)
    found = best_exit(backend, cache, samples, costs, granularity=granularity, progress=progress)
    return TuneResult(found, TunedDrafting(exit_layer=found.layers if found.speedup > _PAYS else None))
