"""From logits to a token: penalties, constraints, truncation, position-keyed draw; knows nothing of models or text."""

from __future__ import annotations

from edgeinfer.runtime.sampling.chooser import TokenChooser
from edgeinfer.runtime.sampling.constraint import ChoiceConstraint, Constraint
from edgeinfer.runtime.sampling.generator import uniform
from edgeinfer.runtime.sampling.penalties import Penalties, TokenCounts
from edgeinfer.runtime.sampling.sampler import Sampler, TokenLogprobs

__all__ = [
    "ChoiceConstraint",
    "Constraint",
    "Penalties",
    "Sampler",
    "TokenChooser",
    "TokenCounts",
    "TokenLogprobs",
    "uniform",
]
