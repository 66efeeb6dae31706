"""Entropy Adaptive Decoding (Simonds 2025): the large model writes where predictions are unsure.

The rolling mean of the active model's entropy is compared with a threshold. Where that is not given, it is a quantile
of the means seen, those that `edgeinfer tune --entropy` kept among them, at a level that follows the share of tokens
that the large model really makes: what a text lacks or has too much of is made up for slowly.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import StorageError

# Name of its array in a profile.
ENTROPY = "entropy"
_WINDOW = 5
# Rolling means that are remembered.
_MOST = 2048
# How far one token moves the level.
_PULL = 0.01


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
        """Adds one rolling mean."""
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
        """Counts a token, by which the level follows the wanted share."""
        offset = self._offsets.get(share, 0.0) + _PULL * (large - share)
        # Beyond the ends of the scale there is nothing to correct.
        self._offsets[share] = min(max(offset, share - 1), share)

    def state(self) -> dict[str, NDArray[Any]]:
        """The arrays to keep, by name."""
        return {"means": np.array(self._means, np.float64)}

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]]) -> Entropies:
        """Takes back what `state` gave."""
        if not state:
            return cls()
        means = state.get("means")
        if means is None or means.dtype != np.float64 or means.ndim != 1 or not _are_bits(means):
            raise StorageError("The kept entropies are damaged.", "Run edgeinfer tune --entropy again.")
        return cls(means.tolist())


def _are_bits(means: NDArray[Any]) -> bool:
    return bool((np.isfinite(means) & (means >= 0)).all())


class Stay:
    """Keeps a choice for a while after it changed.

    Args:
        least: tokens that a model makes before the other one takes over.
    """

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
    """Lets the large model write where predictions are unsure.

    Args:
        entropies: of this pair of models.
        share: of tokens wanted from the large model.
        threshold: in bits; None takes what gives the share.
        stay: tokens that a model makes at least.
    """

    def __init__(self, entropies: Entropies, share: float, threshold: float | None, stay: int) -> None:
        self._entropies = entropies
        self._share = share
        self._threshold = threshold
        self._latest: deque[float] = deque(maxlen=_WINDOW)
        self._stay = Stay(stay)

    def seen(self, entropy: float) -> None:
        """Adds the entropy of another prediction."""
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
        """Counts further tokens that the large model made at once."""
        for _ in range(tokens if self._threshold is None else 0):
            self._entropies.made(self._share, True)


class RandomPolicy:
    """Draws at random which model makes a stretch of tokens: the baseline that any policy has to beat.

    Args:
        share: of tokens that the large model makes, on average.
        stay: tokens that a model makes at least.
        seed: of the draws.
    """

    def __init__(self, share: float, stay: int, seed: int) -> None:
        self._share = share
        self._stay = Stay(stay)
        self._length, self._left, self._drawn = stay, 0, True
        self._random = np.random.default_rng(seed)

    def seen(self, entropy: float) -> None:
        """Ignores the entropy."""

    def large(self) -> bool:
        """Draws once for each stretch of the least length."""
        if self._left == 0:
            self._drawn, self._left = bool(self._random.random() < self._share), self._length
        self._left -= 1
        return self._stay.choose(self._drawn)
