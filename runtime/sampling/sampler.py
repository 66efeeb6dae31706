"""Samples the tokens of one reply: its options, the counts of its tokens and its constraint, also behind a draft."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.sampling.constraint import Constraint, ConstraintPlaces, TextCheck, weighed_draw
from edgeinfer.runtime.sampling.distributions import Ids, Logits, TokenLogprobs, draw_from, token_logprobs, uniform
from edgeinfer.runtime.sampling.processor import LogitsProcessor, TokenCounts

Probabilities = NDArray[np.float64]

# Streams of the generator besides the sampler's own, 0: even ones draw drafts, odd ones decide, far ones shape drafts.
_DRAFTS, _DECISIONS, _SHAPES, _STEP = 2, 1, (1 << 33) + 1, 2


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

    def weighed_sample(
        self, logits: Logits, position: int, path: Sequence[int], power: float, stream: int
    ) -> tuple[int | None, float]:  # (V,)
        """Draw a token behind the reply and `path` by probabilities to a power, of those that form and check accept.
        Returns it, or None, and the logarithm of an estimate, exact without a check, of the sum of these powers."""
        with self._along(path):
            probabilities = self._processor.probabilities(logits, self._counts)
            allowed = self._allowed()
            ids = np.flatnonzero(probabilities) if allowed is None else allowed[probabilities[allowed] > 0]
            if not len(ids):
                return None, -math.inf
            logs = power * np.log(probabilities[ids])
            best = float(logs.max())
            weights = np.exp(logs - best)
            log_sum = math.log(float(weights.sum()))
            if self._check is None:
                return int(ids[self.sample_from(weights, position, stream)]), best + log_sum
            accepts, noise = self._check.accepts, self._processor.noise(ids, position, stream)
            logs -= best + log_sum
            drawn = weighed_draw(logs, logs + noise, lambda index: accepts(int(ids[index])))
            return None if drawn.index is None else int(ids[drawn.index]), best + log_sum + drawn.log_weight

    def sample_from(self, probabilities: Probabilities, position: int, stream: int) -> int:
        """A token from a distribution, by a draw that decides nothing else."""
        return draw_from(probabilities, uniform(self._processor.seed, position, _DRAFTS + _STEP * stream))

    def sample_keyed(self, probabilities: Probabilities, position: int) -> int:  # (V,)
        """The token that `sample` would draw at a position if this were its distribution."""
        return self._processor.keyed(probabilities, position)

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
