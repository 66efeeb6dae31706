"""Tuning of a loaded model: texts of its own in; out come layers that draft, blocks that answers can skip, and how
unsure a draft model is. Knows nothing of how they are searched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from edgeinfer.results import Result
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.tuning.drafting_search import TuneResult, tune
from edgeinfer.runtime.tuning.skip_search import Sample

__all__ = ["SKIP_TOKENS", "TUNING_PROMPTS", "EntropyFacts", "SkipLevel", "TuneResult", "own_texts", "tune_by"]

# What a model is tuned by where its user has nothing better: openings that any model goes on with.
TUNING_PROMPTS = (
    "Once upon a time, there was a little girl who lived near the woods.",
    "The most important thing to know about water is that",
    "def main(arguments):",
    "Dear Sir or Madam, I am writing to you because",
)
# As many as a score looks at, of layers that draft and of blocks that answers skip.
_TOKENS, SKIP_TOKENS = 33, 48


def tune_by(
    prompts: Iterable[list[int]], generate: Callable[..., Result], backend: Backend, **options: Any
) -> TuneResult:
    """Lets the model answer and searches by the answers; options and errors as `tuning.drafting_search.tune`."""
    return tune(backend, own_texts(prompts, generate, _TOKENS), **options)


def own_texts(
    prompts: Iterable[list[int]], generate: Callable[..., Result], tokens: int, temperature: float = 0.0
) -> list[Sample]:
    """What the model answers, so many tokens each."""
    samples = []
    for seed, ids in enumerate(prompts):
        options = {"temperature": temperature, "seed": seed}
        reply = generate(ids, max_tokens=tokens, speculation="off", ignore_eos=True, **options)
        samples.append(Sample(tuple(ids), reply.token_ids))
    return samples


@dataclass(frozen=True)
class SkipLevel:
    """One set of blocks that answers can skip.

    Attributes:
        layer_mask: blocks that run, [2i] attention and [2i+1] MLP of layer i.
        divergence: nats from the whole model's predictions on the texts of the search, mean over tokens.
        ms: of a pass, predicted by measured costs.
        speedup: over the whole model's.
    """

    layer_mask: tuple[bool, ...]
    divergence: float
    ms: float
    speedup: float


@dataclass(frozen=True)
class EntropyFacts:
    """How unsure a draft model is of replies of its target.

    Attributes:
        tokens: that tell it.
        thresholds: bits above which the large model takes over, by the share of tokens that this leaves it.
    """

    tokens: int
    thresholds: dict[float, float]
