"""The backend of bundles exported through Optimum, whose graphs concatenate past and new keys themselves.

The graph's inputs and outputs are listed in edgeinfer.bundle.concat_graph. A pass reads the cache and writes a new one,
so a cancelled or failed pass leaves it as it was. The graph computes the logits of every row. Rows of passes of
different sizes agree to rounding, not bit for bit: attention sums in an order that depends on the size of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.bundle import concat_graph
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.layouts import MODEL
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BackendError, BundleError, CapabilityError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import CacheSnapshot, check_snapshot
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult
from edgeinfer.runtime.backends.forks import OneSequenceBackend
from edgeinfer.runtime.backends.kv_buffers import FloatCache
from edgeinfer.runtime.backends.onnx.session import OrtSession
from edgeinfer.runtime.system.memory import MappedFile


class ConcatCache(FloatCache):
    """Implements `KVCache` by the outputs of the last pass; rows behind the length are cut off before a pass."""

    def __init__(self, geometry: Geometry, capacity: int) -> None:
        super().__init__(geometry, capacity)
        self.clear()

    def empty(self, rows: int) -> list[Floats]:  # 2 L of (1, H, rows, h)
        """Arrays for the outputs of a pass."""
        shape = (1, self._geometry.num_kv_heads, rows, self._geometry.head_dim)
        return [np.empty(shape, np.float32) for _ in range(2 * self._geometry.num_layers)]

    def past(self) -> list[Floats]:  # 2 L of (1, H, length, h)
        """The rows in use: the keys of all layers, then the values."""
        self.replace([np.ascontiguousarray(a[:, :, : self.length]) for a in (*self.keys, *self.values)])
        return [*self.keys, *self.values]

    def replace(self, arrays: list[Floats]) -> None:
        layers = self._geometry.num_layers
        self.keys, self.values, self.length = arrays[:layers], arrays[layers:], arrays[0].shape[2]

    def clear(self) -> None:
        self.replace(self.empty(0))

    def _keep(self, start: int, rows: Sequence[int]) -> None:
        if list(rows) != list(range(len(rows))):
            message = f"The onnx-optimum backend cannot keep rows {list(rows)} of a pass."
            raise CapabilityError(message, "Use a natively exported bundle.")
        self.trim(start + len(rows))

    def append(self, snapshot: CacheSnapshot) -> None:
        check_snapshot(snapshot, self._geometry, self.capacity - self.length)
        both = zip(self.past(), (*snapshot.keys, *snapshot.values), strict=True)
        self.replace([np.concatenate([kept, added[None]], axis=2) for kept, added in both])


class ConcatBackend(OneSequenceBackend):
    """Implements `contract.Backend` for graphs whose cache grows by concatenation; chains only."""

    name = "onnx-optimum"
    kernel = "onnxruntime"

    def __init__(self, bundle: Bundle, capacity: int, *, threads: int = 1) -> None:
        super().__init__()
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
        self._capacity = capacity
        self._mask = np.ones((1, capacity), np.int64)
        self._logits = np.zeros((1, self.geometry.vocab_size), np.float32)
        self._binding = self._session.binding()

    def _new_cache(self, capacity: int) -> ConcatCache:
        return ConcatCache(self.geometry, capacity)

    def _run(self, cache: KVCache, batch: Pass) -> PassResult:
        assert isinstance(cache, ConcatCache), "sequences are made here"
        tokens, positions, rows = batch.tokens, batch.positions, batch.rows
        start, size = cache.length, len(tokens)
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
        for name, array in zip(self._past, cache.past(), strict=True):
            self._bind_input(name, array)
        present = cache.empty(start + size)
        for name, array in zip(self._present, present, strict=True):
            self._bind_output(name, array)
        self._session.run(self._binding)
        cache.replace(present)
        return PassResult(_pick(logits, rows), None)

    def _bind_input(self, name: str, array: NDArray[np.generic]) -> None:
        self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))

    def _bind_output(self, name: str, array: NDArray[np.generic]) -> None:
        self._binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))

    def cancel(self) -> None:
        self._session.cancel()

    def nbytes(self) -> dict[str, int]:
        return {"kv": self._kv_bytes, "buffers": self._mask.nbytes + self._logits.nbytes}

    def close(self) -> None:
        del self._binding, self._session


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
