"""Momentum decoding: greedy, but a token pays for closing a run that the text has already."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.search.strategy import SearchMethod, SearchParts, SearchStrategy, likeliest, log_probabilities

_CANDIDATES = 5
# Earlier places of a token that are looked at: those of a longer text's commonest tokens would take too long.
_MOST_PLACES = 512


class Runs:
    """A text, and how long the runs are that a next token would repeat."""

    def __init__(self, tokens: Sequence[int], most: int) -> None:
        self._most = most
        self._tokens: list[int] = []
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """The text's next token."""
        self._places[token].append(len(self._tokens))
        self._tokens.append(token)

    def closed(self, token: int) -> int:
        """Length of the longest run of tokens, this one the last, that the text would then hold a second time."""
        longest, tokens, end = 0, self._tokens, len(self._tokens)
        for place in self._places.get(token, ())[-_MOST_PLACES:]:
            length = 1
            while length <= min(place, self._most - 1) and tokens[place - length] == tokens[end - length]:
                length += 1
            longest = max(longest, length)
        return longest


class Momentum(SearchStrategy):
    """Among the likeliest tokens, that of the highest p - weight * resistance(length of the run it closes)."""

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts)
        self._count = min(self._config.candidates or _CANDIDATES, self._backend.geometry.vocab_size)
        # Longer ones than the table has are never closed.
        self._resistance = (0.0, *(self._config.resistance_weight * r for r in self._config.resistance), math.inf)
        self._runs = Runs((), 1)

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        self._runs = Runs(prompt, len(self._resistance) - 1)
        yield from ()
        return self._choose(logits)

    def next(self, room: int, lost: int) -> Passes[Sequence[int]]:
        return self._choose((yield from self._feeder.feed(self._root)))

    def _choose(self, logits: Floats) -> tuple[int]:  # (V,)
        probabilities = np.exp(log_probabilities(logits))
        candidates = likeliest(probabilities, self._count)
        scores = [probabilities[token] - self._resistance[self._runs.closed(token)] for token in candidates.tolist()]
        # Where all are infinitely resisted, the likeliest.
        token = int(candidates[int(np.argmax(scores))])
        self.search.trials += token != int(candidates[0])
        self._runs.push(token)
        return self._accept(token, logits)


METHODS = (
    SearchMethod(
        name="momentum",
        help="less repetition: greedy, but repeated runs of tokens are resisted",
        make=Momentum,
        draws="never",
        branches=False,
    ),
)
