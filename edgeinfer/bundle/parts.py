"""The parts of decoders: rotations, mixtures of experts, recurrences, and parts that few families have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import KVLayer, StateLayer, require_described
from edgeinfer.bundle.geometry import require_described as _require
from edgeinfer.core.records import dataclass


@dataclass(frozen=True)
class HeadsSpec:
    """The heads of the layers without a window, where they differ from the other layers' (Gemma 4)."""

    num_kv_heads: int  # of keys and values; there are as many query heads as in other layers
    head_dim: int  # channels of one
    keys_are_values: bool = False  # values are the keys before their norm and rotation, so that one product makes both

    def __post_init__(self) -> None:
        _require(self.num_kv_heads > 0 and self.head_dim > 0, "the heads of full layers must be positive")


@dataclass(frozen=True)
class LayerHeads:
    heads: int
    kv_heads: int
    size: int  # channels of one
    keys_are_values: bool  # see HeadsSpec
    source: int  # the layer whose keys and values are read; where it is an earlier one, the layer only makes queries
    owns: bool  # whether the source is the layer itself

    @property
    def q_size(self) -> int:
        return self.heads * self.size

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.size

    @property
    def products(self) -> tuple[int, ...]:
        """Rows of the first product that make queries, keys and values, if it makes them."""
        if not self.owns:
            return (self.q_size,)
        return (self.q_size, self.kv_size) if self.keys_are_values else (self.q_size, self.kv_size, self.kv_size)

    @property
    def kept(self) -> KVLayer:
        return KVLayer(self.kv_heads, self.size, self.size) if self.owns else KVLayer(0, 0, 0)


def check_heads(heads: Sequence[LayerHeads]) -> None:
    """Refuses layers that read keys and values of a layer without them."""
    _require(all(each.heads % each.kv_heads == 0 for each in heads), "num_heads must be a multiple of num_kv_heads")
    earlier = all(0 <= each.source <= layer for layer, each in enumerate(heads))
    _require(earlier, "kv_sources must be layers that come before their readers")
    alike = all(heads[each.source].owns and each.kv_size == heads[each.source].kv_size for each in heads)
    _require(alike, "kv_sources must have caches of their own, of the heads of their readers")


