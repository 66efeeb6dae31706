"""Tuning of a loaded model: texts of its own in, layers that draft out; knows nothing of how they are searched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from edgeinfer.results import Result
from edgeinfer.runtime.contracts import Backend
from edgeinfer.runtime.speculation.skip_samples import Sample
from edgeinfer.runtime.speculation.tune import TuneResult, tune

__all__ = ["TUNING_PROMPTS", "TuneResult", "tune_by"]

# What a model is tuned by where its user has nothing better: openings that any model goes on with.
TUNING_PROMPTS = (
    "Once upon a time, there was a little girl who lived near the woods.",
    "The most important thing to know about water is that",
    "def main(arguments):",
    "Dear Sir or Madam, I am writing to you because",
)
# As many as a score looks at.
_TOKENS = 33


def tune_by(
    prompts: Iterable[list[int]], generate: Callable[..., Result], backend: Backend, **options: Any
) -> TuneResult:
    """Lets the model answer and searches by the answers; options and errors as `runtime.speculation.tune.tune`."""
    samples = []
    for ids in prompts:
        reply = generate(ids, max_tokens=_TOKENS, speculation="off", ignore_eos=True)
        samples.append(Sample(tuple(ids), reply.token_ids))
    return tune(backend, samples, **options)
