"""The backend of bundles exported through Optimum: each pass reads one copy of the KV cache and writes the next.

Knows the graph's inputs and outputs (edgeinfer.bundle.concat_graph); knows nothing of sampling or text. The graph
concatenates past and new keys itself, so the cache is kept twice and the copies take turns; a cancelled or failed pass
leaves the copy it read as it was. The graph computes the logits of every row. Rows of passes of different sizes agree
to rounding, not bit for bit: what attention adds up depends on the size of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.bundle import MODEL, Bundle, Geometry, concat_graph
from edgeinfer.bundle.kv_types import FLOAT32, find_kv_type
from edgeinfer.errors import BackendError, BundleError, CapabilityError, UsageError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import (
    CacheSnapshot,
    Edit,
    ForwardInput,
    ForwardOutput,
    check_pass,
    check_snapshot,
)
from edgeinfer.runtime.backends.onnx.session import OrtSession
from edgeinfer.runtime.system.memory import MappedFile

__all__ = ["ConcatBackend"]


class ConcatBackend:
    """Implements `contracts.Backend` for graphs whose cache grows by concatenation; chains only.

    Args:
        bundle: an opened bundle made by the optimum export.
        capacity: tokens the cache may hold.
        threads: threads of the session.
        kv: type of the cache, of which only float32 is possible.

    Raises:
        BundleError: the model file cannot be loaded, or has other inputs or outputs.
        UsageError: another type of cache is asked for.
    """

    name = "onnx-optimum"
    kernel = "onnxruntime"

    def __init__(self, bundle: Bundle, capacity: int, *, threads: int = 1, kv: str = FLOAT32) -> None:
        if find_kv_type(kv).name != FLOAT32:
            message = f"{bundle.path} was exported through optimum, so its cache cannot be {kv}."
            raise UsageError(message, "Load it with a float32 cache.")
        self.geometry = bundle.manifest.geometry
        self.capabilities = bundle.manifest.capabilities
        self.capacity = capacity
        layers = self.geometry.num_layers
        self._past, self._present = concat_graph.past_names(layers), concat_graph.present_names(layers)
        self._session = OrtSession(str(bundle.file(MODEL)), threads)
        if bundle.has(concat_graph.WEIGHTS):
            # Most weights are packed into copies; the pages they were read from have done their work.
            MappedFile(bundle.file(concat_graph.WEIGHTS)).release()
        _check_names(self._session, self._past, self._present, bundle)
        self._takes_mask = concat_graph.ATTENTION_MASK in self._session.inputs
        self._takes_positions = concat_graph.POSITION_IDS in self._session.inputs
        self._cache = _TwoCopies(self.geometry, capacity)
        self._mask = np.ones((1, capacity), np.int64)
        self._logits = np.zeros((1, self.geometry.vocab_size), np.float32)
        self._binding = self._session.binding()

    @property
    def length(self) -> int:
        """Tokens the cache holds."""
        return self._cache.length

    @property
    def run_ns(self) -> int:
        """Nanoseconds of the last pass inside onnxruntime."""
        return self._session.run_ns

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        """One pass; see `contract.Backend.forward`."""
        check_pass(self, batch)
        tokens, positions, rows = batch.tokens, batch.positions, batch.rows
        start, size = self.length, len(tokens)
        if not self._takes_positions and not np.array_equal(positions, np.arange(start, start + size)):
            raise BackendError(f"Graph counts positions itself: {positions.tolist()} do not follow row {start}.")
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
        for name, array in zip(self._past, self._cache.past(), strict=True):
            self._bind_input(name, array)
        for name, array in zip(self._present, self._cache.room(start + size), strict=True):
            self._bind_output(name, array)
        self._session.run(self._binding)
        self._cache.swap(start + size)
        return ForwardOutput(_pick(logits, rows), None)

    def _bind_input(self, name: str, array: NDArray[np.generic]) -> None:
        self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))

    def _bind_output(self, name: str, array: NDArray[np.generic]) -> None:
        self._binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))

    def truncate(self, length: int) -> None:
        """Drops all rows from `length` on; the next pass pays for it with a copy of the cache."""
        self._cache.truncate(length)

    def clear(self) -> None:
        """Drops all rows; their memory was taken at the beginning."""
        self._cache.truncate(0)

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keeps the first rows of the pass that began at `start`.

        Raises:
            CapabilityError: other rows are asked for, which only a tree needs.
        """
        if list(rows) != list(range(len(rows))):
            message = f"The {self.name} backend cannot keep rows {list(rows)} of a pass."
            raise CapabilityError(message, "Use a natively exported bundle.")
        self._cache.truncate(start + len(rows))

    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        """Copies the cache, or its rows start..stop-1."""
        return self._cache.snapshot(start, stop)

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Puts a copied cache back."""
        self._cache.restore(snapshot)

    def append(self, snapshot: CacheSnapshot) -> None:
        """Adds copied rows behind those in use, at the price of a copy of the cache."""
        self._cache.append(snapshot)

    def rewrite(self, edit: Edit) -> None:
        """Replaces the rows in use."""
        self._cache.rewrite(edit)

    def cancel(self) -> None:
        """Ends the running pass from another thread."""
        self._session.cancel()

    def drop_pages(self) -> None:
        """Does nothing: the weights are copies in memory."""

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated, by term."""
        return {"kv": self._cache.nbytes, "buffers": self._mask.nbytes + self._logits.nbytes}

    def close(self) -> None:
        """Drops the session and all buffers."""
        del self._binding, self._session, self._cache


