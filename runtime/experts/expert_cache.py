"""Which experts' weights are in memory: a budget of bytes, and who goes when another comes.

Least frequently used with ageing: every use adds to an expert's worth, and all worth halves every `_HALF_LIFE` tokens.
The pages of experts that go are dropped; they come back when a router chooses them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.weights.expert_bytes import AROUND_BYTES

# Tokens after which a use counts half.
_HALF_LIFE = 64.0
# Worth is kept as a sum of growing weights instead of shrinking every sum; above this it is brought down again.
_LARGEST = 1e100


class Pages(Protocol):
    """Weights in a file, as `weight_pages.WeightPart` has them."""

    def release(self) -> None:
        """Drops the pages that are in memory."""

    def prefetch(self) -> None:
        """Has the system read them."""


class ExpertCache:
    """The experts of one model.

    Args:
        parts: weights of each expert by layer and expert, in the order of the file.
        sizes: their bytes; 0 in layers without experts. (L, E)
        limit: bytes of experts that may be in memory at once, what the system maps around them included.

    Attributes:
        cached: those whose pages may be in memory. (L, E)
        cached_bytes: of these.
        limit: as given.
    """

    def __init__(self, parts: Mapping[tuple[int, int], Pages], sizes: Ints, limit: int) -> None:
        self._parts = parts
        self._sizes = sizes
        self.limit = limit
        self.cached: NDArray[np.bool_] = np.zeros(sizes.shape, np.bool_)
        self.cached_bytes = 0
        self.expert_bytes = int(sizes.sum())
        order = list(parts)
        self._beside = {
            each: [order[place + step] for step in (-1, 1) if 0 <= place + step < len(order)]
            for place, each in enumerate(order)
        }
        self._worth = np.zeros(sizes.shape)  # (L, E)
        self._weight = 1.0
        self._hits = self._uses = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of the experts that passes used, each once a pass, which were in memory; None before the first."""
        return self._hits / self._uses if self._uses else None

    def need(self, layer: int, most: int) -> int:
        """The most bytes that a layer's experts take while it runs where up to `most` of them are used, those that are
        in memory left out unless it may be all of them."""
        largest = np.sort(self._sizes[layer])[::-1][:most]
        return int(largest.sum()) + AROUND_BYTES * int(np.count_nonzero(largest))

    def make_room(self, layers: range, most: int) -> None:
        """Drops the experts of least worth until these layers can run, using up to `most` different experts each.

        Of equals those go first whose layer comes last to run again.
        """
        inside = np.zeros(len(self.cached), np.bool_)
        inside[layers.start : layers.stop] = True
        # A layer that may use all its experts takes no more for having some of them already.
        whole = inside & (most >= self.cached.shape[1])
        goes = self.cached & ~whole[:, None]
        cached = int(self._sizes[goes].sum())
        over = cached + sum(self.need(layer, most) for layer in layers) - self.limit
        if over <= 0:
            return
        places = np.argwhere(goes)  # (n, 2)
        distance = (places[:, 0] - layers.start) % len(self.cached)
        freed = 0
        for layer, expert in places[np.lexsort((-distance, self._worth[goes]))].tolist():
            if freed >= over:
                break
            freed += int(self._sizes[layer, expert])
            self.cached[layer, expert] = False
            self._parts[layer, expert].release()
        self.cached_bytes -= freed

    def used(self, ids: Ints) -> None:  # (L, S, k)
        """Tokens used these experts, which are in memory now; -1 are none."""
        layers, experts = self.cached.shape
        places = ids + experts * np.arange(layers)[:, None, None]
        counts = np.bincount(places[ids >= 0], minlength=layers * experts).reshape(layers, experts)
        self._weight *= 2 ** (ids.shape[1] / _HALF_LIFE)
        self._worth += self._weight * counts
        if self._weight > _LARGEST:
            self._worth /= self._weight
            self._weight = 1.0
        touched = counts > 0
        came = touched & ~self.cached
        self._uses += int(touched.sum())
        self._hits += int(touched.sum() - came.sum())
        self.cached |= came
        self.cached_bytes += int(self._sizes[came].sum())
        for layer, expert in np.argwhere(came).tolist():
            # The system maps pages around those that are touched.
            for neighbour in self._beside[layer, expert]:
                if not self.cached[neighbour]:
                    self._parts[neighbour].release()

    def fetch(self, layer: int, experts: Ints | None = None) -> None:  # (n,)
        """Has the system read those of a layer's experts that are not in memory, or of these; returns at once."""
        for expert in (np.arange(self.cached.shape[1]) if experts is None else experts).tolist():
            if not self.cached[layer, expert] and (layer, expert) in self._parts:
                self._parts[layer, expert].prefetch()

    def forget(self) -> None:
        """All pages were dropped."""
        self.cached[...] = False
        self.cached_bytes = 0

    def bias(self) -> Floats:  # (L, E)
        """What keeps routers from choosing experts that are not in memory, in layers that have any there."""
        some = self.cached.any(axis=1, keepdims=True)
        bias: Floats = np.where(some & ~self.cached, np.float32(-1e9), np.float32(0))
        return bias
