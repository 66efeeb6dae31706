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

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts, measure_costs
from edgeinfer.runtime.layer_skip.contract import Mask
from edgeinfer.runtime.profile.drafting import TunedDrafting
from edgeinfer.runtime.speculation.drafters.self_drafters import every_second
from edgeinfer.runtime.tuning.skip_search import Sample, SampleTexts, skip_units

Progress = Callable[[int, int], None]

# Most tokens of each reply that are scored. SWIFT scores 33; logits of that many rows fit anywhere.
_WINDOW = 32
# Of the linear model: spread of a unit's loss before anything was scored, and of what the sum leaves out.
_SPREAD, _NOISE = 1.0, 0.2
# A prediction that is off by this much must not make decoding slower.
_PAYS = 1.05


@dataclass(frozen=True)
class SkipSet:
    """A set of blocks that a search found.

    Attributes:
        layer_mask: blocks that run while drafting. (2 L,)
        match_rate: share of positions where they choose the whole model's token.
        length: draft length that pays best.
        speedup: predicted over plain decoding at that length; below 1 nothing pays.
        evaluations: sets that were scored.
    """

    layer_mask: Mask
    match_rate: float
    length: int
    speedup: float
    evaluations: int

    @property
    def layers(self) -> int:
        """Layers of which a block runs, counted up to the last: the exit layer where the mask is an exit."""
        return int(np.flatnonzero(self.layer_mask).max(initial=-1)) // 2 + 1


class _Scorer:
    """Match rate of any mask."""

    def __init__(self, backend: Backend, samples: Sequence[Sample]) -> None:
        self._texts = SampleTexts(backend, samples, _WINDOW)
        everything = np.ones(2 * backend.geometry.num_layers, np.bool_)
        self._best = self._likeliest(everything)

    def __call__(self, layer_mask: Mask) -> float:
        """Share of positions where the blocks that run choose as all blocks do."""
        return float((self._likeliest(layer_mask) == self._best).mean())

    def _likeliest(self, layer_mask: Mask) -> Ints:  # (N,)
        return np.concatenate([logits.argmax(axis=1) for logits in self._texts.read(layer_mask)])

    @property
    def positions(self) -> int:
        """Tokens that a score counts."""
        return self._texts.positions


def best_exit(backend: Backend, samples: Sequence[Sample], costs: BlockCosts, *, granularity: int = 1) -> SkipSet:
    """The exit layer that drafts fastest by its match rate; its mask runs the layers before it. Empties the cache."""
    layers = backend.geometry.num_layers
    if not 0 < granularity < layers:
        message = f"A model of {layers} layers has no exit after every {granularity} of them."
        raise UsageError(
            message, f"Give a granularity from 1 to {layers - 1}." if layers > 1 else "Choose another drafter."
        )
    scorer = _Scorer(backend, samples)
    found: list[SkipSet] = []
    for exit_layer in range(granularity, layers, granularity):
        mask = np.arange(2 * layers) < 2 * exit_layer
        match_rate = scorer(mask)
        gain = costs.exit_gain(exit_layer, match_rate)
        found.append(SkipSet(mask, match_rate, gain.length, gain.speedup, 0))
    backend.cache.trim(0)
    return replace(max(found, key=lambda exit: exit.speedup), evaluations=len(found))


def best_skip_set(
    backend: Backend,
    samples: Sequence[Sample],
    costs: BlockCosts,
    *,
    granularity: int = 1,
    evaluations: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> SkipSet:
    """Searches the set of skipped blocks that drafts fastest. The same arguments give the same set. Empties the cache.

    Args:
        progress: called with sets scored and to score.
    """
    units = skip_units(backend.geometry.num_layers, granularity, evaluations)
    scorer = _Scorer(backend, samples)
    search = _Search(scorer, costs, units, np.random.default_rng(seed))
    most = min(evaluations, 2 ** len(search.units) - 1)
    while search.scored < most:
        search.step()
        if progress is not None:
            progress(search.scored, most)
    backend.cache.trim(0)
    return search.result()


class _Search:
    """One search: sets of units that were scored, and the next one to score."""

    def __init__(self, scorer: _Scorer, costs: BlockCosts, units: NDArray[np.bool_], rng: np.random.Generator) -> None:
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
        """Sets scored so far."""
        return len(self._scores)

    def result(self) -> SkipSet:
        """The best set so far."""
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
    """The layers that draft best.

    Attributes:
        exit: the early exit that drafts best.
        skip: the set of skipped blocks that drafts best.
        tuning: of these, what is predicted to pay.
    """

    exit: SkipSet
    skip: SkipSet
    tuning: TunedDrafting


def tune(
    backend: Backend,
    samples: Sequence[Sample],
    *,
    granularity: int = 1,
    evaluations: int = 200,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> TuneResult:
    """Measures costs and searches; empties the cache.

    Args:
        granularity: consecutive layers that are skipped together, and after which alone a pass may end.
        progress: called with sets scored and to score.
    """
    costs = measure_costs(backend)
    exits = best_exit(backend, samples, costs, granularity=granularity)
    skip = best_skip_set(
        backend, samples, costs, granularity=granularity, evaluations=evaluations, seed=seed, progress=progress
    )
    tuning = TunedDrafting(
        exit_layer=exits.layers if exits.speedup > _PAYS else None,
        layer_mask=skip.layer_mask if skip.speedup > _PAYS and not skip.layer_mask.all() else None,
    )
    return TuneResult(exits, skip, tuning)
