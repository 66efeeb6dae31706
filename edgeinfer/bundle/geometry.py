"""The sizes that a runtime drives any decoder by, what each layer keeps of a token, and the number types of caches.

A paged cache has the types of PAGED_KV, whose rows edgeinfer.runtime.paging describes. The types of other caches depend
on the engine: ONNX Runtime's caches are float32, llama.cpp's also float16, and blocks of 32 channels that begin with
their scale, held as bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.packing import packed_bytes
from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.core.records import dataclass

Floats = NDArray[np.float32]

BLOCK = 32
_SCALE_BYTES = 2
# Bytes of a block by the bits of its numbers.
BLOCK_BYTES = {8: _SCALE_BYTES + BLOCK, 4: _SCALE_BYTES + BLOCK // 2}


def to_blocks(values: Floats, bits: int) -> NDArray[np.uint8]:  # (..., h) -> (..., h / 32 * bytes)
    """Quantizes rows whose width is a multiple of 32 as llama.cpp does."""
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    stored = np.empty((*blocks.shape[:-1], BLOCK_BYTES[bits]), np.uint8)
    if bits == 8:
        scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
        levels = np.rint(blocks * _inverse(scales))
        stored[..., _SCALE_BYTES:] = levels.astype(np.int8).view(np.uint8)
    else:
        furthest = np.abs(blocks).argmax(axis=-1, keepdims=True)
        scales = np.take_along_axis(blocks, furthest, axis=-1) / np.float32(-8)
        levels = np.minimum(np.floor(blocks * _inverse(scales) + np.float32(8.5)), 15).astype(np.uint8)
        stored[..., _SCALE_BYTES:] = levels[..., : BLOCK // 2] | (levels[..., BLOCK // 2 :] << 4)
    stored[..., :_SCALE_BYTES] = scales.astype("<f2").view(np.uint8)
    return stored.reshape(*values.shape[:-1], -1)


def from_blocks(stored: NDArray[Any], bits: int) -> Floats:  # (..., h / 32 * bytes) -> (..., h)
    blocks = stored.reshape(*stored.shape[:-1], -1, BLOCK_BYTES[bits])
    scales = np.ascontiguousarray(blocks[..., :_SCALE_BYTES]).view("<f2").astype(np.float32)
    packed = np.ascontiguousarray(blocks[..., _SCALE_BYTES:])
    if bits == 8:
        levels = packed.view(np.int8).astype(np.float32)
    else:
        levels = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32) - np.float32(8)
    floats: Floats = (levels * scales).reshape(*stored.shape[:-1], -1)
    return floats


def _inverse(scales: Floats) -> Floats:
    """One over each; 0 for blocks of zeros."""
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)


FLOAT32, FLOAT16 = "float32", "float16"


@dataclass(frozen=True)
class KVType:
    name: str
    dtype: str  # name of the type of the stored array
    bits: int  # of a value
    blocks: bool = False  # the stored bytes are llama.cpp's blocks

    def width(self, head_dim: int) -> int:
        """Items of the stored array for one head's channels; whole blocks where there are any."""
        return self.row_bytes(head_dim) if self.blocks else head_dim

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one head's key or value."""
        if self.blocks:
            return -(-head_dim // BLOCK) * BLOCK_BYTES[self.bits]
        return packed_bytes(head_dim, self.bits)


KV: dict[str, KVType] = {
    kind.name: kind for kind in (KVType(FLOAT32, "float32", 32), KVType("int8", "int8", 8), KVType("int4", "uint8", 4))
}
# Types of llama.cpp's caches, for which there are no ONNX graphs.
LLAMA_KV: dict[str, KVType] = {
    kind.name: kind
    for kind in (
        KV[FLOAT32],
        KVType(FLOAT16, "float16", 16),
        KVType("q8_0", "uint8", 8, blocks=True),
        KVType("q4_0", "uint8", 4, blocks=True),
    )
}
# Types of a paged cache, which makes scales as rows are written; the index of a type is its number in `kv_layout`.
PAGED_KV = (FLOAT32, FLOAT16, "int8", "int4")


def find_kv_type(name: str) -> KVType:
    known = KV | LLAMA_KV
    if name not in known:
        raise UsageError(f"There is no KV type {name!r}.", f"Choose one of {', '.join(known)}.")
    return known[name]


def store(kind: KVType, values: Floats) -> NDArray[Any]:  # (H, n, h) -> (H, n, width)
    """Rows as a cache of floats or blocks holds them."""
    return to_blocks(values, kind.bits) if kind.blocks else values.astype(kind.dtype, copy=False)


def load(kind: KVType, stored: NDArray[Any]) -> Floats:  # (H, n, width) -> (H, n, h)
    """The numbers of stored rows; of float32 the rows themselves, not a copy."""
    return from_blocks(stored, kind.bits) if kind.blocks else stored.astype(np.float32, copy=False)


def require_described(condition: bool, what: str) -> None:
    """Raises BundleError about a model's description unless the condition holds."""
    if not condition:
        raise BundleError(f"Model description: {what}.", "The bundle is damaged or made by another program.")


def require_few_layers(layers: int) -> None:
    """Refuses more than ten times the layers of the deepest models, as some work is done for each."""
    require_described(layers <= 2048, f"num_layers {layers} is impossible")


@dataclass(frozen=True)
class KVLayer:
    """What a layer keeps of every token."""

    heads: int  # of keys and values; 0 where the layer keeps none, and so are the others then
    # `key_size`, `value_size`: channels of one. Without keys, the values are the input of a recurrence: they are
    # float32 whatever the type of the cache.
    key_size: int
    value_size: int

    def __post_init__(self) -> None:
        sizes = (self.heads, self.key_size, self.value_size)
        kept = self.heads > 0 and self.value_size > 0 and self.key_size >= 0
        require_described(kept or sizes == (0, 0, 0), "the heads of a layer need values")

    @property
    def recurrent(self) -> bool:
        """Whether it holds the input of a recurrence."""
        return self.heads > 0 and self.key_size == 0


@dataclass(frozen=True)
class StateLayer:
    """The state that a recurrent layer keeps of a text; all sizes are 0 where it keeps none."""

    heads: int = 0  # matrices, (key_size, value_size) each
    key_heads: int = 0  # heads of keys and queries, each of which serves equally many matrices
    key_size: int = 0
    value_size: int = 0
    # `channels`, `width`: of the convolution before it: its input per token, and the tokens that it reaches over.
    channels: int = 0
    width: int = 0

    def __post_init__(self) -> None:
        sizes = (self.heads, self.key_heads, self.key_size, self.value_size, self.channels, self.width)
        require_described(min(sizes) > 0 or not any(sizes), "a state has all of its sizes")
        require_described(not self.heads or self.heads % self.key_heads == 0, "a state's key_heads divide its heads")

    @property
    def parameters(self) -> int:
        return self.heads * self.key_size * self.value_size


@dataclass(frozen=True)
class Geometry:
    """The sizes a runtime must know to drive any decoder: vocabulary, positions and the shape of its KV cache."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    # Of each layer; empty where all have `num_kv_heads` heads of `head_dim` channels.
    kv_layers: tuple[KVLayer, ...] = ()
    states: tuple[StateLayer, ...] = ()  # of each layer; empty where none keeps one

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require_described(isinstance(value, tuple) or value > 0, f"{name} must be positive")
        require_few_layers(self.num_layers)
        require_described(len(self.kv_layers) in (0, self.num_layers), "kv_layers must name every layer or none")
        require_described(len(self.states) in (0, self.num_layers), "states must name every layer or none")
        require_described(
            not self.states or any(each.heads for each in self.states), "some of the states must be there"
        )
        # Equal geometries have equal fields, as manifests are compared by them.
        require_described(self.kv_layers != self._alike, "kv_layers are for layers that differ")

    @property
    def _alike(self) -> tuple[KVLayer, ...]:
        return (KVLayer(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers

    @property
    def kept(self) -> tuple[KVLayer, ...]:
        """What each layer keeps of a token."""
        return self.kv_layers or self._alike

    def kv_bytes_per_token(self, kv: str = FLOAT32) -> int:
        """Bytes of keys and values of one token over all layers, by the name of their type."""
        total, floats, kind = 0, find_kv_type(FLOAT32), find_kv_type(kv)
        for each in self.kept:
            row_bytes = (floats if each.recurrent else kind).row_bytes
            total += each.heads * (row_bytes(each.key_size) + row_bytes(each.value_size))
        return total
