"""Several continuations of one text in one cache, the text itself stored once.

One pass feeds any of the live branches. Each row sees the trunk, the rows of its own branch and nothing else, so the
attention over a shared beginning is exact and its memory is taken once. Rows that no live branch has are moved out of
the way when there are many of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BackendError
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.visibility import Visibility
from edgeinfer.runtime.search.strategy import Passes

__all__ = ["Branch", "Branches"]

# Rows of dead branches that are not worth moving others for.
_FEW = 64


@dataclass(eq=False)
class Branch:
    """A continuation.

    Attributes:
        path: rows of the cache that it is made of, ascending, the trunk's too if it is a continuation of that; as many
            as it has tokens. (n,)
    """

    path: Ints


class Branches:
    """The branches that begin where the cache ends now.

    Args:
        passes: of the search.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes, self._statistics = passes, passes.statistics
        self._backend = passes.parts.backend
        self._trunk = self._backend.cache.length
        self._slots: Ints = np.arange(self._backend.cache.capacity)
        self._live: list[Branch] = []

    @property
    def live(self) -> tuple[Branch, ...]:
        """The branches that were not dropped."""
        return tuple(self._live)

    @property
    def room(self) -> int:
        """Rows that can still be fed."""
        return self._backend.cache.capacity - self._trunk - int(self._used().sum())

    def begin(self, *, apart: bool = False, rows: Sequence[CacheSnapshot] = ()) -> Branch:
        """Begins a branch of the trunk and of rows that are copied in; or `apart`, a text that begins at position 0."""
        branch = Branch(self._slots[: 0 if apart else self._trunk])
        for piece in rows:
            start = self._backend.cache.length
            self._backend.cache.append(piece)
            branch.path = np.concatenate([branch.path, self._slots[start : start + piece.length]])
        self._live.append(branch)
        self._statistics.branches += 1
        return branch

    def fork(self, branch: Branch) -> Branch:
        """Begins a branch that goes on from where another is now, whose rows both have."""
        forked = Branch(branch.path)
        self._live.append(forked)
        self._statistics.branches += 1
        return forked

    def drop(self, branch: Branch) -> None:
        """Drops a branch."""
        self._live.remove(branch)

    def end(self) -> None:
        """Leaves nothing but the trunk, and no branch."""
        self._live.clear()
        self._backend.cache.trim(self._trunk)

    def feed(self, fed: Sequence[tuple[Branch, Sequence[int]]]) -> Floats:  # (B, V)
        """Feeds tokens of several branches in one pass, and gives the logits behind the last one of each.

        Logits are a view that the next pass overwrites.

        Raises:
            BackendError: the pass failed, was cancelled or does not fit; every branch is as it was.
        """
        self._passes.check()
        tokens = np.array([token for _, part in fed for token in part], np.int64)
        self._make_room(len(tokens))
        if self._backend.cache.length + len(tokens) > self._backend.cache.capacity:
            message = f"A pass of {len(tokens)} tokens of several texts does not fit: there is room for {self.room}."
            raise BackendError(message)
        paths, ends, row = list[Ints](), list[int](), self._backend.cache.length
        for branch, part in fed:
            path = np.concatenate([branch.path, self._slots[row : row + len(part)]])
            paths += [path[: len(branch.path) + count] for count in range(1, len(part) + 1)]
            row += len(part)
            ends.append(len(paths) - 1)
        positions = np.array([len(path) - 1 for path in paths])
        batch = ForwardInput(tokens, positions, np.array(ends), visibility=Visibility(tuple(paths)))
        output = self._backend.forward(batch)
        for (branch, _), end in zip(fed, ends, strict=True):
            branch.path = paths[end]
        self._statistics.passes += 1
        self._statistics.rows += len(tokens)
        return output.logits

    def _used(self) -> NDArray[np.bool_]:
        """Which rows behind the trunk a live branch has."""
        used = np.zeros(self._backend.cache.length - self._trunk, np.bool_)
        for branch in self._live:
            used[branch.path[branch.path >= self._trunk] - self._trunk] = True
        return used

    def _make_room(self, rows: int) -> None:
        """Moves the rows of live branches together where others take up room, or make every pass look at them."""
        length = self._backend.cache.length
        full = length + rows > self._backend.cache.capacity
        if not full and length - self._trunk < _FEW:
            return
        used = self._used()
        kept, count = np.flatnonzero(used), int(used.sum())
        if count == len(used) or not (full or len(used) - count > max(_FEW, count)):
            return
        self._backend.cache.keep(self._trunk, kept.tolist())
        # Where a row of the cache is now, if it was kept.
        moved = self._slots[:length].copy()
        moved[self._trunk + kept] = self._trunk + np.arange(count)
        for branch in self._live:
            branch.path = moved[branch.path]
