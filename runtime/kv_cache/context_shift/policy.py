"""The interface of policies for full caches, and the account of a text that has lost some of its rows.

A context shift happens when every row of the cache is taken and one more token is to be fed, so when it happens
depends on the text's length alone, not on how the text was cut into passes or drafted. Afterwards the position of every
row is its index again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.parts import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import Overflow
from edgeinfer.nn.arithmetic import rope_tables
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import KVCache
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.paging.layout import PAGE, PAGE_UNIT, pages_for


@dataclass(frozen=True)
class Removed:
    rows: int  # rows that the cache lost
    merged: float = 0.0  # rows that went into others, the mean over layers and heads; the remaining ones were dropped


@dataclass(frozen=True)
class Lost:
    """The part of a text that has left the cache."""

    events: int = 0  # context shifts so far
    tokens: int = 0  # tokens of the text less rows of the cache
    merged: float = 0.0  # the tokens among them whose rows went into others; the mean over layers and heads
    # Tokens of the text at the last context shift. Rows of later tokens are theirs alone and may be cut; what the rows
    # of earlier ones were cannot be had back.
    since: int = 0

    def after(self, removed: Removed, since: int) -> Lost:
        """With one more context shift, at a text of `since` tokens."""
        return Lost(self.events + 1, self.tokens + removed.rows, self.merged + removed.merged, since)


class ContextShiftPolicy(Protocol):
    """Makes room in one cache. All its choices are functions of the text, the same every time."""

    @property
    def name(self) -> str:
        """As options name it."""

    def make_room(self, tokens: Sequence[int]) -> Removed:
        """Shortens a full cache."""

    def forget(self) -> None:
        """Another text begins."""


def context_shift_summary(policy: ContextShiftPolicy | None, lost: Lost) -> Overflow:
    """A reply's report of what its context lost; without a policy, nothing is."""
    if policy is None:
        return Overflow()
    merged = round(lost.merged, 2)
    return Overflow(policy.name, lost.events, round(lost.tokens - merged, 2), merged, lost.events == 0)


Positions = NDArray[np.intp]  # (n,), or (H, n) where heads differ


class Rotation:
    """The rotary tables of a context, for keys that were rotated by them.

    A key is turned by the difference of two entries, not by a table of differences: the tables' angles are rounded to
    float32, which at position 2000 is a ten-thousandth of a radian, and the turned key must be the one that a pass at
    its new position would have written.
    """

    def __init__(self, spec: RopeSpec, capacity: int) -> None:
        self._half, self._interleaved = spec.dim // 2, spec.interleaved
        self._cos, self._sin = rope_tables(spec, capacity, capacity)  # (C, r/2)
        # Both tables carry the attention factor, so products of two entries carry it twice.
        self._scale = np.float32(1 / spec.attention_factor**2)

    @staticmethod
    def planned_bytes(spec: RopeSpec, capacity: int) -> int:
        """Bytes of the tables, and of the values picked from them for one layer's rows."""
        return 5 * capacity * spec.dim * 4

    def moved(self, keys: Floats, old: Positions, new: Positions) -> Floats:  # (H, n, h) -> (H, n, h)
        """Keys at `old` positions as they would be at `new` ones; dimensions that are not rotated stay."""
        return self.turned(keys, *self.between(old, new))

    def between(self, old: Positions, new: Positions) -> tuple[Floats, Floats]:  # (..., n, r/2) each
        cos_old, sin_old, cos_new, sin_new = self._cos[old], self._sin[old], self._cos[new], self._sin[new]
        cos = (cos_new * cos_old + sin_new * sin_old) * self._scale
        return cos, (sin_new * cos_old - cos_new * sin_old) * self._scale

    def turned(self, keys: Floats, cos: Floats, sin: Floats) -> Floats:  # (H, n, h) -> (H, n, h)
        """Keys turned by angles that `between` gave."""
        half, out = self._half, keys.copy()
        # Pairs are of both halves, or neighbours.
        first, second = slice(half), slice(half, 2 * half)
        if self._interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        a, b = keys[..., first], keys[..., second]
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
        return out


class LayerRotations:
    """The rotation of each layer of a decoder, for keys that were rotated by it."""

    def __init__(self, spec: DecoderSpec, capacity: int) -> None:
        self._spec = spec
        self._rotations = [Rotation(rope, capacity) for rope in spec.ropes]

    @staticmethod
    def planned_bytes(spec: DecoderSpec, capacity: int) -> int:
        return sum(Rotation.planned_bytes(rope, capacity) for rope in spec.ropes)

    def moved(self, layer: int, keys: Floats, old: Positions, new: Positions) -> Floats:  # (H, n, h) -> (H, n, h)
        index = self._spec.rope_index(layer)
        return keys if index < 0 else self._rotations[index].moved(keys, old, new)

    def mover(self, old: Positions, new: Positions) -> Callable[[int, Floats], Floats]:
        """`moved` for one layer after the other, whose angles are computed once."""
        angles = [rotation.between(old, new) for rotation in self._rotations]

        def moved(layer: int, keys: Floats) -> Floats:  # (H, n, h) -> (H, n, h)
            index = self._spec.rope_index(layer)
            return keys if index < 0 else self._rotations[index].turned(keys, *angles[index])

        return moved


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


def weigh_rows(cache: KVCache, counts: Mapping[int, Floats]) -> None:  # L of (H, n)
    """Gives rows that stand for several tokens as much attention as so many rows would get, where the cache can."""
    if isinstance(cache, PagedCache) and cache.weighed:
        for layer, each in counts.items():
            cache.weigh(layer, np.log(each))


def weights_bytes(spec: DecoderSpec, capacity: int) -> int:
    """Bytes that the weights of rows take in the pages of a cache of so many tokens, with what pages are rounded by."""
    weights = PAGE * np.dtype(np.float32).itemsize * spec.num_layers * spec.num_kv_heads
    return pages_for(capacity) * (weights + PAGE_UNIT)
