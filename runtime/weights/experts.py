"""Experts of a mixture: the bytes that passes need, which of them are in memory, which the next layers will choose."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.parts import MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.weights.weight_pages import WeightPages

# What the system may map around an expert that is touched: of pieces of 64 KB in which it lies, those that begin before
# it and end after it.
AROUND_BYTES = 2 * (64 - 4) * 1024


# MoESD (arXiv:2505.19645): tokens that choose K of E experts independently need N(t) = E (1 - (1 - K/E)^t) of them in a
# pass over t tokens. Real texts need fewer, as neighbours choose alike.
def expected_experts(experts: int, top_k: float, tokens: int) -> float:
    """Different experts of a layer that so many tokens need, each choosing `top_k` of them at random."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


@dataclass(frozen=True)
class ExpertBytes:
    """Memory of a model's quantized experts."""

    moe: MoESpec | None  # None where there are none; the others are 0 then
    total: int  # bytes of all of them, on pages of their own
    least: int  # bytes that must fit into memory for the largest layer to run, whatever its tokens choose

    @classmethod
    def of(cls, decoder: DecoderSpec | None, tensors: Iterable[TensorEntry]) -> ExpertBytes:
        layers: dict[int, int] = {}
        for tensor in tensors:
            expert = find_expert(tensor.name)
            if expert is not None and tensor.bits < 32:
                pages = sum(-(-blob.nbytes // mmap.PAGESIZE) + 1 for blob in tensor.blobs)
                layers[expert.layer] = layers.get(expert.layer, 0) + pages * mmap.PAGESIZE
        if decoder is None or decoder.moe is None or not layers:
            return cls(None, 0, 0)
        around = decoder.moe.experts * AROUND_BYTES
        return cls(decoder.moe, sum(layers.values()), max(layers.values()) + around)

    def needed(self, tokens: int) -> float:
        """Bytes of experts that a pass over so many tokens is expected to read."""
        if self.moe is None:
            return 0.0
        return self.total * expected_experts(self.moe.experts, self.moe.top_k, tokens) / self.moe.experts


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
    """Keeps a model's experts in memory within `limit` bytes, and chooses which one goes for another. Least frequently
    used with ageing: every use adds to an expert's worth, and all worth halves every `_HALF_LIFE` tokens. The pages of
    experts that go are dropped; they come back when a router chooses them again."""

    def __init__(self, parts: Mapping[tuple[int, int], Pages], sizes: Ints, limit: int) -> None:
        self._parts = parts
        self._sizes = sizes
        self.limit = limit
        self.cached: NDArray[np.bool_] = np.zeros(sizes.shape, np.bool_)  # experts whose pages may be in memory. (L, E)
        self.cached_bytes = 0
        self.expert_bytes = int(sizes.sum())
        order = list(parts)
        self._neighbours = {
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
        """The most bytes that a layer's experts take while it runs with up to `most` different ones."""
        largest = np.sort(self._sizes[layer])[::-1][:most]
        return int(largest.sum()) + AROUND_BYTES * int(np.count_nonzero(largest))

    def make_room(self, layers: range, most: int) -> None:
        """Drops the experts of least worth until these layers can run, using up to `most` different experts each. Of
        equals those go first whose layer comes last to run again."""
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
            # The system maps pages around the touched ones.
            for neighbour in self._neighbours[layer, expert]:
                if not self.cached[neighbour]:
                    self._parts[neighbour].release()

    def fetch(self, layer: int, experts: Ints | None = None) -> None:  # (n,)
        """Ask the system to read a layer's experts, or some of them, that are not in memory; returns at once."""
        for expert in (np.arange(self.cached.shape[1]) if experts is None else experts).tolist():
            if not self.cached[layer, expert] and (layer, expert) in self._parts:
                self._parts[layer, expert].prefetch()

    def forget(self) -> None:
        self.cached[...] = False
        self.cached_bytes = 0

    def bias(self) -> Floats:  # (L, E)
        """A bias that keeps routers from choosing experts that are not in memory, in layers that have any in memory."""
        some = self.cached.any(axis=1, keepdims=True)
        bias: Floats = np.where(some & ~self.cached, np.float32(-1e9), np.float32(0))
        return bias


_NORM, _ROUTER = "layers.{}.mlp_norm", "layers.{}.mlp.router"


class RouterGuess:
    """Guesses the experts of the next layers: their own routers (D, E) are applied to earlier hidden states.

    As "Fast Inference of Mixture-of-Experts Language Models with Offloading" (arXiv:2312.17238) does: hidden states
    change little from layer to layer. A guess decides what is read early, never what is computed, so biases, groups and
    other rules of routers are left out of it.
    """

    def __init__(self, routers: Mapping[int, Floats], top_k: int) -> None:
        self._routers = routers
        self._top_k = top_k

    @classmethod
    def of(cls, pages: WeightPages, tensors: Iterable[TensorEntry], top_k: int) -> Self:
        """Reads them from the file; layers whose router or norm is stored in another way have none."""
        known = {tensor.name: tensor for tensor in tensors if tensor.bits == 32}
        routers = {}
        for layer in range(len(known)):
            norm, router = known.get(_NORM.format(layer)), known.get(_ROUTER.format(layer))
            if norm is not None and router is not None and router.shape[1:] == norm.shape:
                weights = pages.floats(router.name).reshape(router.data.shape)
                weights = weights if router.transposed else weights.T
                # The norm's divisor is left out: it changes no order.
                routers[layer] = np.ascontiguousarray(pages.floats(norm.name)[:, None] * weights)
        return cls(routers, top_k)

    def experts(self, layer: int, hidden: Floats) -> Ints:  # (S, D) -> (n,)
        """The experts that the tokens will probably choose in a layer; none if its router is unknown."""
        router = self._routers.get(layer)
        if router is None:
            return np.zeros(0, np.int64)
        best = np.argpartition(hidden @ router, -self._top_k, axis=1)[:, -self._top_k :]  # (S, k)
        return np.unique(best)
