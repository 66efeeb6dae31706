"""The ONNX backend: one session over a native bundle, with the KV cache updated in place.

The graph's inputs and outputs are those of edgeinfer.bundle.graph. Facts it relies on, measured on ONNX Runtime 1.31.1:
GroupQueryAttention works in place when past and present are one buffer, so dropping
rows is passing a smaller length; a row's result does not depend on the other rows of its pass as long as there are at
least two (over a quantized cache any number), and an even number where MatMulNBits multiplies in blocks of 64 or 128.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnxruntime as ort

from edgeinfer.bundle import NATIVE, PORTABLE, Bundle, KVScales, Layout, Manifest, graph
from edgeinfer.bundle.arithmetic import rope_tables
from edgeinfer.bundle.kv_types import FLOAT32, find_kv_type
from edgeinfer.errors import BackendError, BundleError
from edgeinfer.runtime.backends.contract import (
    ForwardInput,
    ForwardOutput,
    check_pass,
)
from edgeinfer.runtime.backends.kv_buffers import KVBuffers
from edgeinfer.runtime.backends.onnx.passes import AttentionBias, Buffers, ExpertInputs, Pass, bind_cache
from edgeinfer.runtime.backends.onnx.session import OrtSession, capabilities_on
from edgeinfer.runtime.devices.arrays import device_value, device_zeros
from edgeinfer.runtime.devices.contract import CPU, CPU_MEMORY, Device
from edgeinfer.runtime.native.library import native_kernel
from edgeinfer.runtime.system.memory import MappedFile
from edgeinfer.runtime.weights.layouts import Progress, kernel_of, prepare
from edgeinfer.runtime.weights.weight_pages import LookedUp, WeightPages

__all__ = ["OnnxBackend"]

# Shapes of passes whose bindings are kept; a binding is a few kilobytes.
_MOST_PASSES = 64


class OnnxBackend:
    """Implements `contract.Backend` for native bundles.

    Args:
        bundle: an opened bundle made by the native export.
        capacity: tokens the cache may hold.
        threads: threads of the session.
        exact: pad passes so that every row is bit-identical whatever pass it is computed in.
        layout: of the weights; None takes the one that the bundle stores. Another is converted to.
        kv: type of the cache, one of edgeinfer.bundle.kv_types.
        kv_scales: that a quantized cache needs.
        weights: of the portable layout: "packed" into memory, or "mapped" from a file of them that is made once for
            this processor; the native layout is always used in place.
        progress: called while weights are converted or packed.
        device: that runs it; where it is not the CPU, the cache lives in its memory, and rows are not exact.
        affinity: as `OrtSession` takes it.

    Attributes:
        pages: of the weights' file where they are used in place.

    Raises:
        BundleError: the bundle is damaged, describes no model, or has no graph for this type of cache.
        UsageError: there are no scales for it.
        NativeUnavailableError: the native layout runs, and there is no native kernel.
        StorageError: there is no place for converted or mapped weights.
        DeviceError: the device fails.
    """

    name = "onnx"

    def __init__(
        self,
        bundle: Bundle,
        capacity: int,
        *,
        threads: int = 1,
        exact: bool = True,
        layout: Layout | None = None,
        kv: str = FLOAT32,
        kv_scales: KVScales | None = None,
        weights: str = "packed",
        progress: Progress | None = None,
        device: Device = CPU,
        affinity: str = "",
    ) -> None:
        layout = layout or bundle.manifest.layout
        decoder = bundle.manifest.decoder
        if decoder is None:
            raise BundleError(f"{bundle.path} has no model description.", "Export it again.")
        self.geometry = decoder.geometry
        self._device = device
        exact = exact and device.on_cpu
        self.capabilities = capabilities_on(device, bundle.manifest.capabilities_in(layout))
        self._window = decoder.window_size
        # Attention needs two rows to be exact; so does the LM head, but only where its kernel takes rows in pairs.
        attention = 1 if find_kv_type(kv).quantized else 2
        self._multiple = max(attention, self.capabilities.row_multiple) if exact else 1
        self._head_multiple = self.capabilities.row_multiple if exact else 1
        kernel = native_kernel() if layout == NATIVE else None
        self.kernel = kernel_of(bundle, layout)
        # Before the session, which takes long: it refuses a type without scales.
        zeros = None if device.on_cpu else device_zeros(device)
        # The operator's own window counts rows, whichever text's they are.
        if self._window and capacity + self._multiple - 1 > self._window + graph.TREE_ROWS:
            self.capabilities = dataclasses.replace(self.capabilities, branches=False)
        self.cache = KVBuffers(self.geometry, capacity, spare=self._multiple - 1, kv=kv, scales=kv_scales, zeros=zeros)
        if layout == PORTABLE and weights == "mapped":
            from edgeinfer.runtime.backends.onnx.packed_cache import prepare_packed

            self._graph = prepare_packed(bundle, progress, kv)
        else:
            self._graph = prepare(bundle, layout, progress, kv)
        self._session = OrtSession(str(self._graph.model), threads, kernel, device=device, affinity=affinity)
        self.pages = self._weight_pages(bundle.manifest)
        self._looked_up = self._watch_embedding()
        tables = rope_tables(decoder.rope, capacity + self._multiple - 1, capacity)
        self._tables = [device_value(np.ascontiguousarray(t), device) for t in tables]
        self._experts = None if decoder.moe is None else ExpertInputs(decoder.moe, decoder.num_layers)
        self._all_layers = np.ones(2 * self.geometry.num_layers, np.bool_)
        self._layer_mask = self._all_layers.copy()
        self._seqlens = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        self._planes = np.zeros(1, np.int32)
        self._bias = AttentionBias(self.cache, self._window, self._experts is not None)
        self._buffers = self._new_buffers(size=2, rows=2)
        self._passes: dict[tuple[int, int, bool, int], Pass] = {}
        self.cache.unbind = self._unbind

    def _weight_pages(self, manifest: Manifest) -> WeightPages | None:
        in_place = self._graph.layout == NATIVE or self._graph.reads is not None
        return WeightPages.of(self._graph, manifest.tensors) if in_place else None

    def _watch_embedding(self) -> LookedUp | None:
        """Drops what only loading read; the native head reads the embedding's pages anyway."""
        if self._graph.layout == NATIVE:
            return None
        file = MappedFile(self._graph.weights)
        file.release()
        return LookedUp(file if self.pages is None else self.pages.embedding())

    @property
    def run_ns(self) -> int:
        """Nanoseconds of the last pass inside onnxruntime."""
        return self._session.run_ns

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        """One pass; see `contract.Backend.forward`."""
        check_pass(self, batch)
        tokens, positions, rows = batch.tokens, batch.positions, batch.rows
        if self._window and batch.tree is not None and len(batch.tree) > graph.TREE_ROWS:
            raise BackendError(f"A draft tree of {len(batch.tree)} rows is larger than {graph.TREE_ROWS}.")
        start, size = self.cache.length, len(tokens)
        padded = -(-size // self._multiple) * self._multiple
        total = start + padded
        self.cache.reserve(total)
        padded_rows = -(-len(rows) // self._head_multiple) * self._head_multiple
        used = 0
        if self._experts is not None:
            self._experts.choose(batch.experts)
            used = int(self._experts.count[0])
        step = self._pass(padded, padded_rows, batch.hidden is not None, used)
        step.fill(tokens, positions, rows, batch.hidden, apart=self._experts is None)
        self._layer_mask[:] = self._all_layers if batch.layer_mask is None else batch.layer_mask
        self._seqlens[0] = total - 1
        self._total[...] = total
        self._planes[0] = batch.planes
        if not self._device.traits.in_place_kv:
            self._bind(step)
        self._bias.bind(step, batch.tree, batch.visibility, size, total)
        self._session.run(step.binding)
        self._swap_copies()
        self.cache.length = start + size
        if self._looked_up is not None:
            self._looked_up.rows(size)
        chosen = None if step.experts is None else step.experts[:, :size]
        return ForwardOutput(step.logits[: len(rows)], step.hidden_out[0, :size], chosen)

    def _new_buffers(self, size: int, rows: int) -> Buffers:
        return Buffers(self.geometry, size, rows, 0 if self._experts is None else self._experts.top_k)

    def _pass(self, padded: int, rows: int, resumes: bool, experts: int) -> Pass:
        key = (padded, rows, resumes, experts)
        if padded > self._buffers.size or rows > self._buffers.rows:
            size, most = max(padded, self._buffers.size), max(rows, self._buffers.rows)
            self._buffers = self._new_buffers(size, most)
            self._passes.clear()
        if key not in self._passes:
            if len(self._passes) >= _MOST_PASSES:
                self._passes.pop(next(iter(self._passes)))
            self._passes[key] = self._bind(Pass(self._buffers, *key))
        return self._passes[key]

    def _unbind(self) -> None:
        """Drops all bindings, and the memory of large passes."""
        self._passes.clear()
        self._buffers = self._new_buffers(size=2, rows=2)

    def _bind(self, step: Pass) -> Pass:
        """Binds all but the attention bias, whose shape changes with every pass."""
        step.binding = self._session.binding()
        inputs = step.inputs | {
            graph.SEQLENS_K: self._seqlens,
            graph.TOTAL_LENGTH: self._total,
            graph.LAYER_MASK: self._layer_mask,
        }
        if self.capabilities.elastic:
            inputs[graph.PLANES] = self._planes
        if self._experts is not None:
            inputs |= {graph.EXPERT_COUNT: self._experts.count, graph.EXPERT_BIAS: self._experts.bias}
        for name, array in inputs.items():
            step.binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        step.binding.bind_ortvalue_input(graph.COS_CACHE, self._tables[0])
        step.binding.bind_ortvalue_input(graph.SIN_CACHE, self._tables[1])
        bind_cache(step.binding, self.cache)
        step.binding.bind_ortvalue_output(graph.LOGITS, ort.OrtValue.ortvalue_from_numpy(step.logits))
        step.binding.bind_ortvalue_output(graph.HIDDEN_OUT, ort.OrtValue.ortvalue_from_numpy(step.hidden_out))
        if step.experts is not None:
            step.binding.bind_ortvalue_output(graph.EXPERT_IDS, ort.OrtValue.ortvalue_from_numpy(step.experts))
        return step

    def _swap_copies(self) -> None:
        """Where a device cannot update the cache in place: what the pass wrote is the cache now."""
        if not self._device.traits.in_place_kv:
            for array in (*self.cache.keys, *self.cache.values):
                array.swap()

    def cancel(self) -> None:
        """Ends the running pass from another thread."""
        self._session.cancel()

    def drop_pages(self) -> None:
        """Lets go of pages of the weights' file."""
        if self.pages is not None:
            self.pages.release()

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated, by term."""
        buffers = self._buffers.nbytes + sum(t.tensor_size_in_bytes() for t in self._tables)
        # What lies in a device's own memory is none of the process's.
        return {"kv": self.cache.nbytes if self._device.memory == CPU_MEMORY else 0, "buffers": buffers}

    def close(self) -> None:
        """Drops the session and all buffers."""
        self._passes.clear()
        if self.pages is not None:
            self.pages.close()
        # One by one: drafters and their costs refer to this backend and to each other, and are collected later.
        del self._session, self.cache, self._buffers, self._tables, self._bias
        self._graph.close()
