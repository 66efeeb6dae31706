"""Common base of the backends of our own ONNX graphs: one session, its weights' pages, passes bound to reused buffers.
The graph's inputs and outputs are those of edgeinfer.bundle.graph. What attention reads besides, and the cache, are
those of each backend."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.bundle import graph
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.layouts import NATIVE, Layout
from edgeinfer.bundle.parts import MoESpec, with_sources
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.core.errors import BackendError, BundleError
from edgeinfer.nn.arithmetic import query_factors, rope_tables, rotation_border
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ExpertChoice, Pass, PassResult
from edgeinfer.runtime.backends.onnx.adapters import PackedAdapters, adapted_graph
from edgeinfer.runtime.backends.onnx.session import Binding, OrtSession, capabilities_on
from edgeinfer.runtime.devices.arrays import device_value
from edgeinfer.runtime.devices.providers import CPU, Device
from edgeinfer.runtime.native.library import native_kernel
from edgeinfer.runtime.system.memory import MappedFile
from edgeinfer.runtime.weights.layouts import Progress, kernel_of, prepare
from edgeinfer.runtime.weights.weight_pages import LookedUp, WeightPages

# Shapes of passes whose bindings are kept; a binding is a few kilobytes.
_MOST_PASSES = 64


class Buffers:
    """Memory for inputs and outputs of passes of up to `size` tokens and `rows` logit rows, shared by all shapes.
    `top_k` and `tapped`, the width of what is read of the target, are 0 in models without."""

    def __init__(self, geometry: Geometry, size: int, rows: int, top_k: int, tapped: int = 0, logits: int = 0) -> None:
        self.size, self.rows, self.layers = size, rows, geometry.num_layers
        self.tokens = np.zeros((1, size), np.int64)
        self.positions = np.zeros((1, size), np.int64)
        self.logit_rows = np.zeros(rows, np.int64)
        self.hidden_in = np.zeros((1, size, geometry.hidden_size), np.float32)
        self.hidden_out = np.zeros((1, size, geometry.hidden_size), np.float32)
        self.logits = np.zeros((rows, logits or geometry.vocab_size), np.float32)
        self.tapped = np.zeros((1, size, tapped), np.float32)
        self.experts = np.zeros(geometry.num_layers * size * top_k, np.int64)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))


class BoundPass:
    """Views into the shared buffers for passes of one shape, and their binding."""

    binding: Binding
    bound: object = None  # whose rows attention reads: what is bound to lives as long as this is kept

    def __init__(self, buffers: Buffers, size: int, rows: int, resumes: bool, experts: int, block: int = 0) -> None:
        self._tokens = buffers.tokens[:, :size]
        self.positions = buffers.positions[0, :size]
        self._positions = buffers.positions[:, :size]
        self._rows = buffers.logit_rows[:rows]
        self._hidden = buffers.hidden_in[:, : size if resumes else 1]
        self.logits = buffers.logits[:rows]  # (R, V)
        self.tapped = buffers.tapped[:, : size - block]  # (1, S - block, W)
        self.hidden_out = buffers.hidden_out[:, :size]  # (1, S, D)
        chosen = (buffers.layers, size, experts)
        self.experts = buffers.experts[: math.prod(chosen)].reshape(chosen) if experts else None  # (L, S, k)
        self.inputs: dict[str, NDArray[Any]] = {
            graph.INPUT_IDS: self._tokens,
            graph.POSITION_IDS: self._positions,
            graph.LOGIT_ROWS: self._rows,
            graph.HIDDEN_IN: self._hidden,
            graph.USE_HIDDEN: np.array([resumes]),
        }

    def fill(self, tokens: Ints, positions: Ints, rows: Ints, hidden: Floats | None, *, apart: bool) -> None:
        """Writes the inputs of the next pass; padding repeats the last token, at the positions that follow if `apart`,
        else at its own."""
        size = len(tokens)
        self._tokens[0, :size] = tokens
        self._positions[0, :size] = positions
        self._rows[: len(rows)] = rows
        self._rows[len(rows) :] = 0
        for extra in range(self._tokens.shape[1] - size):
            self._tokens[0, size + extra] = tokens[-1]
            self._positions[0, size + extra] = positions[-1] + (1 + extra if apart else 0)
        if hidden is not None:
            self._hidden[0, :size] = hidden
            self._hidden[0, size:] = hidden[-1]

    def fill_tapped(self, tapped: Floats) -> None:  # (S, W)
        """Writes what a draft module reads of its target's rows; padding repeats the last."""
        self.tapped[0, : len(tapped)] = tapped
        self.tapped[0, len(tapped) :] = tapped[-1]


