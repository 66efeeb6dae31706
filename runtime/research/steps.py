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
from edgeinfer.runtime.decoding.sequence import Passes, Strategy
from edgeinfer.runtime.layer_skip.reduced_compute import ComputeMethod, ReducedComputeStrategies
from edgeinfer.runtime.layer_skip.strategy import SmallModel, StrategyArguments, feed
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


class StepRoutingDecoding(Strategy):
    """Takes a step of the small model's, or writes it with the large one where that expects to do so much better."""

    def __init__(
        self, given: StrategyArguments, small: SmallModel, ends: Callable[[int], bool], parameters: float
    ) -> None:
        super().__init__(given.sequence, given.sampler)
        self._least = METHOD.values(given.options.method_options)["step_advantage"]
        self._chunk = max(1, min(given.sequence.chunk, given.rows))
        self._small, self._ends, self._parameters = small, ends, parameters
        # `caught_up` counts tokens of steps that were not taken.
        self.compute: ComputeUse = ComputeUse(METHOD.name)
        self._writes = False  # the large model, to the end of a step
        self._row: Floats | None = None  # behind the root, as the pass over a step gave it

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        """The token after the prompt, which the large model makes."""
        yield from ()
        accepted = self._first(prompt, logits)
        self._writes, self._row = False, None
        self._small.begin([*prompt, *accepted])
        return accepted

    def next(self, room: int, lost: int) -> Passes[Sequence[int]]:
        """A step of the small model's, or a token of the large one's."""
        text, use = self._sequence.tokens, self.compute
        if not self._writes:
            step = yield from self._draft(text, min(room, self._cache.capacity - self._cache.length))
            if step and (yield from self._takes(step)):
                use.tokens += len(step)
                use.reduced += len(step)
                return step
            self._writes = True
            use.switches += 1
        if self._row is None:
            accepted: Sequence[int] = yield from self._plain_step(lost)
        else:
            accepted = self._accept(self._sampler.sample(self._row, len(text)), self._row)
            self._row = None
        use.tokens += 1
        if self._ends(accepted[0]):
            self._writes = False
            use.switches += 1
            # The step that it wrote before is no longer the text's.
            self._small.begin([*text, *accepted])
        return accepted

    def _draft(self, text: Sequence[int], room: int) -> Passes[list[int]]:
        """A step of the small model's; empty where its cache has no room for one."""
        step: list[int] = []
        while len(step) < min(room, _LONGEST) and not (step and self._ends(step[-1])):
            logits = yield from self._small.after([*text, *step])
            if logits is None:
                break
            step.append(self._sampler.sample(logits, len(text) + len(step), step))
        return step

    def _takes(self, step: Sequence[int]) -> Passes[bool]:
        """Has the large model read a step; the cache then holds the root, and the step but for its last token if it
        was taken."""
        start, fed = self._cache.length, [self._root, *step[:-1]]
        gained, rows = 0.0, list[Floats]()

        def read(index: int, logits: Floats) -> None:
            nonlocal gained
            before = step[:index]
            row, probabilities = self._sampler.adjusted(logits, before), self._sampler.probabilities(logits, before)
            gained += advantage(row, step[index], probabilities)
            if index == 0 or self._sampler.records_logprobs:
                rows.append(logits.copy())

        yield from feed(self._backend, self._cache, fed, start, range(len(fed)), self._chunk, read)
        if gained <= self._least * len(step):
            for place, token in enumerate(step):
                self._accept(token, rows[min(place, len(rows) - 1)])
            return True
        self.compute.caught_up += len(step)
        self._cache.trim(start + 1)
        self._row = rows[0]
        return False

    def finish(self) -> None:
        """Tell how much of the text each model wrote."""
        use = self.compute
        use.lossless = use.reduced == 0
        if use.tokens:
            use.large_share = share = 1 - use.reduced / use.tokens
            use.parameter_share = share + (1 - share) * self._parameters


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
