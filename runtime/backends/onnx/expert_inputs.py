"""The graph's inputs that say which experts may be used; knows nothing of sessions."""

from __future__ import annotations

import numpy as np

from edgeinfer.bundle.spec import MoESpec
from edgeinfer.errors import BackendError
from edgeinfer.runtime.backends.contract import ExpertChoice

__all__ = ["ExpertInputs"]


class ExpertInputs:
    """Arrays that stay where they are, so that they are bound once; a pass that chooses nothing writes one number.

    Attributes:
        top_k: experts of a token in the whole model.
        count: of experts for each token. (1,)
        bias: added to the routers' scores before choosing. (L, E)
    """

    def __init__(self, moe: MoESpec, layers: int) -> None:
        self.top_k = moe.top_k
        self.count = np.full(1, moe.top_k, np.int64)
        self.bias = np.zeros((layers, moe.experts), np.float32)
        self._biased = False

    def choose(self, choice: ExpertChoice | None) -> None:
        """Sets what the next pass may use; None is the whole model.

        Raises:
            BackendError: a bias of another shape.
        """
        bias = None if choice is None else choice.bias
        if bias is not None and bias.shape != self.bias.shape:
            raise BackendError(f"A bias of experts of shape {bias.shape} does not fit {self.bias.shape}.")
        self.count[0] = self.top_k if choice is None else choice.count
        if bias is not None:
            self.bias[...] = bias
        elif self._biased:
            self.bias[...] = 0
        self._biased = bias is not None
