"""Several continuations of one text, each a sequence of its own that shares with the others what they begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import numpy as np

from edgeinfer.core.errors import BackendError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import ForkableCache
from edgeinfer.runtime.backends.contract import Pass, PreemptedError, TogetherBackend
from edgeinfer.runtime.backends.forks import forking
from edgeinfer.runtime.search.strategy import Passes


@dataclass(eq=False)
class Branch:
    cache: ForkableCache  # holds its rows
    apart: bool = False  # it has nothing of the trunk
    tokens: list[int] = field(default_factory=list)  # behind the trunk


class Branches:
    """The branches that begin where the cache ends now, the trunk's end. Where the backend evaluates sequences
    together, a pass has rows of all of them and of other replies."""

    def __init__(self, passes: Passes) -> None:
        self._passes, self._statistics = passes, passes.statistics
        self._backend = passes.parts.backend
        self._forks = forking(self._backend)
        self._shares = isinstance(self._forks, TogetherBackend)
        self._trunk = self._backend.cache.length
        self._room, _ = passes.parts.room()
        self._live: list[Branch] = []

    @property
    def live(self) -> tuple[Branch, ...]:
        """The branches that were not dropped."""
        return tuple(self._live)

    @property
    def room(self) -> int:
        """Rows that can still be fed to all of them, as if they lay in one cache."""
        return self._room - sum(len(branch.tokens) for branch in self._live)

    def begin(self, *, apart: bool = False) -> Branch:
        """Begin a branch of the trunk; or `apart`, a text that begins at position 0."""
        cache = self._forks.cache.fork()
        if apart:
            cache.clear()
            self._room, _ = self._passes.parts.room(copied=self._trunk)
        return self._add(Branch(cache, apart))

    def begin_trunk(self) -> Branch:
        """Begin the branch that goes on in the cache of the trunk itself; its rows stay there."""
        return self._add(Branch(self._forks.cache))

    def fork(self, branch: Branch) -> Branch:
        """Begin a branch that goes on from where another is now, whose rows both have."""
        return self._add(Branch(branch.cache.fork(), branch.apart, list(branch.tokens)))

    def drop(self, branch: Branch) -> None:
        self._live.remove(branch)

    def end(self) -> None:
        """Leaves nothing but the trunk, and no branch."""
        self._live.clear()
        self._backend.cache.trim(self._trunk)

    def feed(self, fed: Sequence[tuple[Branch, Sequence[int]]]) -> Floats:  # (B, V)
        """Feed tokens of several branches, and give the logits behind the last one of each."""
        return np.concatenate(self.feed_chains([(branch, part, 1) for branch, part in fed]))

    def feed_chains(self, fed: Sequence[tuple[Branch, Sequence[int], int]]) -> list[Floats]:  # of (R, V)
        """Feed tokens of several branches, and give the logits behind so many of the last ones of each."""
        rows = sum(len(part) for _, part, _ in fed)
        if rows > self.room:
            raise BackendError(f"A pass over several texts does not fit: there is room for {self.room} tokens.")
        while True:
            self._passes.check()
            inputs = [(branch.cache, _next_rows(branch.cache.length, part, wanted)) for branch, part, wanted in fed]
            try:
                outputs = self._forks.forward_together(inputs)
                break
            except PreemptedError:
                self._feed_again()
        for branch, part, _ in fed:
            branch.tokens += part
        self._statistics.passes += 1 if self._shares else len(fed)
        self._statistics.rows += rows
        return [output.logits for output in outputs]

    def _feed_again(self) -> None:
        """Evaluate all branches again, whose pages older replies needed, as soon as there are some."""
        trunk, main = self._passes.text()[: self._trunk], self._forks.cache
        while True:
            for branch in self._live:
                branch.cache.clear()
            self._backend.cache.clear()
            self._passes.feed_again(trunk)
            try:
                for branch in self._live:
                    if branch.cache is not main:
                        branch.cache = main.fork()
                        if branch.apart:
                            branch.cache.clear()
                for branch in self._live:
                    self._feed_tokens(branch)
                return
            except PreemptedError:
                continue

    def _feed_tokens(self, branch: Branch) -> None:
        for start in range(0, len(branch.tokens), self._passes.parts.chunk):
            self._passes.check()
            part = branch.tokens[start : start + self._passes.parts.chunk]
            self._forks.forward_together([(branch.cache, _next_rows(branch.cache.length, part, 0))])

    def _add(self, branch: Branch) -> Branch:
        self._live.append(branch)
        self._statistics.branches += 1
        return branch


def _next_rows(start: int, tokens: Sequence[int], wanted: int) -> Pass:
    """A pass over the next tokens of a text, with the logits of so many of the last."""
    size = len(tokens)
    return Pass(np.array(tokens, np.int64), np.arange(start, start + size), np.arange(size - wanted, size))
