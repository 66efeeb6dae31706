"""A backend that follows paths of tokens lazily: what its cache shares with a path stays, the rest is cut and fed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend

# Runs one pass: tokens (S,), positions (S,), rows (R,) -> logits (R, V), valid until the backend's next pass.
Pass = Callable[[Ints, Ints, Ints], Floats]

# Whose rows each backend holds: several followers may take turns at one, and rows look the same from outside whoever
# wrote them. A mark, not the follower, which would keep its backend alive.
_owners: WeakKeyDictionary[Backend, object] = WeakKeyDictionary()


class Follower:
    """Keeps the cache's rows from `start` on in step with a path: a head of committed tokens, then drafted ones.

    Args:
        backend: whose cache follows.
        run: its pass.
        chunk: most tokens of a pass.
    """

    def __init__(self, backend: Backend, run: Pass, chunk: int) -> None:
        self._backend = backend
        self._run = run
        self._chunk = chunk
        self._fed: list[int] = []  # tokens of the rows from `start` on
        self._agreed = 0  # how many of them are known to be the head's
        self._last: Floats | None = None  # logits after the last of them, while they are valid
        self._mark = object()
        self.start = 0

    @property
    def owns(self) -> bool:
        """Whether no other follower wrote the backend's last rows."""
        return _owners.get(self._backend) is self._mark

    @property
    def end(self) -> int:
        """Rows that the cache holds, if no other used it."""
        return self.start + len(self._fed)

    def restart(self, start: int) -> None:
        """Follows from row `start` on, which the cache must reach, and drops what comes after it."""
        self._backend.cache.trim(start)
        self.start = start
        self._fed.clear()
        self._agreed = 0
        self._last = None
        _owners[self._backend] = self._mark

    def leave(self) -> None:
        """Gives up the cache's rows."""
        _owners.pop(self._backend, None)

    def doubt(self) -> None:
        """Another head follows: compares it from its beginning the next time."""
        self._agreed = 0

    def forget_logits(self) -> None:
        """Another pass of the backend overwrote the last logits."""
        self._last = None

    def shared(self, head: Sequence[int], drafted: Sequence[int]) -> int:
        """Rows of this path that the cache holds."""
        fed, agreed = self._fed, self._agreed
        most = min(len(fed), len(head))
        while agreed < most and fed[agreed] == head[agreed]:
            agreed += 1
        self._agreed = agreed
        if agreed == len(head):
            for token in drafted:
                if agreed == len(fed) or fed[agreed] != token:
                    break
                agreed += 1
        return agreed

    def unread(self, head: Sequence[int]) -> int:
        """Tokens that the cache lacks of a head, besides its last one; it may have only grown, as `follow` says."""
        return max(0, len(head) - 1 - (self.shared(head, ()) if self.owns else 0))

    def follow(self, head: Sequence[int], drafted: Sequence[int], wanted: int) -> Floats:
        """Feeds what the cache lacks of a path and gives the logits after its last tokens.

        Args:
            wanted: how many of the path's last tokens to give logits of; 0 is none.

        Returns:
            Logits, a view that the backend's next pass overwrites. (wanted, V)
        """
        if not self.owns:
            self.restart(self.start)
        total, shared = len(head) + len(drafted), self.shared(head, drafted)
        if wanted == 1 and self._last is not None and shared == total == len(self._fed):
            return self._last
        shared = min(shared, total - wanted)
        if shared < len(self._fed):
            shared = self._cut(shared)
        # Drafted tokens come and go, and with them the last ones whose logits are asked for again.
        self._backend.cache.hold(self.start + max(0, len(head) - wanted))
        missing = [*head[shared:], *drafted[max(0, shared - len(head)) :]]
        at = 0
        while len(missing) - at > max(self._chunk, wanted):
            size = min(self._chunk, len(missing) - at - wanted)
            self._feed(missing[at : at + size], 0)
            at += size
        logits = self._feed(missing[at:], wanted) if at < len(missing) else np.empty((0, 0), np.float32)
        self._last = logits[-1:] if wanted else None
        return logits

    def _cut(self, rows: int) -> int:
        """Cuts the rows to so many, or fewer where the cache can go on from those alone; tells how many are left."""
        rows = self._backend.cache.resumable(self.start + rows) - self.start
        self._backend.cache.trim(self.start + rows)
        del self._fed[rows:]
        self._agreed = min(self._agreed, rows)
        self._last = None
        return rows

    def _feed(self, tokens: Sequence[int], wanted: int) -> Floats:  # (wanted, V)
        size, first = len(tokens), self.end
        self._last = None
        logits = self._run(np.array(tokens, np.int64), np.arange(first, first + size), np.arange(size - wanted, size))
        self._fed.extend(tokens)
        return logits
