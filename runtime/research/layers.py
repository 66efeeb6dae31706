"""Three ways to choose the layers that a reply skips: evenly spaced, by importance, or by trained routers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.layer_skip.calibrated import LayerSkipDecoding, kept_layers, layers_mask, skipping
from edgeinfer.runtime.layer_skip.reduced_compute import ComputeMethod, ReducedComputeStrategies
from edgeinfer.runtime.layer_skip.strategy import EvaluatedPrompt, Mask, SpeedTarget, StrategyArguments

_NEEDED = 0.5


class UnifiedPolicy:
    """Unified Layer Skipping (Liu et al. 2024): keeps evenly spaced layers, as many as the wanted speed-up leaves."""

    reads_states: ClassVar[bool] = False

    def mask(self, prompt: EvaluatedPrompt, wanted: SpeedTarget) -> Passes[Mask]:
        yield from ()
        return layers_mask(prompt.layers, kept_layers(prompt.layers, wanted.speedup))


def importance(states: Floats) -> NDArray[np.float64]:  # (L + 1, S, D) -> (L,)
    """1 - cos(entering, leaving) of each layer, mean over tokens."""
    before, after = states[:-1].astype(np.float64), states[1:].astype(np.float64)
    lengths = np.linalg.norm(before, axis=2) * np.linalg.norm(after, axis=2)
    cosines = (before * after).sum(axis=2) / np.maximum(lengths, 1e-12)
    turned: NDArray[np.float64] = 1 - cosines.mean(axis=1)
    return turned


def skip_in_order(order: list[int], layers: int, wanted: SpeedTarget) -> Mask:
    """Skip layers one after the other until passes are as fast as wanted; first and last always stay."""
    kept = list(range(layers))
    for layer in order:
        if wanted.reached(layers_mask(layers, kept)):
            break
        if 0 < layer < layers - 1:
            kept.remove(layer)
    return layers_mask(layers, kept)


class ImportancePolicy:
    """Skips the layers that change the prompt's states least; nothing is trained."""

    reads_states: ClassVar[bool] = True

    def mask(self, prompt: EvaluatedPrompt, wanted: SpeedTarget) -> Passes[Mask]:
        order = np.argsort(importance((yield from prompt.states())), kind="stable").tolist()
        return skip_in_order(order, prompt.layers, wanted)


@dataclass(frozen=True)
class RoutersPolicy:
    """FiRST (Jain et al. 2025): a trained router per layer, weight (L, D) and bias (L,), tells from the mean over the
    prompt of the states that enter the layer whether the reply needs it."""

    reads_states: ClassVar[bool] = True

    weight: Floats
    bias: Floats

    def __post_init__(self) -> None:
        shaped = self.weight.ndim == 2 and self.bias.shape == self.weight.shape[:1]
        if not (shaped and np.isfinite(self.weight).all() and np.isfinite(self.bias).all()):
            raise BundleError("The routers of the bundle are damaged.", "Train them again, or export it again.")

    def needed(self, prompt: EvaluatedPrompt) -> Passes[NDArray[np.float64]]:  # (L,)
        """Probability that the reply needs each layer."""
        means = (yield from prompt.states())[:-1].mean(axis=1, dtype=np.float64)  # (L, D)
        if means.shape != self.weight.shape:
            message = f"Routers of {self.weight.shape} do not fit states of {means.shape}."
            raise BundleError(message, "Train them again, or export it again.")
        scores: NDArray[np.float64] = (means * self.weight).sum(axis=1) + self.bias
        return 1 / (1 + np.exp(-scores))

    def mask(self, prompt: EvaluatedPrompt, wanted: SpeedTarget) -> Passes[Mask]:
        """Skip what is likely not needed, the least likely first, no more than the wanted speed-up takes."""
        needed = yield from self.needed(prompt)
        order = [int(layer) for layer in np.argsort(needed, kind="stable") if needed[layer] <= _NEEDED]
        return skip_in_order(order, prompt.layers, wanted)


def _routers(strategies: ReducedComputeStrategies, given: StrategyArguments) -> LayerSkipDecoding:
    heads = strategies.heads("routers")
    if heads is None:
        message = "The bundle has no routers that choose layers."
        raise UsageError(message, "Train some with edgeinfer distill routers, or use the method 'importance'.")
    return skipping(strategies, given, RoutersPolicy(heads.arrays["weight"], heads.arrays["bias"]))


UNIFIED = ComputeMethod(
    name="unified",
    help="skips evenly spaced layers (unified layer skipping)",
    make=lambda strategies, given: skipping(strategies, given, UnifiedPolicy()),
)
IMPORTANCE = ComputeMethod(
    name="importance",
    help="skips the layers that change the prompt's states least",
    make=lambda strategies, given: skipping(strategies, given, ImportancePolicy()),
)
ROUTERS = ComputeMethod(
    name="routers", help="skips the layers that trained routers find unneeded (FiRST)", make=_routers
)