def _check_names(session: OrtSession, past: list[str], present: list[str], bundle: Bundle) -> None:
    optional = {concat_graph.ATTENTION_MASK, concat_graph.POSITION_IDS}
    inputs = set(session.inputs) - optional
    if inputs != {concat_graph.INPUT_IDS, *past} or not {concat_graph.LOGITS, *present} <= set(session.outputs):
        message = f"{bundle.path} has a graph with other inputs or outputs than {ConcatBackend.name} drives."
        raise BundleError(message, "Leave the backend out, or export the model again.")


def _pick(logits: Floats, rows: Ints) -> Floats:  # (S, V), (R,) -> (R, V)
    """The wanted rows, as a view where they are consecutive."""
    if len(rows) == 0:
        return logits[:0]
    first = int(rows[0])
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        return logits[first : first + len(rows)]
    return logits[rows]


class _TwoCopies:
    """The KV cache twice, float32 (1, kv_heads, rows, head_dim), each array packed at the start of its memory.

    Memory beyond the packed rows is never touched, so it is not resident until the cache grows into it.
    """

    def __init__(self, geometry: Geometry, capacity: int) -> None:
        self._geometry = geometry
        self._row = geometry.num_kv_heads * geometry.head_dim
        arrays = 2 * geometry.num_layers
        self._read, self._write = (
            [np.empty(self._row * capacity, np.float32) for _ in range(arrays)] for _ in range(2)
        )
        self._packed = 0
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(a.nbytes for a in (*self._read, *self._write))

    def _views(self, arrays: list[Floats], rows: int) -> list[Floats]:
        shape = (1, self._geometry.num_kv_heads, rows, self._geometry.head_dim)
        return [a[: self._row * rows].reshape(shape) for a in arrays]

    def past(self) -> list[Floats]:  # 2 L of (1, H, P, h)
        """What the cache holds, packed: keys and values of each layer in turn."""
        if self.length != self._packed:
            held, packed = self._views(self._read, self._packed), self._views(self._write, self.length)
            for old, new in zip(held, packed, strict=True):
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

    def truncate(self, length: int) -> None:
        """Forgets all rows from `length` on."""
        if not 0 <= length <= self.length:
            raise BackendError(f"Cannot truncate a cache of {self.length} tokens to {length}.")
        self.length = length

    def snapshot(self, start: int, stop: int | None) -> CacheSnapshot:
        """Copies the rows in use, or start..stop-1 of them."""
        stop = self.length if stop is None else stop
        if not 0 <= start <= stop <= self.length:
            raise BackendError(f"Cannot copy rows {start} to {stop} of a cache of {self.length} tokens.")
        arrays = [a[0, :, start:stop].copy() for a in self._views(self._read, self._packed)]
        return CacheSnapshot(stop - start, tuple(arrays[::2]), tuple(arrays[1::2]))

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Puts a copy back."""
        check_snapshot(snapshot, self._geometry, self._read[0].size // self._row)
        self.length = 0
        self.append(snapshot)

    def append(self, snapshot: CacheSnapshot) -> None:
        """Adds copied rows behind those in use."""
        start, stop = self.length, self.length + snapshot.length
        check_snapshot(snapshot, self._geometry, self._read[0].size // self._row - start)
        copies = [a for pair in zip(snapshot.keys, snapshot.values, strict=True) for a in pair]
        held = self._views(self._read, self._packed)
        for mine, old, copied in zip(self._views(self._write, stop), held, copies, strict=True):
            mine[0, :, :start] = old[0, :, :start]
            mine[0, :, start:] = copied
        self.swap(stop)

    def rewrite(self, edit: Edit) -> None:
        """Replaces the rows in use; see `contracts.Backend.rewrite`."""
        held, left = self.length, None
        read = self._views(self._read, self._packed)
        self.length = 0
        for layer in range(self._geometry.num_layers):
            edited = edit(layer, *(a[0, :, :held].copy() for a in read[2 * layer : 2 * layer + 2]))
            left = edited[0].shape[1] if left is None else left
            shape = (self._geometry.num_kv_heads, left, self._geometry.head_dim)
            if any(a.shape != shape for a in edited) or left > held:
                raise BackendError(f"An edit of {held} rows returned {edited[0].shape} and {edited[1].shape}.")
            for mine, rows in zip(self._views(self._write[2 * layer : 2 * layer + 2], left), edited, strict=True):
                mine[0] = rows
        self.swap(left or 0)
