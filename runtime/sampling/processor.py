"""Turns the logits of a position into a token or a distribution: bias, penalties, mask, truncation and draw."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import UsageError
from edgeinfer.runtime.sampling.checked import Accepts, first_accepted
from edgeinfer.runtime.sampling.distributions import Ids, Logits, argmax, truncated
from edgeinfer.runtime.sampling.noise import GumbelNoise
from edgeinfer.runtime.sampling.penalties import Penalties, TokenCounts

# Copying a whole row costs as much as copying one of this many logits by its id (measured at 152 thousand).
_SPARSE = 32
# Positions of further noise lie so many bits behind those of texts.
_FAR = 48


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
        self._greedy, self._adjusts = config.greedy, self._penalties.active
        self._row = np.empty(vocab_size if self._penalties.active else 0, np.float32)
        # Arrays of a large vocabulary are fresh pages each time they are allocated, and faulting those in costs more
        # than the arithmetic; so the ones every draw needs are kept.
        most = 0 if config.greedy else config.top_k if 0 < config.top_k < vocab_size else vocab_size
        self._ids = np.arange(most)
        self._weights = np.empty(most)
        self._noise = None if config.greedy else GumbelNoise(seed, vocab_size)
        self._truncates = most < vocab_size or config.top_p < 1 or config.min_p > 0

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
        return self._greedy and not self._adjusts

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
            allowed: ids that may follow, ascending, at least one; None is all. (A,)
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
        """
        row = self._masked(logits, counts, allowed)
        best = self._best(row, logits, allowed)
        ids, weights = (np.array([best]), np.ones(1)) if self._greedy else self._truncated(row, best)
        return ids if allowed is None else allowed[ids], weights

    def sample(
        self, logits: Logits, position: int, counts: TokenCounts | None = None, allowed: Ids | None = None
    ) -> int:
        """The token for an absolute position: the most likely one when greedy, else drawn by Gumbel noise.

        The draw depends on the logits, what is allowed, the seed and the position alone. Each token has noise of its
        own, whatever the others' logits, so a model whose distribution is alike mostly draws the same token.

        Args:
            logits: that predict this position. (V,)
            allowed: ids that may follow, ascending, at least one; None is all. (A,)
        """
        row, ids = self._masked(logits, counts, allowed), allowed
        chosen = self._best(row, logits, allowed)
        if self._noise is not None:
            if self._truncates:
                kept, _ = self._truncated(row, chosen)
                row, ids = row[kept], kept if allowed is None else allowed[kept]
                chosen = int(row.argmax())
            chosen = self._noise.draw(row, chosen, self._config.temperature, position, ids)
        return chosen if ids is None else int(ids[chosen])

    def sample_checked(
        self, logits: Logits, position: int, counts: TokenCounts | None, allowed: Ids | None, accepts: Accepts
    ) -> int:  # (V,)
        """As `sample`, of the tokens that are accepted; each is asked about only when its turn comes."""
        if self._noise is None:
            row = self._masked(logits, counts, allowed)
            self._best(row, logits, allowed)
            ids, scores = np.arange(len(row)) if allowed is None else allowed, row.astype(np.float64)
        else:
            ids, weights = self.support(logits, counts, allowed)
            with np.errstate(divide="ignore"):
                scores = np.log(weights) + self._noise.of(ids, position)
        return int(ids[first_accepted(scores, lambda index: accepts(int(ids[index])))])

    def noise(self, ids: Ids, position: int, stream: int) -> NDArray[np.float64]:  # (S,) -> (S,)
        """Gumbel noise of tokens for one of several draws at a position; none of them is `sample`'s."""
        assert self._noise is not None, "greedy choices have none"
        return self._noise.of(ids, position + (stream + 1 << _FAR))

    def keyed(self, probabilities: NDArray[np.float64], position: int) -> int:  # (V,)
        """The token that the noise of `sample` draws at a position from another distribution."""
        assert self._noise is not None, "greedy choices have none"
        ids = np.flatnonzero(probabilities)
        return int(ids[(np.log(probabilities[ids]) + self._noise.of(ids, position)).argmax()])

    def adjusted(self, logits: Logits, counts: TokenCounts | None = None, allowed: Ids | None = None) -> Logits:  # (V,)
        """The logits with bias and penalties, a copy, with -inf for what may not follow.

        Args:
            logits: of one position. (V,)
            allowed: ids that may follow; None is all. (A,)
        """
        row = self._masked(logits, counts, allowed)
        if allowed is None:
            return row.copy()
        full = np.full(self._vocab_size, -np.inf, np.float32)
        full[allowed] = row
        return full

    def _masked(self, logits: Logits, counts: TokenCounts | None, allowed: Ids | None) -> Logits:  # (A,) or (V,)
        assert logits.shape == (self._vocab_size,), f"logits of shape {logits.shape}, expected ({self._vocab_size},)"
        assert allowed is None or len(allowed), "a constraint that lets no token follow"
        if not self._adjusts:
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
        # argmax counts NaN as largest, so this one look finds NaN anywhere in the row.
        if np.isfinite(row[best]):
            return best
        if np.isneginf(self._penalties.bias).any():
            argmax(logits if allowed is None else logits[allowed])
            raise UsageError("logit_bias bans every token that may follow.", "Leave one that the reply may go on with.")
        return argmax(row)

    def _truncated(self, row: Logits, best: int) -> tuple[Ids, NDArray[np.float64]]:  # (A,) -> (S,), (S,)
        size = len(row)
        return truncated(row, best, self._config, self._ids[:size], self._weights[:size])
