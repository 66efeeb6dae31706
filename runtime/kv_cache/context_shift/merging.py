"""Merges cached rows into others of the same head, weighted by how many tokens each stands for; knows no policy.

Keys are compared and averaged as they were before rotation, where position does not enter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.arrays import Floats

__all__ = ["Indices", "cosines", "merge_rows"]

Indices = NDArray[np.intp]


def cosines(a: Floats, b: Floats) -> Floats:  # (n, h), (m, h) -> (n, m)
    """Cosine of the angle between each two rows; 0 where one has no direction."""
    similar: Floats = _directions(a) @ _directions(b).T
    return similar


def _directions(x: Floats) -> Floats:  # (n, h) -> (n, h)
    lengths = np.sqrt((x * x).sum(axis=-1, keepdims=True))
    directions: Floats = x / np.maximum(lengths, np.float32(1e-20))
    return directions


def merge_rows(
    rows: Floats,  # (n, d)
    counts: Floats,  # (n,), tokens that each row stands for
    sources: Indices,  # (e,), different ones
    targets: Indices,  # (e,), none of them a source
) -> None:
    """Replaces each target by the mean of the tokens of itself and its sources, in place, and counts them."""
    if not len(sources):
        return
    order = np.argsort(targets, kind="stable")
    sources = sources[order]
    touched, starts = np.unique(targets[order], return_index=True)
    weights = counts[sources]
    sums = rows[touched] * counts[touched, None]
    sums += np.add.reduceat(rows[sources] * weights[:, None], starts)
    counts[touched] += np.add.reduceat(weights, starts)
    rows[touched] = sums / counts[touched, None]
