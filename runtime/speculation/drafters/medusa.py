"""Drafts with one small head for each place, all over the state that predicted the root; knows nothing of training.

Medusa (Cai et al. 2024): head i is one residual block, x + SiLU(W x + b), before the model's own output rows. The rows
are those of the most frequent tokens only: on a CPU the whole output matrix would cost a good part of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.bundle.heads import Heads
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.speculation.contracts import Context
from edgeinfer.runtime.speculation.drafters.matrix import Matrix
from edgeinfer.runtime.speculation.drafters.states import OutputRows, StateDrafter, silu

__all__ = ["MedusaDrafter"]


class MedusaDrafter(StateDrafter):
    """Implements `contracts.Drafter`.

    Args:
        target: whose states the heads read.
        heads: of kind "medusa".
    """

    name = "medusa"

    def __init__(self, target: Backend, heads: Heads) -> None:
        super().__init__(target, heads)
        self._weights = [Matrix(weight) for weight in heads.arrays["weight"]]  # H of (D, D)
        self._bias = heads.arrays["bias"].astype(np.float32)  # (H, D)
        self._output = OutputRows(heads, target.geometry.vocab_size)

    def _guessed(self, state: Floats, context: Context, drafted: Sequence[int]) -> Floats | None:  # (D,) -> (V,)
        head = len(drafted)
        if head >= len(self._weights):
            return None
        return self._output.logits(state + silu((self._weights[head] @ state) + self._bias[head]))

    def nbytes(self) -> int:
        """Bytes that it holds."""
        matrices = sum(weight.nbytes for weight in self._weights)
        return super().nbytes() + matrices + self._bias.nbytes + self._output.nbytes
