"""Samples the tokens of one reply: its options, the counts of its tokens and its constraint, also behind a draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.sampling.constraint import Constraint
from edgeinfer.runtime.sampling.logits import Logits, LogitsProcessor, TokenLogprobs, draw_from, uniform
from edgeinfer.runtime.sampling.penalties import TokenCounts

__all__ = ["Sampler"]

Probabilities = NDArray[np.float64]

# Streams of the generator beside the sampler's own, 0: even ones draw drafts, odd ones decide about them.
_DRAFTS, _DECISIONS, _STEP = 2, 1, 2


class Sampler:
    """Samples the tokens of one reply, and accepts them.

    Args:
        processor: with the options and the seed of the generation.
        prompt: token ids, for penalties.
        constraint: on what may follow; None leaves it free.

    Attributes:
        logprobs: of the reply's tokens so far, where they were asked for.
    """

    def __init__(self, processor: LogitsProcessor, prompt: Sequence[int], constraint: Constraint | None = None) -> None:
        self._processor = processor
        self._counts = TokenCounts(prompt) if processor.counting else None
        self._constraint = constraint
        self._alternatives = processor.config.logprobs
        self.logprobs: list[TokenLogprobs] = []

    @property
    def seed(self) -> int:
        """The seed every draw is keyed by."""
        return self._processor.seed

    @property
    def constrained(self) -> bool:
        """Whether a constraint says what may follow."""
        return self._constraint is not None

    @property
    def follows_paths(self) -> bool:
        """Whether choices depend on the reply's tokens other than by the logits."""
        return self._counts is not None or self._constraint is not None

    @property
    def takes_likeliest(self) -> bool:
        """Whether every choice is simply the token of the largest logit."""
        return not self.follows_paths and self._processor.takes_likeliest

    def sample(self, logits: Logits, position: int, path: Sequence[int] = ()) -> int:  # (V,)
        """The token at an absolute position behind the reply and `path`."""
        if not self.follows_paths:
            return self._processor.sample(logits, position)
        with self._along(path):
            return self._processor.sample(logits, position, self._counts, self._allowed())

    def adjusted(self, logits: Logits) -> Logits:  # (V,) -> (V,)
        """The logits with bias and penalties behind the reply, a copy, with -inf for what may not follow."""
        return self._processor.adjusted(logits, self._counts, self._allowed())

    def probabilities(self, logits: Logits, path: Sequence[int] = ()) -> Probabilities:  # (V,) -> (V,)
        """The distribution that `sample` draws from."""
        with self._along(path):
            return self._processor.probabilities(logits, self._counts, self._allowed())

    def sample_from(self, probabilities: Probabilities, position: int, stream: int) -> int:
        """A token from a distribution, by a draw that decides nothing else."""
        return draw_from(probabilities, uniform(self._processor.seed, position, _DRAFTS + _STEP * stream))

    def uniform(self, position: int, draw: int) -> float:
        """A number in [0, 1) of this position, independent for each draw and of all tokens drawn."""
        return uniform(self._processor.seed, position, _DECISIONS + _STEP * draw)

    def forced(self, path: Sequence[int]) -> Sequence[int]:
        """Tokens that the constraint leaves no choice about after `path`."""
        if self._constraint is None:
            return ()
        with self._along(path):
            return self._constraint.forced()

    def accept(self, token: int, logits: Logits) -> None:  # (V,)
        """The token joins the reply.

        Args:
            logits: the model's own of its place.
        """
        if self._alternatives is not None:
            self.logprobs.append(self._processor.logprobs(logits, token, self._alternatives))
        if self._counts is not None:
            self._counts.push(token)
        if self._constraint is not None:
            self._constraint.push(token)

    def _allowed(self) -> NDArray[np.int64] | None:
        return None if self._constraint is None else self._constraint.allowed()

    @contextmanager
    def _along(self, path: Sequence[int]) -> Iterator[None]:
        stacks = [stack for stack in (self._counts, self._constraint) if stack is not None]
        for token in path:
            for stack in stacks:
                stack.push(token)
        try:
            yield
        finally:
            for stack in stacks:
                stack.pop(len(path))
