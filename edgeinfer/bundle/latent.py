"""The sizes of multi-head latent attention, whose cache holds one small vector for the keys and values of all heads."""

from __future__ import annotations

from edgeinfer.bundle.geometry import require_described
from edgeinfer.records import dataclass

__all__ = ["LatentSpec"]


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
        require_described(self.query_rank >= 0, "query_rank must be 0 or positive")
        for name in ("rank", "plain_size", "rotary_size", "value_size"):
            require_described(getattr(self, name) > 0, f"{name} must be positive")
        require_described(0 < self.norm_eps < 1, "norm_eps must be in (0, 1)")

    @property
    def met_size(self) -> int:
        """Channels that a query meets of a token."""
        return self.rank + self.rotary_size
