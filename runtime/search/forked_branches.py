"""Several continuations of one text in sequences of their own, which share the pages of what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import numpy as np

from edgeinfer.errors import BackendError
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot, SharingCache
from edgeinfer.runtime.backends.contract import ForwardInput, PreemptedError, TogetherBackend
from edgeinfer.runtime.backends.wrapped import uncounted
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import Passes, SearchParts

__all__ = ["ForkedBranches", "branches_of", "together_backend"]


@dataclass(eq=False)
class _Sequence:
    """A branch.

    Attributes:
        apart: it has nothing of the trunk.
        tokens: behind the trunk.
    """

    cache: SharingCache
    apart: bool
    tokens: list[int] = field(default_factory=list)


class ForkedBranches(Branches):
    """Implements `Branches` by forks of the cache, whose rows one pass evaluates; beside those of other replies, where
    these share it.

    Args:
        passes: of the search.
        backend: of the search, which evaluates several sequences together.
    """

    def __init__(self, passes: Passes, backend: TogetherBackend) -> None:
        super().__init__(passes)
        self._together = backend
        self._sequences: dict[Branch, _Sequence] = {}

    @property
    def room(self) -> int:
        """Rows that can still be fed to all of them, as if they lay in one cache."""
        taken = sum(len(each.tokens) for each in self._sequences.values())
        return self._backend.cache.capacity - self._trunk - taken

    def begin(self, *, apart: bool = False, rows: Sequence[CacheSnapshot] = ()) -> Branch:
        """See `Branches.begin`."""
        cache = self._together.cache.fork()
        if apart:
            cache.trim(0)
        for piece in rows:
            cache.append(piece)
        return self._add(_Sequence(cache, apart))

    def begin_trunk(self) -> Branch:
        """Begins the branch that goes on in the cache of the trunk itself; its rows stay there."""
        return self._add(_Sequence(self._together.cache, apart=False))

    def fork(self, branch: Branch) -> Branch:
        """See `Branches.fork`."""
        forked = self._sequences[branch]
        return self._add(_Sequence(forked.cache.fork(), forked.apart, list(forked.tokens)))

    def drop(self, branch: Branch) -> None:
        """See `Branches.drop`."""
        super().drop(branch)
        del self._sequences[branch]

    def end(self) -> None:
        """See `Branches.end`."""
        self._sequences.clear()
        super().end()

    def feed(self, fed: Sequence[tuple[Branch, Sequence[int]]]) -> Floats:  # (B, V)
        """See `Branches.feed`."""
        if sum(len(part) for _, part in fed) > self.room:
            raise BackendError(f"A pass over several texts does not fit: there is room for {self.room} tokens.")
        while True:
            self._passes.check()
            sequences = [self._sequences[branch] for branch, _ in fed]
            inputs = [
                (each.cache, _next_rows(each.cache.length, part, wanted=True))
                for each, (_, part) in zip(sequences, fed, strict=True)
            ]
            try:
                outputs = self._together.forward_together(inputs)
                break
            except PreemptedError:
                self._feed_again()
        for each, (_, part) in zip(sequences, fed, strict=True):
            each.tokens += part
        self._statistics.passes += 1
        self._statistics.rows += sum(len(part) for _, part in fed)
        return np.concatenate([output.logits for output in outputs])

    def _feed_again(self) -> None:
        """Evaluates all branches again, whose pages older replies needed, as soon as there are some."""
        trunk = self._passes.text()[: self._trunk]
        while True:
            for each in self._sequences.values():
                each.cache.clear()
            self._backend.cache.clear()
            self._passes.feed_again(trunk)
            try:
                for each in self._sequences.values():
                    if each.cache is not self._together.cache:
                        each.cache = self._together.cache.fork()
                        if each.apart:
                            each.cache.trim(0)
                for each in self._sequences.values():
                    self._feed_tokens(each)
                return
            except PreemptedError:
                continue

    def _feed_tokens(self, sequence: _Sequence) -> None:
        for start in range(0, len(sequence.tokens), self._passes.parts.chunk):
            self._passes.check()
            part = sequence.tokens[start : start + self._passes.parts.chunk]
            self._together.forward_together([(sequence.cache, _next_rows(sequence.cache.length, part, wanted=False))])

    def _add(self, sequence: _Sequence) -> Branch:
        branch = Branch(self._slots[:0])
        self._sequences[branch] = sequence
        self._live.append(branch)
        self._statistics.branches += 1
        return branch


def _next_rows(start: int, tokens: Sequence[int], *, wanted: bool) -> ForwardInput:
    """A pass over the next tokens of a text; with the logits of the last one where they are wanted."""
    size = len(tokens)
    rows = np.array([size - 1] if wanted else [], np.int64)
    return ForwardInput(np.array(tokens, np.int64), np.arange(start, start + size), rows)


def together_backend(parts: SearchParts) -> TogetherBackend | None:
    """What evaluates the branches of a search as sequences of one pass; None where the backend cannot."""
    backend = uncounted(parts.backend)
    return backend if isinstance(backend, TogetherBackend) else None


def branches_of(passes: Passes) -> Branches:
    """The branches of a search: sequences that share passes, or elsewhere texts in one cache."""
    backend = together_backend(passes.parts)
    return Branches(passes) if backend is None else ForkedBranches(passes, backend)
