"""What drafters share that guess from the target's own states: the latest one, and a small output matrix.

Knows nothing of what heads make of a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle.heads import STATE_EPS, Heads
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, require
from edgeinfer.runtime.speculation.contracts import Context, Round
from edgeinfer.runtime.speculation.drafters.logit_drafter import LogitDrafter
from edgeinfer.runtime.speculation.drafters.matrix import Matrix

__all__ = ["OutputRows", "StateDrafter", "silu"]


def silu(x: Floats) -> Floats:
    """x times its sigmoid."""
    # exp of more than 88 is infinite in float32, and x / infinity the 0 that it should be.
    with np.errstate(over="ignore"):
        scaled: Floats = x / (1 + np.exp(-x))
    return scaled


class OutputRows:
    """Logits of the tokens that heads may guess; all others are impossible.

    Args:
        heads: with `tokens` and `rows`.
        vocabulary: V.
    """

    def __init__(self, heads: Heads, vocabulary: int) -> None:
        self._tokens = heads.arrays["tokens"].astype(np.int64)  # (K,)
        self._rows = Matrix(heads.arrays["rows"])  # (K, D)
        self._all = np.full(vocabulary, -np.inf, np.float32)
        self.places = {token: place for place, token in enumerate(self._tokens.tolist())}

    def logits(self, state: Floats) -> Floats:  # (D,) -> (V,)
        """Of a state that is normed already; a view that the next call overwrites."""
        self._all[self._tokens] = self._rows @ state
        return self._all

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in (self._tokens, self._all)) + self._rows.nbytes


class StateDrafter(LogitDrafter):
    """A drafter with heads over the state that predicted the root.

    Until a round has shown that state, after a prompt, it has no guess.

    Args:
        target: whose states they are.
        heads: with the model's final norm.

    Raises:
        CapabilityError: the target gives no states.
    """

    uses_target = False

    def __init__(self, target: Backend, heads: Heads) -> None:
        hint = "Use a natively exported bundle, or another drafter."
        require(target.capabilities.hidden, target, "show its hidden states", hint)
        super().__init__(target.geometry.vocab_size)
        self._norm = heads.arrays["norm"].astype(np.float32)  # (D,)
        self._state = np.zeros_like(self._norm)
        self._seen = self._normed = False

    def begin(self, tokens: Sequence[int]) -> None:
        """Waits for the first state of the new text."""
        super().begin(tokens)
        self._seen = False

    def observe(self, round: Round) -> None:
        """Takes in the state that predicted the new root."""
        super().observe(round)
        self._seen = round.hidden is not None
        if round.hidden is not None:
            accepted = round.verdict.accepted
            self._state[:] = round.hidden[accepted[-1] + 1 if accepted else 0]
            self._normed = False

    def _latest(self) -> Floats | None:  # (D,)
        """The state as the model's head sees it; None where none is known."""
        if not self._seen:
            return None
        if not self._normed:
            self._state /= np.sqrt(np.dot(self._state, self._state) / len(self._state) + STATE_EPS)
            self._state *= self._norm
            self._normed = True
        return self._state

    def _logits(self, context: Context, drafted: Sequence[int]) -> Floats | None:  # (V,)
        state = self._latest()
        return None if state is None else self._guessed(state, context, drafted)

    def _guessed(self, state: Floats, context: Context, drafted: Sequence[int]) -> Floats | None:  # (D,) -> (V,)
        """Logits after the drafted tokens; None where there is no head for that place."""
        raise NotImplementedError

    def nbytes(self) -> int:
        """Bytes that it holds."""
        return super().nbytes() + self._norm.nbytes + self._state.nbytes
