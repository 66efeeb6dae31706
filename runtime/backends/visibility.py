"""Which rows of the cache the rows of a pass see: in draft trees, in sliding windows, in texts side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BackendError
from edgeinfer.runtime.arrays import Ints

__all__ = ["Visibility", "ancestors", "check_visibility", "in_window"]


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which rows of the cache the new rows of a pass see, where texts that share a beginning lie in it side by side.

    Attributes:
        sees: of the T = length + S cached and new rows, those that each new row may attend to: itself, and earlier ones
            only. (S, T)
        places: the position that every row was or is fed with, for sliding windows. (T,)
    """

    sees: NDArray[np.bool_]
    places: Ints


def check_visibility(visibility: Visibility, length: int, size: int, tree: Ints | None) -> None:
    """Refuses what the rows of a pass over `size` tokens cannot see behind `length` cached ones."""
    total, sees = length + size, visibility.sees
    if tree is not None:
        raise BackendError("A pass takes a draft tree or a visibility, not both.")
    if length == 0:
        raise BackendError("Rows of several texts need at least one token in the cache.")
    if sees.shape != (size, total) or visibility.places.shape != (total,):
        shapes = f"{sees.shape} and {visibility.places.shape}"
        raise BackendError(f"A visibility has shapes {shapes}, not ({size}, {total}) and ({total},).")
    new = sees[:, length:]
    if not new.diagonal().all() or np.triu(new, 1).any():
        raise BackendError("A row must see itself and no later row of its pass.")


def in_window(
    positions: Ints, total: int, window: int, places: Ints | None = None
) -> NDArray[np.bool_]:  # (S,), (T',) -> (S, T)
    """Which of the T rows lie less than `window` positions before each of the S new tokens, the last of the rows.

    Args:
        places: positions of the first T' rows, at least of all but the new ones; None where they count up.
    """
    cached = total - len(positions)
    rows = np.concatenate([np.arange(cached) if places is None else places[:cached], positions])
    near: NDArray[np.bool_] = positions[:, None] - rows < window
    return near


def ancestors(tree: Ints) -> NDArray[np.bool_]:  # (S,) -> (S, S)
    """Which rows each row of a draft tree may attend to: itself and its ancestors."""
    size = len(tree)
    sees = np.eye(size, dtype=np.bool_)
    for row, parent in enumerate(tree):
        if parent >= 0:
            sees[row] |= sees[parent]
    return sees
