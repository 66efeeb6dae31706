"""Policies that compute less, and which one an option names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.adaptive import ComputeOptions, kept_layers
from edgeinfer.errors import BundleError, StorageError, UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.layer_skip.contract import EvaluatedPrompt, Mask, SkipPolicy, SpeedTarget, SwitchPolicy
from edgeinfer.runtime.layer_skip.entropy import Entropies, EntropyPolicy, RandomPolicy

# Name of its arrays in a profile.
SKIP_LEVELS = "ladder"
_NEEDED = 0.5


def layers_mask(layers: int, kept: list[int]) -> Mask:
    """Attention and MLP of these layers."""
    mask = np.zeros((layers, 2), np.bool_)
    mask[kept] = True
    return mask.reshape(-1)


class UnifiedPolicy:
    """Unified Layer Skipping (Liu et al. 2024): keeps evenly spaced layers, as many as the wanted speed-up leaves."""

    reads_states: ClassVar[bool] = False

    def mask(self, prompt: EvaluatedPrompt, wanted: SpeedTarget) -> Mask:
        """The same layers for every prompt."""
        return layers_mask(prompt.layers, kept_layers(prompt.layers, wanted.speedup))


def importance(states: Floats) -> NDArray[np.float64]:  # (L + 1, S, D) -> (L,)
    """1 - cos(entering, leaving) of each layer, mean over tokens."""
    before, after = states[:-1].astype(np.float64), states[1:].astype(np.float64)
    lengths = np.linalg.norm(before, axis=2) * np.linalg.norm(after, axis=2)
    cosines = (before * after).sum(axis=2) / np.maximum(lengths, 1e-12)
    turned: NDArray[np.float64] = 1 - cosines.mean(axis=1)
    return turned


def skip_in_order(order: list[int], layers: int, wanted: SpeedTarget) -> Mask:
    """Skips layers one after the other until passes are as fast as wanted; first and last always stay."""
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

    def mask(self, prompt: EvaluatedPrompt, wanted: SpeedTarget) -> Mask:
        """Skips the least important layers of this prompt."""
        order = np.argsort(importance(prompt.states()), kind="stable").tolist()
        return skip_in_order(order, prompt.layers, wanted)


@dataclass(frozen=True)
class RoutersPolicy:
    """FiRST (Jain et al. 2025): a trained router per layer tells from the prompt whether its reply needs the layer.

    Attributes:
        weight, bias: of each layer's router, which takes the mean over the prompt of the states entering the layer.
            (L, D), (L,)

    Raises:
        BundleError: their shapes do not belong together, or they hold other than finite numbers.
    """

    reads_states: ClassVar[bool] = True

    weight: Floats
    bias: Floats

    def __post_init__(self) -> None:
        shaped = self.weight.ndim == 2 and self.bias.shape == self.weight.shape[:1]
        if not (shaped and np.isfinite(self.weight).all() and np.isfinite(self.bias).all()):
            raise BundleError("The routers of the bundle are damaged.", "Train them again, or export it again.")

    def needed(self, prompt: EvaluatedPrompt) -> NDArray[np.float64]:  # (L,)
        """Probability that the reply needs each layer."""
        means = prompt.states()[:-1].mean(axis=1, dtype=np.float64)  # (L, D)
        if means.shape != self.weight.shape:
            message = f"Routers of {self.weight.shape} do not fit states of {means.shape}."
            raise BundleError(message, "Train them again, or export it again.")
        scores: NDArray[np.float64] = (means * self.weight).sum(axis=1) + self.bias
        return 1 / (1 + np.exp(-scores))

    def mask(self, prompt: EvaluatedPrompt, wanted: SpeedTarget) -> Mask:
        """Skips what is likely not needed, the least likely first, no more than the wanted speed-up takes."""
        needed = self.needed(prompt)
        order = [int(layer) for layer in np.argsort(needed, kind="stable") if needed[layer] <= _NEEDED]
        return skip_in_order(order, prompt.layers, wanted)


@dataclass(frozen=True)
class SkipLevels:
    """Sets by ascending saving, each of no less loss than the one before it; the first leaves nothing out.

    Attributes:
        masks: blocks that run. (N, 2 L)
        losses: nats from the whole model's predictions on the texts of the search, mean over tokens. (N,)
    """

    masks: NDArray[np.bool_]
    losses: NDArray[np.float64]

    def state(self) -> dict[str, NDArray[Any]]:
        """The arrays to keep, by name."""
        return {"masks": self.masks, "losses": self.losses}

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]], layers: int) -> SkipLevels | None:
        """Takes back what `state` gave, for a model of so many layers; None where nothing was kept."""
        if not state:
            return None
        masks, losses = state.get("masks"), state.get("losses")
        if masks is None or losses is None or not _fit(masks, losses, layers):
            raise StorageError("The calibrated sets belong to another model.", "Run edgeinfer tune --skip again.")
        return cls(masks, losses)

    def choose(self, wanted: SpeedTarget) -> Mask:
        """The least harmful set that is as fast as wanted; where none is, the fastest."""
        every = range(len(self.masks))
        fast = [row for row in every if wanted.reached(self.masks[row])]
        if fast:
            chosen = min(fast, key=lambda row: float(self.losses[row]))
        else:
            chosen = min(every, key=lambda row: wanted.costs.ms(self.masks[row]))
        mask: Mask = self.masks[chosen]
        return mask


def _fit(masks: NDArray[Any], losses: NDArray[Any], layers: int) -> bool:
    """Whether these are levels of a model of so many layers."""
    shaped = masks.ndim == 2 and masks.shape[1] == 2 * layers and losses.shape == masks.shape[:1] != (0,)
    typed = masks.dtype == np.bool_ and losses.dtype == np.float64
    return shaped and typed and bool(np.isfinite(losses).all() and masks[0].all())


@dataclass(frozen=True)
class CalibratedPolicy:
    """Skips the blocks that `edgeinfer tune --skip` found least harmful."""

    reads_states: ClassVar[bool] = False

    levels: SkipLevels

    def mask(self, prompt: EvaluatedPrompt, wanted: SpeedTarget) -> Mask:
        """The same blocks for every prompt."""
        return self.levels.choose(wanted)


@dataclass(frozen=True)
class PolicyParts:
    """What policies are made of.

    Attributes:
        levels: the sets that `edgeinfer tune --skip` found; None where it did not run.
        routers: gives weights and biases that the bundle has; None where it has none.
        entropies: of the model and its draft model.
    """

    levels: SkipLevels | None
    routers: Callable[[], tuple[Floats, Floats] | None]
    entropies: Entropies


def _calibrated(parts: PolicyParts, options: ComputeOptions) -> SkipPolicy:
    if parts.levels is None:
        message = "This model has no calibrated sets of blocks to skip."
        raise UsageError(message, "Run edgeinfer tune --skip on it once, or use the method 'unified' or 'importance'.")
    return CalibratedPolicy(parts.levels)


def _routers(parts: PolicyParts, options: ComputeOptions) -> SkipPolicy:
    found = parts.routers()
    if found is None:
        message = "The bundle has no routers that choose layers."
        raise UsageError(message, "Train some with edgeinfer distill routers, or use the method 'importance'.")
    return RoutersPolicy(*found)


def _entropy(parts: PolicyParts, options: ComputeOptions) -> SwitchPolicy:
    return EntropyPolicy(parts.entropies, options.compute_share, options.entropy_threshold, options.entropy_stay)


# Ways that skip a set of blocks for the whole reply, and those that let two models take turns.
SKIPPING: dict[str, Callable[[PolicyParts, ComputeOptions], SkipPolicy]] = {
    "unified": lambda parts, options: UnifiedPolicy(),
    "calibrated": _calibrated,
    "importance": lambda parts, options: ImportancePolicy(),
    "routers": _routers,
}
SWITCHING: dict[str, Callable[[PolicyParts, ComputeOptions], SwitchPolicy]] = {
    "entropy": _entropy,
    "random": lambda parts, options: RandomPolicy(options.compute_share, options.entropy_stay, seed=0),
}
