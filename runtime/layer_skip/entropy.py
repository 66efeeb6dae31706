"""Entropy Adaptive Decoding (Simonds 2025): the large model writes where predictions are unsure.

The rolling mean of the active model's entropy is compared with a threshold. Where that is not given, it is a quantile
of the means seen, those that `edgeinfer tune --entropy` kept among them, at a level that follows the share of tokens
that the large model really makes: what a text lacks or has too much of is made up for slowly.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import StorageError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.layer_skip.reduced_compute import ComputeMethod, ReducedComputeStrategies
from edgeinfer.runtime.layer_skip.strategy import (
    ReducedDecoding,
    SmallModel,
    StrategyArguments,
    SwitchPolicy,
    entropy_bits,
)

# Name of its array in a profile.
ENTROPY = "entropy"
_WINDOW = 5
# Rolling means that are remembered.
_MOST = 2048
# How far one token moves the level.
_PULL = 0.01
# Tokens that the small model may write before the large one looks at them, where divergence is limited: at first few,
# as nothing is known yet.
_FIRST, _LONGEST = 4, 8


def rolling_means(entropies: Sequence[float]) -> list[float]:
    """The mean of each and up to four before it."""
    return [float(np.mean(entropies[max(0, end - _WINDOW) : end])) for end in range(1, len(entropies) + 1)]


class Entropies:
    """Rolling means seen with a pair of models, and the threshold that gives a share; of all replies together."""

    def __init__(self, means: Iterable[float] = ()) -> None:
        self._means: deque[float] = deque(means, maxlen=_MOST)
        self._sorted = sorted(self._means)  # asked for at every token
        self._offsets: dict[float, float] = {}  # by share: what was learnt of the level

    def __len__(self) -> int:
        return len(self._means)

    def add(self, mean: float) -> None:
        if len(self._means) == _MOST:
            del self._sorted[bisect_left(self._sorted, self._means[0])]
        self._means.append(mean)
        insort(self._sorted, mean)

    def threshold(self, share: float) -> float:
        """The bits above which as many of the means lie as the large model is to make."""
        level = min(max(1 - share + self._offsets.get(share, 0.0), 0.0), 1.0)
        if level in (0.0, 1.0):
            return math.inf if level else -1.0
        return self._sorted[int(level * len(self._sorted))] if self._sorted else 0.0

    def made(self, share: float, large: bool) -> None:
        """Count a token, by which the level follows the wanted share."""
        offset = self._offsets.get(share, 0.0) + _PULL * (large - share)
        # Beyond the ends of the scale there is nothing to correct.
        self._offsets[share] = min(max(offset, share - 1), share)

    def state(self) -> dict[str, NDArray[Any]]:
        """The arrays to keep, by name."""
        return {"means": np.array(self._means, np.float64)}

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]]) -> Entropies:
        if not state:
            return cls()
        means = state.get("means")
        usable = means is not None and means.dtype == np.float64 and means.ndim == 1
        if means is None or not usable or not (np.isfinite(means) & (means >= 0)).all():
            raise StorageError("The kept entropies are damaged.", "Run edgeinfer tune --entropy again.")
        return cls(means.tolist())


class Stay:
    """Keeps a choice for a while after it changed."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._large, self._since = True, least

    def choose(self, large: bool) -> bool:
        """The wanted model, or the one that still has to stay."""
        if large != self._large and self._since >= self._least:
            self._large, self._since = large, 0
        self._since += 1
        return self._large


class EntropyPolicy:
    """Lets the large model write a `share` of tokens where predictions are unsure; without a threshold in bits, by the
    one that gives that share."""

    def __init__(self, entropies: Entropies, share: float, threshold: float | None, stay: int) -> None:
        self._entropies = entropies
        self._share = share
        self._threshold = threshold
        self._latest: deque[float] = deque(maxlen=_WINDOW)
        self._stay = Stay(stay)

    def seen(self, entropy: float) -> None:
        """Add the entropy of another prediction."""
        self._latest.append(entropy)
        self._entropies.add(self._mean)

    @property
    def _mean(self) -> float:
        return sum(self._latest) / len(self._latest)

    def large(self) -> bool:
        """Whether the predictions were unsure."""
        threshold = self._entropies.threshold(self._share) if self._threshold is None else self._threshold
        large = self._stay.choose(self._mean > threshold)
        if self._threshold is None:
            self._entropies.made(self._share, large)
        return large

    def large_made(self, tokens: int) -> None:
        """Count further tokens that the large model made at once."""
        for _ in range(tokens if self._threshold is None else 0):
            self._entropies.made(self._share, True)


