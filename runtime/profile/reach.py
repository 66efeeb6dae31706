"""How far drafts are accepted, over all replies on this device, by which plans predict speed; knows no single reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["REACH", "Reach", "reach_of"]

REACH = "reach"
# Rounds after which what was seen counts half.
_HALF_LIFE = 2000.0
# Rounds that tell anything, and places that are counted.
_ENOUGH = 50
_PLACES = 63


class Reach:
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
        """What is to be kept."""
        return {"counts": self._counts.copy()}


def reach_of(kept: Mapping[str, NDArray[Any]] | None) -> tuple[float, ...]:
    """Chance that a draft's token at each place is accepted; () where too little was seen to tell."""
    if kept is None or not _is_sound(kept) or kept["counts"][0] < _ENOUGH:
        return ()
    rounds, accepted = float(kept["counts"][0]), np.trim_zeros(kept["counts"][1:], "b")
    return tuple(min(1.0, float(count) / rounds) for count in accepted)


def _is_sound(kept: Mapping[str, NDArray[Any]]) -> bool:
    counts = kept.get("counts")
    if set(kept) != {"counts"} or counts is None or counts.shape != (1 + _PLACES,) or counts.dtype != np.float64:
        return False
    return bool(np.isfinite(counts).all() and (counts >= 0).all())
