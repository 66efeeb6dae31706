"""What was found about a model's own layers as drafters, kept with its costs; knows nothing of how it was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import StorageError

__all__ = ["TUNING", "Tuning"]

# Name of its arrays in a profile.
TUNING = "tuning"


@dataclass(frozen=True)
class Tuning:
    """Self-drafting that pays on this device.

    Attributes:
        exit_layer: layers of an early exit; None where none pays.
        layer_mask: attention and MLP blocks that run; None where no set pays. (2 L,)
    """

    exit_layer: int | None = None
    layer_mask: NDArray[np.bool_] | None = None

    def state(self) -> dict[str, NDArray[Any]]:
        """As arrays."""
        arrays: dict[str, NDArray[Any]] = {}
        if self.exit_layer is not None:
            arrays["exit_layer"] = np.array([self.exit_layer])
        if self.layer_mask is not None:
            arrays["layer_mask"] = self.layer_mask
        return arrays

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]], layers: int) -> Tuning:
        """Takes back what `state` gave, for a model of so many layers.

        Raises:
            StorageError: it is of another model.
        """
        mask, exits = state.get("layer_mask"), state.get("exit_layer")
        fits = mask is None or (mask.dtype == np.bool_ and mask.shape == (2 * layers,))
        if exits is not None:
            fits = fits and exits.shape == (1,) and exits.dtype == np.int64 and 1 <= int(exits[0]) < layers
        if not fits:
            raise StorageError("What was tuned is of another model.", "Run edgeinfer tune again.")
        return cls(None if exits is None else int(exits[0]), mask)
