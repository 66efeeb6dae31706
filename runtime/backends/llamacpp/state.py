"""llama.cpp's copies of a sequence's cache as snapshots and back; knows the format of the bytes, no context.

A copy is a magic number and the sequence; then of layers that attend, if there are any: the number of streams, the
number of cells; of each cell its position, the number of sequences it belongs to, where positions have sections also
its place in a picture and its token, and the sequences; whether values are transposed, the number of layers; of each
layer the type of its keys, the length of a row and the rows, one for each cell; then the same of the values, or where
they are transposed their type, the bytes of one, their number in a row and rows that each hold one channel of all
cells; latent attention has no values. Cells come in the order of the cache, which need not be that of their positions.
Where some layers have a sliding window there are two such parts, of the layers without one and of those with one. The
second lacks cells that the window hides from the last row.
What is behind that is of recurrent layers: the number of states, which is 1, its position, the number of sequences,
which is 0, and what is kept.

Keys and values of quantized caches whose heads are a multiple of 64 wide are stored turned by a Hadamard matrix, which
spreads outliers; the matrix is its own inverse.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import find_kv_type
from edgeinfer.bundle.geometry import load as load_rows
from edgeinfer.bundle.geometry import store as store_rows
from edgeinfer.core.errors import BackendError, CapabilityError, Setting
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows, check_rows, check_type

_MAGIC = 0xAF143CD8
_HEAD = struct.Struct("<Ii")  # magic, sequence
_CELLS = struct.Struct("<II")  # streams, cells
_CELL, _PLACED_CELL = 3, 6  # int32 numbers
_LAYERS = struct.Struct("<II")  # whether values are transposed, layers
_ROWS = struct.Struct("<iQ")  # ggml type, bytes of a row
_COLUMNS = struct.Struct("<iII")  # ggml type, bytes of a number, channels
_TOKEN, _NO_TOKEN = 4, -1  # where a placed cell has its token, which text does not need
_BEHIND = struct.Struct("<IiI")  # states, position, sequences
_TYPES = {"float32": 0, "float16": 1, "q8_0": 8, "q4_0": 2}
_HADAMARD = 64  # heads whose width is a multiple of this are turned in quantized caches


class CellRows(NamedTuple):
    """Sizes of a token's rows in a layer."""

    heads: int  # heads of keys and values; 0 where the layer keeps nothing
    # `key_size`, `value_size`: channels of one; no values where attention is latent.
    key_size: int
    value_size: int