def with_sources(kv_sources: Sequence[int], layer_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:  # (2 L,) -> (2 L,)
    """A layer mask that also runs the attention of every layer whose keys and values are read."""
    whole = layer_mask.copy()
    whole[[2 * source for layer, source in enumerate(kv_sources) if layer_mask[2 * layer]]] = True
    return whole


@dataclass(frozen=True)
class PerLayerSpec:
    """Per-layer embeddings: a small vector for every layer and token, used after the layer's MLP (Gemma 3n, 4). A
    layer's vector is the sum of a row of a table, by the token, and of a product with the token's embedding, normed.
    After its MLP, the layer adds norm(out(act(gate(x)) * vector)) to the hidden states x."""

    size: int  # channels of a vector
    vocab_size: int  # tokens of the table

    def __post_init__(self) -> None:
        _require(self.size > 0 and self.vocab_size > 0, "per-layer embeddings need a size and a vocabulary")


@dataclass(frozen=True)
class StreamsSpec:
    """Hidden states in several streams: a layer computes with the first and predicts the others (AltUp).

    A router maps the first stream's hidden states to a number from -1 to 1 for each stream. First, the layer predicts
    each stream as itself plus a weighted sum of all; the weights are a product of these numbers. Then the change that
    attention and MLP make to the first stream is added to every stream, times one plus another product of the router's
    numbers for the changed stream. A per-layer embedding is added to all streams but the first. Embeddings enter the
    other streams by a matrix each, and the head reads the mean of all streams after a matrix each; both keep the
    magnitude of the first.

    The input of a layer's attention also goes through up(down(x)) of width `laurel_rank` and a norm; the result is
    added to the hidden states after attention, and the sum divided by the root of two.
    """

    count: int
    laurel_rank: int
    scaled: bool = True  # the first stream is multiplied by a vector before it meets the per-layer embedding

    def __post_init__(self) -> None:
        _require(2 <= self.count <= 64, "there must be 2 to 64 streams")
        _require(self.laurel_rank > 0, "laurel_rank must be positive")


@dataclass(frozen=True)
class LatentSpec:
    """Keys and values made from one small vector per token (multi-head latent attention, DeepSeek-V2).

    The cache holds that vector after its norm, and one rotated key for all heads. A head's score is the product of the
    rotated parts plus the product of `attn.k_b` times the rest of the query with the vector. Its result is `attn.v_b`
    times the weighted sum of vectors.
    """

    query_rank: int  # width of the queries' own small vector; 0 where they are made from the hidden state
    rank: int  # width of the vector
    # `plain_size`, `rotary_size`: channels of a head's query and key without and with rotation.
    plain_size: int
    rotary_size: int
    value_size: int
    norm_eps: float = 1e-6  # of the norms of both small vectors

    def __post_init__(self) -> None:
        _require(self.query_rank >= 0, "query_rank must be 0 or positive")
        for name in ("rank", "plain_size", "rotary_size", "value_size"):
            _require(getattr(self, name) > 0, f"{name} must be positive")
        _require(0 < self.norm_eps < 1, "norm_eps must be in (0, 1)")

    @property
    def met_size(self) -> int:
        """Channels of the vector that is kept of a token."""
        return self.rank + self.rotary_size


@dataclass(frozen=True)
class DenseSpec:
    """A product behind an encoder's pooling: act(W x + b), normed where it says so."""

    size: int
    activation: Literal["", "tanh", "gelu", "silu"] = ""
    bias: bool = True
    norm: bool = False

    def __post_init__(self) -> None:
        _require(self.size > 0, "a product behind the pooling needs a size")


@dataclass(frozen=True)
class EncoderSpec:
    """What makes layers an encoder: every token attends to all of its text, or to the window around it, and nothing is
    kept. A text's vector, pooled of the last hidden states, goes through the products of `dense`."""

    positions: int = 0  # rows of a learned table that is added to the embeddings; 0 where there is none
    first_position: int = 0  # row of a text's first token
    token_types: int = 0  # rows of another, by the part of the text: 0, and 1 for the second of a pair
    embed_norm: bool = False  # the sum of all embeddings is normed
    sums_normed: bool = False  # norms are of the sums with the residual (BERT); the decoder's post_norm says where
    dense: tuple[DenseSpec, ...] = ()
    scores: bool = False  # the last product gives scores of a text or a pair (a reranker), not a vector

    def __post_init__(self) -> None:
        _require(
            min(self.positions, self.first_position, self.token_types) >= 0,
            "tables of an encoder must be 0 or positive",
        )
        _require(bool(self.dense) or not self.scores, "scores come from a product")


RopeType = Literal["default", "linear", "dynamic", "llama3", "longrope", "yarn", "proportional"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, in Hugging Face's words (`rope_scaling` / `rope_parameters`)."""

    type: RopeType
    theta: float
    dim: int  # rotated dimensions of a head, even; the rest pass through
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    # `short_factors`, `long_factors`: LongRoPE's divisors, `dim / 2` each.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0  # multiplies sine and cosine; 1 for all types but longrope and yarn
    # `beta_fast`, `beta_slow`, `truncate`: YaRN's borders in rotations, and whether they are rounded to whole pairs.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    interleaved: bool = False  # neighbouring channels are a pair, instead of one of each half
    # Queries at position p are multiplied by 1 + query_beta * log(1 + p // original_max_positions) (Llama 4, Ministral
    # 3); 0 leaves them as they are.
    query_beta: float = 0.0
    turned: int = 0  # pairs that a "proportional" rotation turns; the others stay (LFM3, Gemma 4)

    def __post_init__(self) -> None:
        _require(self.type in get_args(RopeType), f"rope type {self.type!r} is unknown")
        _require(self.theta > 0 and self.factor > 0, "rope theta and factor must be positive")
        _require(self.dim >= 2 and self.dim % 2 == 0, f"rope dim {self.dim} must be even and positive")
        if self.type in ("dynamic", "llama3", "longrope", "yarn") or self.query_beta:
            _require(self.original_max_positions > 0, f"rope type {self.type} needs original_max_positions")
        proportional = self.type == "proportional"
        _require(0 < self.turned <= self.dim // 2 if proportional else not self.turned, "rope pairs must be of its dim")
        if self.type == "llama3":
            ordered = self.high_freq_factor > self.low_freq_factor > 0
            _require(ordered, "rope high_freq_factor must exceed low_freq_factor")
        if self.type == "yarn":
            _require(self.beta_fast > self.beta_slow > 0, "rope beta_fast must exceed beta_slow")
            _require(self.theta > 1, "yarn needs a rope theta above 1")
        if self.type == "longrope":
            sizes = {len(self.short_factors), len(self.long_factors)}
            _require(sizes == {self.dim // 2}, "longrope needs dim/2 short and long factors")
            _require(min(self.short_factors + self.long_factors) > 0, "longrope factors must be positive")


Router = Literal["softmax", "relu", "sigmoid", "sparsemixer"]


@dataclass(frozen=True)
class MoESpec:
    """The mixture of experts that replaces a layer's MLP.

    A token's scores are the router's product with its normed hidden state, plus a bias where there is one. The router
    says how experts are chosen and weighted:

    - "softmax", "sigmoid": the scores become shares, by a softmax over all experts or by a sigmoid of each. The `top_k`
      experts with the highest share (plus `choice_bias`) are used and weighted by their shares, which are divided by
      their sum where `renormalize`, times `scale`.
    - "relu" (BlockFFN): every expert with a positive score, weighted by the RMS norm of the rectified scores; `top_k`
      is the number of experts.
    - "sparsemixer" (Phi-3.5-MoE): by falling score, each weighted by its share of a softmax over the experts that are
      not chosen before it and whose score is at most 2 `jitter` lower, relative to the larger magnitude of both.
    """

    experts: int
    top_k: int  # the most a token uses
    expert_size: int  # inner width of one
    shared_size: int = 0  # inner width of the expert that every token uses; 0 where there is none
    shared_gate: bool = False  # its result is multiplied by the logistic function of a product of its own (Qwen2-MoE)
    router: Router = "softmax"
    renormalize: bool = True
    gated: bool = True  # experts, the shared one too, are down(act(gate(x)) * up(x)); otherwise down(act(up(x)))
    dense_layers: tuple[int, ...] = ()  # layers that have an ordinary MLP of `intermediate_size`, ascending
    router_bias: bool = False  # is added to the scores (gpt-oss)
    choice_bias: bool = False  # is added to the shares when experts are chosen, and not to their weights (DeepSeek-V3)
    expert_bias: bool = False  # the experts' matrices have biases (gpt-oss)
    # `groups`, `group_top_k`: experts are chosen among the best groups alone (DeepSeek); 1 group is all of them. A
    # group's rank is its best share, or with a choice bias the sum of its two best.
    groups: int = 1
    group_top_k: int = 1
    scale: float = 1.0
    jitter: float = 0.0  # of a "sparsemixer"; 0 for other routers
    # The layer has its ordinary MLP as well. Router, experts and MLP each read the hidden states through a norm of
    # their own; the experts' results are multiplied by a number of each, and the layer's MLP gives the sum of the
    # normed results of experts and MLP (Gemma 4).
    with_mlp: bool = False

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "expert_size"):
            _require(getattr(self, name) > 0, f"{name} must be positive")
        _require(self.experts <= 4096, f"{self.experts} experts are impossible")
        _require(self.top_k <= self.experts, f"top_k {self.top_k} exceeds {self.experts} experts")
        _require(self.shared_size >= 0, "shared_size must be 0 or positive")
        _require(self.shared_size > 0 or not self.shared_gate, "a shared gate needs a shared expert")
        _require(self.router in get_args(Router), f"router {self.router!r} is unknown")
        every = self.router != "relu" or self.top_k == self.experts
        _require(every, "a relu router chooses among all experts")
        ascending = self.dense_layers == tuple(sorted(set(self.dense_layers)))
        _require(ascending and min(self.dense_layers, default=0) >= 0, "dense_layers must ascend")
        _require(1 <= self.group_top_k <= self.groups, "group_top_k must be from 1 to groups")
        _require(self.experts % self.groups == 0, "groups must divide the experts")
        enough = self.top_k <= self.experts // self.groups * self.group_top_k
        _require(enough, "the groups chosen have fewer experts than top_k")
        _require(self.scale > 0, "the scale of the experts must be positive")
        mixes = self.router == "sparsemixer"
        _require(self.jitter > 0 if mixes else not self.jitter, "jitter is of a sparsemixer router, and positive")
        plain = self.groups == 1 and not self.choice_bias and not self.renormalize
        _require(not mixes or plain, "a sparsemixer has weights of its own, and chooses by scores alone")

        _require(not self.with_mlp or (self.gated and not self.shared_size), "experts next to an MLP share none")

    @property
    def by_shares(self) -> bool:
        """Whether weights are shares, made before the experts are chosen and not chosen by."""
        return self.router == "sigmoid" or self.choice_bias or (self.groups > 1 and not self.renormalize)

    @property
    def draft_count(self) -> int:
        """Experts of a token in a cheap pass, where an operator cannot have any number of them."""
        return max(1, self.top_k // 2)


# How a layer mixes tokens; with two, the results of both for the same normed hidden states are added.
Mixer = Literal["attention", "conv", "delta", "mamba2", "attention+mamba2", "none"]


@dataclass(frozen=True)
class ConvSpec:
    """A short convolution between two gates (LFM2): out(C * conv(B * x)) of B, C and x made from the hidden state. Each
    channel has its own weights over the last tokens. The input of the convolution, B * x, is kept for every token like
    keys and values."""

    width: int  # tokens that it reaches over, the latest included
    bias: bool = False  # of both products and of the convolution

    def __post_init__(self) -> None:
        require_described(1 <= self.width <= 64, "the width of a convolution must be from 1 to 64")


@dataclass(frozen=True)
class DeltaSpec:
    """The gated delta rule (Qwen3-Next, Qwen3.5): each head has a matrix that every token decays and corrects. Queries,
    keys and values are made from the hidden state and go through a convolution over the last tokens and silu. The
    results of the heads are normed and multiplied by silu of a gate."""

    # `key_heads`, `value_heads`: each head of queries and keys serves equally many heads of values.
    key_heads: int
    value_heads: int
    # `key_size`, `value_size`: channels of one.
    key_size: int
    value_size: int
    width: int  # tokens that the convolution reaches over, the latest included

    def __post_init__(self) -> None:
        sizes = (self.key_heads, self.value_heads, self.key_size, self.value_size)
        require_described(all(0 < size <= 4096 for size in sizes), "the heads of a delta rule must be from 1 to 4096")
        require_described(self.value_heads % self.key_heads == 0, "value_heads must be a multiple of key_heads")
        require_described(1 <= self.width <= 16, "the width of a convolution must be from 1 to 16")

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Channels of all values, and of the gate."""
        return self.value_heads * self.value_size

    @property
    def state(self) -> StateLayer:
        sizes = (self.value_heads, self.key_heads, self.key_size, self.value_size)
        return StateLayer(*sizes, channels=2 * self.keys + self.values, width=self.width)


@dataclass(frozen=True)
class Mamba2Spec:
    """A matrix per head as state, which every token scales down and adds to (Mamba-2, "SSD").

    One product of the hidden state gives a gate z, the channels x, B and C, and a time step for each head. x, B and C
    pass a convolution over the last tokens and SiLU. With dt = softplus(time step + bias), clipped, a head's state S
    becomes exp(-exp(a_log) dt) S + dt x B^T and gives S C + d x. The heads' results are multiplied by SiLU(z) and
    normed.
    """

    # `heads`, `head_size`: of x and z; their product is the width of the last matrix's input.
    heads: int
    head_size: int
    groups: int  # of heads, which share B and C, and of channels, which share a norm
    state_size: int  # channels of B and of C
    width: int = 4  # tokens that the convolution reaches over, the latest included
    bias: bool = False  # of both products
    conv_bias: bool = True  # of the convolution
    normed: bool = True  # there is a norm; otherwise the gate is all
    norm_first: bool = False  # the norm comes before the gate
    # `least_step`, `most_step`: limits of dt; 0 for the latter sets none.
    least_step: float = 0.0
    most_step: float = 0.0

    def __post_init__(self) -> None:
        for name in ("heads", "head_size", "groups", "state_size"):
            require_described(0 < getattr(self, name) <= 1 << 16, f"{name} of a recurrence must be from 1 to 65536")
        require_described(1 <= self.width <= 64, "the width of a convolution must be from 1 to 64")
        require_described(self.heads % self.groups == 0, "heads of a recurrence must be a multiple of its groups")
        require_described(self.normed or not self.norm_first, "a norm before the gate needs a norm")
        clipped = self.least_step <= self.most_step if self.most_step else self.least_step == 0
        require_described(self.least_step >= 0 and clipped, "the least time step must not exceed the largest")

    @property
    def inner_size(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_size

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.groups * self.state_size

    @property
    def read_size(self) -> int:
        """Width of the first product: z, x, B, C and time steps."""
        return self.inner_size + self.conv_size + self.heads

    @property
    def state(self) -> StateLayer:
        sizes = (self.heads, self.groups, self.state_size, self.head_size)
        return StateLayer(*sizes, channels=self.conv_size, width=self.width)


def parts_of(mixer: Mixer) -> tuple[Mixer, ...]:
    """The attention and recurrences of a mixer."""
    both: tuple[Mixer, ...] = ("attention", "mamba2")
    return both if mixer == "attention+mamba2" else () if mixer == "none" else (mixer,)


def check_mixers(
    mixers: tuple[Mixer, ...], layers: int, sizes: Mapping[str, object | None], no_mlp: tuple[int, ...]
) -> None:
    """Checks the mixers of all layers; the sizes of a recurrence are None where no layer has it."""
    require_described(len(mixers) in (0, layers), "mixers must name every layer or none")
    require_described(all(mixer in get_args(Mixer) for mixer in mixers), "mixers must be known")
    require_described(not mixers or set(mixers) != {"attention"}, "mixers are for layers without attention")
    for kind, described in sizes.items():
        there = any(kind in parts_of(mixer) for mixer in mixers)
        require_described(there == (described is not None), f"layers of {kind} need its sizes, and those such layers")
    ascending = no_mlp == tuple(sorted(set(no_mlp))) and all(layer in range(len(mixers)) for layer in no_mlp)
    require_described(ascending, "no_mlp must ascend, next to mixers")
    require_described(all(mixers[layer] != "none" for layer in no_mlp), "a layer must have a mixer or an MLP")
