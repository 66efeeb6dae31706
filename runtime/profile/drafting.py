"""What is kept of drafting on this device: how far drafts are accepted, and which of a model's own layers draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import StorageError
from edgeinfer.records import dataclass

__all__ = ["ACCEPTANCE", "LAYER_DRAFTING", "LayerDrafting", "PositionAcceptance", "acceptance_by_position"]

# Name of its arrays in a profile.
LAYER_DRAFTING = "tuning"
ACCEPTANCE = "reach"
# Rounds after which what was seen counts half.
_HALF_LIFE = 2000.0
# Rounds that tell anything, and places that are counted.
_ENOUGH = 50
_PLACES = 63


@dataclass(frozen=True)
class LayerDrafting:
    """Self-drafting that pays on this device.

    Attributes:
        exit_layer: layers of an early exit; None where none pays.
        layer_mask: attention and MLP blocks that run; None where no set pays. (2 L,)
    """

    exit_layer: int | None = None
    layer_mask: NDArray[np.bool_] | None = None

    def state(self) -> dict[str, NDArray[Any]]:
        """The arrays to keep, by name."""
        arrays: dict[str, NDArray[Any]] = {}
        if self.exit_layer is not None:
            arrays["exit_layer"] = np.array([self.exit_layer])
        if self.layer_mask is not None:
            arrays["layer_mask"] = self.layer_mask
        return arrays

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]], layers: int) -> LayerDrafting:
        """Takes back what `state` gave, for a model of so many layers.

        Raises:
            StorageError: it is of another model.
        """
        mask, exits = state.get("layer_mask"), state.get("exit_layer")
        fits = mask is None or (mask.dtype == np.bool_ and mask.shape == (2 * layers,))
        if exits is not None:
            fits = fits and exits.shape == (1,) and exits.dtype == np.int64 and 1 <= int(exits[0]) < layers
        if not fits:
            raise StorageError("The tuned layers belong to another model.", "Run edgeinfer tune again.")
        return cls(None if exits is None else int(exits[0]), mask)


class PositionAcceptance:
    """Counts, of the rounds seen, how many had the token at each place of a draft accepted.

    Args:
        kept: what `state` gave in an earlier session; anything else is ignored.
    """

    def __init__(self, kept: Mapping[str, NDArray[Any]] | None = None) -> None:
        self._counts: NDArray[np.float64] = np.zeros(1 + _PLACES)  # rounds, then accepted by place
        if kept is not None and _is_sound(kept):
            self._counts[:] = kept["counts"]

    def add(self, rounds: int, accepted_per_position: Sequence[int]) -> None:
        """Counts a reply's rounds."""
        self._counts *= 0.5 ** (rounds / _HALF_LIFE)
        self._counts[0] += rounds
        places = accepted_per_position[:_PLACES]
        self._counts[1 : 1 + len(places)] += places

    def state(self) -> dict[str, NDArray[np.float64]]:
        """The arrays to keep, by name."""
        return {"counts": self._counts.copy()}


def acceptance_by_position(kept: Mapping[str, NDArray[Any]] | None) -> tuple[float, ...]:
    """Acceptance rate of a draft's token at each position; () where too few rounds were seen."""
    if kept is None or not _is_sound(kept) or kept["counts"][0] < _ENOUGH:
        return ()
    rounds, accepted = float(kept["counts"][0]), np.trim_zeros(kept["counts"][1:], "b")
    return tuple(min(1.0, float(count) / rounds) for count in accepted)


def _is_sound(kept: Mapping[str, NDArray[Any]]) -> bool:
    counts = kept.get("counts")
    if set(kept) != {"counts"} or counts is None or counts.shape != (1 + _PLACES,) or counts.dtype != np.float64:
        return False
    return bool(np.isfinite(counts).all() and (counts >= 0).all())
