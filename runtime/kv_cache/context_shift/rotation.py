"""Moves cached keys to other positions, by turning their rotary part; knows nothing of which rows are kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import RopeSpec
from edgeinfer.bundle.arithmetic import rope_tables
from edgeinfer.runtime.arrays import Floats

__all__ = ["Rotation"]

Positions = NDArray[np.intp]  # (n,), or (H, n) where heads differ


class Rotation:
    """The rotary tables of a context, for keys that were rotated by them.

    A key is turned by the difference of two entries, not by a table of differences: the tables' angles are rounded to
    float32, which at position 2000 is a ten-thousandth of a radian, and the turned key must be the one that a pass at
    its new position would have written.

    Args:
        spec: of the model.
        capacity: tokens that the cache may hold.
    """

    def __init__(self, spec: RopeSpec, capacity: int) -> None:
        self._half = spec.dim // 2
        self._cos, self._sin = rope_tables(spec, capacity, capacity)  # (C, r/2)
        # Both tables carry the attention factor, so products of two entries carry it twice.
        self._scale = np.float32(1 / spec.attention_factor**2)

    @staticmethod
    def planned_bytes(spec: RopeSpec, capacity: int) -> int:
        """Bytes of the tables, and of what is picked from them for one layer's rows."""
        return 5 * capacity * spec.dim * 4

    def moved(self, keys: Floats, old: Positions, new: Positions) -> Floats:  # (H, n, h) -> (H, n, h)
        """Keys at `old` positions as they would be at `new` ones; dimensions that are not rotated stay."""
        half = self._half
        cos_old, sin_old, cos_new, sin_new = self._cos[old], self._sin[old], self._cos[new], self._sin[new]
        cos = (cos_new * cos_old + sin_new * sin_old) * self._scale
        sin = (sin_new * cos_old - cos_new * sin_old) * self._scale
        out = keys.copy()
        a, b = keys[..., :half], keys[..., half : 2 * half]
        out[..., :half] = a * cos - b * sin
        out[..., half : 2 * half] = b * cos + a * sin
        return out
