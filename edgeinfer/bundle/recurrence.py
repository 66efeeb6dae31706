"""The recurrences that stand in for attention in layers of hybrid decoders, each described by its sizes."""

from __future__ import annotations

from typing import Literal

from edgeinfer.bundle.geometry import StateLayer, require_described
from edgeinfer.records import dataclass

__all__ = ["ConvSpec", "DeltaSpec", "Mixer"]

# What mixes the tokens of a layer.
Mixer = Literal["attention", "conv", "delta"]


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