class ModelSwitchDecoding(ReducedDecoding):
    """A reply that two models write by turns, one token at a time."""

    def __init__(self, given: StrategyArguments, small: SmallModel, policy: SwitchPolicy, parameters: float) -> None:
        super().__init__(given)
        self._small = small
        self._policy = policy
        self._parameters = parameters
        self._active_large = True
        self._kept: dict[int, Floats] = {}  # of tokens the large model has not fed: index into the text, said behind it
        self._window = _FIRST
        self._large_ms: list[float] = []  # of its passes over one token

    def _begin(self, text: Sequence[int], logits: Floats) -> Passes[None]:
        self._kept.clear()
        self._small.begin(text)
        self._policy.seen(entropy_bits(logits))
        if not self.compute.tokens:
            options = self._options
            yield from self._try(text, 1 - options.compute_share if options.entropy_threshold is None else 1.0)

    def _reduced(
        self, text: Sequence[int], tokens: Sequence[int], start: int, wanted: Sequence[int]
    ) -> Passes[dict[int, Floats]]:
        # The last ones, in one pass: the small model keeps what it has read.
        said = (yield from self._small.behind(text[:-1], len(wanted))) or []
        return {len(tokens) - len(said) + place: logits for place, logits in enumerate(said)}

    def _logits(self, tokens: Sequence[int], lost: int) -> Passes[Floats]:  # (V,)
        seen = self._cache.length + lost  # tokens that the large model has evaluated
        unseen = len(tokens) - seen
        large = self._policy.large() or self._limit.stopped
        if self._limit.watching:
            # What a run of the small one's tokens may cost must have been earned by the large one's before.
            begins = unseen == 1 and not self._limit.allows(self._window, self.compute.reduced, self.compute.tokens)
            large = large or unseen > self._window or begins
        # All that is unseen must fit its cache.
        large = large or self._cache.length + unseen >= self._cache.capacity
        logits = None if large else (yield from self._small.after(tokens))
        large = logits is None  # also where the text is too long for the small one
        if logits is None:
            logits = yield from self._of_large(tokens, seen)
        else:
            self.compute.reduced += 1
            if self._limit.watching and (unseen - 1) % -(-self._window // self._samples) == 0:
                self._kept[len(tokens) - 1] = logits.copy()
        self.compute.switches += large != self._active_large
        self._active_large = large
        return logits

    def _of_large(self, tokens: Sequence[int], seen: int) -> Passes[Floats]:  # (V,)
        """The large model's turn: it evaluates what it has not seen."""
        started, unseen, last = time.perf_counter(), len(tokens) - seen, np.zeros(0, np.float32)
        wanted = [*(index - seen for index in sorted(self._kept)), unseen - 1]

        def see(index: int, logits: Floats) -> None:
            nonlocal last
            if index < unseen - 1:
                self._limit.add(logits, self._kept[seen + index])
            last = logits

        yield from self._feed(tokens[seen:], self._cache.length, wanted, see)
        if unseen == 1:
            self._large_ms.append((time.perf_counter() - started) * 1e3)
        self._kept.clear()
        self.compute.caught_up += unseen - 1
        self._limit.check(self.compute.reduced, self.compute.tokens)
        if self._limit.easy:
            self._window = min(2 * self._window, _LONGEST)
        return last

    def _chosen(self, logits: Floats) -> Passes[None]:
        yield from ()
        self._policy.seen(entropy_bits(logits))

    def finish(self) -> None:
        """Without another measure, the large model's own passes time a plain one."""
        use = self.compute
        if use.plain_ms is None and self._large_ms:
            use.plain_ms = median(self._large_ms)
        share = 1 - use.reduced / max(use.tokens, 1)
        use.large_share, use.parameter_share = share, share + (1 - share) * self._parameters
        super().finish()


def _make(strategies: ReducedComputeStrategies, given: StrategyArguments) -> ModelSwitchDecoding:
    options = given.options
    known = strategies.kept(ENTROPY, Entropies.from_state, Entropies())  # replies add to it
    policy = EntropyPolicy(known, options.compute_share, options.entropy_threshold, options.entropy_stay)
    return ModelSwitchDecoding(given, strategies.require_small(), policy, strategies.parameters)


METHODS = (
    ComputeMethod(name="entropy", help="the draft model writes the parts that are easy", make=_make, remote=True),
)
