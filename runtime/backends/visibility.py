"""Which rows of the cache the rows of a pass see: in chains, in draft trees, in sliding windows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.arrays import Ints


def visible_rows(start: int, size: int, tree: Ints | None, window: int = 0) -> NDArray[np.bool_]:  # (S, T)
    """Which of the T cached and new rows each of the S new ones sees: all before it without a tree.

    Args:
        window: places of its text up to its own that a row sees at most; 0 is all.
    """
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
