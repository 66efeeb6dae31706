"""The sizes that a runtime drives any decoder by, and what each layer keeps of a token."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edgeinfer.bundle.kv_types import FLOAT32, find_kv_type
from edgeinfer.errors import BundleError
from edgeinfer.records import dataclass


def require_described(condition: bool, what: str) -> None:
    """Raises BundleError about a model's description unless the condition holds."""
    if not condition:
        raise BundleError(f"Model description: {what}.", "The bundle is damaged or made by another program.")


def require_few_layers(layers: int) -> None:
    """Refuses more than ten times the layers of the deepest models: what is made for each must come to an end."""
    require_described(layers <= 2048, f"num_layers {layers} is impossible")


@dataclass(frozen=True)
class KVLayer:
    """What a layer keeps of every token.

    Attributes:
        heads: of keys and values; 0 where the layer keeps none, and so are the others then.
        key_size, value_size: channels of one. Without keys, the values are what a recurrence reads of a token: they are
            float32 whatever the type of the cache.
    """

    heads: int
    key_size: int
    value_size: int

    def __post_init__(self) -> None:
        sizes = (self.heads, self.key_size, self.value_size)
        kept = self.heads > 0 and self.value_size > 0 and self.key_size >= 0
        require_described(kept or sizes == (0, 0, 0), "the heads of a layer need values")

    @property
    def recurrent(self) -> bool:
        """Whether it is what a recurrence reads of a token."""
        return self.heads > 0 and self.key_size == 0


@dataclass(frozen=True)
class StateLayer:
    """The state that a recurrent layer keeps of a text; all sizes are 0 where it keeps none.

    Attributes:
        heads: matrices, (key_size, value_size) each.
        key_heads: heads of keys and queries, each of which serves as many matrices.
        channels, width: of the convolution before it: what it reads of a token, and tokens that it reaches over.
    """

    heads: int = 0
    key_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    channels: int = 0
    width: int = 0

    def __post_init__(self) -> None:
        sizes = (self.heads, self.key_heads, self.key_size, self.value_size, self.channels, self.width)
        require_described(min(sizes) > 0 or not any(sizes), "a state has all of its sizes")
        require_described(not self.heads or self.heads % self.key_heads == 0, "a state's key_heads divide its heads")

    @property
    def parameters(self) -> int:
        """Numbers of the state."""
        return self.heads * self.key_size * self.value_size


@dataclass(frozen=True)
class Geometry:
    """The sizes a runtime must know to drive any decoder: vocabulary, positions and the shape of its KV cache.

    Attributes:
        kv_layers: of each layer; empty where all have `num_kv_heads` heads of `head_dim` channels.
        states: of each layer; empty where none keeps one.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    kv_layers: tuple[KVLayer, ...] = ()
    states: tuple[StateLayer, ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require_described(isinstance(value, tuple) or value > 0, f"{name} must be positive")
        require_few_layers(self.num_layers)
        require_described(len(self.kv_layers) in (0, self.num_layers), "kv_layers must name every layer or none")
        require_described(len(self.states) in (0, self.num_layers), "states must name every layer or none")
        require_described(
            not self.states or any(each.heads for each in self.states), "some of the states must be there"
        )
        # One description of one thing: manifests are compared by it.
        require_described(self.kv_layers != self._alike, "kv_layers are for layers that differ")

    @property
    def _alike(self) -> tuple[KVLayer, ...]:
        return (KVLayer(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers

    @property
    def kept(self) -> tuple[KVLayer, ...]:
        """What each layer keeps of a token."""
        return self.kv_layers or self._alike

    def description(self) -> dict[str, Any]:
        """The fields as JSON's types, as manifests hold them; without `kv_layers` and `states` where there are none."""
        described = asdict(self)
        for name in ("kv_layers", "states"):
            if not described[name]:
                del described[name]
        return described

    def kv_bytes_per_token(self, kv: str = FLOAT32) -> int:
        """Bytes of keys and values of one token over all layers, cached in a type of edgeinfer.bundle.kv_types."""
        total, floats, kind = 0, find_kv_type(FLOAT32), find_kv_type(kv)
        for each in self.kept:
            row_bytes = (floats if each.recurrent else kind).row_bytes
            total += each.heads * (row_bytes(each.key_size) + row_bytes(each.value_size))
        return total
