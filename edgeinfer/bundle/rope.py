"""The rotation of queries and keys that a decoder has, with the constants of its kind."""

from __future__ import annotations

from typing import Literal, get_args

from edgeinfer.bundle.geometry import require_described as _require
from edgeinfer.records import dataclass

RopeType = Literal["default", "linear", "dynamic", "llama3", "longrope", "yarn", "proportional"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, in Hugging Face's words (`rope_scaling` / `rope_parameters`).

    Attributes:
        dim: rotated dimensions of a head, even; the rest pass through.
        factor, low_freq_factor, high_freq_factor, original_max_positions: scaling constants of the type.
        short_factors, long_factors: LongRoPE's divisors, `dim / 2` each.
        attention_factor: multiplies sine and cosine; 1 for all types but longrope and yarn.
        beta_fast, beta_slow, truncate: YaRN's borders in rotations, and whether they are rounded to whole pairs.
        interleaved: neighbouring channels are a pair, instead of one of each half.
        query_beta: queries at position p are multiplied by 1 + query_beta * log(1 + p // original_max_positions)
            (Llama 4, Ministral 3); 0 leaves them as they are.
        turned: of "proportional": pairs that turn, the others stand still (LFM3, Gemma 4).
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
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    interleaved: bool = False
    query_beta: float = 0.0
    turned: int = 0

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
