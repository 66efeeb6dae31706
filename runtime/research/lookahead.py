"""AdaDec: where the next token is uncertain, each likely one is judged by what would follow it; else the likeliest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.core.methods import method_option
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import (
    SearchMethod,
    SearchParts,
    SearchStrategy,
    entropy,
    likeliest,
    log_probabilities,
)

_CANDIDATES = 3


class Lookahead(SearchStrategy):
    """A candidate's score is the mean log-probability of itself and of the tokens that greedily follow it."""

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts)
        self._options = METHOD.values(self._config.method_options)
        self._count = min(self._config.candidates or _CANDIDATES, self._backend.geometry.vocab_size)

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        return (yield from self._choose(logits, room))

    def next(self, room: int, lost: int) -> Passes[Sequence[int]]:
        return (yield from self._choose((yield from self._feeder.feed(self._root)), room))

    def _choose(self, logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        known = log_probabilities(logits)
        candidates = likeliest(known, self._count).tolist()
        ahead = min(self._options["look_ahead"], room - 1, self._parts.room()[0] // self._count)
        if ahead < 1 or entropy(np.exp(known)) <= self._options["uncertainty"]:
            return self._accept(candidates[0], logits)
        logits = logits.copy()
        followed = yield from self._follow(candidates, ahead)
        pairs = zip(candidates, followed, strict=True)
        scores = [(known[token] + sum(more)) / (1 + len(more)) for token, more in pairs]
        self.search.trials += 1
        return self._accept(candidates[int(np.argmax(scores))], logits)

    def _follow(self, candidates: Sequence[int], ahead: int) -> Passes[list[list[float]]]:
        """Log-probabilities of the tokens that greedily follow each candidate, up to a stop token."""
        stop_ids = self._parts.stop_ids
        branches, found = Branches(self._feeder), [list[float]() for _ in candidates]
        live: list[tuple[int, Branch, int]] = [
            (index, branches.begin(), token) for index, token in enumerate(candidates) if token not in stop_ids
        ]
        for _ in range(ahead):
            if not live:
                break
            rows = yield from branches.feed([(branch, [token]) for _, branch, token in live])
            longer = []
            for row, (index, branch, _) in zip(rows, live, strict=True):
                known = log_probabilities(row)
                token = int(known.argmax())
                found[index].append(float(known[token]))
                if token not in stop_ids:
                    longer.append((index, branch, token))
            live = longer
        branches.end()
        return found


METHOD = SearchMethod(
    name="lookahead",
    help="looks ahead behind each likely token where the next is uncertain (AdaDec)",
    make=Lookahead,
    draws="never",
    options=(
        method_option("look_ahead", 5, "tokens that are evaluated ahead", low=1, high=64),
        method_option("uncertainty", 1.5, "entropy in nats above which the next token is uncertain", low=0, high=100),
    ),
)