class ExpertInputs:
    """Arrays that stay where they are, so that they are bound once; a pass that chooses nothing writes one number."""

    def __init__(self, moe: MoESpec, layers: int) -> None:
        self.top_k = moe.top_k  # experts of a token in the whole model
        self.count = np.full(1, moe.top_k, np.int64)  # experts for each token. (1,)
        self.bias = np.zeros((layers, moe.experts), np.float32)  # added to the routers' scores before choosing. (L, E)
        self._biased = False

    def choose(self, choice: ExpertChoice | None) -> None:
        """Sets what the next pass may use; None is the whole model."""
        bias = None if choice is None else choice.bias
        if bias is not None and bias.shape != self.bias.shape:
            raise BackendError(f"A bias of experts of shape {bias.shape} does not fit {self.bias.shape}.")
        self.count[0] = self.top_k if choice is None else choice.count
        if bias is not None:
            self.bias[...] = bias
        elif self._biased:
            self.bias[...] = 0
        self._biased = bias is not None


class GraphBackend(Backend):
    """Implements `contract.Backend` but for caches and `forward`, whose steps these are."""

    name = "onnx"

    def __init__(
        self,
        bundle: Bundle,
        capacity: int,
        *,
        places: int,
        threads: int,
        layout: Layout,
        progress: Progress | None = None,
        device: Device = CPU,
        affinity: str = "",
        adapters: PackedAdapters | None = None,
    ) -> None:
        super().__init__()
        decoder = bundle.manifest.decoder
        if decoder is None:
            raise BundleError(f"{bundle.path} has no model description.", "Export it again.")
        self.geometry = decoder.geometry
        self._device = device
        self.capabilities = capabilities_on(device, bundle.manifest.capabilities_in(layout))
        self.kernel = kernel_of(bundle, layout)
        self._graph = prepare(bundle, layout, progress)
        kernel = native_kernel() if layout == NATIVE else None
        self._module = bundle.manifest.module
        self._tapped = len(bundle.manifest.taps) * decoder.hidden_size
        # A draft module's graph reads what it shares in the bundle around it, which a model of a path may not leave.
        around = None if self._module is None else bundle.path.parent
        model = str(self._graph.model) if around is None else self._graph.model.read_bytes()
        if adapters is not None:
            model, around = self._graph.model.read_bytes(), self._graph.model.parent
            model = adapted_graph(model, bundle.manifest, adapters)
        self._session = OrtSession(model, threads, kernel, device=device, affinity=affinity, folder=around)
        self.pages: WeightPages | None = None  # pages of the weights' file where it is used in place
        if layout == NATIVE:
            self.pages = WeightPages(self._graph.weights, tensors_in(bundle.manifest, NATIVE))
            self.pages.large_pages()
        self._decoder, self._places = decoder, places
        self._looked_up = self._watch_embedding()
        self.rotation_border = rotation_border(decoder.ropes, capacity)
        self.rotates_long = self.rotation_border is not None
        self._tables = self._rotary_tables(capacity)
        self._experts = None if decoder.moe is None else ExpertInputs(decoder.moe, decoder.num_layers)
        self._layer_mask = np.ones(2 * self.geometry.num_layers, np.bool_)
        self._planes = np.zeros(1, np.int32)
        self._buffers = self._new_buffers(size=2, rows=2)
        self._passes: dict[tuple[int, int, bool, int, int], BoundPass] = {}

    def _watch_embedding(self) -> LookedUp | None:
        """Release pages that only loading read, and watch the embedding; the native head reads all of it anyway."""
        if self._graph.layout == NATIVE:
            return None if self._decoder.per_layer is None or self.pages is None else LookedUp(self.pages.per_layer())
        file = MappedFile(self._graph.weights)
        file.release()
        return LookedUp(file)

    def rotate_long(self, long: bool) -> None:
        if self.rotation_border is None or long == self.rotates_long:
            return
        self.rotates_long = long
        self._tables = self._rotary_tables(self._places if long else self.rotation_border)
        self._passes.clear()

    def _rotary_tables(self, context: int) -> dict[str, ort.OrtValue]:
        """The inputs that say what positions mean, for texts of so many tokens."""
        tables = _tables(self._decoder, self._places, context)
        return {name: device_value(table, self._device) for name, table in tables}

    @abstractmethod
    def _attention_inputs(self, step: BoundPass) -> dict[str, NDArray[Any]]:
        """Inputs of attention whose arrays are the same for every pass of a shape."""

    def _prepared(self, batch: Pass, size: int, rows: int, *, apart: bool) -> BoundPass:
        """A pass of so many rows, padding included, ready to run but for what attention reads; see `BoundPass.fill`."""
        used = 0
        if self._experts is not None:
            self._experts.choose(batch.experts)
            used = int(self._experts.count[0])
        step = self._pass(size, rows, batch.hidden is not None, used, batch.block or 0)
        step.fill(batch.tokens, batch.positions, batch.rows, batch.hidden, apart=apart)
        if batch.tapped is not None:
            step.fill_tapped(batch.tapped)
        mask, sources = batch.layer_mask, self._decoder.kv_sources if batch.hidden is None else ()
        self._layer_mask[:] = True if mask is None else with_sources(sources, mask)
        self._planes[0] = batch.planes
        return step

    def _output(self, step: BoundPass, size: int, rows: int) -> PassResult:
        """The results of the pass that ran, without its padding."""
        if self._looked_up is not None:
            self._looked_up.rows(size)
        chosen = None if step.experts is None else step.experts[:, :size]
        tapped = step.tapped[0, :size] if self._tapped else None
        return PassResult(step.logits[:rows], step.hidden_out[0, :size], chosen, tapped)

    def _new_buffers(self, size: int, rows: int) -> Buffers:
        top_k = 0 if self._experts is None else self._experts.top_k
        if self._module is None:
            return Buffers(self.geometry, size, rows, top_k, self._tapped)
        return Buffers(self.geometry, size, rows, top_k, self._module.width, self._module.vocab_size)

    def _pass(self, size: int, rows: int, resumes: bool, experts: int, block: int) -> BoundPass:
        key = (size, rows, resumes, experts, block)
        step = self._passes.get(key)
        if step is not None:
            return step
        if size > self._buffers.size or rows > self._buffers.rows:
            self._buffers = self._new_buffers(max(size, self._buffers.size), max(rows, self._buffers.rows))
            self._passes.clear()
        if len(self._passes) >= _MOST_PASSES:
            self._passes.pop(next(iter(self._passes)))
        step = self._passes[key] = self._bind(BoundPass(self._buffers, *key))
        return step

    def _unbind(self) -> None:
        """Drops all bindings, and the memory of large passes."""
        self._passes.clear()
        self._buffers = self._new_buffers(size=2, rows=2)

    def _bind(self, step: BoundPass) -> BoundPass:
        """Bind all inputs and outputs of passes of one shape."""
        step.binding = self._session.binding()
        inputs = {**step.inputs, graph.LAYER_MASK: self._layer_mask, **self._attention_inputs(step)}
        if self.capabilities.high_planes:
            inputs[graph.PLANES] = self._planes
        if self._experts is not None:
            inputs |= {graph.EXPERT_COUNT: self._experts.count, graph.EXPERT_BIAS: self._experts.bias}
        for name, array in inputs.items():
            bind_input(step.binding, name, array)
        for name, table in self._tables.items():
            step.binding.bind_ortvalue_input(name, table)
        if self._module is not None:
            bind_input(step.binding, graph.TAPPED, step.tapped)
        elif self._tapped:
            step.binding.bind_ortvalue_output(graph.TAPPED, ort.OrtValue.ortvalue_from_numpy(step.tapped))
        step.binding.bind_ortvalue_output(graph.LOGITS, ort.OrtValue.ortvalue_from_numpy(step.logits))
        step.binding.bind_ortvalue_output(graph.HIDDEN_OUT, ort.OrtValue.ortvalue_from_numpy(step.hidden_out))
        if step.experts is not None:
            step.binding.bind_ortvalue_output(graph.EXPERT_IDS, ort.OrtValue.ortvalue_from_numpy(step.experts))
        return step

    def cancel(self) -> None:
        self._session.cancel()

    @property
    def _buffer_bytes(self) -> int:
        return self._buffers.nbytes + sum(int(t.tensor_size_in_bytes()) for t in self._tables.values())

    def close(self) -> None:
        self._passes.clear()
        if self.pages is not None:
            self.pages.close()
        # One by one: drafters and their costs refer to this backend and to each other, and are collected later.
        del self._session, self._buffers, self._tables
        MappedFile.forget(self._graph.weights)
        self._graph.close()


def _tables(decoder: DecoderSpec, rows: int, context: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Tables that attention looks positions up in, by input: all rotations, and factors of queries."""
    for index, rope in enumerate(decoder.ropes):
        for name, table in zip(graph.rotary_names(index), rope_tables(rope, rows, context), strict=True):
            yield name, np.ascontiguousarray(table)
    factored = [rope for rope in decoder.ropes if rope.query_beta]
    if factored:
        yield graph.QUERY_FACTORS, query_factors(factored[0], np.arange(rows))[:, None]


def bind_input(binding: Binding, name: str, array: NDArray[Any]) -> None:
    """Binds an input to an array, which is read where it lies."""
    binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
