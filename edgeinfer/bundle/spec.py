"""The decoder a bundle holds, as data: sizes, norms, biases, rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from edgeinfer.bundle.kv_types import FLOAT32, find_kv_type
from edgeinfer.errors import BundleError

__all__ = ["Activation", "DecoderSpec", "Geometry", "MoESpec", "RopeSpec", "RopeType", "Router"]

RopeType = Literal["default", "linear", "llama3", "longrope"]
Activation = Literal["silu"]
Router = Literal["softmax", "relu"]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise BundleError(f"Model description: {what}.", "The bundle is damaged or made by another program.")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, in Hugging Face's words (`rope_scaling` / `rope_parameters`).

    Attributes:
        dim: rotated dimensions of a head, even; the rest pass through.
        factor, low_freq_factor, high_freq_factor, original_max_positions: scaling constants of the type.
        short_factors, long_factors: LongRoPE's divisors, `dim / 2` each.
        attention_factor: multiplies sine and cosine; 1 for all types but longrope.
    """

    type: RopeType
    theta: float
    dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _require(self.type in get_args(RopeType), f"rope type {self.type!r} is unknown")
        _require(self.theta > 0 and self.factor > 0, "rope theta and factor must be positive")
        _require(self.dim >= 2 and self.dim % 2 == 0, f"rope dim {self.dim} must be even and positive")
        if self.type in ("llama3", "longrope"):
            _require(self.original_max_positions > 0, f"rope type {self.type} needs original_max_positions")
        if self.type == "llama3":
            ordered = self.high_freq_factor > self.low_freq_factor > 0
            _require(ordered, "rope high_freq_factor must exceed low_freq_factor")
        if self.type == "longrope":
            sizes = {len(self.short_factors), len(self.long_factors)}
            _require(sizes == {self.dim // 2}, "longrope needs dim/2 short and long factors")
            _require(min(self.short_factors + self.long_factors) > 0, "longrope factors must be positive")


@dataclass(frozen=True)
class Geometry:
    """The sizes a runtime must know to drive any decoder: vocabulary, positions and the shape of its KV cache."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _require(value > 0, f"{name} must be positive")
        # Ten times the deepest models: a runtime that makes something for each layer must come to an end.
        _require(self.num_layers <= 2048, f"num_layers {self.num_layers} is impossible")

    def kv_bytes_per_token(self, kv: str = FLOAT32) -> int:
        """Bytes of keys and values of one token over all layers, cached in a type of edgeinfer.bundle.kv_types.

        Raises:
            UsageError: there is no such type.
        """
        return 2 * self.num_layers * self.num_kv_heads * find_kv_type(kv).row_bytes(self.head_dim)


@dataclass(frozen=True)
class MoESpec:
    """The mixture of experts that stands in for a layer's MLP.

    A token's scores are the router's product with its normed hidden state. "softmax": the `top_k` experts of highest
    score, weighted by the softmax over all scores, divided by the chosen ones' sum where `renormalize` (Mixtral,
    Qwen3-MoE; the same as a softmax over the chosen scores, Granite). "relu": every expert whose score is positive,
    weighted by the RMS norm of the rectified scores (BlockFFN); `top_k` is the number of experts then.

    Attributes:
        experts: of a layer.
        top_k: the most a token uses.
        expert_size: inner width of one.
        shared_size: inner width of the expert that every token uses; 0 where there is none.
        shared_gate: its result is multiplied by the logistic function of a product of its own (Qwen2-MoE).
        gated: experts are down(silu(gate(x)) * up(x)); otherwise down(silu(up(x))).
        dense_layers: layers that have an ordinary MLP of `intermediate_size`, ascending.
    """

    experts: int
    top_k: int
    expert_size: int
    shared_size: int = 0
    shared_gate: bool = False
    router: Router = "softmax"
    renormalize: bool = True
    gated: bool = True
    dense_layers: tuple[int, ...] = ()

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

    @property
    def draft_count(self) -> int:
        """Experts of a token in a cheap pass, where an operator cannot have any number of them."""
        return max(1, self.top_k // 2)


@dataclass(frozen=True)
class DecoderSpec:
    """A pre-norm decoder with grouped-query attention and a gated MLP or a mixture of experts.

    Attributes:
        windows: sliding window of each layer in tokens, 0 for full attention; empty when all are full.
        qk_norm: RMS norm on every query and key head before rotation (Qwen3).
        whole_norm: that norm is over all heads together (OLMoE).
        moe: the experts of every layer that is not among its dense layers; None where all are dense.
        tied: the LM head is the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeSpec
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    whole_norm: bool = False
    tied: bool = False
    windows: tuple[int, ...] = ()
    moe: MoESpec | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_positions"):
            _require(getattr(self, name) > 0, f"{name} must be positive")
        _require(self.num_heads % self.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads")
        _require(self.rope.dim <= self.head_dim, "rope dim exceeds head_dim")
        _require(0 < self.norm_eps < 1, "norm_eps must be in (0, 1)")
        _require(self.activation in get_args(Activation), f"activation {self.activation!r} is unknown")
        _require(len(self.windows) in (0, self.num_layers), "windows must name every layer or none")
        _require(all(w >= 0 for w in self.windows), "windows must be 0 or positive")
        _require(len({w for w in self.windows if w}) <= 1, "all windows must be of one size")
        _require(self.qk_norm or not self.whole_norm, "whole_norm is a kind of qk_norm")
        dense = () if self.moe is None else self.moe.dense_layers
        _require(all(layer < self.num_layers for layer in dense), "dense_layers must be layers")

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def experts_of(self, layer: int) -> MoESpec | None:
        """The mixture of experts of a layer; None where it has an ordinary MLP."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    @property
    def window_size(self) -> int:
        """Sliding window of the layers that have one, in tokens; 0 when none has."""
        return max(self.windows, default=0)

    def window(self, layer: int) -> int:
        """Sliding window of a layer in tokens; 0 is full attention."""
        return self.windows[layer] if self.windows else 0

    @property
    def geometry(self) -> Geometry:
        """The sizes a runtime drives the decoder by."""
        return Geometry(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_positions=self.max_positions,
        )
