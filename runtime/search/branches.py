"""Several continuations of one text, each a sequence of its own that shares with the others what they begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import numpy as np

from edgeinfer.core.errors import BackendError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import KVCache, Pass, PreemptedError
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes
from edgeinfer.runtime.search.strategy import Feeder


@dataclass(eq=False)
class Branch:
    cache: KVCache  # holds its rows
    tokens: list[int] = field(default_factory=list)  # behind the trunk


class Branches:
    """The branches that begin where the cache ends now, the trunk's end. Where the backend evaluates sequences
    together, a pass has rows of all of them and of other replies."""

    def __init__(self, feeder: Feeder) -> None:
        self._feeder, self._use = feeder, feeder.use
        sequence = feeder.parts.sequence
        self._backend, self._cache, self._chunk = sequence.backend, sequence.cache, sequence.chunk
        self._trunk = self._cache.length
        self._room, _ = feeder.parts.room()
        self._live: list[Branch] = []

    @property
    def live(self) -> tuple[Branch, ...]:
        """The branches that were not dropped."""
        return tuple(self._live)

    @property
    def room(self) -> int:
        """Rows that can still be fed to all of them, as if they lay in one cache."""
        return self._room - sum(len(branch.tokens) for branch in self._live)

    def begin(self) -> Branch:
        """Begin a branch of the trunk."""
        return self._add(Branch(self._cache.fork()))

    def begin_trunk(self) -> Branch:
        """Begin the branch that goes on in the cache of the trunk itself; its rows stay there."""
        return self._add(Branch(self._cache))

    def fork(self, branch: Branch) -> Branch:
        """Begin a branch that goes on from where another is now, whose rows both have."""
        return self._add(Branch(branch.cache.fork(), list(branch.tokens)))

    def drop(self, branch: Branch) -> None:
        self._live.remove(branch)

    def end(self) -> None:
        """Leaves nothing but the trunk, and no branch."""
        self._live.clear()
        self._cache.trim(self._trunk)

    def feed(self, fed: Sequence[tuple[Branch, Sequence[int]]]) -> Passes[Floats]:  # (B, V)
        """Feed tokens of several branches, and give the logits behind the last one of each."""
        return np.concatenate((yield from self.feed_chains([(branch, part, 1) for branch, part in fed])))

    def feed_chains(self, fed: Sequence[tuple[Branch, Sequence[int], int]]) -> Passes[list[Floats]]:  # of (R, V)
        """Feed tokens of several branches, and give the logits behind so many of the last ones of each."""
        rows = sum(len(part) for _, part, _ in fed)
        if rows > self.room:
            raise BackendError(f"A pass over several texts does not fit: there is room for {self.room} tokens.")
        while True:
            passes = [(branch.cache, _next_rows(branch.cache.length, part, wanted)) for branch, part, wanted in fed]
            try:
                results = yield Evaluate(self._backend, passes)
                break
            except PreemptedError:
                yield from self._feed_again()
        for branch, part, _ in fed:
            branch.tokens += part
        self._use.passes += 1 if self._backend.max_sequences > 1 else len(fed)
        self._use.rows += rows
        return [result.logits for result in results]

    def _feed_again(self) -> Passes[None]:
        """Evaluate all branches again, whose pages older replies needed, as soon as there are some."""
        trunk = self._feeder.text()[: self._trunk]
        while True:
            for branch in self._live:
                branch.cache.clear()
            self._cache.clear()
            yield from self._feeder.feed_again(trunk)
            try:
                for branch in self._live:
                    if branch.cache is not self._cache:
                        branch.cache = self._cache.fork()
                for branch in self._live:
                    yield from self._feed_tokens(branch)
                return
            except PreemptedError:
                continue

    def _feed_tokens(self, branch: Branch) -> Passes[None]:
        for start in range(0, len(branch.tokens), self._chunk):
            part = branch.tokens[start : start + self._chunk]
            yield Evaluate(self._backend, [(branch.cache, _next_rows(branch.cache.length, part, 0))])

    def _add(self, branch: Branch) -> Branch:
        self._live.append(branch)
        self._use.branches += 1
        return branch


def _next_rows(start: int, tokens: Sequence[int], wanted: int) -> Pass:
    """A pass over the next tokens of a text, with the logits of so many of the last."""
    size = len(tokens)
    return Pass(np.array(tokens, np.int64), np.arange(start, start + size), np.arange(size - wanted, size))
