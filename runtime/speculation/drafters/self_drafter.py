"""What drafters that run the target in a cheaper way share: rows of their own at the end of the target's cache.

Knows nothing of what makes the passes cheaper. The engine leaves the cache one token, the root, short of the context;
drafting appends the root's row and those of drafted tokens, which are dropped before verification.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.speculation.contracts import Context
from edgeinfer.runtime.speculation.drafters.following import Follower
from edgeinfer.runtime.speculation.drafters.logit_drafter import LogitDrafter

__all__ = ["SelfDrafter"]


class SelfDrafter(LogitDrafter):
    """A drafter that runs the target itself.

    Args:
        target: whose cache is borrowed while drafting.
    """

    uses_target = True

    def __init__(self, target: Backend) -> None:
        super().__init__(target.geometry.vocab_size)
        self._target = target
        self._follower = Follower(target, self._run, target.capacity)

    @abstractmethod
    def _run(self, tokens: Ints, positions: Ints, rows: Ints) -> Floats:  # (S,), (S,), (R,) -> (R, V)
        """One pass of the target, made cheaper."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Forgets the rows of the last round."""
        super().begin(tokens)
        self._follower.leave()

    def _logits(self, context: Context, drafted: Sequence[int]) -> Floats | None:  # (V,)
        if context.root_row + 1 + len(drafted) > self._target.capacity:
            return None
        logits: Floats = self._follower.follow(self._head(context), drafted, 1)[0]
        return logits

    def _head(self, context: Context) -> list[int]:
        """The root; the rows after it are this drafter's own of this round from here on."""
        base = context.root_row
        # Several self-drafters may take turns at one cache within a round.
        if not self._follower.owns or self._follower.start != base or self._follower.end != self._target.length:
            self._follower.restart(base)
        return context.tokens[-1:]
