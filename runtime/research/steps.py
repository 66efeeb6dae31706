"""A reply that the small model writes in steps, each of which the large one reads and may write again.

The routing of Arbitrage (Maheswaran et al. 2025, arXiv 2512.05033): what counts is by how much the large model would
write the step better, not how good the step is. The paper trains a router on the scores of a reward model; here the
large model's own reading tells: the log-probability that it expects of tokens of its own, less that of those it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from edgeinfer.core.methods import method_option
from edgeinfer.core.results import ComputeUse
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.strategy import DecodingStrategy, ReducedStatistics
from edgeinfer.runtime.layer_skip.reduced_compute import ComputeMethod, ReducedComputeStrategies
from edgeinfer.runtime.layer_skip.strategy import SmallModel, StrategyArguments, feed, whole_pass
from edgeinfer.runtime.sampling.sampler import Probabilities

# Tokens of a step that has no end by itself.
_LONGEST = 48
_SENTENCE_ENDS = frozenset(".!?\n")


class _Decoder(Protocol):
    """What makes text of tokens."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some."""


class StepEnds:
    """Tells whether a token ends a step: a sentence, a line or the reply; the paper's steps are paragraphs."""

    def __init__(self, tokenizer: _Decoder, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._known = tokenizer, dict.fromkeys(stop_ids, True)

    def __call__(self, token: int) -> bool:
        if token not in self._known:
            self._known[token] = not _SENTENCE_ENDS.isdisjoint(self._tokenizer.decode([token]))
        return self._known[token]


def advantage(logits: Floats, token: int, probabilities: Probabilities) -> float:  # (V,), (V,)
    """By how many nats a model, whose logits are -inf for what may not follow, expects a token of its own to be
    likelier than this one."""
    powers = logits.astype(np.float64) - float(logits.max())
    own = np.flatnonzero(probabilities)
    return float(probabilities[own] @ powers[own]) - float(powers[token])


class StepRoutingDecoding(DecodingStrategy):
    """Takes a step of the small model's, or writes it with the large one where that expects to do so much better."""

    def __init__(
        self, given: StrategyArguments, small: SmallModel, ends: Callable[[int], bool], parameters: float
    ) -> None:
        super().__init__(given.backend, given.sampler)
        self._least, self._chunk = (
            METHOD.values(given.options.method_options)["step_advantage"],
            max(1, min(given.chunk, given.rows)),
        )
        self._small, self._ends, self._parameters = small, ends, parameters
        self._statistics = ReducedStatistics()
        self._text: list[int] = []  # prompt and reply; the last is the root
        self._writes = False  # the large model, to the end of a step
        self._row: Floats | None = None  # behind the root, as the pass over a step gave it
        self._switches = 0

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Sequence[int]:  # (V,)
        """The token after the prompt, which the large model makes."""
        accepted = self._accept(self._sampler.sample(logits, len(prompt)), logits)
        self._text = [*prompt, *accepted]
        self._writes, self._row = False, None
        self._small.begin(self._text)
        return accepted

    def next(self, room: int, lost: int) -> Sequence[int]:
        """A step of the small model's, or a token of the large one's."""
        if not self._writes:
            step = self._draft(min(room, self._backend.cache.capacity - self._backend.cache.length))
            if step and self._takes(step):
                self._text += step
                self._statistics.tokens += len(step)
                self._statistics.reduced += len(step)
                return step
            self._writes = True
            self._switches += 1
        logits = self._forward(self._root) if self._row is None else self._row
        self._row = None
        (token,) = accepted = self._accept(self._sampler.sample(logits, len(self._text)), logits)
        self._text.append(token)
        self._statistics.tokens += 1
        if self._ends(token):
            self._writes = False
            self._switches += 1
            # The step that it wrote before is no longer the text's.
            self._small.begin(self._text)
        return accepted

    def _draft(self, room: int) -> list[int]:
        """A step of the small model's; empty where its cache has no room for one."""
        step: list[int] = []
        while len(step) < min(room, _LONGEST) and not (step and self._ends(step[-1])):
            logits = self._small.after([*self._text, *step])
            if logits is None:
                break
            step.append(self._sampler.sample(logits, len(self._text) + len(step), step))
        return step

    def _takes(self, step: Sequence[int]) -> bool:
        """Has the large model read a step; the cache then holds the root, and the step but for its last token if it
        was taken."""
        start, fed = self._backend.cache.length, [self._root, *step[:-1]]
        gained, rows, first = 0.0, list[Floats](), np.zeros(0, np.float32)
        run = whole_pass(self._backend)
        for index, logits in feed(run, fed, start, range(len(fed)), self._chunk):
            before = step[:index]
            row, probabilities = self._sampler.adjusted(logits, before), self._sampler.probabilities(logits, before)
            gained += advantage(row, step[index], probabilities)
            if index == 0:
                first = logits.copy()
            if self._sampler.records_logprobs:
                rows.append(logits.copy())
        if gained <= self._least * len(step):
            for place, token in enumerate(step):
                self._accept(token, rows[place] if rows else first)
            return True
        self._statistics.caught_up += len(step)
        self._backend.cache.trim(start + 1)
        self._row = first
        return False

    def compute_use(self) -> ComputeUse:
        """How much of the text each model wrote; `caught_up` counts tokens of steps that were not taken."""
        statistics = self._statistics
        share = 1 - statistics.reduced / statistics.tokens if statistics.tokens else None
        return ComputeUse(
            compute=METHOD.name,
            lossless=statistics.reduced == 0,
            tokens=statistics.tokens,
            reduced=statistics.reduced,
            caught_up=statistics.caught_up,
            large_share=share,
            switches=self._switches,
            parameter_share=None if share is None else share + (1 - share) * self._parameters,
        )


def _make(strategies: ReducedComputeStrategies, given: StrategyArguments) -> StepRoutingDecoding:
    assert given.tokenizer is not None, "replies are written with a tokenizer"
    ends = StepEnds(given.tokenizer, given.stop_ids)
    return StepRoutingDecoding(given, strategies.require_small(), ends, strategies.parameters)


METHOD = ComputeMethod(
    name="steps",
    help="the draft model writes sentences, and the model writes again where it expects to do better (Arbitrage)",
    make=_make,
    refuses=("skip_cache", "quality_floor"),
    follows_replies=False,
    options=(
        method_option(
            "step_advantage",
            0.5,
            "nats a token by which the model must expect to write a step better",
            low=-100,
            high=100,
        ),
    ),
)
