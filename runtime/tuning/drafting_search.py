"""Finds the blocks that drafting can skip, and the layer it can leave after.

Scores as SWIFT does: one pass of the skipped model over text of the target's tells its match rate, the share of
positions where its most likely token is the whole model's. The objective is Draft & Verify's, tokens per second, but
worked out from match rate and measured costs instead of by generating.

The search is Bayesian over a linear model (BOCS, Baptista & Poloczek 2018): the negative logarithm of match rate is
taken as a sum over skipped units with normal weights and noise. Every other step draws weights from what the scores so
far leave likely (Thompson's rule) and scores the set that is best under them; the steps between score a neighbour of
the best set so far, against what a sum does not express. The first scores are SWIFT's first set and each unit alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

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
from edgeinfer.runtime.speculation.drafters.self_drafters import every_second

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
# Of the linear model: spread of a unit's loss before anything was scored, and of what the sum leaves out.
_SPREAD, _NOISE = 1.0, 0.2
# A prediction that is off by this much must not make decoding slower.
_PAYS = 1.05


@dataclass(frozen=True)
class SkipSet:
    """A set of blocks that a search found."""

    layer_mask: Mask  # blocks that run while drafting. (2 L,)
    match_rate: float  # share of positions where they choose the whole model's token
    length: int  # draft length that pays best
    speedup: float  # predicted over plain decoding at that length; below 1 nothing pays
    evaluations: int  # sets that were scored

    @property
    def layers(self) -> int:
        """Layers of which a block runs, counted up to the last: the exit layer where the mask is an exit."""
        return int(np.flatnonzero(self.layer_mask).max(initial=-1)) // 2 + 1


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

    @property
    def positions(self) -> int:
        return self._texts.positions


def best_exit(
    backend: Backend, cache: KVCache, samples: Sequence[Sample], costs: BlockCosts, *, granularity: int = 1
) -> SkipSet:
    """The exit layer that drafts fastest by its match rate; its mask runs the layers before it. Empties the cache."""
    layers = backend.geometry.num_layers
    if not 0 < granularity < layers:
        message = f"A model of {layers} layers has no exit after every {granularity} of them."
        raise UsageError(
            message, f"Give a granularity from 1 to {layers - 1}." if layers > 1 else "Choose another drafter."
        )
    scorer = _MatchScorer(backend, cache, samples)
    found: list[SkipSet] = []
    for exit_layer in range(granularity, layers, granularity):
        mask = np.arange(2 * layers) < 2 * exit_layer
        match_rate = scorer(mask)
        gain = costs.exit_gain(exit_layer, match_rate)
        found.append(SkipSet(mask, match_rate, gain.length, gain.speedup, 0))
    cache.trim(0)
    return replace(max(found, key=lambda exit: exit.speedup), evaluations=len(found))


def best_skip_set(
    backend: Backend,
    cache: KVCache,
    samples: Sequence[Sample],
    costs: BlockCosts,
    *,
    granularity: int = 1,
    evaluations: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> SkipSet:
    """Search the set of skipped blocks that drafts fastest, deterministically; empties the cache."""
    units = skip_units(backend.geometry.num_layers, granularity, evaluations)
    scorer = _MatchScorer(backend, cache, samples)
    search = _DraftingSearch(scorer, costs, units, np.random.default_rng(seed))
    most = min(evaluations, 2 ** len(search.units) - 1)
    while search.scored < most:
        search.step()
        if progress is not None:
            progress(search.scored, most)
    cache.trim(0)
    return search.result()


class _DraftingSearch:
    """One search: sets of units that were scored, and the next one to score."""

    def __init__(
        self, scorer: _MatchScorer, costs: BlockCosts, units: NDArray[np.bool_], rng: np.random.Generator
    ) -> None:
        self.units = units
        self._scorer = scorer
        self._costs = costs
        self._rng = rng
        self._scores: dict[bytes, float] = {}  # match rate by set
        self._best = SkipSet(np.ones(units.shape[1], np.bool_), 1.0, 0, 0.0, 0)
        self._best_set = np.zeros(len(units), np.bool_)
        self._savings = np.array([max(np.dot(costs.blocks, unit), 1e-9) for unit in units])
        self._first = self._first_sets()

    @property
    def scored(self) -> int:
        return len(self._scores)

    def result(self) -> SkipSet:
        return replace(self._best, evaluations=self.scored)

    def step(self) -> None:
        """Scores one more set; there must be one left."""
        skipped = self._next()  # (U,)
        mask = self._mask(skipped)
        self._scores[skipped.tobytes()] = match_rate = self._scorer(mask)
        gain = self._costs.gain(mask, match_rate)
        if gain.speedup > self._best.speedup:
            self._best_set = skipped
            self._best = SkipSet(mask, match_rate, gain.length, gain.speedup, 0)

    def _mask(self, skipped: NDArray[Any]) -> Mask:  # (U,) or indices -> (2 L,)
        mask: Mask = np.logical_not(self.units[skipped].any(axis=0))
        return mask

    def _first_sets(self) -> list[NDArray[np.bool_]]:  # (U,) each
        """The first sets to score, in reverse: SWIFT's first set, as far as units allow it, then each unit alone."""
        alone = list(np.eye(len(self.units), dtype=np.bool_))[::-1]
        num_layers = self.units.shape[1] // 2
        if num_layers < 3:
            return alone
        first = every_second(num_layers)
        return [*alone, np.array([not first[unit].any() for unit in self.units])]

    def _next(self) -> NDArray[np.bool_]:  # (U,)
        while self._first:
            if self._is_new(first := self._first.pop()):
                return first
        if self.scored % 2 == 0 and self._is_new(drawn := self._likely_best()):
            return drawn
        return self._neighbour()

    def _is_new(self, skipped: NDArray[np.bool_]) -> bool:  # (U,)
        return bool(skipped.any()) and skipped.tobytes() not in self._scores

    def _likely_best(self) -> NDArray[np.bool_]:  # (U,)
        """The best set under weights of the linear model drawn from their posterior."""
        sets = np.array([np.frombuffer(key, np.bool_) for key in self._scores], np.float64)  # (N, U)
        floor = 0.5 / self._scorer.positions
        losses = -np.log(np.maximum(list(self._scores.values()), floor))  # (N,)
        precision = sets.T @ sets / _NOISE**2 + np.eye(len(self.units)) / _SPREAD**2
        mean = np.linalg.solve(precision, sets.T @ losses / _NOISE**2)
        noise = np.linalg.solve(np.linalg.cholesky(precision).T, self._rng.standard_normal(len(mean)))
        weights = np.maximum(mean + noise, 0.0)
        # Units in the order of what they lose for what they save: the best set is nearly always the first few of them.
        order = np.argsort(weights / self._savings, kind="stable")
        best, best_speedup = np.zeros(len(order), np.bool_), 0.0
        for count in range(1, len(order) + 1):
            chosen = order[:count]
            mask = self._mask(chosen)
            speedup = self._costs.gain(mask, float(np.exp(-weights[chosen].sum()))).speedup
            if speedup > best_speedup:
                best, best_speedup = np.isin(np.arange(len(order)), chosen), speedup
        return best

    def _neighbour(self) -> NDArray[np.bool_]:  # (U,)
        """A new set as near to the best one as there is any, of those equally near one at random."""
        size = len(self.units)
        distance = 1
        while True:
            for _ in range(4 * size):
                skipped = self._best_set.copy()
                skipped[self._rng.choice(size, min(distance, size), replace=False)] ^= True
                if self._is_new(skipped):
                    return skipped
            distance = distance % size + 1


@dataclass(frozen=True)
class TuneResult:
    """The early exit and the set of skipped blocks that draft best, and of these what is predicted to pay."""

    exit: SkipSet
    skip: SkipSet
    tuning: TunedDrafting


def tune(
    backend: Backend,
    cache: KVCache,
    samples: Sequence[Sample],
    *,
    granularity: int = 1,
    evaluations: int = 200,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> TuneResult:
    """Measure costs and search; empties the cache. Layers are skipped in groups of `granularity`."""
    costs = measure_costs(backend, cache)
    exits = best_exit(backend, cache, samples, costs, granularity=granularity)
    skip = best_skip_set(
        backend, cache, samples, costs, granularity=granularity, evaluations=evaluations, seed=seed, progress=progress
    )
    tuning = TunedDrafting(
        exit_layer=exits.layers if exits.speedup > _PAYS else None,
        layer_mask=skip.layer_mask if skip.speedup > _PAYS and not skip.layer_mask.all() else None,
    )
    return TuneResult(exits, skip, tuning)
