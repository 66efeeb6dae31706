"""From logits to a token: penalties, constraints, truncation, position-keyed draw; grammars by their own modules."""

from __future__ import annotations

from edgeinfer.runtime.sampling.checked import TextCheck
from edgeinfer.runtime.sampling.choice_trie import ChoiceTrie
from edgeinfer.runtime.sampling.constraint import ChoiceConstraint, Constraint, ConstraintPlaces
from edgeinfer.runtime.sampling.distributions import TokenLogprobs, uniform
from edgeinfer.runtime.sampling.penalties import Penalties, TokenCounts
from edgeinfer.runtime.sampling.processor import LogitsProcessor
from edgeinfer.runtime.sampling.sampler import Sampler

__all__ = [
    "ChoiceConstraint",
    "ChoiceTrie",
    "Constraint",
    "ConstraintPlaces",
    "LogitsProcessor",
    "Penalties",
    "Sampler",
    "TextCheck",
    "TokenCounts",
    "TokenLogprobs",
    "uniform",
]
