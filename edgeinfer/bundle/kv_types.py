"""The number types keys and values can be cached in, and rows in and out of those that are not paged.

A paged cache has the types of PAGED_KV, whose rows edgeinfer.runtime.paging describes. Others depend on who computes:
ONNX Runtime's caches are float32, llama.cpp's also float16, and blocks of 32 channels with a scale of their own in
front, held as bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.packing import packed_bytes
from edgeinfer.errors import UsageError
from edgeinfer.records import dataclass

Floats = NDArray[np.float32]

BLOCK = 32
_SCALE_BYTES = 2
# Bytes of a block by the bits of its numbers.
BLOCK_BYTES = {8: _SCALE_BYTES + BLOCK, 4: _SCALE_BYTES + BLOCK // 2}


def to_blocks(values: Floats, bits: int) -> NDArray[np.uint8]:  # (..., h) -> (..., h / 32 * bytes)
    """Rows whose width is a multiple of 32, quantized as llama.cpp does."""
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
    """The numbers that rows of blocks stand for."""
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
    """A type of cached numbers.

    Attributes:
        dtype: name of the type of the stored array.
        bits: of a value.
        blocks: the stored bytes are llama.cpp's blocks.
    """

    name: str
    dtype: str
    bits: int
    blocks: bool = False

    def width(self, head_dim: int) -> int:
        """Items of the stored array that the channels of one head take; of blocks, whole ones."""
        return self.row_bytes(head_dim) if self.blocks else head_dim

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one head's key or value."""
        if self.blocks:
            return -(-head_dim // BLOCK) * BLOCK_BYTES[self.bits]
        return packed_bytes(head_dim, self.bits)


KV: dict[str, KVType] = {
    kind.name: kind for kind in (KVType(FLOAT32, "float32", 32), KVType("int8", "int8", 8), KVType("int4", "uint8", 4))
}
# Those of llama.cpp's caches; for these no ONNX graph is written.
LLAMA_KV: dict[str, KVType] = {
    kind.name: kind
    for kind in (
        KV[FLOAT32],
        KVType(FLOAT16, "float16", 16),
        KVType("q8_0", "uint8", 8, blocks=True),
        KVType("q4_0", "uint8", 4, blocks=True),
    )
}
# Those of a paged cache, which makes scales as rows are written; the place of a type is its number in `kv_layout`.
PAGED_KV = (FLOAT32, FLOAT16, "int8", "int4")


def find_kv_type(name: str) -> KVType:
    """A type by its name."""
    known = KV | LLAMA_KV
    if name not in known:
        raise UsageError(f"There is no KV type {name!r}.", f"Choose one of {', '.join(known)}.")
    return known[name]


def store(kind: KVType, values: Floats) -> NDArray[Any]:  # (H, n, h) -> (H, n, width)
    """Rows as a cache of floats or blocks holds them."""
    return to_blocks(values, kind.bits) if kind.blocks else values.astype(kind.dtype, copy=False)


def load(kind: KVType, stored: NDArray[Any]) -> Floats:  # (H, n, width) -> (H, n, h)
    """The numbers that rows of floats or blocks stand for; of float32 the rows themselves, not a copy."""
    return from_blocks(stored, kind.bits) if kind.blocks else stored.astype(np.float32, copy=False)
