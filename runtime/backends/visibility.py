"""Which rows of the cache the rows of a pass see: in draft trees, in sliding windows, in texts side by side."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BackendError
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Ints

__all__ = ["Visibility", "ancestors", "check_visibility", "visible_rows"]


@dataclass(frozen=True, eq=False)
class Visibility:
    """What the new rows of a pass see, where texts that share a beginning lie in the cache side by side.

    Attributes:
        paths: of each new row the rows of the cache that it attends to, ascending, itself the last. They are its text
            from the first token on, so the index of a row in a path is its place there. S of (n,)
    """

    paths: tuple[Ints, ...]


def check_visibility(visibility: Visibility, length: int, size: int, tree: Ints | None) -> None:
    """Refuses what the rows of a pass over `size` tokens cannot see behind `length` cached ones."""
    if tree is not None:
        raise BackendError("A pass takes a draft tree or a visibility, not both.")
    if length == 0:
        raise BackendError("Rows of several texts need at least one token in the cache.")
    if len(visibility.paths) != size:
        raise BackendError(f"A pass of {size} tokens has the paths of {len(visibility.paths)}.")
    for row, path in enumerate(visibility.paths, length):
        if len(path) == 0 or path[-1] != row or path[0] < 0 or (path[1:] <= path[:-1]).any():
            raise BackendError(f"The path of row {row} must ascend to the row itself.")


def visible_rows(
    start: int, size: int, tree: Ints | None, visibility: Visibility | None, window: int = 0
) -> NDArray[np.bool_]:  # (S, T)
    """Which of the T cached and new rows each of the S new ones sees: a chain without tree and visibility.

    Args:
        start: rows in the cache before the pass.
        window: places of its text up to its own that a row sees at most; 0 is all.
    """
    if visibility is not None:
        seen = np.zeros((size, start + size), np.bool_)
        for row, path in enumerate(visibility.paths):
            seen[row, path[-window:]] = True
        return seen
    seen = np.ones((size, start + size), np.bool_)
    seen[:, start:] = np.tri(size, dtype=np.bool_) if tree is None else ancestors(tree)
    if window:
        # A row is as deep as it has rows of the pass above it, or is one of those.
        places = np.concatenate([np.arange(start), start - 1 + seen[:, start:].sum(axis=1)])  # (T,)
        seen &= places[start:, None] - places < window
    return seen


def ancestors(tree: Ints) -> NDArray[np.bool_]:  # (S,) -> (S, S)
    """Which rows each row of a draft tree may attend to: itself and its ancestors."""
    size = len(tree)
    sees = np.eye(size, dtype=np.bool_)
    for row, parent in enumerate(tree):
        if parent >= 0:
            sees[row] |= sees[parent]
    return sees
