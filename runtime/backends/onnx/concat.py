"""The backend of bundles exported through Optimum: each pass reads one copy of the KV cache and writes the next.

The graph's inputs and outputs are those of edgeinfer.bundle.concat_graph. The graph
concatenates past and new keys itself, so the cache is kept twice and the copies take turns; a cancelled or failed pass
leaves the copy it read as it was. The graph computes the logits of every row. Rows of passes of different sizes agree
to rounding, not bit for bit: what attention adds up depends on the size of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.bundle import concat_graph
from edgeinfer.bundle.geometry import FLOAT32, Geometry, find_kv_type
from edgeinfer.bundle.layouts import MODEL
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import BackendError, BundleError, CapabilityError, UsageError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import (
    CacheSnapshot,
    CopiedRows,
    Edit,
    TrimmedCache,
    check_edit,
    check_length,
    check_snapshot,
    row_range,
)
from edgeinfer.runtime.backends.contract import (
    ForwardInput,
    ForwardOutput,
    check_pass,
)
from edgeinfer.runtime.backends.onnx.session import OrtSession
from edgeinfer.runtime.system.memory import MappedFile


class ConcatCache(TrimmedCache):
    """Implements `KVCache` by two copies, float32 (1, kv_heads, rows, head_dim), each array packed at the
    start of its memory.

    Memory beyond the packed rows is never touched, so the system gives it none until the cache grows into it.
    """

    copyable = True

    def __init__(self, geometry: Geometry, capacity: int) -> None:
        self._geometry = geometry
        self.capacity = capacity
        self._row = geometry.num_kv_heads * geometry.head_dim
        arrays = 2 * geometry.num_layers
        self._read, self._write = (
            [np.empty(self._row * capacity, np.float32) for _ in range(arrays)] for _ in range(2)
        )
        self._packed = 0
        self.length = 0

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self._read, *self._write))

    def _views(self, arrays: list[Floats], rows: int) -> list[Floats]:
        shape = (1, self._geometry.num_kv_heads, rows, self._geometry.head_dim)
        return [a[: self._row * rows].reshape(shape) for a in arrays]

    def past(self) -> list[Floats]:  # 2 L of (1, H, P, h)
        """What the cache holds, packed: keys and values of each layer in turn."""
        if self.length != self._packed:
            cached, packed = self._views(self._read, self._packed), self._views(self._write, self.length)
            for old, new in zip(cached, packed, strict=True):
                new[...] = old[:, :, : self.length]
            self.swap(self.length)
        return self._views(self._read, self.length)

    def room(self, rows: int) -> list[Floats]:  # 2 L of (1, H, rows, h)
        """Where the next pass writes; call `swap` when it has."""
        return self._views(self._write, rows)

    def swap(self, rows: int) -> None:
        """Makes what was written, with this many rows, the cache."""
        self._read, self._write = self._write, self._read
        self._packed = self.length = rows

    def trim(self, length: int) -> None:
        check_length(length, self.length)
        self.length = length

    def clear(self) -> None:
        self.length = 0

    def keep(self, start: int, rows: Sequence[int]) -> None:
        if list(rows) != list(range(len(rows))):
            message = f"The onnx-optimum backend cannot keep rows {list(rows)} of a pass."
            raise CapabilityError(message, "Use a natively exported bundle.")
        self.trim(start + len(rows))

    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        start, stop = row_range(start, stop, self.length)
        arrays = [a[0, :, start:stop].copy() for a in self._views(self._read, self._packed)]
        return CopiedRows(stop - start, tuple(arrays[::2]), tuple(arrays[1::2]))

    def restore(self, snapshot: CacheSnapshot) -> None:
        check_snapshot(snapshot, self._geometry, self.capacity)
        self.length = 0
        self.append(snapshot)

    def append(self, snapshot: CacheSnapshot) -> None:
        start, stop = self.length, self.length + snapshot.length
        check_snapshot(snapshot, self._geometry, self.capacity - start)
        copies = [a for pair in zip(snapshot.keys, snapshot.values, strict=True) for a in pair]
        cached = self._views(self._read, self._packed)
        for mine, old, copied in zip(self._views(self._write, stop), cached, copies, strict=True):
            mine[0, :, :start] = old[0, :, :start]
            mine[0, :, start:] = copied
        self.swap(stop)

    def rewrite(self, edit: Edit) -> None:
        rows, left = self.length, None
        read = self._views(self._read, self._packed)
        self.length = 0
        for layer in range(self._geometry.num_layers):
            keys, values = (a[0, :, :rows].copy() for a in read[2 * layer : 2 * layer + 2])
            edited = edit(layer, keys, values)
            left = check_edit(self._geometry.kept[layer], layer, edited, rows, left)
            for mine, new in zip(self._views(self._write[2 * layer : 2 * layer + 2], left), edited, strict=True):
                mine[0] = new
        self.swap(left or 0)


class ConcatBackend:
    """Implements `contract.Backend` for graphs whose cache grows by concatenation; chains only."""

    name = "onnx-optimum"
    kernel = "onnxruntime"

    def __init__(self, bundle: Bundle, capacity: int, *, threads: int = 1, kv: str = FLOAT32) -> None:
        if find_kv_type(kv).name != FLOAT32:
            message = f"{bundle.path} was exported through optimum, so its KV cache cannot be {kv}."
            raise UsageError(message, "Load it with a float32 KV cache.")
        self.geometry = bundle.manifest.geometry
        self.capabilities = bundle.manifest.capabilities
        layers = self.geometry.num_layers
        self._past, self._present = concat_graph.past_names(layers), concat_graph.present_names(layers)
        self._session = OrtSession(str(bundle.file(MODEL)), threads)
        if bundle.has(concat_graph.WEIGHTS):
            # Most weights are packed into copies; the pages they were read from have done their work.
            MappedFile(bundle.file(concat_graph.WEIGHTS)).release()
        _check_names(self._session, self._past, self._present, bundle)
        self._takes_mask = concat_graph.ATTENTION_MASK in self._session.inputs
        self._takes_positions = concat_graph.POSITION_IDS in self._session.inputs
        self.cache = ConcatCache(self.geometry, capacity)
        self._mask = np.ones((1, capacity), np.int64)
        self._logits = np.zeros((1, self.geometry.vocab_size), np.float32)
        self._binding = self._session.binding()

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        check_pass(self, batch)
        tokens, positions, rows = batch.tokens, batch.positions, batch.rows
        start, size = self.cache.length, len(tokens)
        if not self._takes_positions and not np.array_equal(positions, np.arange(start, start + size)):
            raise BackendError(f"The graph counts positions itself: {positions.tolist()} do not follow row {start}.")
        if size > len(self._logits):
            self._logits = np.zeros((size, self.geometry.vocab_size), np.float32)
        logits = self._logits[:size]  # (S, V)
        ids, places = (np.ascontiguousarray(a, np.int64)[None] for a in (tokens, positions))
        self._bind_input(concat_graph.INPUT_IDS, ids)
        if self._takes_mask:
            self._bind_input(concat_graph.ATTENTION_MASK, self._mask[:, : start + size])
        if self._takes_positions:
            self._bind_input(concat_graph.POSITION_IDS, places)
        self._bind_output(concat_graph.LOGITS, logits[None])
        for name, array in zip(self._past, self.cache.past(), strict=True):
            self._bind_input(name, array)
        for name, array in zip(self._present, self.cache.room(start + size), strict=True):
            self._bind_output(name, array)
        self._session.run(self._binding)
        self.cache.swap(start + size)
        return ForwardOutput(_pick(logits, rows), None)

    def _bind_input(self, name: str, array: NDArray[np.generic]) -> None:
        self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))

    def _bind_output(self, name: str, array: NDArray[np.generic]) -> None:
        self._binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))

    def cancel(self) -> None:
        self._session.cancel()

    def nbytes(self) -> dict[str, int]:
        return {"kv": self.cache.nbytes, "buffers": self._mask.nbytes + self._logits.nbytes}

    def close(self) -> None:
        del self._binding, self._session, self.cache


def _check_names(session: OrtSession, past: list[str], present: list[str], bundle: Bundle) -> None:
    optional = {concat_graph.ATTENTION_MASK, concat_graph.POSITION_IDS}
    inputs = set(session.inputs) - optional
    if inputs != {concat_graph.INPUT_IDS, *past} or not {concat_graph.LOGITS, *present} <= set(session.outputs):
        message = (
            f"The graph of {bundle.path} has inputs or outputs that the {ConcatBackend.name} backend does not support."
        )
        raise BundleError(message, "Leave the backend out, or export the model again.")


def _pick(logits: Floats, rows: Ints) -> Floats:  # (S, V), (R,) -> (R, V)
    """The wanted rows, as a view where they are consecutive."""
    if len(rows) == 0:
        return logits[:0]
    first = int(rows[0])
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        return logits[first : first + len(rows)]
    return logits[rows]
