"""Parts that few families have: latent attention, heads that differ by layer, shared caches, per-layer embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import KVLayer
from edgeinfer.bundle.geometry import require_described as _require
from edgeinfer.records import dataclass


@dataclass(frozen=True)
class HeadsSpec:
    """The heads of the layers without a window, where they differ from those of the others (Gemma 4).

    Attributes:
        num_kv_heads: of keys and values; there are as many query heads as in other layers.
        head_dim: channels of one.
        keys_are_values: values are the keys before their norm and rotation, so that one product makes both.
    """

    num_kv_heads: int
    head_dim: int
    keys_are_values: bool = False

    def __post_init__(self) -> None:
        _require(self.num_kv_heads > 0 and self.head_dim > 0, "the heads of full layers must be positive")


@dataclass(frozen=True)
class LayerHeads:
    """The heads of one layer's attention, as a decoder's description gives them.

    Attributes:
        heads, kv_heads: of queries; of keys and values.
        size: channels of one.
        keys_are_values: see HeadsSpec.
        source: the layer whose keys and values are read: its own number, or that of an earlier one, and then the layer
            makes queries alone and writes nothing.
        owns: whether they are its own.
    """

    heads: int
    kv_heads: int
    size: int
    keys_are_values: bool
    source: int
    owns: bool

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.size

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.size

    @property
    def products(self) -> tuple[int, ...]:
        """Rows of the first product that make queries, keys and values, as far as it makes them."""
        if not self.owns:
            return (self.q_size,)
        return (self.q_size, self.kv_size) if self.keys_are_values else (self.q_size, self.kv_size, self.kv_size)

    @property
    def kept(self) -> KVLayer:
        """What the layer keeps of a token."""
        return KVLayer(self.kv_heads, self.size, self.size) if self.owns else KVLayer(0, 0, 0)


def check_heads(heads: Sequence[LayerHeads]) -> None:
    """Raises BundleError unless every layer reads the keys and values of one that can have them."""
    _require(all(each.heads % each.kv_heads == 0 for each in heads), "num_heads must be a multiple of num_kv_heads")
    earlier = all(0 <= each.source <= layer for layer, each in enumerate(heads))
    _require(earlier, "kv_sources must be layers that come before their readers")
    alike = all(heads[each.source].owns and each.kv_size == heads[each.source].kv_size for each in heads)
    _require(alike, "kv_sources must have caches of their own, of the heads of their readers")


def with_sources(kv_sources: Sequence[int], layer_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:  # (2 L,) -> (2 L,)
    """A layer mask with the attention of every layer whose keys and values a layer that runs reads."""
    whole = layer_mask.copy()
    whole[[2 * source for layer, source in enumerate(kv_sources) if layer_mask[2 * layer]]] = True
    return whole


@dataclass(frozen=True)
class PerLayerSpec:
    """Per-layer embeddings: a small vector for every layer and token, which its MLP is followed by (Gemma 3n, 4).

    A layer's vector is the sum of a row of a table, by the token, and of a product with the token's embedding, normed.
    After its MLP, the layer adds norm(out(act(gate(x)) * vector)) to the hidden states x.

    Attributes:
        size: channels of a vector.
        vocab_size: tokens of the table.
    """

    size: int
    vocab_size: int

    def __post_init__(self) -> None:
        _require(self.size > 0 and self.vocab_size > 0, "per-layer embeddings need a size and a vocabulary")


@dataclass(frozen=True)
class StreamsSpec:
    """Hidden states in several streams, of which a layer computes with the first and predicts the others (AltUp).

    A router makes a number for each stream of the first one's hidden states, between -1 and 1. A layer's streams are
    first predicted: each is itself plus a sum of all, weighted by a product of these numbers. What attention and MLP
    then change of the first stream is added to each, times one plus another product of the numbers that the router
    makes of it. A per-layer embedding is added to all streams but the first. Embeddings enter the other streams by a
    matrix for each, and the head reads the mean of all after another, which both keep the magnitude of the first.

    What a layer's attention reads, and up(down(x)) of that, of `laurel_rank`, normed, is added to the hidden states
    behind attention, and their sum divided by the root of two.

    Attributes:
        count: of streams.
        laurel_rank: inner width of the augmented residual.
        scaled: the first stream is multiplied by a vector before it meets the per-layer embedding.
    """

    count: int
    laurel_rank: int
    scaled: bool = True

    def __post_init__(self) -> None:
        _require(2 <= self.count <= 64, "there must be 2 to 64 streams")
        _require(self.laurel_rank > 0, "laurel_rank must be positive")


@dataclass(frozen=True)
class LatentSpec:
    """Keys and values made of one small vector for each token (multi-head latent attention, DeepSeek-V2).

    The cache holds that vector after its norm, and one rotated key for all heads.

    A head's scores are the products of its query with the rotated key, and of what its matrix `attn.k_b` makes of the
    rest of the query with the vector itself; its results are what `attn.v_b` makes of the weighted sum of vectors.

    Attributes:
        query_rank: width of the queries' own small vector; 0 where they are made of the hidden state.
        rank: width of the vector that keys and values are made of.
        plain_size, rotary_size: channels of a head's query and key that are not rotated, and those that are.
        value_size: channels of a head's values.
        norm_eps: of the norms of both small vectors.
    """

    query_rank: int
    rank: int
    plain_size: int
    rotary_size: int
    value_size: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _require(self.query_rank >= 0, "query_rank must be 0 or positive")
        for name in ("rank", "plain_size", "rotary_size", "value_size"):
            _require(getattr(self, name) > 0, f"{name} must be positive")
        _require(0 < self.norm_eps < 1, "norm_eps must be in (0, 1)")

    @property
    def met_size(self) -> int:
        """Channels that a query meets of a token."""
        return self.rank + self.rotary_size
