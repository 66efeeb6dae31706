"""Whether a draft model's next token will be accepted, by a head over its state (SpecDec++); knows no drafts."""

from __future__ import annotations

import numpy as np

from edgeinfer.bundle.heads import STATE_EPS, Heads
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.speculation.drafters.matrix import Matrix
from edgeinfer.runtime.speculation.drafters.states import silu

__all__ = ["AcceptanceJudge"]

# Times that the one block is run: SpecDec++ (Huang et al. 2024) shares it between its three places.
_TIMES = 3


class AcceptanceJudge:
    """Estimates acceptance.

    Args:
        heads: of kind "acceptance", of the draft model.
    """

    def __init__(self, heads: Heads) -> None:
        names = ("weight", "bias", "out", "out_bias")
        weight, *others = (heads.arrays[name].astype(np.float32) for name in names)
        self._weight = Matrix(weight)
        self._bias, self._out, self._out_bias = others

    def accepts(self, state: Floats) -> float:  # (D,)
        """Probability that the token that the model draws from this state, before its final norm, is accepted."""
        state = state / np.sqrt(np.dot(state, state) / len(state) + STATE_EPS)
        for _ in range(_TIMES):
            state = state + silu((self._weight @ state) + self._bias)
        rejected, accepted = (self._out @ state + self._out_bias).tolist()
        return float(1 / (1 + np.exp(min(rejected - accepted, 60.0))))

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in (self._weight, self._bias, self._out, self._out_bias))
