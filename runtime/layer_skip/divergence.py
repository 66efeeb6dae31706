"""How unsure predictions are, how far a reply's are from the whole model's, and whether that is too far."""

from __future__ import annotations

import math

import numpy as np

from edgeinfer.bundle.arithmetic import log_softmax
from edgeinfer.runtime.arrays import Floats

_LN2 = float(np.log(2))
# Samples from which on a reply's own say how far its tokens diverge at worst, and spreads above the mean that are that.
_ENOUGH, _SPREADS = 8, 2.0


def entropy_bits(logits: Floats) -> float:  # (V,)
    """Entropy of the next token before any temperature."""
    shifted = logits - logits.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    # Tokens that are impossible are minus infinity, and add nothing.
    shifted = np.where(weights > 0, shifted, 0)
    return max(0.0, (float(np.log(total)) - float(weights @ shifted) / total) / _LN2)


def likeliest(logits: Floats) -> tuple[int, float]:  # (V,)
    """The likeliest token and its probability."""
    best = int(logits.argmax())
    return best, 1.0 / float(np.exp(logits - logits[best]).sum())


def divergence(whole: Floats, reduced: Floats) -> float:  # (V,), (V,)
    """Kullback-Leibler divergence of the reduced model's prediction from the whole model's, in nats."""
    ours, theirs = log_softmax(reduced, np.float64), log_softmax(whole, np.float64)
    probabilities = np.exp(theirs)
    possible = probabilities > 0
    return max(0.0, float((probabilities[possible] * (theirs[possible] - ours[possible])).sum()))


class DivergenceLimit:
    """A limit on the mean divergence of a reply's tokens.

    Args:
        nats: the limit; None only counts.

    Attributes:
        stopped_at: tokens of the reply when it was exceeded; None as long as it is not.
    """

    def __init__(self, nats: float | None) -> None:
        self.nats = nats
        self.sampled = 0
        self.stopped_at: int | None = None
        self._sum = self._squares = 0.0
        self._worst = math.inf  # of a token, as the prompt tells

    @property
    def watching(self) -> bool:
        """Whether samples may still stop the reduction."""
        return self.nats is not None and self.stopped_at is None

    @property
    def stopped(self) -> bool:
        """Whether nothing more is to be left out."""
        return self.stopped_at is not None

    def add(self, whole: Floats, reduced: Floats) -> None:  # (V,), (V,)
        """Adds a sampled token, as the whole model predicts it and as the reduced one did."""
        nats = divergence(whole, reduced)
        self.sampled += 1
        self._sum += nats
        self._squares += nats * nats

    @property
    def mean(self) -> float | None:
        """The mean divergence of the samples."""
        return self._sum / self.sampled if self.sampled else None

    @property
    def bound(self) -> float:
        """What the mean may be: it and one standard error, taken from a spread that is never below the mean.

        Divergences are spread at least as widely as that; a few samples that happen to agree would say otherwise.
        """
        if not self.sampled:
            return 0.0
        mean = self._sum / self.sampled
        return mean + max(self._spread, mean) / math.sqrt(self.sampled)

    @property
    def _spread(self) -> float:
        mean = self._sum / self.sampled
        return math.sqrt(max(self._squares / self.sampled - mean * mean, 0.0))

    @property
    def worst(self) -> float:
        """What a token is likely to diverge by at worst."""
        if self.sampled < _ENOUGH:
            return self._worst
        mean = self._sum / self.sampled
        return mean + _SPREADS * max(self._spread, mean)

    def expect(self, prompt: DivergenceLimit) -> None:
        """Takes over from samples of the prompt what a token may diverge by at worst."""
        if prompt.sampled:
            mean = prompt._sum / prompt.sampled
            self._worst = mean + _SPREADS * max(prompt._spread, mean)

    def allows(self, further: int, reduced: int, tokens: int) -> bool:
        """Whether so many further tokens, at their worst, leave the reply's mean within the limit as it is now."""
        if self.nats is None:
            return True
        return self.bound * reduced + self.worst * further <= self.nats * tokens

    def check(self, reduced: float, tokens: int) -> bool:
        """Whether the reply may go on as it does, `reduced` of whose tokens were made with less."""
        if self.nats is not None and self.stopped_at is None and self.bound * reduced > self.nats * tokens:
            self.stopped_at = tokens
        return self.stopped_at is None

    @property
    def easy(self) -> bool:
        """Whether the samples are so far below the limit that fewer of them will do."""
        return self.nats is not None and self.bound <= self.nats / 2

    def refuse(self) -> None:
        """Stops from the beginning, as samples of the prompt diverge too far."""
        self.stopped_at = 0
