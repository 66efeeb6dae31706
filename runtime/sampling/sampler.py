"""Turns the logits of a position into a token (bias, penalties, mask, truncation, draw), and samples the tokens of one
reply by its options, the counts of its tokens and its constraint, also behind a draft."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.sampling.constraint import (
    Accepts,
    Constraint,
    ConstraintPlaces,
    TextCheck,
    first_accepted,
)
from edgeinfer.runtime.sampling.distributions import (
    GumbelNoise,
    Ids,
    Logits,
    TokenLogprobs,
    argmax,
    draw_from,
    token_logprobs,
    truncated,
    uniform,
)
from edgeinfer.runtime.sampling.penalties import Penalties, TokenCounts

Probabilities = NDArray[np.float64]

# Streams of the generator besides the sampler's own, 0: even ones draw drafts, odd ones decide, far ones shape drafts.
_DRAFTS, _DECISIONS, _SHAPES, _STEP = 2, 1, (1 << 33) + 1, 2
# Copying a whole row costs as much as copying one of this many logits by its id (measured at 152 thousand).
_SPARSE = 32
# Positions of further noise lie so many bits behind those of texts.
_FAR = 48


class LogitsProcessor:
    """Turns logits (V,) into tokens: bias, penalties, mask, top-n-sigma, top-k, temperature, top-p, min-p, XTC. Not
    thread-safe. The mask is the ids that a constraint allows, and the work after it is on those alone. Each truncation
    works on what the one before left, renormalised; at its edge the lower token id wins a tie. `pieces` gives the bytes
    of a token."""

    def __init__(
        self, config: ReplyOptions, vocab_size: int, seed: int, pieces: Callable[[int], bytes] | None = None
    ) -> None:
        self.config = config
        self.seed = seed
        self._penalties = Penalties.from_config(config, vocab_size, pieces)
        self._vocab_size = vocab_size
        self._greedy, self._adjusts = config.greedy, self._penalties.active
        self._row = np.empty(vocab_size if self._penalties.active else 0, np.float32)
        # Arrays of a large vocabulary are fresh pages each time they are allocated, and faulting those in costs more
        # than the arithmetic; so the ones every draw needs are kept.
        most = 0 if config.greedy else config.top_k if 0 < config.top_k < vocab_size else vocab_size
        self._ids = np.arange(most)
        self._weights = np.empty(most)
        self._noise = None if config.greedy else GumbelNoise(seed, vocab_size)
        self._truncates = most < vocab_size or config.top_p < 1 or config.min_p > 0 or config.top_n_sigma > 0
        self._reweighs = config.xtc_probability > 0 or config.dynatemp_range > 0

    @property
    def takes_likeliest(self) -> bool:
        """Whether every token is simply the one of the largest logit."""
        return self._greedy and not self._adjusts

    @property
    def counting(self) -> bool:
        """Whether results depend on token counts; where false, `counts` may be None."""
        return self._penalties.counting

    def probabilities(
        self, logits: Logits, counts: TokenCounts | None = None, allowed: Ids | None = None
    ) -> NDArray[np.float64]:  # (V,)
        """The distribution (V,) that tokens are drawn from; one-hot when greedy. `allowed` ids ascend; None is all."""
        ids, weights = self.support(logits, counts, allowed)
        full = np.zeros(self._vocab_size)
        full[ids] = weights / weights.sum()
        return full

    def support(
        self, logits: Logits, counts: TokenCounts | None = None, allowed: Ids | None = None
    ) -> tuple[Ids, NDArray[np.float64]]:  # (S,), (S,)
        """Token ids that survive mask and truncation, ascending, and their probabilities up to a common factor. The
        arrays are valid until the next call and must not be written to."""
        row = self._masked(logits, counts, allowed)
        best = self._best(row, logits, allowed)
        ids, weights = (np.array([best]), np.ones(1)) if self._greedy else self._truncated(row, best)
        return ids if allowed is None else allowed[ids], weights

    def sample(
        self, logits: Logits, position: int, counts: TokenCounts | None = None, allowed: Ids | None = None
    ) -> int:
        """The token for an absolute position: the most likely one when greedy, else drawn by Gumbel noise. The draw
        depends on the logits, what is allowed, the seed and the position alone. Each token has noise of its own,
        whatever the others' logits, so a model whose distribution is alike mostly draws the same token."""
        row, ids = self._masked(logits, counts, allowed), allowed
        chosen = self._best(row, logits, allowed)
        if self._noise is not None:
            if self._reweighs:
                ids, weights = self.support(logits, counts, allowed)
                with np.errstate(divide="ignore"):
                    scores = np.log(weights)
                return int(ids[self._noise.draw(scores, int(weights.argmax()), 1.0, position, ids)])
            if self._truncates:
                kept, _ = self._truncated(row, chosen)
                row, ids = row[kept], kept if allowed is None else allowed[kept]
                chosen = int(row.argmax())
            chosen = self._noise.draw(row, chosen, self.config.temperature, position, ids)
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

    def adjusted(self, logits: Logits, counts: TokenCounts | None = None, allowed: Ids | None = None) -> Logits:  # (V,)
        """A copy of the logits with bias and penalties, and -inf for what may not follow."""
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
        """Index of the largest masked logit."""
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
        return truncated(row, best, self.config, self._ids[:size], self._weights[:size])


