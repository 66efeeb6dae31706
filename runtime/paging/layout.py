"""Where keys and values lie in a page, which graph, kernel and numpy share, and rows in and out of pages.

A page holds 64 positions of one sequence over all layers: the layers one behind the other, those with heads of one size
together, in each its heads, in each the keys and then the values. Keys lie in tiles of 16 positions, channel by
channel, so that one channel of a query meets 16 keys at once; values lie row by row, padded to 16
channels, those of int8 in fours of rows, channel by channel. Where positions are weighed, a head's weights follow.
Rows are read and written as they are stored, wherever in the pool their slots lie: a number of rows of layers with
heads of one size is one indexed read or write each for keys, values and their scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import FLOAT32, Geometry, KVLayer
from edgeinfer.bundle.graph import PAGE_SLOTS
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.paging.codecs import RowCodec, find_row_codec

PAGE = PAGE_SLOTS
# Rows of a sequence beyond its capacity, for a copy of a pass's last row.
SPARE_ROWS = 1
TILE = 16
_VALUE_CHANNELS = 16  # values are padded to a multiple of this
_ALIGNED = 64  # bytes: keys and values begin at multiples of it
_FLOATS = find_row_codec(FLOAT32)
_WEIGHED = 16  # added to the type of keys in the graph's input
_WEIGHTS = PAGE * 4  # bytes
PAGE_UNIT = 4096  # bytes: a page takes a multiple of it, so that the system gets it back whole


def pages_for(rows: int) -> int:
    return -(-rows // PAGE)


def pages_of(capacity: int) -> int:
    """Pages of a sequence of so many tokens: one for each 64 rows, and one for a copy of a shared last page."""
    return pages_for(capacity + SPARE_ROWS) + 1


class StoredRows(NamedTuple):
    """Shape of the stored rows of a layer's keys, or of its values: heads, items of each, their type."""

    heads: int
    width: int
    dtype: str


@dataclass(frozen=True)
class LayerGroup:
    """Layers of a model whose heads are of one size: they lie side by side in a page."""

    layers: tuple[int, ...]  # indices in the model, ascending
    kept: KVLayer
    offset: int  # where the first begins in a page
    # `keys`, `values`: how their rows are stored.
    keys: RowCodec
    values: RowCodec
    weighed: bool = False  # behind the values of a head lies what is added to the scores of each position

    @cached_property
    def key_bytes(self) -> int:
        shape, scales = self.key_shape, PAGE * _scale_bytes(self.keys, self.kept.key_size)
        return _aligned(int(np.prod(shape)) * _item_bytes(self.keys) + scales)

    @cached_property
    def value_bytes(self) -> int:
        shape, scales = self.value_shape, PAGE * _scale_bytes(self.values, self.kept.value_size)
        return _aligned(int(np.prod(shape)) * _item_bytes(self.values) + scales)

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        """Shape of a head's keys without their scales: tiles, groups of channels, positions, items of a group."""
        channels = self.keys.lanes * self.keys.packed
        return PAGE // TILE, -(-self.kept.key_size // channels), TILE, self.keys.lanes

    @property
    def value_shape(self) -> tuple[int, int, int]:
        """Shape of a head's values without their scales: runs of positions, items of a row, positions of a run."""
        padded = -(-self.kept.value_size // _VALUE_CHANNELS) * _VALUE_CHANNELS
        run = len(self.values.order)
        return PAGE // run, padded // self.values.packed, run

    @property
    def layer_bytes(self) -> int:
        return self.kept.heads * self._head_bytes

    @property
    def _head_bytes(self) -> int:
        return self.key_bytes + self.value_bytes + (_WEIGHTS if self.weighed else 0)

    @property
    def end(self) -> int:
        return self.offset + len(self.layers) * self.layer_bytes

    def head_parts(self, pages: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any]]:  # (pages, bytes)
        """The bytes of every head's keys and values, as views: (pages, layers, H, bytes) each."""
        heads, border = self._heads(pages), self.key_bytes + self.value_bytes
        return heads[..., : self.key_bytes], heads[..., self.key_bytes : border]

    def weights(self, pages: NDArray[np.uint8]) -> NDArray[np.float32]:  # (pages, bytes) -> (pages, layers, H, 64)
        """Weights that are added to the scores of positions, as a view; empty where positions have none."""
        return self._heads(pages)[..., self.key_bytes + self.value_bytes :].view(np.float32)

    def _heads(self, pages: NDArray[np.uint8]) -> NDArray[np.uint8]:  # (pages, bytes) -> (pages, layers, H, bytes)
        shape = (len(pages), len(self.layers), self.kept.heads, self._head_bytes)
        return pages[:, self.offset : self.end].reshape(shape)


