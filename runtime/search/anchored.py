"""Anchored Decoding (He et al. 2026, arXiv 2602.07120): a text that stays within a divergence of another model's.

Each token is drawn from a geometric mean of the model's distribution and the anchor's, as close to the model's as the
budget allows. A token may spend what earlier ones left of theirs, so that the divergences of all tokens from the anchor
add up to no more than the budget of each times their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import ContextLengthError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.layer_skip.strategy import SmallModel
from edgeinfer.runtime.search.strategy import MOST_ROWS, SearchMethod, SearchParts, SearchStrategy, logprob

Distribution = NDArray[np.float64]
T = TypeVar("T")

# Share of a budget that may stay unspent, and steps that look for the weight that spends the rest of it.
_CLOSE, _MOST_STEPS = 1e-6, 60
# Tokens of the prompt at most that tell the debt: the model evaluates them once more, for their probabilities.
_READ = 512


@dataclass(frozen=True)
class Fused:
    """A distribution between two others."""

    probabilities: Distribution  # (V,)
    weight: float  # of the model in the geometric mean; 1 is the model alone, 0 the anchor alone
    divergence: float  # from the anchor's distribution, in nats


def fuse(own: Distribution, anchor: Distribution, budget: float) -> Fused:  # (V,), (V,)
    """The distribution nearest to `own` among the geometric means whose KL divergence from `anchor` is in the budget.
    Only tokens that both find possible have a probability, unless the anchor's own distribution is all that fits."""
    shared = np.flatnonzero((own > 0) & (anchor > 0))
    if budget <= 0 or not len(shared):
        return Fused(anchor, 0.0, 0.0)
    base = np.log(anchor[shared])
    ratio = np.log(own[shared]) - base

    def mean(weight: float) -> tuple[Distribution, float, float]:
        """The mean of a weight, its divergence, and how fast that grows with the weight."""
        powers = base + weight * ratio
        best = float(powers.max())
        terms = np.exp(powers - best)
        total = float(terms.sum())
        mixed = terms / total
        average = float(mixed @ ratio)
        divergence = weight * average - math.log(total) - best
        return mixed, max(divergence, 0.0), weight * float(mixed @ np.square(ratio - average))

    mixed, divergence, slope = mean(1.0)
    weight, low, high = 1.0, 0.0, 1.0
    best: tuple[float, Distribution, float] | None = (1.0, mixed, divergence) if divergence <= budget else None
    for _ in range(0 if best is not None else _MOST_STEPS):
        # Newton's step towards a little less than the budget, or half of what is left where it leads elsewhere.
        guess = weight - (divergence - budget * (1 - _CLOSE)) / slope if slope > 0 else low
        weight = guess if low < guess < high else (low + high) / 2
        mixed, divergence, slope = mean(weight)
        if divergence > budget:
            high = weight
            continue
        low, best = weight, (weight, mixed, divergence)
        if divergence >= budget * (1 - 2 * _CLOSE):
            break
    if best is None:
        return Fused(anchor, 0.0, 0.0)
    probabilities = np.zeros_like(anchor)
    probabilities[shared] = best[1]
    return Fused(probabilities, best[0], best[2])


class DivergenceBudget:
    """Tells what each token may spend: the nats that it adds to the budget, less those owed before the first, and what
    earlier ones left."""

    def __init__(self, each: float, debt: float = 0.0) -> None:
        self._each, self._debt = each, debt
        self._tokens = 0
        self.spent = 0.0  # nats so far

    @property
    def allowed(self) -> float:
        """Nats that the tokens so far may have spent in all."""
        return max(0.0, self._tokens * self._each - self._debt)

    def next(self) -> float:
        """Nats that the next token may spend."""
        self._tokens += 1
        return max(0.0, self.allowed - self.spent)

    def spend(self, nats: float) -> None:
        """Take what it did spend."""
        self.spent += nats


def prefix_debt(ratios: Sequence[float], count: int) -> float:
    """What a prompt owes that the model finds likelier than the anchor: the mean of its largest positive log-ratios."""
    positive = sorted((ratio for ratio in ratios if ratio > 0), reverse=True)[:count]
    return sum(positive) / len(positive) if positive else 0.0


class Anchored(SearchStrategy):
    """Draws each token from the mean of both models that the budget allows."""

    def __init__(self, parts: SearchParts, anchor: SmallModel) -> None:
        super().__init__(parts)
        self._anchor = anchor
        self._budget = DivergenceBudget(self._config.anchor_budget)

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        own = logits.copy()
        self._anchor.begin(prompt)
        if self._config.anchor_debt:
            debt = prefix_debt((yield from self._ratios()), self._config.anchor_debt)
            self._budget = DivergenceBudget(self._config.anchor_budget, debt)
        return (yield from self._draw(own))

    def next(self, room: int, lost: int) -> Passes[Sequence[int]]:
        return (yield from self._draw((yield from self._feeder.feed(self._root))))

    def _draw(self, logits: Floats) -> Passes[tuple[int]]:  # (V,)
        sampler, logits = self._parts.sampler, logits.copy()
        said = _said((yield from self._anchor.after(self._sequence.tokens)), self._sequence.tokens)
        fused = fuse(sampler.probabilities(logits), sampler.probabilities(said), self._budget.next())
        self._budget.spend(fused.divergence)
        self.search.divergence, self.search.divergence_allowed = self._budget.spent, self._budget.allowed
        self.search.trials += fused.weight < 1
        token = sampler.sample_keyed(fused.probabilities, len(self._sequence.tokens))
        return self._accept(token, logits)

    def _ratios(self) -> Passes[list[float]]:
        """By how many nats the model finds each of the prompt's last tokens likelier than the anchor does."""
        cache, text, ratios = self._cache, self._sequence.tokens, list[float]()
        start = cache.rewindable_to(max(0, cache.length - _READ))
        cache.trim(start)
        for begin in range(start, len(text), MOST_ROWS):
            part = text[begin : begin + MOST_ROWS]
            head = text[: begin + len(part)]
            said = _said((yield from self._anchor.behind(head, len(part))), head)

            def compare(index: int, own: Floats, begin: int = begin, said: list[Floats] = said) -> None:
                # Behind the last token of the prompt none is known.
                for token in text[begin + index + 1 : begin + index + 2]:
                    ratios.append(logprob(own, token) - logprob(said[index], token))

            yield from self._feeder.chain(part, compare)
        return ratios


def _said(said: T | None, text: Sequence[int]) -> T:
    """What the anchor says of a text."""
    if said is None:
        message = f"The draft model's context has no room for {len(text)} tokens, so it cannot anchor the reply."
        raise ContextLengthError(message, "Ask for a shorter reply, or choose a draft model with a larger context.")
    return said


def _make(parts: SearchParts) -> Anchored:
    assert parts.small is not None, "replies are searched for with a draft model, or with the reason for none"
    return Anchored(parts, parts.small())


METHODS = (
    SearchMethod(
        name="anchored",
        help="replies that stay near the draft model's distribution",
        make=_make,
        draws="always",
        branches=False,
        rereads=True,
        constrained=True,
        thinks=True,
        shares=False,
    ),
)
