"""What a policy for full caches promises, and what is known of a text that has lost some of its rows; knows no policy.

An overflow happens when every row of the cache is taken and one more token is to be fed, so when it happens depends on
the text's length alone, not on how the text was cut into passes or drafted. Afterwards the position of every row is its
index again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgeinfer.results import Overflow

__all__ = ["Lost", "OverflowPolicy", "Removed", "overflow_summary"]


@dataclass(frozen=True)
class Removed:
    """What one overflow did.

    Attributes:
        rows: by how many the cache is shorter.
        merged: rows that went into others, the mean over layers and heads; the remaining ones were dropped.
    """

    rows: int
    merged: float = 0.0


@dataclass(frozen=True)
class Lost:
    """What of a text has left the cache.

    Attributes:
        events: overflows so far.
        tokens: tokens of the text less rows of the cache.
        merged: of them, those that went into others; the mean over layers and heads.
        since: tokens of the text at the last overflow. Rows of later tokens are theirs alone and may be cut; what the
            rows of earlier ones were cannot be had back.
    """

    events: int = 0
    tokens: int = 0
    merged: float = 0.0
    since: int = 0

    def after(self, removed: Removed, since: int) -> Lost:
        """With one more overflow, at a text of `since` tokens."""
        return Lost(self.events + 1, self.tokens + removed.rows, self.merged + removed.merged, since)


class OverflowPolicy(Protocol):
    """Makes room in one backend's cache. All its choices are functions of the text, the same every time."""

    @property
    def name(self) -> str:
        """As options name it."""

    def make_room(self, tokens: Sequence[int]) -> Removed:
        """Shortens a full cache.

        Args:
            tokens: of the text, all that was fed; the last of them are in the last rows, one each.

        Raises:
            PassCancelledError: a pass it needed was cancelled; the cache has lost some of its last rows, no others.
            BackendError: it failed; the cache must not be used again before it is emptied.
        """

    def forget(self) -> None:
        """Another text begins."""


def overflow_summary(policy: OverflowPolicy | None, lost: Lost) -> Overflow:
    """What a reply says about what was lost before it ended; None is a context that nothing is lost of."""
    if policy is None:
        return Overflow()
    merged = round(lost.merged, 2)
    return Overflow(policy.name, lost.events, round(lost.tokens - merged, 2), merged, lost.events == 0)
