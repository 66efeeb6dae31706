"""Unified Layer Skipping (Liu et al. 2024): evenly spaced layers, as many as the wanted speed-up leaves."""

from __future__ import annotations

import numpy as np

from edgeinfer.runtime.layer_skip.contract import Mask, Prompt, Wanted

__all__ = ["UnifiedPolicy", "kept_layers", "layers_mask"]


def kept_layers(layers: int, speedup: float) -> list[int]:
    """The authors' rule: first and last, and each multiple of an interval until int(L / speedup) layers are kept.

    Below three layers to keep there is nothing to space; first and last always stay.
    """
    count = int(layers / speedup)
    if count >= layers:
        return list(range(layers))
    kept = sorted({0, layers - 1})
    if count > 2:
        interval = int(layers / (count - 2 + 1))
        for layer in range(1, layers - 1):
            if layer % interval == 0 and len(kept) < count:
                kept.append(layer)
    return sorted(kept)


def layers_mask(layers: int, kept: list[int]) -> Mask:
    """Attention and MLP of these layers."""
    mask = np.zeros((layers, 2), np.bool_)
    mask[kept] = True
    return mask.reshape(-1)


class UnifiedPolicy:
    """Implements `contract.SkipPolicy`."""

    def mask(self, prompt: Prompt, wanted: Wanted) -> Mask:
        """The same layers for every prompt."""
        return layers_mask(prompt.layers, kept_layers(prompt.layers, wanted.speedup))
