"""Where keys and values lie in a page: the sizes and places that graph, kernel and numpy share.

A page holds 64 positions of one sequence over all layers: the layers one behind the other, those with heads of one size
together, in each its heads, in each the keys and then the values. Keys lie in tiles of 16 positions, channel by
channel, so that one channel of a query meets 16 keys at once; values lie row by row, padded to 16
channels, those of int8 in fours of rows, channel by channel. Where positions are weighed, a head's weights follow.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import FLOAT32, Geometry, KVLayer
from edgeinfer.bundle.graph import PAGE_SLOTS
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.paging.codecs import RowCodec, find_row_codec

PAGE = PAGE_SLOTS
TILE = 16
_VALUE_CHANNELS = 16  # values are padded to a multiple of this
_ALIGNED = 64  # bytes: keys and values begin at multiples of it
_FLOATS = find_row_codec(FLOAT32)
_WEIGHED = 16  # added to the type of keys that the graph is told
_WEIGHTS = PAGE * 4  # bytes
PAGE_UNIT = 4096  # bytes: a page takes a multiple of it, so that the system gets it back whole


def pages_for(rows: int) -> int:
    """Pages that so many rows of one sequence take."""
    return -(-rows // PAGE)


class StoredRows(NamedTuple):
    """What the stored rows of a layer's keys, or of its values, have: heads, items of each, their type."""

    heads: int
    width: int
    dtype: str


@dataclass(frozen=True)
class LayerGroup:
    """Layers of a model whose heads are of one size: they lie side by side in a page.

    Attributes:
        layers: of the model, ascending.
        kept: by each of them.
        offset: where the first begins in a page.
        keys, values: how their rows are stored.
        weighed: behind the values of a head lies what is added to the scores of each position.
    """

    layers: tuple[int, ...]
    kept: KVLayer
    offset: int
    keys: RowCodec
    values: RowCodec
    weighed: bool = False

    @cached_property
    def key_bytes(self) -> int:
        """Of a head's keys in a page."""
        shape, scales = self.key_shape, PAGE * _scale_bytes(self.keys, self.kept.key_size)
        return _aligned(int(np.prod(shape)) * _item_bytes(self.keys) + scales)

    @cached_property
    def value_bytes(self) -> int:
        """Of a head's values in a page."""
        shape, scales = self.value_shape, PAGE * _scale_bytes(self.values, self.kept.value_size)
        return _aligned(int(np.prod(shape)) * _item_bytes(self.values) + scales)

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        """Of a head's keys without their scales: tiles, groups of channels, positions, items of a group."""
        channels = self.keys.lanes * self.keys.packed
        return PAGE // TILE, -(-self.kept.key_size // channels), TILE, self.keys.lanes

    @property
    def value_shape(self) -> tuple[int, int, int]:
        """Of a head's values without their scales: runs of positions, items of a row, positions of a run."""
        padded = -(-self.kept.value_size // _VALUE_CHANNELS) * _VALUE_CHANNELS
        run = len(self.values.order)
        return PAGE // run, padded // self.values.packed, run

    @property
    def layer_bytes(self) -> int:
        """Of one layer's part of a page."""
        return self.kept.heads * self._head_bytes

    @property
    def _head_bytes(self) -> int:
        return self.key_bytes + self.value_bytes + (_WEIGHTS if self.weighed else 0)

    @property
    def end(self) -> int:
        """Where the last layer's part of a page ends."""
        return self.offset + len(self.layers) * self.layer_bytes

    def head_parts(self, pages: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any]]:  # (pages, bytes)
        """The bytes of every head's keys and values, as views: (pages, layers, H, bytes) each."""
        heads, border = self._heads(pages), self.key_bytes + self.value_bytes
        return heads[..., : self.key_bytes], heads[..., self.key_bytes : border]

    def weights(self, pages: NDArray[np.uint8]) -> NDArray[np.float32]:  # (pages, bytes) -> (pages, layers, H, 64)
        """What is added to the scores of each position, as a view; nothing where positions are not weighed."""
        return self._heads(pages)[..., self.key_bytes + self.value_bytes :].view(np.float32)

    def _heads(self, pages: NDArray[np.uint8]) -> NDArray[np.uint8]:  # (pages, bytes) -> (pages, layers, H, bytes)
        shape = (len(pages), len(self.layers), self.kept.heads, self._head_bytes)
        return pages[:, self.offset : self.end].reshape(shape)


@dataclass(frozen=True)
class PageLayout:
    """The pages of one model's cache.

    Attributes:
        layers: what each keeps of a position.
        keys, values: how their rows are stored; those of recurrences are float32.
        weighed: each position of a head has a weight, which is added to its scores.
    """

    layers: tuple[KVLayer, ...]
    keys: RowCodec
    values: RowCodec
    weighed: bool = False

    @classmethod
    def of(cls, geometry: Geometry, kv: str, *, weighed: bool = False) -> PageLayout:
        """The pages of a model whose keys and values are stored as one type."""
        codec = find_row_codec(kv)
        return cls(geometry.kept, codec, codec, weighed)

    @property
    def kv(self) -> str:
        """The type of the rows as users name it."""
        return self.keys.name if self.keys is self.values else f"{self.keys.name}/{self.values.name}"

    @property
    def scales(self) -> str:
        """What a snapshot says of the rows' scales."""
        return self.keys.scales or self.values.scales

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers that keep rows, those with heads of one size together."""
        groups: list[LayerGroup] = []
        for kept in dict.fromkeys(self.layers):
            if kept.heads:
                alike = tuple(layer for layer, each in enumerate(self.layers) if each == kept)
                offset = groups[-1].end if groups else 0
                codecs = (_FLOATS, _FLOATS) if kept.recurrent else (self.keys, self.values)
                groups.append(LayerGroup(alike, kept, offset, *codecs, self.weighed))
        return tuple(groups)

    @cached_property
    def page_bytes(self) -> int:
        """Of a page; of a model whose layers keep no rows the least there may be."""
        used = self.groups[-1].end if self.groups else 1
        return -(-used // PAGE_UNIT) * PAGE_UNIT

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each layer's part of a page begins; 0 for a layer that keeps no rows."""
        offsets = [0] * len(self.layers)
        for group in self.groups:
            for place, layer in enumerate(group.layers):
                offsets[layer] = group.offset + place * group.layer_bytes
        return tuple(offsets)

    @property
    def stored(self) -> tuple[StoredRows, ...]:
        """The rows of keys of each layer as snapshots carry them, and then those of values."""
        keys = [_stored(each, each.key_size, self.keys) for each in self.layers]
        return (*keys, *(_stored(each, each.value_size, self.values) for each in self.layers))

    @property
    def array(self) -> Ints:
        """What the graph is told: (3 + L,) the types of keys and values, the bytes of a page, the layers' offsets."""
        keys = self.keys.code + (_WEIGHED if self.weighed else 0)
        return np.array([keys, self.values.code, self.page_bytes, *self.offsets], np.int64)


def _stored(kept: KVLayer, size: int, codec: RowCodec) -> StoredRows:
    codec = _FLOATS if kept.recurrent else codec
    return StoredRows(kept.heads, codec.width(size) if size else 0, codec.dtype)


def _item_bytes(codec: RowCodec) -> int:
    return np.dtype(codec.level_dtype).itemsize


def _scale_bytes(codec: RowCodec, size: int) -> int:
    return int(np.prod(codec.scale_shape(size))) * np.dtype(codec.scale_dtype).itemsize if codec.scale_dtype else 0


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