class Sampler:
    """Samples the tokens of one reply, and accepts them. Constraint and check are None where there are none."""

    def __init__(
        self,
        processor: LogitsProcessor,
        prompt: Sequence[int],
        constraint: Constraint | None = None,
        check: TextCheck | None = None,
    ) -> None:
        self._processor = processor
        self._check = check
        self._counts = TokenCounts(prompt) if processor.counting else None
        self._constraint = constraint
        self._alternatives = processor.config.logprobs
        self.logprobs: list[TokenLogprobs] = []

    @property
    def seed(self) -> int:
        return self._processor.seed

    @property
    def constrained(self) -> bool:
        return self._constraint is not None

    @property
    def checked(self) -> bool:
        """Whether a caller's check says what may follow, so that no distribution is known before it was asked."""
        return self._check is not None

    def places(self) -> ConstraintPlaces | None:
        """What the constraint lets follow several texts that go on from here; None where there is none."""
        return None if self._constraint is None else self._constraint.places()

    @property
    def records_logprobs(self) -> bool:
        """Whether log-probabilities are recorded."""
        return self._alternatives is not None

    @property
    def follows_paths(self) -> bool:
        """Whether choices depend on the reply's tokens other than by the logits."""
        return any(stack is not None for stack in (self._counts, self._constraint, self._check))

    @property
    def takes_likeliest(self) -> bool:
        """Whether every token is simply the one of the largest logit."""
        return not self.follows_paths and self._processor.takes_likeliest

    def only_ends(self, stop_ids: Collection[int]) -> bool:
        """Whether the constraint lets nothing but the end follow: the reply is complete without its stop token."""
        allowed = self._allowed()
        return allowed is not None and len(allowed) <= len(stop_ids) and set(allowed.tolist()) <= set(stop_ids)

    def sample(self, logits: Logits, position: int, path: Sequence[int] = ()) -> int:  # (V,)
        """The token at an absolute position behind the reply and `path`."""
        if not self.follows_paths:
            return self._processor.sample(logits, position)
        with self._along(path):
            if self._check is not None:
                accepts = self._check.accepts
                return self._processor.sample_checked(logits, position, self._counts, self._allowed(), accepts)
            return self._processor.sample(logits, position, self._counts, self._allowed())

    def adjusted(self, logits: Logits, path: Sequence[int] = ()) -> Logits:  # (V,) -> (V,)
        """The logits with bias and penalties behind the reply and `path`, a copy, with -inf for what may not follow."""
        with self._along(path):
            return self._processor.adjusted(logits, self._counts, self._allowed())

    def probabilities(self, logits: Logits, path: Sequence[int] = ()) -> Probabilities:  # (V,) -> (V,)
        with self._along(path):
            return self._processor.probabilities(logits, self._counts, self._allowed())

    def unbound(self, logits: Logits, path: Sequence[int]) -> tuple[Probabilities, Ids]:  # (V,) -> (V,), (A,)
        """The distribution behind the reply and `path` as if nothing bound it, and what the constraint lets follow."""
        with self._along(path):
            allowed = self._allowed()
            assert allowed is not None, "a constraint says what may follow"
            return self._processor.probabilities(logits, self._counts), allowed

    def sample_from(self, probabilities: Probabilities, position: int, stream: int) -> int:
        """A token from a distribution, by a draw that decides nothing else."""
        return draw_from(probabilities, uniform(self._processor.seed, position, _DRAFTS + _STEP * stream))

    def uniform(self, position: int, draw: int) -> float:
        """A number in [0, 1) of this position, independent for each draw and of all tokens drawn."""
        return uniform(self._processor.seed, position, _DECISIONS + _STEP * draw)

    def chance(self, position: int, draw: int) -> float:
        """Like `uniform`, and independent of it: for the shape of drafts."""
        return uniform(self._processor.seed, position, _SHAPES + _STEP * draw)

    def forced(self, path: Sequence[int]) -> Sequence[int]:
        """Tokens that the constraint forces after `path`."""
        if self._constraint is None:
            return ()
        with self._along(path):
            return self._constraint.forced()

    def accept(self, token: int, logits: Logits) -> None:  # (V,)
        """Add a token to the reply; `logits` are ignored where no log-probabilities are recorded."""
        self.accept_with(token, self.logprobs_of(token, logits) if self.records_logprobs else None)

    def logprobs_of(self, token: int, logits: Logits) -> TokenLogprobs:  # (V,)
        """Log-probabilities of a token by the model's own logits."""
        assert self._alternatives is not None, "log-probabilities were asked for"
        return token_logprobs(logits, token, self._alternatives)

    def accept_with(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token to the reply, with its log-probabilities if they are recorded."""
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self._counts is not None:
            self._counts.push(token)
        for stack in (self._constraint, self._check):
            if stack is not None:
                stack.push(token)

    def _allowed(self) -> NDArray[np.int64] | None:
        return None if self._constraint is None else self._constraint.allowed()

    @contextmanager
    def _along(self, path: Sequence[int]) -> Iterator[None]:
        stacks = [stack for stack in (self._counts, self._constraint, self._check) if stack is not None]
        for token in path:
            for stack in stacks:
                stack.push(token)
        try:
            yield
        finally:
            for stack in stacks:
                stack.pop(len(path))
