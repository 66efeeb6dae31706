"""What drafters with a draft module share: they follow the target's passes and read the text before they guess."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.spec import DraftModule
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, ForwardOutput, ObservedBackend
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Round
from edgeinfer.runtime.speculation.drafters.logit_drafter import LogitDrafter
from edgeinfer.runtime.speculation.drafters.target_states import TargetStates, Unread

_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class OpenModule:
    """A draft module that was loaded for a target.

    Attributes:
        target: whose passes it follows.
        backend: the module's, which nothing but its drafter uses; the drafter does not close it.
        described: what the module reads.
        tapped: whether that is the states of tapped layers; otherwise the last ones.
        tokens: the target's tokens that the module's are; None where they are the same. (Vd,)
    """

    target: ObservedBackend
    backend: Backend
    described: DraftModule
    tapped: bool
    tokens: NDArray[np.int64] | None


class ModuleDrafter(LogitDrafter):
    """Drafts with a draft module, whose cache holds rows of the text and, behind them, those of a draft.

    Args:
        own: the module, which follows its target's passes from now on.
    """

    follows_passes = True

    def __init__(self, own: OpenModule) -> None:
        vocabulary = own.backend.geometry.vocab_size
        super().__init__(vocabulary)
        self._tokens = own.tokens
        self._all = np.full(0 if own.tokens is None else vocabulary, -np.inf, np.float32)
        self._target, self._module = own.target, own.backend
        self._states = TargetStates(own.described.width, _tapped if own.tapped else _last, self._read, self._trim)
        self._ready = False  # it has read the text up to the root
        self._lost = 0
        self._module.cache.trim(0)
        self._target.observe_pass = self._states.observe

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

    def unread(self, context: DraftContext) -> int:
        """Rows that wait, besides the one before the root."""
        return 0 if self._ready else max(0, self._states.waiting - 1)

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


class StepDrafter(ModuleDrafter):
    """Drafts with a module whose row before the root gives logits and a state, from which it goes on; arguments as
    its base."""

    def __init__(self, own: OpenModule) -> None:
        super().__init__(own)
        drafted = own.backend.geometry.vocab_size if own.tokens is None else len(own.tokens)
        self._first = np.empty(drafted, np.float32)  # logits behind the root

    @abstractmethod
    def _begin_at(self, state: Floats) -> None:  # (D,)
        """Takes the module's state in the row before the root, a view that the next pass overwrites."""

    def _read(self, unread: Unread) -> None:
        self._leave_draft()
        rows = np.array([len(unread.tokens) - 1]) if unread.last else _NO_ROWS
        output = self._module.forward(ForwardInput(unread.tokens, unread.positions, rows, tapped=unread.states))
        if not unread.last:
            return
        assert output.hidden is not None, "modules give their states"
        self._first[:] = output.logits[0]
        self._begin_at(output.hidden[-1])

    def nbytes(self) -> int:
        """Bytes that its module's backend allocated, and its own."""
        return super().nbytes() + self._first.nbytes


def _tapped(output: ForwardOutput) -> Floats | None:  # (S, W)
    return output.tapped


def _last(output: ForwardOutput) -> Floats | None:  # (S, D)
    return output.hidden
