"""The backend of static bundles: passes are cut into runs of graphs of fixed shapes, padded, and masked.

The graphs' inputs and outputs are listed in edgeinfer.bundle.static_graph. The cache is the runtime's, in ordinary
memory, read by all graphs; new keys and values are copied into it after a run. As a graph
puts new rows at their places before it sums over them, drafts of any shape are verified, and rows do not depend on how
a chain is cut into passes: bit for bit on the CPU from two rows on, and elsewhere as far as the device's own kernels
keep to that within one graph. Sessions are made when they are first needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.bundle import static_graph as io
from edgeinfer.bundle.layouts import WEIGHTS
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.static_graph import StaticGraph
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BackendError, BundleError, Setting, UsageError
from edgeinfer.nn.arithmetic import rope_tables
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult
from edgeinfer.runtime.backends.forks import OneSequenceBackend
from edgeinfer.runtime.backends.kv_buffers import KVBuffers, visible_rows
from edgeinfer.runtime.backends.onnx.session import OrtSession
from edgeinfer.runtime.backends.static.memory import Bools, Run, choose_graphs
from edgeinfer.runtime.devices.providers import CPU, Device
from edgeinfer.runtime.system.memory import MappedFile, release_code

# Hides a score from the softmax: exp underflows to exactly 0, and unlike -inf no row can become NaN. Half floats, which
# some devices compute in, reach 65504.
_HIDDEN = np.float32(-3e4)


class StaticSession:
    """Runs one graph; its results stay in its arrays until the next run."""

    def __init__(self, session: OrtSession, graph: StaticGraph, spec: DecoderSpec) -> None:
        self.graph = graph
        self._session = session
        past = {name for layer in range(spec.num_layers) for name in io.past_names(layer)}
        self._inputs = {v.name: np.zeros(v.shape, v.dtype) for v in graph.inputs(spec) if v.name not in past}
        self._outputs = {v.name: np.zeros(v.shape, v.dtype) for v in graph.outputs(spec)}
        self._inputs[io.NEW_PLACES][0, :, :, 1] = np.arange(spec.num_kv_heads)[:, None]
        self.logits: Floats = self._outputs[io.LOGITS]  # (R, V)
        self._binding = session.binding()
        for name, array in self._inputs.items():
            self._bind_input(name, array)
        for name, array in self._outputs.items():
            self._binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self._inputs.values(), *self._outputs.values()))

    def bind_cache(self, keys: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]]) -> None:
        """Reads the past from these arrays from now on, (1, H, C, h) of each layer."""
        for layer, arrays in enumerate(zip(keys, values, strict=True)):
            for name, array in zip(io.past_names(layer), arrays, strict=True):
                self._bind_input(name, array)

    def run(
        self,
        tokens: Ints,  # (n,), n <= S
        tables: tuple[Floats, Floats],  # 2 x (n, r / 2)
        seen: tuple[Bools, Bools],  # 2 x (n, T)
        start: int,
        logit_row: int,
    ) -> None:
        """Runs over new tokens that will lie from row `start` on; padding repeats the last, and is seen by no token."""
        size, inputs = len(tokens), self._inputs
        ids = inputs[io.INPUT_IDS][0]
        ids[:size], ids[size:] = tokens, tokens[-1]
        for name, table in zip((io.COS_ROWS, io.SIN_ROWS), tables, strict=True):
            inputs[name][:size], inputs[name][size:] = table, table[-1]
        for name, visible in zip((io.ATTENTION_BIAS, io.WINDOW_BIAS), seen, strict=True):
            if name in inputs:
                bias = inputs[name][0, 0]
                bias[:] = _HIDDEN
                bias[:size, : visible.shape[1]][visible] = 0
                bias[size:] = bias[size - 1]
        places = start + np.arange(self.graph.rows)
        # A full cache has no row left for padding, which repeats the last token and what is computed of it.
        places[size:][places[size:] >= self.graph.context] = start + size - 1
        inputs[io.NEW_PLACES][..., 2] = places
        if self.graph.prompts:
            inputs[io.LOGIT_ROWS][0] = logit_row
        self._session.run(self._binding)

    def new(self, layer: int) -> tuple[Floats, Floats]:  # 2 x (H, S, h)
        key, value = io.new_names(layer)
        return self._outputs[key][0], self._outputs[value][0]

    def cancel(self) -> None:
        self._session.cancel()

    def _bind_input(self, name: str, array: NDArray[Any]) -> None:
        self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))


_TYPES = {"float32": "tensor(float)", "int32": "tensor(int32)", "int64": "tensor(int64)"}  # onnxruntime's names


def _check_graph(session: OrtSession, path: Path, graph: StaticGraph, spec: DecoderSpec) -> None:
    """Refuse a graph whose inputs or outputs are not the runtime's."""
    for wanted, declared in zip((graph.inputs(spec), graph.outputs(spec)), session.declared, strict=True):
        expected = {value.name: (_TYPES[value.dtype], value.shape) for value in wanted}
        wrong = sorted(name for name in {*expected, *declared} if expected.get(name) != declared.get(name))
        if wrong:
            message = f"{path} declares other inputs or outputs than the bundle describes: {', '.join(wrong[:3])}."
            raise BundleError(message, "Export or download the bundle again.")


