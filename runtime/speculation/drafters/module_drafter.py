"""What drafters with a draft module share: they follow the target's passes and read the text before they guess."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, ForwardOutput, ObservedBackend
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Round
from edgeinfer.runtime.speculation.drafters.logit_drafter import LogitDrafter
from edgeinfer.runtime.speculation.drafters.target_states import TargetStates, Unread

__all__ = ["ModuleDrafter"]


class ModuleDrafter(LogitDrafter):
    """Drafts with a draft module, whose cache holds rows of the text and, behind them, those of a draft.

    Args:
        target: whose passes it follows from now on.
        module: its backend, which nothing else uses; the drafter does not close it.
        width: of what the module reads of a row.
        tapped: whether that is the states of tapped layers; otherwise the last ones.
        tokens: the target's tokens that the module's are; None where they are the same. (Vd,)
    """

    follows_passes = True

    def __init__(
        self,
        target: ObservedBackend,
        module: Backend,
        width: int,
        *,
        tapped: bool,
        tokens: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(module.geometry.vocab_size)
        self._tokens = tokens
        self._all = np.full(0 if tokens is None else module.geometry.vocab_size, -np.inf, np.float32)
        self._target, self._module = target, module
        self._states = TargetStates(width, _tapped if tapped else _last, self._read, self._trim)
        self._ready = False  # it has read the text up to the root
        self._lost = 0
        module.cache.trim(0)
        target.observe_pass = self._states.observe

    def begin(self, tokens: Sequence[int]) -> None:
        """Another text may have begun, or the same has been fed further."""
        super().begin(tokens)
        self._leave_draft()
        self._states.compare(tokens)

    def observe(self, round: Round) -> None:
        """Keeps the states of the accepted path; the draft's own rows go."""
        super().observe(round)
        self._leave_draft()
        self._states.keep([0, *(node + 1 for node in round.verdict.accepted)])

    @abstractmethod
    def _read(self, unread: Unread) -> None:
        """Reads rows of the text."""

    @abstractmethod
    def _trim(self, rows: int) -> None:
        """Leaves so many rows of the text in the module's cache, and none of a draft."""

    def _leave_draft(self) -> None:
        """A round is over: what was computed for it is of no use."""
        self._ready = False

    def _catch_up(self, context: DraftContext, base: int) -> bool:
        """Reads the text up to the root; false where the row before it is not known."""
        if self._ready:
            return True
        if context.lost() != self._lost:
            # Rows have moved, and what they were is not known.
            self._lost = context.lost()
            self._states.clear()
        self._ready = self._states.catch_up(base, context.tokens[-1])
        return self._ready

    def _widened(self, logits: Floats) -> Floats:  # (Vd,) -> (V,)
        """Logits of all tokens, where those that the module cannot draft are impossible; a view."""
        if self._tokens is None:
            return logits
        self._all[self._tokens] = logits
        return self._all

    def nbytes(self) -> int:
        """Bytes that its module's backend allocated, and its own."""
        return sum(self._module.nbytes().values()) + super().nbytes() + self._states.nbytes + self._all.nbytes

    def close(self) -> None:
        """Follows the target's passes no longer."""
        super().close()
        self._target.observe_pass = None


def _tapped(output: ForwardOutput) -> Floats | None:  # (S, W)
    return output.tapped


def _last(output: ForwardOutput) -> Floats | None:  # (S, D)
    return output.hidden
