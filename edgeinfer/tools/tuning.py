"""Tuning of drafts and of reduced compute; the results are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from edgeinfer.core.records import dataclass
from edgeinfer.model import Model
from edgeinfer.runtime.tuning.drafting_search import Sample, TuneResult, calibrate_entropy, calibrate_skips, tune

# Default texts for tuning: openings that any model can continue.
TUNING_PROMPTS = (
    "Once upon a time, there was a little girl who lived near the woods.",
    "The most important thing to know about water is that",
    "def main(arguments):",
    "Dear Sir or Madam, I am writing to you because",
)
# Tokens of a reply for scoring layers that draft, and blocks that answers skip.
_TOKENS, _SKIP_TOKENS = 33, 48


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
    """How unsure a draft model is of its target's replies: bits above which the large model takes over, by the share of
    the tokens that this leaves it."""

    tokens: int
    thresholds: dict[float, float]


def tune_drafting(
    model: Model,
    prompts: Sequence[str] | None = None,
    *,
    granularity: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> TuneResult:
    """Finds the layer after which drafting with the model's own first layers pays; it is kept, and used from now on.

    Args:
        prompts: texts whose replies tell how well that does; None takes a few of edgeinfer's own.
        granularity: layers between two exits that are tried.
        progress: called with exits tried and to try.

    Raises:
        CapabilityError: the backend cannot skip layers.
        UsageError: a prompt has no reply to score by, or the context is too small.
    """
    with model._replies.idle() as parts:
        ids = [model.tokenize(prompt) for prompt in (TUNING_PROMPTS if prompts is None else prompts)]
        try:
            result = tune(
                parts.backend,
                parts.sequence.cache,
                _own_texts(model, ids, _TOKENS),
                granularity=granularity,
                progress=progress,
            )
        finally:
            parts.sequence.forget()
        parts.speculator.tuned(result.tuning)
    return result


def tune_skips(
    model: Model,
    prompts: Sequence[str | Sequence[int]] | None = None,
    *,
    granularity: int = 1,
    evaluations: int = 400,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[SkipLevel, ...]:
    """Finds the blocks that answers can skip with the least harm (compute="calibrated"), for every speed-up that is
    to be had; they are kept, and used from now on.

    Args:
        prompts: texts or token ids whose replies tell the harm; None takes a few of edgeinfer's own.
        granularity: consecutive layers that are skipped together.
        evaluations: sets to try at most.
        progress: called with sets tried and to try.

    Raises:
        CapabilityError: the backend cannot skip layers.
        UsageError: a prompt has no reply to score by, or the context is too small.
    """
    # Sampled at temperature 1: the likeliest texts repeat themselves, and forgive more.
    samples = _replies(model, prompts, temperature=1.0)
    with model._replies.idle() as parts:
        levels, costs = calibrate_skips(
            parts.reduced, samples, granularity=granularity, evaluations=evaluations, progress=progress
        )
    whole = costs.ms(np.ones(levels.masks.shape[1], np.bool_))
    each = [(mask, float(loss), costs.ms(mask)) for mask, loss in zip(levels.masks, levels.losses, strict=True)]
    return tuple(SkipLevel(tuple(mask.tolist()), loss, ms, whole / ms) for mask, loss, ms in each)


def tune_entropy(model: Model, prompts: Sequence[str | Sequence[int]] | None = None) -> EntropyFacts:
    """Finds how unsure the draft model is of this model's replies, by which compute="entropy" begins to share them out;
    it is kept, and used from now on. Prompts are as for `tune_skips`; UsageError where there is no draft model."""
    samples = _replies(model, prompts)
    with model._replies.idle() as parts:
        entropies = calibrate_entropy(parts.reduced, samples)
    shares = (0.1, 0.25, 0.5, 0.75, 0.9)
    return EntropyFacts(len(entropies), {share: entropies.threshold(share) for share in shares})


def _replies(model: Model, prompts: Sequence[str | Sequence[int]] | None, temperature: float = 0.0) -> list[Sample]:
    given = TUNING_PROMPTS if prompts is None else prompts
    ids = [model.tokenize(each) if isinstance(each, str) else list(each) for each in given]
    return _own_texts(model, ids, _SKIP_TOKENS, temperature)


def _own_texts(model: Model, prompts: Iterable[list[int]], tokens: int, temperature: float = 0.0) -> list[Sample]:
    """The model's replies, `tokens` tokens each."""
    samples = []
    for seed, ids in enumerate(prompts):
        reply = model.generate(
            ids, max_tokens=tokens, speculation="off", ignore_eos=True, temperature=temperature, seed=seed
        )
        samples.append(Sample(tuple(ids), reply.token_ids))
    return samples