class StateCodec:
    """Reads and writes copies of one model's cache, whose cells hold a place in a picture too where they are
    `placed`."""

    def __init__(
        self,
        layers: Sequence[CellRows],
        kv: str,
        parts: Sequence[Sequence[int]],
        *,
        placed: bool = False,
        recurrent: bool = False,
    ) -> None:
        self._kind = find_kv_type(kv)
        self._dtype = np.dtype(self._kind.dtype)
        self._recurrent = recurrent
        self._cell = _PLACED_CELL if placed else _CELL
        # Where attention is computed step by step, which a cache of blocks does not allow.
        self._transposed = not self._kind.blocks
        self.layers = tuple(layers)
        self._parts, self._half = parts, len(layers)
        keys = [(each.heads, each.key_size) for each in layers]
        values = [(each.heads if each.value_size else 0, each.value_size) for each in layers]
        # Of each array of a snapshot, keys of all layers and then values: heads, and items of one.
        self._arrays = [(heads, self._kind.width(size) if heads else 0) for heads, size in (*keys, *values)]

    def nothing(self) -> CopiedRows:
        return self._snapshot([np.empty((heads, 0, width), self._dtype) for heads, width in self._arrays], 0)

    def check(self, snapshot: CacheSnapshot, capacity: int) -> None:
        check_type(snapshot, capacity, self._kind.name, "")
        check_rows(snapshot, [(heads, width, self._kind.dtype) for heads, width in self._arrays])

    def check_state(self, state: NDArray[np.uint8], length: int) -> None:  # (bytes,)
        """Refuses bytes that are no state of recurrent layers behind so many tokens."""
        if len(state) < _BEHIND.size or _BEHIND.unpack_from(state.data) != (1, length - 1, 0):
            raise BackendError("The state of recurrent layers belongs to another model or text.")

    def decode(self, blob: NDArray[np.uint8], start: int, stop: int) -> CopiedRows:  # (bytes,)
        """The rows at positions start..stop-1 of a copy, without the state behind the last of all."""
        starts = self._starts(blob)
        if starts[-1] > len(blob) or (starts[-1] < len(blob)) != self._recurrent:
            raise _foreign()
        arrays = [np.empty((heads, stop - start, width), self._dtype) for heads, width in self._arrays]
        for at, layers in zip(starts, self._parts, strict=False):
            self._read_part(blob, at, layers, range(start, stop), arrays)
        return self._snapshot(arrays, len(blob) - starts[-1])

    def _read_part(
        self,
        blob: NDArray[np.uint8],  # (bytes,)
        at: int,
        layers: Sequence[int],
        wanted: range,  # positions
        arrays: Sequence[NDArray[Any]],  # 2 L of (H, n, width)
    ) -> None:
        """Fills the arrays of some layers with rows of the part of a copy that begins at `at`."""
        streams, count = _CELLS.unpack_from(blob.data, at)
        at += _CELLS.size
        cells = blob[at : at + self._cell_bytes(count)].view("<i4").reshape(-1, self._cell)
        order = np.argsort(cells[:, 0], kind="stable")
        first = int(np.searchsorted(cells[order, 0], wanted.start))
        order = order[first : first + len(wanted)]
        if streams != 1 or not np.array_equal(cells[order, 0], wanted):
            raise _foreign()
        at += self._cell_bytes(count)
        if _LAYERS.unpack_from(blob.data, at) != (self._transposed, len(layers)):
            raise _foreign()
        at += _LAYERS.size
        for place, heads, width in self._stored(layers):
            head = self._head(place, heads * width)
            if head != bytes(blob[at : at + _ROWS.size]):
                raise _foreign()
            stored = blob[at + _ROWS.size : at + _ROWS.size + count * heads * width * self._dtype.itemsize]
            arrays[place][...] = self._rows(stored, place, count)[:, order]
            at += _ROWS.size + len(stored)

    def state(self, blob: NDArray[np.uint8]) -> NDArray[np.uint8]:  # (bytes,) -> (bytes,)
        """The state in a copy, which is one itself."""
        return blob[self._starts(blob)[-1] :].copy()

    def encode(
        self,
        pieces: Sequence[CacheSnapshot],
        start: int,
        sequence: int,
        state: NDArray[np.uint8] | None = None,  # (bytes,)
    ) -> NDArray[np.uint8]:  # (bytes,)
        """The copy that puts rows at the positions from `start` on, piece behind piece; they fit the model."""
        count, at = sum(piece.length for piece in pieces), _HEAD.size
        end = at + sum(self._part_bytes(layers, count) for layers in self._parts)
        blob = np.empty(end + (0 if state is None else len(state)), np.uint8)
        _HEAD.pack_into(blob.data, 0, _MAGIC, sequence)
        if state is not None:
            blob[end:] = state
        # Where positions have sections, all of those of a text are its position.
        cells = np.repeat(np.arange(start, start + count, dtype="<i4")[:, None], self._cell, axis=1)
        cells[:, 1], cells[:, -1] = 1, sequence
        cells[:, _TOKEN:-1] = _NO_TOKEN
        for layers in self._parts:
            self._write_part(blob, at, layers, cells, pieces)
            at += self._part_bytes(layers, count)
        return blob

    def _write_part(
        self,
        blob: NDArray[np.uint8],  # (bytes,)
        at: int,
        layers: Sequence[int],
        cells: NDArray[np.int32],  # (n, numbers)
        pieces: Sequence[CacheSnapshot],
    ) -> None:
        count = len(cells)
        _CELLS.pack_into(blob.data, at, 1, count)
        at += _CELLS.size
        blob[at : at + cells.nbytes] = cells.reshape(-1).view(np.uint8)
        at += cells.nbytes
        _LAYERS.pack_into(blob.data, at, self._transposed, len(layers))
        at += _LAYERS.size
        parts = [(*piece.keys, *piece.values) for piece in pieces]
        for place, heads, width in self._stored(layers):
            blob[at : at + _ROWS.size] = np.frombuffer(self._head(place, heads * width), np.uint8)
            stored = blob[at + _ROWS.size : at + _ROWS.size + count * heads * width * self._dtype.itemsize]
            rows, row = self._rows(stored, place, count), 0
            for arrays in parts:
                rows[:, row : row + arrays[place].shape[1]] = arrays[place]
                row += arrays[place].shape[1]
            at += _ROWS.size + len(stored)

    def _snapshot(self, arrays: Sequence[NDArray[Any]], state_bytes: int) -> CopiedRows:  # 2 L of (H, n, width)
        keys, values = arrays[: self._half], arrays[self._half :]
        return CopiedRows(arrays[0].shape[1], keys, values, self._kind.name, state_bytes=state_bytes)

    def _starts(self, blob: NDArray[np.uint8]) -> list[int]:  # (bytes,)
        """Where the parts of a copy begin, and where the last of them ends."""
        starts = [_HEAD.size]
        for layers in self._parts:
            if len(blob) < starts[-1] + _CELLS.size:
                raise _foreign()
            starts.append(starts[-1] + self._part_bytes(layers, int(_CELLS.unpack_from(blob.data, starts[-1])[1])))
        return starts

    def _part_bytes(self, layers: Sequence[int], rows: int) -> int:
        """Bytes of these layers' part of a copy of so many rows."""
        matrices = [heads * width * self._dtype.itemsize for _, heads, width in self._stored(layers)]
        return _CELLS.size + self._cell_bytes(rows) + _LAYERS.size + sum(_ROWS.size + rows * each for each in matrices)

    def _stored(self, layers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """The arrays of these layers in the order of a copy: the place in a snapshot, heads and items of one."""
        for half in (0, self._half):
            for layer in layers:
                heads, width = self._arrays[half + layer]
                if heads:
                    yield half + layer, heads, width

    def _cell_bytes(self, cells: int) -> int:
        return 4 * self._cell * cells

    def _head(self, place: int, items: int) -> bytes:
        """Header of an array's rows, each of so many items."""
        kind, size = _TYPES[self._kind.name], self._dtype.itemsize
        return _COLUMNS.pack(kind, size, items) if self._in_columns(place) else _ROWS.pack(kind, items * size)

    def _in_columns(self, place: int) -> bool:
        return self._transposed and place >= self._half

    def _rows(self, stored: NDArray[np.uint8], place: int, count: int) -> NDArray[Any]:  # (bytes,) -> (H, n, width)
        heads, items = self._arrays[place][0], stored.view(self._dtype)
        if self._in_columns(place):
            return items.reshape(heads, -1, count).transpose(0, 2, 1)
        return items.reshape(count, heads, -1).transpose(1, 0, 2)

    def load(self, rows: NDArray[Any], *, keys: bool) -> Floats:  # (H, n, width) -> (H, n, h), a copy
        """The numbers that rows stand for, as they were before the cache turned them."""
        floats = load_rows(self._kind, rows)
        return self._turn(np.array(floats, np.float32), keys)

    def store(self, floats: Floats, *, keys: bool) -> NDArray[Any]:  # (H, n, h) -> (H, n, width)
        floats = np.ascontiguousarray(floats, np.float32)
        return store_rows(self._kind, self._turn(floats, keys))

    def _turn(self, floats: Floats, keys: bool) -> Floats:  # (H, n, h) -> (H, n, h)
        width = floats.shape[-1]
        if not self._kind.blocks or width % _HADAMARD:
            return floats
        # Keys by the largest power of two that divides the width, values by 64.
        size = width & -width if keys else _HADAMARD
        turned: Floats = (floats.reshape(-1, size) @ _hadamard(size)).reshape(floats.shape)
        return turned


def state_of(blob: NDArray[np.uint8]) -> NDArray[np.uint8]:  # (bytes,) -> (bytes,)
    """The state in a copy that has nothing of layers that attend."""
    return blob[_HEAD.size :]


def _foreign() -> CapabilityError:
    return CapabilityError(
        "Copies of this model's cache have parts that edgeinfer does not know.",
        "Load it without " + Setting("prefix_cache") + ", and do not save its sessions.",
    )


@cache
def _hadamard(size: int) -> Floats:  # (n, n)
    matrix: Floats = np.ones((1, 1), np.float32)
    block = np.array([[1, 1], [1, -1]], np.float32)
    while len(matrix) < size:
        matrix = np.kron(block, matrix)
    matrix /= np.sqrt(np.float32(size))
    return matrix
