"""llama.cpp's copies of a sequence's cache as snapshots and back; knows the format of the bytes, no context.

A copy is: a magic number, the sequence, the number of streams, the number of cells; of each cell its position and the
sequences it belongs to; whether values are transposed, the number of layers; of each layer the type of its keys, the
length of a row and the rows, one for each cell; then the same of the values, or where they are transposed their type,
the bytes of one, their number in a row and rows that each hold one channel of all cells. Cells come in the order of
the cache, which need not be that of their positions.

Keys and values of quantized caches whose heads are a multiple of 64 wide are stored turned by a Hadamard matrix, which
spreads outliers; the matrix is its own inverse.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Geometry
from edgeinfer.bundle.kv_types import KVType, find_kv_type
from edgeinfer.bundle.kv_types import load as load_rows
from edgeinfer.bundle.kv_types import store as store_rows
from edgeinfer.errors import CapabilityError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows
from edgeinfer.wording import Setting

__all__ = ["StateCodec", "copied_bytes"]

_MAGIC = 0xAF143CD8
_HEAD = struct.Struct("<IiII")  # magic, sequence, streams, cells
_CELL_BYTES = 12  # position, number of sequences, sequence
_LAYERS = struct.Struct("<II")  # whether values are transposed, layers
_ROWS = struct.Struct("<iQ")  # ggml type, bytes of a row
_COLUMNS = struct.Struct("<iII")  # ggml type, bytes of a number, channels
_TYPES = {"float32": 0, "float16": 1, "q8_0": 8, "q4_0": 2}
_HADAMARD = 64  # heads whose width is a multiple of this are turned in quantized caches


class StateCodec:
    """Reads and writes copies of one model's cache.

    Args:
        geometry: of the model.
        kv: type of the cache.
    """

    def __init__(self, geometry: Geometry, kv: str) -> None:
        self._geometry = geometry
        self._kind = find_kv_type(kv)
        # Where attention is computed step by step, which a cache of blocks does not allow.
        self._transposed = not self._kind.blocks
        self._row = geometry.num_kv_heads * self._kind.row_bytes(geometry.head_dim)

    def blob_bytes(self, rows: int) -> int:
        """Length of a copy of so many rows."""
        # The two kinds of matrices have heads of the same length.
        per_matrix = _ROWS.size + rows * self._row
        return _HEAD.size + rows * _CELL_BYTES + _LAYERS.size + 2 * self._geometry.num_layers * per_matrix

    def decode(self, blob: NDArray[np.uint8], length: int) -> CopiedRows:  # (bytes,)
        """The rows of a copy in the order of their positions.

        Raises:
            CapabilityError: the bytes are not those of one plain cache with so many rows.
        """
        layers, at = self._geometry.num_layers, _HEAD.size + length * _CELL_BYTES
        if len(blob) != self.blob_bytes(length) or _HEAD.unpack_from(blob.data)[0::2] != (_MAGIC, 1):
            raise _foreign()
        if _HEAD.unpack_from(blob.data)[3] != length or _LAYERS.unpack_from(blob.data, at) != (
            self._transposed,
            layers,
        ):
            raise _foreign()
        cells = blob[_HEAD.size : at].view("<i4").reshape(length, 3)
        order = np.argsort(cells[:, 0], kind="stable")
        at += _LAYERS.size
        matrices = []
        for index in range(2 * layers):
            columns = self._transposed and index >= layers
            if self._head(columns) != bytes(blob[at : at + _ROWS.size]):
                raise _foreign()
            at += _ROWS.size
            items = blob[at : at + length * self._row].view(self._kind.dtype)
            rows = items.reshape(-1, length).T if columns else items.reshape(length, -1)  # (n, H width)
            heads = rows[order].reshape(length, self._geometry.num_kv_heads, -1).transpose(1, 0, 2)
            matrices.append(np.ascontiguousarray(heads))
            at += length * self._row
        return CopiedRows(length, tuple(matrices[:layers]), tuple(matrices[layers:]), self._kind.name)

    def encode(self, snapshot: CacheSnapshot, start: int, sequence: int) -> NDArray[np.uint8]:  # (bytes,)
        """The copy that puts a snapshot's rows at the positions from `start` on; the snapshot fits the model."""
        length, layers = snapshot.length, self._geometry.num_layers
        blob = np.empty(self.blob_bytes(length), np.uint8)
        _HEAD.pack_into(blob.data, 0, _MAGIC, sequence, 1, length)
        at = _HEAD.size + length * _CELL_BYTES
        cells = blob[_HEAD.size : at].view("<i4").reshape(length, 3)
        cells[:, 0] = np.arange(start, start + length)
        cells[:, 1:] = 1, sequence
        _LAYERS.pack_into(blob.data, at, self._transposed, layers)
        at += _LAYERS.size
        for index, matrix in enumerate((*snapshot.keys, *snapshot.values)):
            columns = self._transposed and index >= layers
            blob[at : at + _ROWS.size] = np.frombuffer(self._head(columns), np.uint8)
            at += _ROWS.size
            items = blob[at : at + length * self._row].view(self._kind.dtype)
            heads = (self._geometry.num_kv_heads, -1)
            if columns:
                items.reshape(*heads, length)[...] = matrix.transpose(0, 2, 1)
            else:
                items.reshape(length, *heads)[...] = matrix.transpose(1, 0, 2)
            at += length * self._row
        return blob

    def _head(self, columns: bool) -> bytes:
        """What stands before the rows of a layer's matrix."""
        kind = _TYPES[self._kind.name]
        if not columns:
            return _ROWS.pack(kind, self._row)
        width = np.dtype(self._kind.dtype).itemsize
        return _COLUMNS.pack(kind, width, self._row // width)

    def load(self, rows: NDArray[Any], *, keys: bool) -> Floats:  # (H, n, width) -> (H, n, h), a copy
        """The numbers that rows stand for, as they were before the cache turned them."""
        floats = load_rows(self._kind, rows, None)
        return self._turn(floats, keys) if self._turns else np.array(floats, np.float32)

    def store(self, floats: Floats, *, keys: bool) -> NDArray[Any]:  # (H, n, h) -> (H, n, width)
        """Rows as the cache holds them."""
        floats = np.ascontiguousarray(floats, np.float32)
        return store_rows(self._kind, self._turn(floats, keys) if self._turns else floats, None)

    @property
    def _turns(self) -> bool:
        return self._kind.blocks and self._geometry.head_dim % _HADAMARD == 0

    def _turn(self, floats: Floats, keys: bool) -> Floats:  # (H, n, h) -> (H, n, h)
        # Keys by the largest power of two that divides the width, values by 64.
        width = self._geometry.head_dim
        size = width & -width if keys else _HADAMARD
        turned: Floats = (floats.reshape(-1, size) @ _hadamard(size)).reshape(floats.shape)
        return turned


def copied_bytes(kind: KVType, geometry: Geometry, rows: int) -> int:
    """Memory beside the snapshot while so many rows are copied out or in."""
    return StateCodec(geometry, kind.name).blob_bytes(rows)


def _foreign() -> CapabilityError:
    return CapabilityError(
        "Copies of this model's cache have parts that edgeinfer does not know.",
        "Load it without " + Setting("prefix_cache") + ", and do not save its sessions.",
    )


@cache
def _hadamard(size: int) -> Floats:  # (n, n)
    """Sylvester's matrix, orthonormal and symmetric."""
    matrix: Floats = np.ones((1, 1), np.float32)
    block = np.array([[1, 1], [1, -1]], np.float32)
    while len(matrix) < size:
        matrix = np.kron(block, matrix)
    matrix /= np.sqrt(np.float32(size))
    return matrix
