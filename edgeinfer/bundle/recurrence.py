"""The recurrences that stand in for attention in layers of hybrid decoders, each described by its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from edgeinfer.bundle.geometry import StateLayer, require_described
from edgeinfer.records import dataclass

# What mixes the tokens of a layer; the one with two adds up what both make of the same normed hidden states.
Mixer = Literal["attention", "conv", "delta", "mamba2", "attention+mamba2", "none"]


@dataclass(frozen=True)
class ConvSpec:
    """A short convolution between two gates (LFM2): out(C * conv(B * x)) of B, C and x made of the hidden state.

    Each channel has its own weights over the last tokens. What the convolution reads, B * x, is kept of every token
    like keys and values are.

    Attributes:
        width: tokens that it reaches over, the latest included.
        bias: of both products and of the convolution.
    """

    width: int
    bias: bool = False

    def __post_init__(self) -> None:
        require_described(1 <= self.width <= 64, "the width of a convolution must be from 1 to 64")


@dataclass(frozen=True)
class DeltaSpec:
    """The gated delta rule (Qwen3-Next, Qwen3.5), whose heads have a matrix each that a token decays and corrects.

    Queries, keys and values are made of the hidden state and go through a convolution over the last tokens and silu.
    What heads give is normalised and multiplied by silu of a gate.

    Attributes:
        key_heads, value_heads: heads of queries and keys, each of which serves as many of values.
        key_size, value_size: channels of one.
        width: tokens that the convolution reaches over, the latest included.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int

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
        """What a layer keeps."""
        sizes = (self.value_heads, self.key_heads, self.key_size, self.value_size)
        return StateLayer(*sizes, channels=2 * self.keys + self.values, width=self.width)


@dataclass(frozen=True)
class Mamba2Spec:
    """A state of a matrix for each head, scaled down and added to by every token (Mamba-2, "SSD").

    One product of the hidden state gives a gate z, the channels x, B and C, and a time step for each head. x, B and C
    pass a convolution over the last tokens and SiLU. With dt = softplus(time step + bias), clipped, a head's state S
    becomes exp(-exp(a_log) dt) S + dt x B^T and gives S C + d x. What heads give is multiplied by SiLU(z) and normed.

    Attributes:
        heads, head_size: of x and z; together they are as wide as what the last product reads.
        groups: of heads, which share B and C, and of channels, which share a norm.
        state_size: channels of B and of C.
        width: tokens that the convolution reaches over, the latest included.
        bias: of both products.
        conv_bias: of the convolution.
        normed: there is a norm; otherwise the gate is all.
        norm_first: the norm comes before the gate.
        least_step, most_step: what dt is clipped to; 0 for the latter leaves it as it is.
    """

    heads: int
    head_size: int
    groups: int
    state_size: int
    width: int = 4
    bias: bool = False
    conv_bias: bool = True
    normed: bool = True
    norm_first: bool = False
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
        """What a layer keeps: of each head a matrix of channels of B and channels of x."""
        sizes = (self.heads, self.groups, self.state_size, self.head_size)
        return StateLayer(*sizes, channels=self.conv_size, width=self.width)


def parts_of(mixer: Mixer) -> tuple[Mixer, ...]:
    """What a layer has of attention and recurrences."""
    both: tuple[Mixer, ...] = ("attention", "mamba2")
    return both if mixer == "attention+mamba2" else () if mixer == "none" else (mixer,)


def check_mixers(
    mixers: tuple[Mixer, ...], layers: int, sizes: Mapping[str, object | None], no_mlp: tuple[int, ...]
) -> None:
    """Checks what mixes the tokens of each layer.

    Args:
        sizes: of each kind of recurrence; None where no layer has it.
    """
    require_described(len(mixers) in (0, layers), "mixers must name every layer or none")
    require_described(all(mixer in get_args(Mixer) for mixer in mixers), "mixers must be known")
    require_described(not mixers or set(mixers) != {"attention"}, "mixers are for layers without attention")
    for kind, described in sizes.items():
        there = any(kind in parts_of(mixer) for mixer in mixers)
        require_described(there == (described is not None), f"layers of {kind} need its sizes, and those such layers")
    ascending = no_mlp == tuple(sorted(set(no_mlp))) and all(layer in range(len(mixers)) for layer in no_mlp)
    require_described(ascending, "no_mlp must ascend, beside mixers")
    require_described(all(mixers[layer] != "none" for layer in no_mlp), "a layer must have a mixer or an MLP")