class StaticBackend(OneSequenceBackend):
    """Implements `contract.Backend` for static bundles; `exact` uses only graphs whose rows are bit-identical. `rows`
    limits passes that are no prompt, None for any number; `chunk` those of prompts, None for the widest graph."""

    name = "onnx-static"

    def __init__(
        self,
        bundle: Bundle,
        capacity: int,
        *,
        threads: int = 1,
        device: Device = CPU,
        affinity: str = "",
        exact: bool = True,
        rows: int | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        static, decoder = bundle.manifest.static, bundle.manifest.decoder
        if static is None or decoder is None:
            message = f"{bundle.path} has no static graphs."
            raise BundleError(message, "Leave the backend out, or export the model with --static.")
        if capacity > static.context:
            message = (
                f"{capacity} tokens do not fit the static graphs of {bundle.path}, which have a context of "
                f"{static.context}."
            )
            raise UsageError(message, "Use " + Setting("context", static.context) + " or less.")
        self.geometry = decoder.geometry
        self.capabilities = dataclasses.replace(bundle.manifest.capabilities, exact=exact)
        self.kernel = kernel_of(bundle)
        self._bundle, self._spec, self._device = bundle, decoder, device
        self._threads, self._affinity = threads, affinity
        wanted, most = rows or static.widths[-1], chunk or static.chunk
        self.graphs = choose_graphs(static, exact=exact, on_cpu=device.on_cpu, rows=wanted, chunk=most)
        self._capacity, self._context = capacity, static.context
        self._tables = rope_tables(decoder.rope, capacity, capacity)
        self._logits = np.zeros((1, self.geometry.vocab_size), np.float32)
        self._sessions: dict[StaticGraph, StaticSession] = {}
        self._running: StaticSession | None = None
        self._bound: tuple[list[Any], list[Any]] | None = None  # arrays of keys and values that graphs read
        # Here, where a caller expects a device to fail, and not in the first pass.
        self._session(self.graphs.narrow[0])

    def _new_cache(self, capacity: int) -> KVBuffers:
        self._bound = None
        cache = KVBuffers(self.geometry, capacity, spare=self._context - capacity, fixed=True)
        for session in self._sessions.values():
            session.bind_cache(cache.keys, cache.values)
        self._bound = cache.keys, cache.values
        return cache

    def _run(self, cache: KVCache, batch: Pass) -> PassResult:
        assert isinstance(cache, KVBuffers), "sequences are made here"
        tokens, positions, rows = batch.tokens, batch.positions, batch.rows
        if not 0 <= int(positions.min()) <= int(positions.max()) < self._capacity:
            raise BackendError(f"Positions {positions.tolist()} are outside a cache of {self._capacity} tokens.")
        start, size = cache.length, len(tokens)
        full = visible_rows(start, size, batch.tree)
        window = self._spec.window_size
        near = visible_rows(start, size, batch.tree, window) if window else full
        if len(rows) > len(self._logits):
            self._logits = np.zeros((len(rows), self.geometry.vocab_size), np.float32)
        logits = self._logits[: len(rows)]
        for run in self.graphs.runs(size, rows):
            session = self._running = self._session(run.graph)
            new, end = slice(run.start, run.stop), start + run.stop
            places = positions[new]
            here = np.flatnonzero((run.start <= rows) & (rows < run.stop))
            wanted = rows[here] - run.start
            session.run(
                tokens[new],
                (self._tables[0][places], self._tables[1][places]),
                (full[new, :end], near[new, :end]),
                start + run.start,
                int(wanted[0]) if len(wanted) else 0,
            )
            self._take(cache, session, run, start)
            logits[here] = session.logits[:1] if run.graph.prompts else session.logits[wanted]
        cache.length = start + size
        return PassResult(logits, None)

    def _take(self, cache: KVBuffers, session: StaticSession, run: Run, start: int) -> None:
        count = run.stop - run.start
        for layer in range(self.geometry.num_layers):
            keys, values = session.new(layer)
            cache.write(layer, start + run.start, keys[:, :count], values[:, :count])

    def _session(self, graph: StaticGraph) -> StaticSession:
        if graph not in self._sessions:
            path = self._bundle.file(graph.file)
            session = OrtSession(str(path), self._threads, device=self._device, affinity=self._affinity)
            _check_graph(session, path, graph, self._spec)
            made = StaticSession(session, graph, self._spec)
            if self._bound is not None:
                made.bind_cache(*self._bound)
            self._sessions[graph] = made
            # Making it ran through much of onnxruntime, running needs a part of it, which comes back by itself.
            release_code()
            # Weights are packed into copies; the pages they were read from have done their work.
            MappedFile(self._bundle.path / WEIGHTS).release()
        return self._sessions[graph]

    def cancel(self) -> None:
        running = self._running
        if running is not None:
            running.cancel()

    def nbytes(self) -> dict[str, int]:
        buffers = sum(session.nbytes for session in self._sessions.values())
        return {"kv": self._kv_bytes, "buffers": buffers + sum(t.nbytes for t in self._tables) + self._logits.nbytes}

    def close(self) -> None:
        self._running = None
        del self._sessions, self._bound, self._tables, self._logits


def kernel_of(bundle: Bundle) -> str:
    """What multiplies matrices: operators of whatever provider runs them."""
    return "DequantizeLinear" if any(t.bits < 32 for t in bundle.manifest.tensors) else "MatMul"