@dataclass(frozen=True)
class PageLayout:
    """The pages of one model's cache."""

    layers: tuple[KVLayer, ...]
    # `keys`, `values`: how their rows are stored; recurrent states are float32.
    keys: RowCodec
    values: RowCodec
    weighed: bool = False  # each position of a head has a weight, which is added to its scores

    @classmethod
    def of(cls, geometry: Geometry, kv: str, *, weighed: bool = False) -> PageLayout:
        codec = find_row_codec(kv)
        return cls(geometry.kept, codec, codec, weighed)

    @property
    def kv(self) -> str:
        return self.keys.name if self.keys is self.values else f"{self.keys.name}/{self.values.name}"

    @property
    def scales(self) -> str:
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
        """Bytes of a page, at least one unit even if the layers keep no rows."""
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
        """The key rows of each layer as snapshots carry them, and then the value rows."""
        keys = [_stored(each, each.key_size, self.keys) for each in self.layers]
        return (*keys, *(_stored(each, each.value_size, self.values) for each in self.layers))

    @property
    def array(self) -> Ints:
        """The graph's input: (3 + L,) the types of keys and values, the bytes of a page, the layers' offsets."""
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


_ALL = slice(None)
# Channels of a value whose first half lies in the lower bits of its bytes; the last ones may be half as many.
_RUN = 32

# Rows as they lie in a page, (n, L, H, ...): numbers, and what scales them.
_Lying = tuple[NDArray[Any], NDArray[Any] | None]


