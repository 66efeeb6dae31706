"""Reads a reply of given tokens with reduced compute, and compares what was predicted with the whole model.

The strategy is that of a real reply; only the sampler returns the given tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.adaptive import ComputeUse
from edgeinfer.errors import UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.decoding.strategy import DecodingStrategy
from edgeinfer.runtime.layer_skip.divergence import divergence
from edgeinfer.runtime.sampling.distributions import Logits, token_logprobs
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.tuning.measure import token_logits


@dataclass(frozen=True)
class ReplyReading:
    """How the tokens of a reply after its first were predicted.

    Attributes:
        logprobs: natural log-probability of each. (N,)
        divergences: of the predictions from the whole model's, in nats. (N,)
        use: what computing less did; None where all was computed in full. Its times are not those of decoding.
    """

    logprobs: NDArray[np.float64]
    divergences: NDArray[np.float64]
    use: ComputeUse | None


class _Given(Sampler):
    """Takes the tokens of a text, whatever is predicted."""

    def __init__(self, prompt: int, reply: Sequence[int], whole: Floats) -> None:
        self._prompt = prompt
        self._reply = reply
        self._whole = whole  # after the prompt, and after each token of the reply but the last (N + 1, V)
        self._place = 0
        self.found: list[float] = []
        self.divergences: list[float] = []

    def sample(self, logits: Logits, position: int, path: Sequence[int] = ()) -> int:  # (V,)
        return self._reply[position - self._prompt]

    def accept(self, token: int, logits: Logits) -> None:  # (V,)
        if self._place:
            self.found.append(token_logprobs(logits, token).logprob)
            self.divergences.append(divergence(self._whole[self._place], logits))
        self._place += 1


def read_reply(
    engine: Engine, prompt: Sequence[int], reply: Sequence[int], make: Callable[[Sampler], DecodingStrategy | None]
) -> ReplyReading:
    """Reads a reply; empties the cache.

    Args:
        make: the strategy of a sampler's reply; None computes in full.
    """
    if not prompt or len(reply) < 2:
        raise UsageError("There is no reply to read.", "Give a prompt and at least two tokens after it.")
    text = [*prompt, *reply[:-1]]
    whole, place = np.empty((len(reply), engine.backend.geometry.vocab_size), np.float32), 1 - len(prompt)
    for rows in token_logits(engine, text):  # (R, V)
        wanted = rows[max(0, -place) :]
        place += len(rows)
        if len(wanted):
            whole[place - len(wanted) : place] = wanted
    sampler = _Given(len(prompt), reply, whole)
    strategy = make(sampler)
    for _ in engine.generate(prompt, sampler, max_tokens=len(reply), stop_ids=frozenset(), strategy=strategy):
        pass
    engine.forget()
    use = None if strategy is None else strategy.compute_use()
    return ReplyReading(np.array(sampler.found), np.array(sampler.divergences), use)
