"""Sets of blocks that answers can skip, each the least harmful for what it saves; knows no model but by its passes.

The search is greedy: from the whole model on, it leaves out the block whose loss is least for each millisecond that it
saves, and tries to exchange what it left out before for something better. Every set that was scored takes part in the
result, evenly spaced layers too: those that no other set beats in both loss and time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import StorageError, UsageError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.layer_skip.contract import Mask, Prompt, Wanted
from edgeinfer.runtime.layer_skip.unified import kept_layers, layers_mask
from edgeinfer.runtime.speculation.skip_costs import BlockCosts
from edgeinfer.runtime.speculation.skip_samples import Sample, SampleTexts
from edgeinfer.runtime.speculation.skip_search import skip_units

__all__ = ["LADDER", "Ladder", "LadderPolicy", "search_ladder"]

Progress = Callable[[int, int], None]

# Name of its arrays in a profile.
LADDER = "ladder"
# Tokens of each reply that are read: logits of as many rows are held at once.
_WINDOW = 48
# Likeliest tokens by which predictions are compared; all others count as one.
_TOP = 256
# Units that are tried at each step where trying all would take too long, and exchanges tried after it.
_TRIED, _EXCHANGED = 8, 4
# Speed-ups of the evenly spaced sets that take part.
_EVEN = (1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)


@dataclass(frozen=True)
class Ladder:
    """Sets by ascending saving, each of no less loss than the one before it; the first leaves nothing out.

    Attributes:
        masks: blocks that run. (N, 2 L)
        losses: nats from the whole model's predictions on the texts of the search, mean over tokens. (N,)
    """

    masks: NDArray[np.bool_]
    losses: NDArray[np.float64]

    def state(self) -> dict[str, NDArray[Any]]:
        """As arrays."""
        return {"masks": self.masks, "losses": self.losses}

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]], layers: int) -> Ladder | None:
        """Takes back what `state` gave, for a model of so many layers; None where nothing was kept.

        Raises:
            StorageError: it is damaged, or of another model.
        """
        if not state:
            return None
        masks, losses = state.get("masks"), state.get("losses")
        if masks is None or losses is None or not _fit(masks, losses, layers):
            raise StorageError("The calibrated sets are of another model.", "Run edgeinfer tune --skip again.")
        return cls(masks, losses)

    def choose(self, wanted: Wanted) -> Mask:
        """The least harmful set that is as fast as wanted; where none is, the fastest."""
        every = range(len(self.masks))
        fast = [row for row in every if wanted.reached(self.masks[row])]
        if fast:
            chosen = min(fast, key=lambda row: float(self.losses[row]))
        else:
            chosen = min(every, key=lambda row: wanted.costs.ms(self.masks[row]))
        mask: Mask = self.masks[chosen]
        return mask


def _fit(masks: NDArray[Any], losses: NDArray[Any], layers: int) -> bool:
    """Whether this is a ladder of a model of so many layers."""
    shaped = masks.ndim == 2 and masks.shape[1] == 2 * layers and losses.shape == masks.shape[:1] != (0,)
    typed = masks.dtype == np.bool_ and losses.dtype == np.float64
    return shaped and typed and bool(np.isfinite(losses).all() and masks[0].all())


@dataclass(frozen=True)
class LadderPolicy:
    """Implements `contract.SkipPolicy`."""

    ladder: Ladder

    def mask(self, prompt: Prompt, wanted: Wanted) -> Mask:
        """The same blocks for every prompt."""
        return self.ladder.choose(wanted)


def search_ladder(
    backend: Backend,
    samples: Sequence[Sample],
    costs: BlockCosts,
    *,
    granularity: int = 1,
    evaluations: int = 400,
    progress: Progress | None = None,
) -> Ladder:
    """Searches sets of blocks to skip, by texts of the model's own; empties the cache.

    Args:
        granularity: consecutive layers whose attention blocks are skipped together, and whose MLP blocks are.
        evaluations: most sets to score, a pass over the samples each.
        progress: called with sets scored and to score.

    Raises:
        CapabilityError: the backend cannot skip layers.
        UsageError: no samples, or a granularity or number of evaluations below 1.
        BackendError: a text does not fit the cache.
    """
    if min(granularity, evaluations) < 1:
        raise UsageError("A search needs a granularity and a number of evaluations.", "Give numbers from 1 on.")
    units = skip_units(backend.geometry.num_layers, granularity)
    search = _Search(_Scorer(backend, samples), costs, units, evaluations, progress)
    search.run()
    backend.cache.trim(0)
    return search.ladder()


class _Scorer:
    """Loss of any mask: divergence from the whole model, over its likeliest tokens and all others together."""

    def __init__(self, backend: Backend, samples: Sequence[Sample]) -> None:
        self._texts = SampleTexts(backend, samples, _WINDOW)
        self._whole: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []  # tokens and chances (S, K), (S, K + 1)
        for logits in self._texts.read(np.ones(2 * backend.geometry.num_layers, np.bool_)):
            top = min(_TOP, logits.shape[1] - 1)
            likeliest = np.argpartition(-logits, top, axis=1)[:, :top]
            self._whole.append((likeliest, _chances(logits, likeliest)))

    def __call__(self, layer_mask: Mask) -> float:
        """Mean over all tokens, in nats; a little less than by all tokens apart."""
        total = 0.0
        for logits, (likeliest, whole) in zip(self._texts.read(layer_mask), self._whole, strict=True):
            total += float((whole * (np.log(whole) - np.log(_chances(logits, likeliest)))).sum())
        return total / self._texts.positions


def _chances(logits: Floats, tokens: NDArray[np.int64]) -> NDArray[np.float64]:  # (S, V), (S, K) -> (S, K + 1)
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances = np.take_along_axis(shifted, tokens, axis=1).astype(np.float64)
    chances /= shifted.sum(axis=1, dtype=np.float64)[:, None]
    rest = 1 - chances.sum(axis=1, keepdims=True)
    # What rounds to nothing is still possible.
    possible: NDArray[np.float64] = np.maximum(np.concatenate([chances, rest], axis=1), 1e-12)
    return possible


class _Search:
    """Sets of units that were scored, by which units run. (U,)"""

    def __init__(
        self,
        scorer: _Scorer,
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

    def ladder(self) -> Ladder:
        """What no other set beats."""
        masks = [(self._mask(np.frombuffer(key, np.bool_)), loss) for key, loss in self._scores.items()]
        best: list[tuple[float, Mask]] = []
        # From the fastest on; of equally fast ones the better first.
        for mask, loss in sorted(masks, key=lambda each: (self._costs.ms(each[0]), each[1])):
            if not best or loss < best[-1][0]:
                best.append((loss, mask))
        if not best[-1][1].all():
            # Blocks that change nothing can be left out for nothing, but nobody who asks for no speed has to.
            best.append((0.0, np.ones(self._units.shape[1], np.bool_)))
        best.reverse()
        return Ladder(np.array([mask for _, mask in best]), np.array([loss for loss, _ in best], np.float64))


def _without(running: NDArray[np.bool_], unit: int) -> NDArray[np.bool_]:
    smaller = running.copy()
    smaller[unit] = False
    return smaller
