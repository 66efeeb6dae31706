"""Several continuations of one text in caches of their own, for models whose recurrent layers have a state for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.errors import BackendError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot, SharingCache
from edgeinfer.runtime.backends.contract import ForwardInput, TogetherBackend
from edgeinfer.runtime.decoding.strategy import SearchStatistics
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import SearchParts

__all__ = ["ForkedBranches", "branches_of"]


class ForkedBranches(Branches):
    """Implements `Branches` by forks of the cache, evaluated in one pass.

    Args:
        backend: of the search, which evaluates several sequences together.
    """

    def __init__(self, parts: SearchParts, statistics: SearchStatistics, backend: TogetherBackend) -> None:
        super().__init__(parts, statistics)
        self._together = backend
        self._caches: dict[Branch, SharingCache] = {}

    @property
    def room(self) -> int:
        """Rows that can still be fed to the longest of them."""
        return self._backend.cache.capacity - max((len(branch.path) for branch in self._live), default=self._trunk)

    def begin(self, *, apart: bool = False, rows: Sequence[CacheSnapshot] = ()) -> Branch:
        """See `Branches.begin`."""
        cache = self._together.cache.fork()
        if apart:
            cache.trim(0)
        for piece in rows:
            cache.append(piece)
        return self._add(cache)

    def fork(self, branch: Branch) -> Branch:
        """See `Branches.fork`."""
        return self._add(self._caches[branch].fork())

    def drop(self, branch: Branch) -> None:
        """See `Branches.drop`."""
        super().drop(branch)
        del self._caches[branch]

    def end(self) -> None:
        """See `Branches.end`."""
        self._caches.clear()
        super().end()

    def feed(self, fed: Sequence[tuple[Branch, Sequence[int]]]) -> Floats:  # (B, V)
        """See `Branches.feed`."""
        self._passes.check()
        if max(len(part) for _, part in fed) > self.room:
            raise BackendError(f"A pass over several texts does not fit: there is room for {self.room} tokens of one.")
        together = [(self._caches[branch], _last_row(self._caches[branch].length, part)) for branch, part in fed]
        logits = np.concatenate([output.logits for output in self._together.forward_together(together)])
        for branch, _ in fed:
            branch.path = self._slots[: self._caches[branch].length]
        self._statistics.passes += 1
        self._statistics.rows += sum(len(part) for _, part in fed)
        return logits

    def _add(self, cache: SharingCache) -> Branch:
        branch = Branch(self._slots[: cache.length])
        self._caches[branch] = cache
        self._live.append(branch)
        self._statistics.branches += 1
        return branch


def _last_row(start: int, tokens: Sequence[int]) -> ForwardInput:
    """A pass over the next tokens of a text, with the logits of the last one."""
    size = len(tokens)
    return ForwardInput(np.array(tokens, np.int64), np.arange(start, start + size), np.array([size - 1]))


def branches_of(parts: SearchParts, statistics: SearchStatistics) -> Branches:
    """The branches of a search: in one cache, or each in its own where recurrent layers have a state."""
    if parts.backend.geometry.states and isinstance(parts.backend, TogetherBackend):
        return ForkedBranches(parts, statistics, parts.backend)
    return Branches(parts, statistics)
