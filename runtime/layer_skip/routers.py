"""FiRST (Jain et al. 2025): a trained router per layer tells from the prompt whether its reply needs the layer.

Knows nothing of training, nor of where weights are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BundleError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.layer_skip.contract import Mask, Prompt, Wanted
from edgeinfer.runtime.layer_skip.importance import skip_in_order

__all__ = ["RoutersPolicy"]

_NEEDED = 0.5


@dataclass(frozen=True)
class RoutersPolicy:
    """Implements `contract.SkipPolicy`.

    Attributes:
        weight, bias: of each layer's router, which takes the mean over the prompt of the states entering the layer.
            (L, D), (L,)

    Raises:
        BundleError: their shapes do not belong together, or they hold other than finite numbers.
    """

    weight: Floats
    bias: Floats

    def __post_init__(self) -> None:
        shaped = self.weight.ndim == 2 and self.bias.shape == self.weight.shape[:1]
        if not (shaped and np.isfinite(self.weight).all() and np.isfinite(self.bias).all()):
            raise BundleError("The routers of the bundle are damaged.", "Train them again, or export it again.")

    def needed(self, prompt: Prompt) -> NDArray[np.float64]:  # (L,)
        """Probability that the reply needs each layer."""
        means = prompt.states()[:-1].mean(axis=1, dtype=np.float64)  # (L, D)
        if means.shape != self.weight.shape:
            message = f"Routers of {self.weight.shape} do not fit states of {means.shape}."
            raise BundleError(message, "Train them again, or export it again.")
        scores: NDArray[np.float64] = (means * self.weight).sum(axis=1) + self.bias
        return 1 / (1 + np.exp(-scores))

    def mask(self, prompt: Prompt, wanted: Wanted) -> Mask:
        """Skips what is likely not needed, the least likely first, no more than the wanted speed-up takes."""
        needed = self.needed(prompt)
        order = [int(layer) for layer in np.argsort(needed, kind="stable") if needed[layer] <= _NEEDED]
        return skip_in_order(order, prompt.layers, wanted)
