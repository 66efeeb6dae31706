"""How one generation chooses: a sampler with the counts and the constraint of its reply, also behind drafted tokens.

Knows nothing of models, passes or drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.sampling.constraint import Constraint
from edgeinfer.runtime.sampling.generator import draw_from, uniform
from edgeinfer.runtime.sampling.penalties import TokenCounts
from edgeinfer.runtime.sampling.sampler import Logits, Sampler, TokenLogprobs

__all__ = ["TokenChooser"]

Law = NDArray[np.float64]

# Streams of the generator beside the sampler's own, 0: even ones draw drafts, odd ones decide about them.
_DRAFTS, _DECISIONS, _STEP = 2, 1, 2


class TokenChooser:
    """Chooses the tokens of one reply.

    Args:
        sampler: with the options and the seed of the generation.
        prompt: token ids, for penalties.
        constraint: on what may follow; None leaves it free.

    Attributes:
        logprobs: of the reply's tokens so far, where they were asked for.
    """

    def __init__(self, sampler: Sampler, prompt: Sequence[int], constraint: Constraint | None = None) -> None:
        self._sampler = sampler
        self._counts = TokenCounts(prompt) if sampler.counting else None
        self._constraint = constraint
        self._alternatives = sampler.config.logprobs
        self.logprobs: list[TokenLogprobs] = []

    @property
    def seed(self) -> int:
        """The seed every draw is keyed by."""
        return self._sampler.seed

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
        return not self.follows_paths and self._sampler.takes_likeliest

    def token(self, logits: Logits, position: int, path: Sequence[int] = ()) -> int:  # (V,)
        """The token at an absolute position behind the reply and `path`."""
        if not self.follows_paths:
            return self._sampler.token(logits, position)
        with self._along(path):
            return self._sampler.token(logits, position, self._counts, self._allowed())

    def adjusted(self, logits: Logits) -> Logits:  # (V,) -> (V,)
        """The logits with bias and penalties behind the reply, a copy, with -inf for what may not follow."""
        return self._sampler.adjusted(logits, self._counts, self._allowed())

    def law(self, logits: Logits, path: Sequence[int] = ()) -> Law:  # (V,) -> (V,)
        """The distribution that `token` draws from."""
        with self._along(path):
            return self._sampler.probabilities(logits, self._counts, self._allowed())

    def draw(self, law: Law, position: int, stream: int) -> int:
        """A token from a law, by a draw that decides nothing else."""
        return draw_from(law, uniform(self._sampler.seed, position, _DRAFTS + _STEP * stream))

    def chance(self, position: int, draw: int) -> float:
        """A number in [0, 1) of this position, independent for each draw and of all tokens drawn."""
        return uniform(self._sampler.seed, position, _DECISIONS + _STEP * draw)

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
            self.logprobs.append(self._sampler.logprobs(logits, token, self._alternatives))
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
