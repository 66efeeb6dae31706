"""The recurrences that stand in for attention in layers of hybrid decoders, each described by its sizes."""

from __future__ import annotations

from typing import Literal

from edgeinfer.bundle.geometry import require_described
from edgeinfer.records import dataclass

__all__ = ["ConvSpec", "Mixer"]

# What mixes the tokens of a layer.
Mixer = Literal["attention", "conv"]


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
