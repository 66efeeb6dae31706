"""Drafting with the target less some of its attention and MLP blocks; knows nothing of how the set is searched.

Draft & Verify (Zhang et al. 2024) and SWIFT (Xia et al. 2025).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UsageError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, require
from edgeinfer.runtime.speculation.drafters.self_drafter import SelfDrafter

__all__ = ["SkipDrafter", "every_second"]

# SWIFT's share of skipped layers.
_MOST_SKIPPED = 0.45


def every_second(num_layers: int) -> NDArray[np.bool_]:  # (2 L,)
    """SWIFT's first set: skips attention and MLP of every second layer from 1 to L - 2, at most 45% of all layers.

    Raises:
        UsageError: with fewer than three layers there is none between the first and the last.
    """
    skipped = list(range(1, num_layers - 1, 2))[: int(_MOST_SKIPPED * num_layers)]
    if not skipped:
        message = f"A model of {num_layers} layers has none to skip between its first and its last."
        raise UsageError(message, "Choose another drafter.")
    mask = np.ones((num_layers, 2), np.bool_)
    mask[skipped] = False
    return mask.reshape(-1)


class SkipDrafter(SelfDrafter):
    """Implements `contracts.Drafter`.

    Args:
        target: must skip layers.
        layer_mask: blocks that run, as `Backend.forward` takes it; None takes `every_second`. (2 L,)

    Raises:
        CapabilityError: the target cannot skip layers.
        UsageError: the mask does not fit the model, or skips nothing.
    """

    name = "skip"

    def __init__(self, target: Backend, layer_mask: NDArray[np.bool_] | None = None) -> None:
        hint = "Use a natively exported bundle, or another drafter."
        require(target.capabilities.layer_skip, target, "skip layers", hint)
        layers = target.geometry.num_layers
        mask = every_second(layers) if layer_mask is None else np.array(layer_mask, np.bool_)
        if mask.shape != (2 * layers,) or mask.all():
            message = f"A layer mask of shape {mask.shape} with {np.sum(~mask)} blocks skipped drafts nothing."
            raise UsageError(message, f"Give {2 * layers} values, at least one of them false.")
        super().__init__(target)
        self._layer_mask = mask

    def _run(self, tokens: Ints, positions: Ints, rows: Ints) -> Floats:
        return self._target.forward(ForwardInput(tokens, positions, rows, layer_mask=self._layer_mask)).logits
