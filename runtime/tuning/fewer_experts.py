"""What passes with fewer experts guess and cost, token by token of a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle.arithmetic import softmax
from edgeinfer.errors import CapabilityError, UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.backends.contract import ExpertChoice, ForwardInput
from edgeinfer.runtime.decoding.engine import Engine

__all__ = ["FewerExperts", "compare_fewer_experts"]


@dataclass(frozen=True)
class FewerExperts:
    """Passes over one token with fewer experts against those with all that the model uses.

    Attributes:
        count: of experts for each token.
        same_best: share of tokens after which both find the same token most likely: a greedy draft's acceptance.
        overlap: mean of the sum of min(p, q) over the vocabulary: a sampled draft's.
        pass_ms, fewer_ms: median milliseconds of a pass, all of the engine's inside.
    """

    count: int
    tokens: int
    same_best: float
    overlap: float
    pass_ms: float
    fewer_ms: float


def compare_fewer_experts(engine: Engine, tokens: Sequence[int], count: int) -> FewerExperts:
    """Feeds a text one token at a time, each first with fewer experts and then, for good, as the model is.

    Empties the cache. Both kinds of pass see the same past, as the first token of every draft does.

    Raises:
        CapabilityError: the model cannot use so few.
        UsageError: fewer than two tokens, or more than the context.
    """
    backend = engine.backend
    if count not in backend.capabilities.expert_counts:
        counts = ", ".join(map(str, backend.capabilities.expert_counts)) or "none"
        raise CapabilityError(f"This model cannot use {count} experts for each token.", f"Possible: {counts}.")
    if not 2 <= len(tokens) <= backend.cache.capacity:
        raise UsageError(f"{len(tokens)} tokens cannot be compared.", f"Give 2 to {backend.cache.capacity}.")
    engine.forget()
    row = np.zeros(1, np.int64)
    same, overlap, whole_ns, fewer_ns = 0, 0.0, [], []
    for position, token in enumerate(tokens):
        step, place = np.array([token]), np.array([position])
        guess = backend.forward(ForwardInput(step, place, row, experts=ExpertChoice(count))).logits[0].copy()  # (V,)
        fewer_ns.append(backend.run_ns)
        backend.cache.trim(position)
        real = backend.forward(ForwardInput(step, place, row)).logits[0]  # (V,)
        whole_ns.append(backend.run_ns)
        same += int(guess.argmax() == real.argmax())
        overlap += float(np.minimum(softmax(guess), softmax(real)).sum())
    engine.forget()
    size = len(tokens)
    return FewerExperts(
        count, size, same / size, overlap / size, float(np.median(whole_ns)) / 1e6, float(np.median(fewer_ns)) / 1e6
    )
