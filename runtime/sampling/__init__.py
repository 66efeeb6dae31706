"""From logits to a token: penalties, constraints, truncation, position-keyed draw."""

from __future__ import annotations

from edgeinfer.runtime.sampling.constraint import ChoiceConstraint, Constraint
from edgeinfer.runtime.sampling.distributions import TokenLogprobs, uniform
from edgeinfer.runtime.sampling.grammar import GrammarConstraint, GrammarCosts, check_grammar
from edgeinfer.runtime.sampling.grammar_source import grammar_source, json_rule
from edgeinfer.runtime.sampling.grammar_tokens import GrammarVocabulary
from edgeinfer.runtime.sampling.penalties import Penalties, TokenCounts
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler

__all__ = [
    "ChoiceConstraint",
    "Constraint",
    "GrammarConstraint",
    "GrammarCosts",
    "GrammarVocabulary",
    "LogitsProcessor",
    "Penalties",
    "Sampler",
    "TokenCounts",
    "TokenLogprobs",
    "check_grammar",
    "grammar_source",
    "json_rule",
    "uniform",
]
