"""Layers that change the prompt's states least are skipped: nothing is trained; knows nothing of how states are had."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.layer_skip.contract import Mask, Prompt, Wanted
from edgeinfer.runtime.layer_skip.unified import layers_mask

__all__ = ["ImportancePolicy", "importance", "skip_in_order"]


def importance(states: Floats) -> NDArray[np.float64]:  # (L + 1, S, D) -> (L,)
    """1 - cos(entering, leaving) of each layer, mean over tokens."""
    before, after = states[:-1].astype(np.float64), states[1:].astype(np.float64)
    lengths = np.linalg.norm(before, axis=2) * np.linalg.norm(after, axis=2)
    cosines = (before * after).sum(axis=2) / np.maximum(lengths, 1e-12)
    turned: NDArray[np.float64] = 1 - cosines.mean(axis=1)
    return turned


def skip_in_order(order: list[int], layers: int, wanted: Wanted) -> Mask:
    """Skips layers one after the other until passes are as fast as wanted; first and last always stay."""
    kept = list(range(layers))
    for layer in order:
        if wanted.reached(layers_mask(layers, kept)):
            break
        if 0 < layer < layers - 1:
            kept.remove(layer)
    return layers_mask(layers, kept)


class ImportancePolicy:
    """Implements `contract.SkipPolicy`."""

    def mask(self, prompt: Prompt, wanted: Wanted) -> Mask:
        """Skips the least important layers of this prompt."""
        order = np.argsort(importance(prompt.states()), kind="stable").tolist()
        return skip_in_order(order, prompt.layers, wanted)
