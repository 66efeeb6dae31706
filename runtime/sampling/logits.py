"""One row of logits becomes a distribution, a token or log-probabilities, by draws keyed by seed and position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import BackendError, UsageError
from edgeinfer.runtime.sampling.penalties import Penalties, TokenCounts

__all__ = ["LogitsProcessor", "TokenLogprobs", "draw_from", "uniform"]

Logits = NDArray[np.floating[Any]]
Ids = NDArray[np.int64]

# Sorting a whole vocabulary costs more than all else here, and a nucleus is nearly always inside this many tokens.
_NUCLEUS_GUESS = 256
# Copying a whole row costs as much as copying one of this many logits by its id (measured at 152 thousand).
_SPARSE = 32
_UNIT = 2.0**-53  # spacing of the doubles in [1/2, 1): 53 random bits fill a mantissa
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities under the model itself, before bias, penalties, mask, temperature and truncation.

    Attributes:
        logprob: of the chosen token.
        top: the most likely (token id, log-probability) pairs, best first, lower id first on ties.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class LogitsProcessor:
    """Turns logits into tokens as one generation asks.

    Order: bias, penalties, mask, temperature, top-k, top-p, min-p. The mask is the ids that a constraint allows, and
    the work after it is on those alone. Each truncation works on what the one before left, renormalised; at its edge
    the lower token id wins a tie. Not for use by several threads at once.

    Args:
        config: the options of the generation.
        vocab_size: V, the length of a row of logits.
        seed: of the position-keyed generator, in [0, 2**64).

    Raises:
        UsageError: a biased token id is outside the vocabulary.
    """

    def __init__(self, config: GenerationConfig, vocab_size: int, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._penalties = Penalties.from_config(config, vocab_size)
        self._vocab_size = vocab_size
        self._row = np.empty(vocab_size if self._penalties.active else 0, np.float32)
        # Arrays of a large vocabulary are fresh pages each time they are allocated, and faulting those in costs more
        # than the arithmetic; so the ones every draw needs are kept.
        most = 0 if config.greedy else config.top_k if 0 < config.top_k < vocab_size else vocab_size
        self._ids = np.arange(most)
        self._weights = np.empty(most)
        self._cumulative = np.empty(most)

    @property
    def config(self) -> GenerationConfig:
        """The options in force."""
        return self._config

    @property
    def seed(self) -> int:
        """The seed every draw is keyed by."""
        return self._seed

    @property
    def takes_likeliest(self) -> bool:
        """Whether a token is simply that of the largest logit."""
        return self._config.greedy and not self._penalties.active

    @property
    def counting(self) -> bool:
        """Whether results depend on token counts; where false, `counts` may be None."""
        return self._penalties.counting

    def probabilities(
        self, logits: Logits, counts: TokenCounts | None = None, allowed: Ids | None = None
    ) -> NDArray[np.float64]:  # (V,)
        """The distribution tokens are drawn from; one-hot when greedy.

        Args:
            logits: of one position. (V,)
            counts: tokens before that position.
            allowed: ids that may follow, ascending, at least one; None is all. (A,)

        Raises:
            BackendError: the logits hold NaN or allow no token.
            UsageError: the bias bans all that may follow.
        """
        ids, weights = self.support(logits, counts, allowed)
        full = np.zeros(self._vocab_size)
        full[ids] = weights / weights.sum()
        return full

    def support(
        self, logits: Logits, counts: TokenCounts | None = None, allowed: Ids | None = None
    ) -> tuple[Ids, NDArray[np.float64]]:  # (S,), (S,)
        """Token ids that survive mask and truncation, ascending, and their probabilities up to a common factor.

        The arrays are valid until the next call and must not be written to.

        Raises:
            BackendError: the logits hold NaN or allow no token.
            UsageError: the bias bans all that may follow.
        """
        row = self._masked(logits, counts, allowed)
        best = self._best(row, logits, allowed)
        ids, weights = (np.array([best]), np.ones(1)) if self._config.greedy else self._truncated(row, best)
        return ids if allowed is None else allowed[ids], weights

    def sample(
        self, logits: Logits, position: int, counts: TokenCounts | None = None, allowed: Ids | None = None
    ) -> int:
        """The token for an absolute position: the most likely one when greedy, else drawn by inverse CDF.

        The draw depends on the logits, what is allowed, the seed and the position alone. The CDF runs in order of
        token id, so that a rounding difference in the logits moves its edges a little and never reorders them.

        Args:
            logits: that predict this position. (V,)
            position: absolute index of the token in prompt plus reply.
            counts: tokens before that position.
            allowed: ids that may follow, ascending, at least one; None is all. (A,)

        Raises:
            BackendError: the logits hold NaN or allow no token.
            UsageError: the bias bans all that may follow.
        """
        if self._config.greedy:
            best = self._best(self._masked(logits, counts, allowed), logits, allowed)
            return best if allowed is None else int(allowed[best])
        ids, weights = self.support(logits, counts, allowed)
        cumulative = weights.cumsum(out=self._cumulative[: len(weights)])
        total = cumulative[-1]
        drawn = int(cumulative.searchsorted(uniform(self._seed, position) * total, side="right"))
        # Rounding can lift the product to the total; the last token of non-zero weight owns that edge.
        last = int(cumulative.searchsorted(total, side="left"))
        return int(ids[min(drawn, last)])

    def adjusted(self, logits: Logits, counts: TokenCounts | None = None, allowed: Ids | None = None) -> Logits:  # (V,)
        """The logits with bias and penalties, a copy, with -inf for what may not follow.

        Args:
            logits: of one position. (V,)
            counts: tokens before that position.
            allowed: ids that may follow; None is all. (A,)
        """
        row = self._masked(logits, counts, allowed)
        if allowed is None:
            return row.copy()
        full = np.full(self._vocab_size, -np.inf, np.float32)
        full[allowed] = row
        return full

    def logprobs(self, logits: Logits, token: int, top: int = 0) -> TokenLogprobs:
        """Log-probabilities of a token and of the `top` most likely ones, from the untouched logits.

        Args:
            logits: that predicted the token. (V,)
            token: the chosen id.
            top: how many alternatives to list.

        Raises:
            BackendError: the logits hold NaN or allow no token.
            UsageError: the bias bans all that may follow.
        """
        best = float(logits[_argmax(logits)])
        shifted = logits.astype(np.float64)
        shifted -= best
        normaliser = float(np.log(np.exp(shifted).sum()))
        ids = _largest(logits, top) if top < len(logits) else np.arange(len(logits))
        ids = ids[np.argsort(-shifted[ids], kind="stable")]
        pairs = tuple((int(i), float(shifted[i]) - normaliser) for i in ids)
        return TokenLogprobs(float(shifted[token]) - normaliser, pairs)

    def _truncated(self, row: Logits, best: int) -> tuple[Ids, NDArray[np.float64]]:  # (S,), (S,)
        """Indices of a row (A,) that survive truncation, and their weights; the one at `best` has weight 1."""
        config = self._config
        if 0 < config.top_k < len(row):
            ids = _largest(row, config.top_k)
            weights = row[ids].astype(np.float64)
        elif config.top_p == 1 and config.min_p > 0:
            # Nearly all of the vocabulary goes out here, before the exponential; the slack leaves the edge to min-p.
            top = float(row[best])
            floor = top + config.temperature * math.log(config.min_p) - 1e-3 - 1e-6 * abs(top)
            ids = np.flatnonzero(row >= np.float32(max(floor, _LOWEST)))
            weights = row[ids].astype(np.float64)
        else:
            ids, weights = self._ids[: len(row)], self._weights[: len(row)]
            np.copyto(weights, row)
        # The best value leaves before dividing, so that no temperature, however small, overflows.
        weights -= float(row[best])
        with np.errstate(over="ignore"):  # an overflow to -inf is a weight of 0
            weights /= config.temperature
        np.exp(weights, out=weights)
        if config.top_p < 1:
            keep = _nucleus(weights, config.top_p)
            ids, weights = ids[keep], weights[keep]
        if config.min_p > 0:
            likely = weights >= config.min_p  # the best weight is 1
            ids, weights = ids[likely], weights[likely]
        return ids, weights

    def _masked(self, logits: Logits, counts: TokenCounts | None, allowed: Ids | None) -> Logits:  # (A,) or (V,)
        assert logits.shape == (self._vocab_size,), f"logits of shape {logits.shape}, expected ({self._vocab_size},)"
        assert allowed is None or len(allowed), "a constraint that lets no token follow"
        if not self._penalties.active:
            return logits if allowed is None else logits[allowed]
        if allowed is None or len(allowed) * _SPARSE > len(logits):
            np.copyto(self._row, logits)
        else:
            # Only what is read below: what is allowed, and what penalties change.
            for ids in (allowed, self._penalties.bias_ids, *(() if counts is None else (counts.ids,))):
                self._row[ids] = logits[ids]
        self._penalties.apply(self._row, counts)
        return self._row if allowed is None else self._row[allowed]

    def _best(self, row: Logits, logits: Logits, allowed: Ids | None) -> int:  # (A,) or (V,), (V,)
        """Index of the largest of what `_masked` made of logits."""
        best = int(row.argmax())
        if not np.isfinite(row[best]) and np.isneginf(self._penalties.bias).any():
            _argmax(logits if allowed is None else logits[allowed])
            raise UsageError("logit_bias bans every token that may follow.", "Leave one that the reply may go on with.")
        return _argmax(row)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """The number in [0, 1) that belongs to this seed, position and stream.

    A counter-based generator: nothing is remembered, so the number is the same on every platform and whatever
    was drawn before. That is why sampled text does not depend on speculation.

    Args:
        seed: in [0, 2**64).
        position: absolute position of the token being drawn, in [0, 2**64).
        stream: separates independent draws at one position, in [0, 2**64).
    """
    bits: int = Philox(counter=position, key=seed | stream << 64).random_raw()
    return (bits >> 11) * _UNIT


def draw_from(probabilities: NDArray[np.float64], draw: float) -> int:
    """The token at a draw in [0, 1) of the cumulative distribution in order of token id; never an impossible one.

    Args:
        probabilities: a distribution, or weights of positive sum. (V,)
    """
    cumulative = np.cumsum(probabilities)
    # The largest double below 1 takes more than half a rounding off any sum: some token always lies beyond the product.
    return int(cumulative.searchsorted(draw * cumulative[-1], side="right"))


def _argmax(row: Logits) -> int:
    """Index of the largest logit, the lowest on ties, having checked that the row is usable."""
    best = int(row.argmax())
    # argmax counts NaN as largest, so this one look finds NaN anywhere in the row.
    if not np.isfinite(row[best]):
        raise BackendError(
            f"No token can be chosen: the largest logit is {row[best]}.",
            "The model's weights or its export are broken: export it again.",
        )
    return best


def _largest(row: NDArray[Any], count: int) -> Ids:
    """Ascending indices of the `count` largest values, count < len(row); lower indices win ties at the edge."""
    if count == 0:
        return np.empty(0, np.int64)
    edge = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= edge)
    surplus = len(ids) - count
    if surplus:
        tied = np.flatnonzero(row[ids] == edge)
        ids = np.delete(ids, tied[len(tied) - surplus :])
    return ids


def _nucleus(weights: NDArray[np.float64], mass: float) -> Ids:
    """Ascending indices of the smallest set of largest weights whose share of the total reaches `mass`."""
    wanted = mass * weights.sum()
    size = _NUCLEUS_GUESS
    while True:
        some = _largest(weights, size) if size < len(weights) else np.arange(len(weights))
        order = some[np.argsort(-weights[some], kind="stable")]
        reached = np.cumsum(weights[order])
        if reached[-1] >= wanted or len(some) == len(weights):
            return np.sort(order[: int(reached.searchsorted(wanted)) + 1])
        size *= 8
