"""From a row of logits to a token: penalties, truncation, the position-keyed draw; knows nothing of models or text."""

from __future__ import annotations

from edgeinfer.runtime.sampling.generator import uniform
from edgeinfer.runtime.sampling.penalties import Penalties, TokenCounts
from edgeinfer.runtime.sampling.sampler import Sampler, TokenLogprobs

__all__ = ["Penalties", "Sampler", "TokenCounts", "TokenLogprobs", "uniform"]
