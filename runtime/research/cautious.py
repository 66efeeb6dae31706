"""Cautious next tokens (CNTP, arXiv 2507.03038): the less certain the next token, the more continuations are tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field

import numpy as np

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import SearchMethod, SearchParts, SearchStrategy, entropy

_LOWEST, _HIGHEST, _MOST_TRIALS = 0.01, 1.5, 10
_ENDS = frozenset(".,\n?!:;)]}")
# Tokens of a trial that meets no punctuation.
_LONGEST = 48


def trials_for(uncertainty: float) -> int:
    """How many continuations an entropy in nats is worth: 1 to 10."""
    share = (uncertainty - _LOWEST) / (_HIGHEST - _LOWEST)
    return int(1 + (_MOST_TRIALS - 1) * min(max(share, 0.0), 1.0))


@dataclass
class _Trial:
    branch: Branch
    tokens: list[int] = field(default_factory=list)
    surprise: float = 0.0

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / len(self.tokens))


class Cautious(SearchStrategy):
    """Trials are drawn up to the next punctuation, and the one of the lowest perplexity per token joins the reply.
    Where one trial is due, the reply grows by one token, so that the next one is asked about again. Entropy and
    perplexity are those of the distribution that tokens are drawn from: after temperature and truncation."""

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts)
        self._ends: dict[int, bool] = {}
        self._length = 0  # tokens of the text

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        self._length = len(prompt)
        return (yield from self._piece(logits, room))

    def next(self, room: int, lost: int) -> Passes[Sequence[int]]:
        return (yield from self._piece((yield from self._feeder.feed(self._root)), room))

    def _piece(self, logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        sampler = self._parts.sampler
        probabilities = sampler.probabilities(logits)
        count = trials_for(entropy(probabilities))
        self.search.trials += count
        if count == 1:
            token = sampler.sample_from(probabilities, self._length, 0)
            self._length += 1
            return self._accept(token, logits)
        first_logits = logits.copy()
        longest = min(room, _LONGEST, 1 + self._parts.room()[0] // count)
        branches = Branches(self._feeder)
        trials = [_Trial(branches.begin()) for _ in range(count)]
        for stream, trial in enumerate(trials):
            self._draw(trial, probabilities, stream)
        for _ in range(1, longest):
            live = [(stream, trial) for stream, trial in enumerate(trials) if not self._ended(trial)]
            if not live:
                break
            rows = yield from branches.feed([(trial.branch, trial.tokens[-1:]) for _, trial in live])
            for (stream, trial), row in zip(live, rows, strict=True):
                self._draw(trial, sampler.probabilities(row, trial.tokens), stream)
        branches.end()
        best = min(trials, key=lambda trial: trial.perplexity)
        self._length += len(best.tokens)
        return (yield from self._take(best.tokens, first_logits))

    def _draw(self, trial: _Trial, probabilities: np.typing.NDArray[np.float64], stream: int) -> None:  # (V,)
        token = self._parts.sampler.sample_from(probabilities, self._length + len(trial.tokens), stream)
        trial.tokens.append(token)
        trial.surprise -= math.log(probabilities[token])

    def _ended(self, trial: _Trial) -> bool:
        token = trial.tokens[-1]
        if token not in self._ends:
            text = self._parts.tokenizer.decode([token])
            self._ends[token] = token in self._parts.stop_ids or not _ENDS.isdisjoint(text)
        return self._ends[token]


METHOD = SearchMethod(
    name="cautious",
    help="more continuations where the next token is uncertain (CNTP)",
    make=Cautious,
    draws="always",
    constrained=True,
    thinks=True,
)
