"""What is kept of drafting on this device: how far drafts are accepted, who drafts, and with which of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.drafting import DRAFTERS
from edgeinfer.errors import StorageError
from edgeinfer.records import dataclass

__all__ = ["ACCEPTANCE", "TUNED_DRAFTING", "PositionAcceptance", "TunedDrafting", "acceptance_by_position"]

# Name of its arrays in a profile.
TUNED_DRAFTING = "tuning"
ACCEPTANCE = "reach"
# Rounds after which what was seen counts half.
_HALF_LIFE = 2000.0
# Rounds that tell anything, and places that are counted.
_ENOUGH = 50
_PLACES = 63


@dataclass(frozen=True)
class TunedDrafting:
    """Drafting that pays on this device.

    Attributes:
        exit_layer: layers of an early exit; None where none pays.
        layer_mask: attention and MLP blocks that run; None where no set pays. (2 L,)
        drafters: those that paid on the user's texts, whom alone `auto` asks; None where nobody measured.
    """

    exit_layer: int | None = None
    layer_mask: NDArray[np.bool_] | None = None
    drafters: tuple[str, ...] | None = None

    def state(self) -> dict[str, NDArray[Any]]:
        """The arrays to keep, by name."""
        arrays: dict[str, NDArray[Any]] = {}
        if self.exit_layer is not None:
            arrays["exit_layer"] = np.array([self.exit_layer])
        if self.layer_mask is not None:
            arrays["layer_mask"] = self.layer_mask
        if self.drafters is not None:
            # Profiles keep numbers only.
            arrays["drafters"] = np.frombuffer(",".join(self.drafters).encode(), np.uint8)
        return arrays

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]], layers: int) -> TunedDrafting:
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
        names = state.get("drafters")
        return cls(None if exits is None else int(exits[0]), mask, None if names is None else _names(names))


def _names(kept: NDArray[Any]) -> tuple[str, ...]:  # (N,)
    """The drafters' names that bytes spell."""
    names = tuple(kept.tobytes().decode("ascii", "replace").split(",")) if kept.size else ()
    if kept.dtype != np.uint8 or not set(names) <= set(DRAFTERS):
        raise StorageError("The tuned drafters are not known here.", "Run edgeinfer tune --drafters again.")
    return names


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
