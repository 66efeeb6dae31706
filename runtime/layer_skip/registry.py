"""Which policy a way of computing less is, made of what a model has; knows nothing of what they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgeinfer.adaptive import ComputeOptions
from edgeinfer.errors import UsageError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.layer_skip.chance import ChancePolicy
from edgeinfer.runtime.layer_skip.contract import SkipPolicy, SwitchPolicy
from edgeinfer.runtime.layer_skip.entropy import Entropies, EntropyPolicy
from edgeinfer.runtime.layer_skip.importance import ImportancePolicy
from edgeinfer.runtime.layer_skip.ladder import Ladder, LadderPolicy
from edgeinfer.runtime.layer_skip.routers import RoutersPolicy
from edgeinfer.runtime.layer_skip.unified import UnifiedPolicy

__all__ = ["SKIPPING", "SWITCHING", "PolicyParts"]


@dataclass(frozen=True)
class PolicyParts:
    """What policies are made of.

    Attributes:
        ladder: the sets that `edgeinfer tune --skip` found; None where it did not run.
        routers: gives weights and biases that the bundle has; None where it has none.
        entropies: of the model and its draft model.
    """

    ladder: Ladder | None
    routers: Callable[[], tuple[Floats, Floats] | None]
    entropies: Entropies


def _calibrated(parts: PolicyParts, options: ComputeOptions) -> SkipPolicy:
    if parts.ladder is None:
        message = "No sets of blocks to skip are known of this model."
        raise UsageError(message, "Run edgeinfer tune --skip on it once, or compute 'unified' or 'importance'.")
    return LadderPolicy(parts.ladder)


def _routers(parts: PolicyParts, options: ComputeOptions) -> SkipPolicy:
    found = parts.routers()
    if found is None:
        message = "The bundle has no routers that choose layers."
        raise UsageError(message, "Train some with edgeinfer distill routers, or compute 'importance'.")
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
    "random": lambda parts, options: ChancePolicy(options.compute_share, options.entropy_stay, seed=0),
}