class PageRows:
    """Reads and writes the rows of pages, each named by the number of its page times 64 plus its position there.

    Args:
        centres: what turned keys of a layer are stored without, (H, 1, h) each.
    """

    def __init__(
        self, layout: PageLayout, memory: NDArray[np.uint8], centres: Mapping[int, Floats] = MappingProxyType({})
    ) -> None:
        self._layout = layout
        self._centres = centres if layout.keys.turned else {}
        self._keys: list[_Part] = []  # of each group of layers
        self._values: list[_Part] = []
        self._weights: list[NDArray[np.float32]] = []  # (pages, L, H, 64) each
        self._found: dict[int, tuple[int, int]] = {}  # group of a layer that keeps rows, and place in it
        for index, group in enumerate(layout.groups):
            pages = memory.reshape(-1, layout.page_bytes)
            keys, values = group.head_parts(pages)
            if layout.weighed:
                self._weights.append(group.weights(pages))
            self._keys.append(_Keys(group.keys, group.kept.key_size, group.key_shape, keys))
            self._values.append(_Values(group.values, group.kept.value_size, group.value_shape, values))
            self._found |= {layer: (index, place) for place, layer in enumerate(group.layers)}

    def copy(self, sources: Ints, targets: Ints) -> None:  # (n,) each
        """Copies rows of all layers as they are stored; all are read before the first is written."""
        for part in (*self._keys, *self._values):
            part.put(targets, part.get(sources))
        for weights in self._weights:
            weights[targets // PAGE, :, :, targets % PAGE] = weights[sources // PAGE, :, :, sources % PAGE]

    def stored_keys(self, places: Ints) -> tuple[NDArray[Any], ...]:  # (n,) -> L of (H, n, width)
        return self._stored(self._keys, places, self._layout.keys)

    def stored_values(self, places: Ints) -> tuple[NDArray[Any], ...]:  # (n,) -> L of (H, n, width)
        return self._stored(self._values, places, self._layout.values)

    def _stored(self, parts: list[_Part], places: Ints, codec: RowCodec) -> tuple[NDArray[Any], ...]:
        groups = [part.joined(part.get(places)).transpose(1, 2, 0, 3) for part in parts]  # (layers, H, n, width) each
        nothing = np.zeros((0, len(places), 0), codec.dtype)
        found = [self._found.get(layer) for layer in range(len(self._layout.layers))]
        return tuple(nothing if at is None else groups[at[0]][at[1]] for at in found)

    def put_stored(
        self, places: Ints, keys: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]]
    ) -> None:  # (n,), L of (H, n, width) each
        """Writes rows of all layers as snapshots carry them: without weights."""
        for weights in self._weights:
            weights[places // PAGE, :, :, places % PAGE] = 0
        for parts, rows in ((self._keys, keys), (self._values, values)):
            for part, group in zip(parts, self._layout.groups, strict=True):
                stored = np.stack([rows[layer] for layer in group.layers])  # (layers, H, n, width)
                part.put(places, part.split(stored.transpose(2, 0, 1, 3)))

    def read(self, layer: int, places: Ints) -> tuple[Floats, Floats]:  # (n,) -> (H, n, h), (H, n, v)
        """The floats of one layer's rows; empty where it keeps none."""
        if layer not in self._found:
            nothing = np.zeros((0, len(places), 0), np.float32)
            return nothing, nothing
        group, place = self._found[layer]
        return self.read_keys(layer, places), self._values[group].read(place, places)

    def write(self, layer: int, places: Ints, keys: Floats, values: Floats) -> None:  # (n,), (H, n, h), (H, n, v)
        """Stores rows of one layer, without weights; nothing where it keeps none."""
        if layer in self._found:
            group, place = self._found[layer]
            self.write_keys(layer, places, keys)
            self._values[group].write(place, places, values)
            if self._layout.weighed:
                self._weights[group][places // PAGE, place, :, places % PAGE] = 0

    def read_keys(self, layer: int, places: Ints) -> Floats:  # (n,) -> (H, n, h)
        if layer not in self._found:
            return np.zeros((0, len(places), 0), np.float32)
        group, place = self._found[layer]
        keys = self._keys[group].read(place, places)
        return keys + self._centres[layer] if layer in self._centres else keys

    def write_keys(self, layer: int, places: Ints, keys: Floats) -> None:  # (n,), (H, n, h)
        """Replaces the keys of one layer's rows; does nothing where it keeps none."""
        if layer in self._found:
            group, place = self._found[layer]
            stored = keys - self._centres[layer] if layer in self._centres else keys
            self._keys[group].write(place, places, stored)

    def weigh(self, layer: int, places: Ints, weights: Floats) -> None:  # (n,), (H, n)
        """Sets the weights of one layer's rows, in a pool whose positions are weighed."""
        group, place = self._found[layer]
        self._weights[group][places // PAGE, place, :, places % PAGE] = weights.T


class _Part(ABC):
    """The keys or the values of a group of layers in all pages, whose heads have `size` channels in numbers of this
    shape; `memory` has the bytes of every head, (pages, L, H, bytes)."""

    def __init__(self, codec: RowCodec, size: int, shape: tuple[int, ...], memory: NDArray[Any]) -> None:
        self._codec = codec
        self._size = size
        self._shape = shape
        end = int(np.prod(shape)) * np.dtype(codec.level_dtype).itemsize
        self._numbers = memory[..., :end].view(codec.level_dtype).reshape(*memory.shape[:3], *shape)
        self._scales: NDArray[Any] | None = None  # (pages, L, H, 64, ...)
        if codec.scale_dtype:
            form = (PAGE, *codec.scale_shape(size))
            stop = end + int(np.prod(form)) * np.dtype(codec.scale_dtype).itemsize
            self._scales = memory[..., end:stop].view(codec.scale_dtype).reshape(*memory.shape[:3], *form)

    def get(self, places: Ints, layers: slice = _ALL) -> _Lying:  # (n,)
        pages, at = places // PAGE, places % PAGE
        scales = None if self._scales is None else self._scales[:, layers][pages, :, :, at]
        return self._get(self._numbers[:, layers], pages, at), scales

    def put(self, places: Ints, lying: _Lying, layers: slice = _ALL) -> None:
        pages, at = places // PAGE, places % PAGE
        numbers, scales = lying
        self._put(self._numbers[:, layers], pages, at, numbers)
        if self._scales is not None:
            self._scales[:, layers][pages, :, :, at] = scales

    def joined(self, lying: _Lying) -> NDArray[Any]:  # (n, L, H, width)
        numbers, scales = lying
        return self._codec.join(self._unpadded(numbers), scales)

    def split(self, stored: NDArray[Any]) -> _Lying:  # (n, L, H, width)
        levels, scales = self._codec.split(stored, self._size)
        return self._padded(levels), scales

    def read(self, layer: int, places: Ints) -> Floats:  # (n,) -> (H, n, size)
        stored = self.joined(self.get(places, slice(layer, layer + 1)))
        return self._codec.decode(stored[:, 0], self._size).swapaxes(0, 1)

    def write(self, layer: int, places: Ints, rows: Floats) -> None:  # (n,), (H, n, size)
        lying = self.split(self._codec.encode(rows.swapaxes(0, 1)[:, None]))
        self.put(places, lying, slice(layer, layer + 1))

    @abstractmethod
    def _get(self, numbers: NDArray[Any], pages: Ints, at: Ints) -> NDArray[Any]:
        """The numbers of some rows."""

    @abstractmethod
    def _put(self, numbers: NDArray[Any], pages: Ints, at: Ints, rows: NDArray[Any]) -> None:
        """Writes what `_get` gives."""

    @abstractmethod
    def _padded(self, levels: NDArray[Any]) -> NDArray[Any]:  # (..., size)
        """Items in which the levels of a row lie."""

    @abstractmethod
    def _unpadded(self, items: NDArray[Any]) -> NDArray[Any]:  # -> (..., size)
        """The levels of a row."""

    def _with_zeros(self, levels: NDArray[Any], channels: int) -> NDArray[Any]:  # (..., size) -> (..., channels)
        padded = np.zeros((*levels.shape[:-1], channels), levels.dtype)
        padded[..., : self._size] = levels
        return padded


class _Keys(_Part):
    """(pages, L, H, tile, group of channels, position, channel of the group)"""

    def _get(self, numbers: NDArray[Any], pages: Ints, at: Ints) -> NDArray[Any]:
        return numbers[pages, :, :, at // TILE, :, at % TILE]

    def _put(self, numbers: NDArray[Any], pages: Ints, at: Ints, rows: NDArray[Any]) -> None:
        numbers[pages, :, :, at // TILE, :, at % TILE] = rows

    def _padded(self, levels: NDArray[Any]) -> NDArray[Any]:
        _, groups, _, lanes = self._shape
        packed = self._codec.packed
        pieces = self._with_zeros(levels, groups * packed * lanes).reshape(*levels.shape[:-1], groups, packed, lanes)
        low: NDArray[Any] = pieces[..., 0, :]
        if packed == 1:
            return low
        both: NDArray[Any] = low | pieces[..., 1, :] << np.uint8(4)
        return both

    def _unpadded(self, items: NDArray[Any]) -> NDArray[Any]:
        *start, groups, lanes = items.shape
        if self._codec.packed == 2:
            items = np.stack([items & np.uint8(15), items >> np.uint8(4)], axis=-2)
        levels: NDArray[Any] = items.reshape(*start, groups * self._codec.packed * lanes)[..., : self._size]
        return levels


class _Values(_Part):
    """(pages, L, H, run of positions, item, position): of packed ones, 32 channels have their first half in the lower
    bits."""

    def _get(self, numbers: NDArray[Any], pages: Ints, at: Ints) -> NDArray[Any]:
        run, lane = self._place(at)
        return numbers[pages, :, :, run, :, lane]

    def _put(self, numbers: NDArray[Any], pages: Ints, at: Ints, rows: NDArray[Any]) -> None:
        run, lane = self._place(at)
        numbers[pages, :, :, run, :, lane] = rows

    def _place(self, at: Ints) -> tuple[Ints, Ints]:
        order = np.array(self._codec.order)
        return at // order.size, order[at % order.size]

    def _padded(self, levels: NDArray[Any]) -> NDArray[Any]:
        channels = self._shape[1] * self._codec.packed
        padded = self._with_zeros(levels, channels)
        if self._codec.packed == 1:
            return padded
        low, high = _halves(channels)
        items: NDArray[Any] = padded[..., low] | padded[..., high] << np.uint8(4)
        return items

    def _unpadded(self, items: NDArray[Any]) -> NDArray[Any]:
        if self._codec.packed == 1:
            return items[..., : self._size]
        channels = self._shape[1] * 2
        low, high = _halves(channels)
        levels = np.empty((*items.shape[:-1], channels), np.uint8)
        levels[..., low], levels[..., high] = items & np.uint8(15), items >> np.uint8(4)
        return levels[..., : self._size]


def _halves(channels: int) -> tuple[Ints, Ints]:  # (channels / 2,) each
    """The channels in the lower and in the higher half of each byte of a value, in runs of 32 and a last one of 16."""
    whole = channels // _RUN * _RUN
    runs = np.arange(whole).reshape(-1, 2, _RUN // 2)
    last = np.arange(whole, channels).reshape(2, -1)
    return np.concatenate([runs[:, 0].ravel(), last[0]]), np.concatenate([runs[:, 1].ravel(), last[1]])
