"""The backend of static bundles: passes are cut into runs of graphs of fixed shapes, padded, and masked.

The graphs' inputs and outputs are those of edgeinfer.bundle.static_graph. The cache is
the runtime's, in ordinary memory, read by all graphs; new keys and values are copied into it after a run. As a graph
puts new rows at their places before it sums over them, drafts of any shape are verified, and rows do not depend on how
a chain is cut into passes: bit for bit on the CPU from two rows on, and elsewhere as far as the device's own kernels
keep to that within one graph. Sessions are made when they are first needed.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from edgeinfer.bundle.arithmetic import rope_tables
from edgeinfer.bundle.geometry import FLOAT32, find_kv_type
from edgeinfer.bundle.layouts import WEIGHTS
from edgeinfer.bundle.static_graph import StaticGraph
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import BackendError, BundleError, Setting, UsageError
from edgeinfer.runtime.backends.contract import (
    ForwardInput,
    ForwardOutput,
    check_pass,
)
from edgeinfer.runtime.backends.kv_buffers import KVBuffers
from edgeinfer.runtime.backends.onnx.session import OrtSession
from edgeinfer.runtime.backends.static.passes import Run, choose_graphs
from edgeinfer.runtime.backends.static.session import StaticSession, check_graph_file
from edgeinfer.runtime.backends.visibility import visible_rows
from edgeinfer.runtime.devices.contract import CPU, Device
from edgeinfer.runtime.system.memory import MappedFile, release_code


class StaticBackend:
    """Implements `contract.Backend` for static bundles.

    Args:
        bundle: an opened bundle made by the static export.
        capacity: tokens the cache may hold, at most as many as the graphs' caches have rows.
        threads: threads of each session.
        device: that runs the graphs.
        affinity: of threads, as `OrtSession` takes it.
        exact: use such graphs only whose rows are bit-identical, as `passes.choose_graphs` says.
        rows: of the widest pass that is no prompt; None for any.
        chunk: prompt tokens per pass; None for as many as the graph for prompts takes.
        kv: type of the cache, of which only float32 is possible.

    Raises:
        BundleError: the bundle is damaged, is not static, or its graphs are not as it describes.
        UsageError: another type of cache, or more capacity, is asked for.
        DeviceError: the device fails.
    """

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
        kv: str = FLOAT32,
    ) -> None:
        static, decoder = bundle.manifest.static, bundle.manifest.decoder
        if static is None or decoder is None:
            message = f"{bundle.path} has no static graphs."
            raise BundleError(message, "Leave the backend out, or export the model with --static.")
        if find_kv_type(kv).name != FLOAT32:
            raise UsageError(
                f"A static bundle cannot use a KV cache of type {kv}.", "Load it with " + Setting("kv", "float32") + "."
            )
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
        self._paths = {graph: check_graph_file(bundle, graph, decoder) for graph in self.graphs.all}
        self.cache = KVBuffers(self.geometry, capacity, spare=static.context - capacity, fixed=True)
        self._tables = rope_tables(decoder.rope, capacity, capacity)
        self._logits = np.zeros((1, self.geometry.vocab_size), np.float32)
        self._sessions: dict[StaticGraph, StaticSession] = {}
        self._running: StaticSession | None = None
        # Here, where a caller expects a device to fail, and not in the first pass.
        self._session(self.graphs.narrow[0])

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        """One pass; see `contract.Backend.forward`."""
        check_pass(self, batch)
        tokens, positions, rows = batch.tokens, batch.positions, batch.rows
        if not 0 <= int(positions.min()) <= int(positions.max()) < self.cache.capacity:
            raise BackendError(f"Positions {positions.tolist()} are outside a cache of {self.cache.capacity} tokens.")
        start, size = self.cache.length, len(tokens)
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
            self._take(session, run, start)
            logits[here] = session.logits[:1] if run.graph.prompts else session.logits[wanted]
        self.cache.length = start + size
        return ForwardOutput(logits, None)

    def _take(self, session: StaticSession, run: Run, start: int) -> None:
        """Copies what a run computed into the cache."""
        count = run.stop - run.start
        for layer in range(self.geometry.num_layers):
            keys, values = session.new(layer)
            self.cache.write(layer, start + run.start, keys[:, :count], values[:, :count])

    def _session(self, graph: StaticGraph) -> StaticSession:
        if graph not in self._sessions:
            path = self._paths[graph]
            session = OrtSession(path, self._threads, device=self._device, affinity=self._affinity)
            made = StaticSession(session, graph, self._spec)
            made.bind_cache(self.cache.keys, self.cache.values)
            self._sessions[graph] = made
            # Making it ran through much of onnxruntime, running needs a part of it, which comes back by itself.
            release_code()
            # Weights are packed into copies; the pages they were read from have done their work.
            MappedFile(self._bundle.path / WEIGHTS).release()
        return self._sessions[graph]

    def cancel(self) -> None:
        """Ends the running pass from another thread."""
        running = self._running
        if running is not None:
            running.cancel()

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated, by term."""
        buffers = sum(session.nbytes for session in self._sessions.values())
        return {"kv": self.cache.nbytes, "buffers": buffers + sum(t.nbytes for t in self._tables) + self._logits.nbytes}

    def close(self) -> None:
        """Drops the sessions and all buffers."""
        self._running = None
        del self._sessions, self.cache, self._tables, self._logits


def kernel_of(bundle: Bundle) -> str:
    """What multiplies: operators of whatever provider runs them."""
    return "DequantizeLinear" if any(t.bits < 32 for t in bundle.manifest.tensors) else "MatMul"
