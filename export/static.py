"""Static bundles: from a checkpoint to ONNX graphs of fixed shapes, as edgeinfer.bundle.static_graph describes them."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import onnx

from edgeinfer.bundle import static_graph as io
from edgeinfer.bundle.codecs import CODECS
from edgeinfer.bundle.layouts import LAYOUT_VERSIONS, PORTABLE, STATIC, WEIGHTS, values_dtype
from edgeinfer.bundle.manifest import Blob, Capabilities, Manifest, TensorEntry
from edgeinfer.bundle.packing import midpoint
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.static_graph import BACKEND, StaticGraph, StaticGraphs
from edgeinfer.bundle.tables import Outline, lay_out
from edgeinfer.bundle.writing import seal, write_bundle
from edgeinfer.core.errors import UsageError
from edgeinfer.core.results import Progress
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.architectures.described import Described, describe, read_spec, require_plain
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.graph.builder import GraphBuilder
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.export.source.sidecar import read_sidecar
from edgeinfer.export.weights.calibrated import write_weights
from edgeinfer.export.weights.planning import outline, plan_weights, with_defaults
from edgeinfer.quant.policy import QuantPlan, QuantScheme

# The first with DequantizeLinear in blocks and with types of four bits; what devices take lags behind ONNX.
_OPSET = 21


class _StaticOperators:
    """Adds nodes to a graph whose hidden states are (1, rows, D): of two dimensions ONNX Runtime makes a float-only
    Gemm of MatMul and sum, and would dequantize the matrix in every pass."""

    def __init__(self, graph: GraphBuilder, spec: DecoderSpec, tensors: Mapping[str, TensorEntry], rows: int) -> None:
        self._graph, self._spec, self._tensors, self._rows = graph, spec, tensors, rows

    def embed(self) -> str:
        """Looks up the input tokens' rows of the embedding and dequantizes them."""
        entry, graph = self._tensors["embed"], self._graph
        if entry.bits == 32:
            found = graph.op("Gather", [graph.weight("embed", entry.data), io.INPUT_IDS], "embed.rows", axis=0)
            return self._reshape(found, "embedded", [1, self._rows, self._spec.hidden_size])
        blocks, zeros = entry.quantized.blocks, self._embedding_zeros(entry)
        values = self._looked_up("embed", entry.data, entry.bits, [self._rows, blocks, entry.block_size])
        assert entry.scales is not None
        scales = graph.op("Gather", [graph.weight("embed.scales", entry.scales), io.INPUT_IDS], "embed.scale", axis=0)
        scale = self._reshape(scales, "embed.scale_rows", [self._rows, blocks, 1])
        centred = graph.op("Sub", [values, zeros], "embed.centred")
        scaled = graph.op("Mul", [centred, scale], "embed.scaled")
        width, hidden = blocks * entry.block_size, self._spec.hidden_size
        if width == hidden:
            return self._reshape(scaled, "embedded", [1, self._rows, hidden])
        padded = self._reshape(scaled, "embed.padded", [1, self._rows, width])
        return self._first(padded, "embedded", hidden)

    def _embedding_zeros(self, entry: TensorEntry) -> str:
        if entry.zero_points is None:
            return self._graph.scalar("embed.middle", midpoint(entry.bits))
        stored = entry.zero_points.shape[-1] * 8 // entry.bits
        points = self._looked_up("embed.zeros", entry.zero_points, entry.bits, [self._rows, stored])
        blocks = entry.quantized.blocks
        points = points if stored == blocks else self._first(points, "embed.zeros.blocks", blocks)
        return self._reshape(points, "embed.zeros.rows", [self._rows, blocks, 1])

    def _looked_up(self, name: str, blob: Blob, bits: int, shape: list[int]) -> str:
        """Packed rows of the input tokens as floats; every provider has arithmetic on floats."""
        graph = self._graph
        width = blob.nbytes // blob.shape[0]
        packed = graph.weight(name, blob, (blob.shape[0], width))
        found = graph.op("Gather", [packed, io.INPUT_IDS], f"{name}.packed", axis=0)
        floats = graph.op("Cast", [found], f"{name}.floats", to=graph.type("float32"))
        if bits == 8:
            return self._reshape(floats, f"{name}.values", shape)
        sixteenth = graph.op("Mul", [floats, graph.scalar("sixteenth", 1 / 16)], f"{name}.sixteenth")
        high = graph.op("Floor", [sixteenth], f"{name}.high")
        shifted = graph.op("Mul", [high, graph.scalar("sixteen", 16.0)], f"{name}.shifted")
        low = graph.op("Sub", [floats, shifted], f"{name}.low")
        halves = [self._reshape(half, f"{half}.column", [self._rows, width, 1]) for half in (low, high)]
        return self._reshape(graph.op("Concat", halves, f"{name}.pairs", axis=2), f"{name}.values", shape)

    def norm(self, value: str, name: str) -> str:
        """Root-mean-square normalisation over the last axis."""
        graph = self._graph
        squared = graph.op("Pow", [value, graph.scalar("two", 2.0)], f"{name}.squared")
        mean = graph.op("ReduceMean", [squared, graph.constant([-1])], f"{name}.mean", keepdims=1)
        shifted = graph.op("Add", [mean, graph.scalar("norm_eps", self._spec.norm_eps)], f"{name}.shifted")
        root = graph.op("Sqrt", [shifted], f"{name}.root")
        divided = graph.op("Div", [value, root], f"{name}.divided")
        return graph.op("Mul", [divided, graph.weight(name, self._tensors[name].data)], f"{name}.out")

    def linear(self, value: str, name: str, result: str) -> str:
        """Multiplies by a matrix and adds its bias, if any, row by row: (S, N)."""
        graph, entry = self._graph, self._tensors[name]
        bias = self._tensors.get(f"{name}_bias")
        product = result if bias is None else f"{name}.product"
        if entry.bits == 32 and not entry.transposed:
            table = "embed" if name == "head" and entry.data == self._tensors["embed"].data else name
            graph.op("Gemm", [value, graph.weight(table, entry.data)], product, transB=1)
        else:
            graph.op("MatMul", [value, self._matrix(entry)], product)
        if bias is None:
            return result
        rows = self._reshape(product, f"{name}.rows", [self._rows, entry.shape[0]])
        return graph.op("Add", [rows, graph.weight(bias.name, bias.data)], result)

    def _matrix(self, entry: TensorEntry) -> str:
        graph, (n, k) = self._graph, entry.shape
        if entry.bits == 32:
            return graph.weight(entry.name, entry.data)
        assert entry.scales is not None
        dtype, blocks = values_dtype(entry.quantized), entry.quantized.blocks
        inputs = [
            graph.weight(entry.name, entry.data, (k, n), dtype),
            graph.weight(f"{entry.name}.scales", entry.scales),
        ]
        if entry.zero_points is not None:
            inputs.append(graph.weight(f"{entry.name}.zero_points", entry.zero_points, (blocks, n), dtype))
        return graph.op("DequantizeLinear", inputs, f"{entry.name}.matrix", axis=0, block_size=entry.block_size)

    def gated(self, value: str, prefix: str) -> str:
        graph, size = self._graph, self._spec.intermediate_size
        joined = self.linear(value, f"{prefix}.gate_up", f"{prefix}.gate_up.result")
        gate, up = f"{prefix}.gate", f"{prefix}.up"
        graph.ops("Split", [joined, graph.constant([size, size])], [gate, up], axis=-1)
        sigmoid = graph.op("Sigmoid", [gate], f"{prefix}.sigmoid")
        activated = graph.op("Mul", [gate, sigmoid], f"{prefix}.activated")
        return graph.op("Mul", [activated, up], f"{prefix}.product")

    def _first(self, value: str, result: str, count: int) -> str:
        bounds = [self._graph.constant([number]) for number in (0, count, -1)]
        return self._graph.op("Slice", [value, *bounds], result)

    def _reshape(self, value: str, result: str, shape: list[int]) -> str:
        return self._graph.op("Reshape", [value, self._graph.constant(shape)], result)


def build_static_graph(spec: DecoderSpec, tensors: Mapping[str, TensorEntry], shape: StaticGraph) -> onnx.ModelProto:
    return _StaticDecoder(spec, tensors, shape).build()


class _StaticDecoder(_StaticOperators):
    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, TensorEntry], shape: StaticGraph) -> None:
        super().__init__(GraphBuilder(WEIGHTS, opset=_OPSET), spec, tensors, shape.rows)
        self._shape = shape
        # Query heads that share a key/value head; their rows follow one another, so that nothing is repeated.
        self._sharing = spec.num_heads // spec.num_kv_heads

    def build(self) -> onnx.ModelProto:
        spec, graph = self._spec, self._graph
        for value in self._shape.inputs(spec):
            graph.input(value.name, value.dtype, value.shape)
        biases = {False: self._per_head(io.ATTENTION_BIAS)}
        if spec.window_size:
            biases[True] = self._per_head(io.WINDOW_BIAS)
        hidden = self.embed()
        for layer in range(spec.num_layers):
            hidden = self._attention(layer, hidden, biases[spec.window(layer) > 0])
            hidden = self._mlp(layer, hidden)
        if self._shape.prompts:
            hidden = graph.op("Gather", [hidden, io.LOGIT_ROWS], "wanted", axis=1)
        normed = self.norm(hidden, "final_norm")
        rows = self._reshape(normed, "rows", [self._shape.logit_rows, spec.hidden_size])
        self.linear(rows, "head", io.LOGITS)
        for value in self._shape.outputs(spec):
            graph.output(value.name, value.dtype, value.shape)
        return graph.model("static_decoder")

    def _per_head(self, bias: str) -> str:
        """A bias for the rows of all query heads that share a key/value head."""
        if self._sharing == 1:
            return bias
        return self._graph.op("Concat", [bias] * self._sharing, f"{bias}.heads", axis=2)

    def _attention(self, layer: int, hidden: str, bias: str) -> str:
        spec, graph, rows = self._spec, self._graph, self._rows
        prefix = f"layers.{layer}.attn"
        qkv = self.linear(self.norm(hidden, f"layers.{layer}.attn_norm"), f"{prefix}.qkv", f"{prefix}.qkv.out")
        parts = [f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"]
        graph.ops("Split", [qkv, graph.constant([spec.q_size, spec.kv_size, spec.kv_size])], parts, axis=-1)
        query = self._rotate(self._heads(parts[0], spec.num_heads, f"{prefix}.q_norm"), f"{prefix}.q.rotated")
        new_key, new_value = io.new_names(layer)
        self._rotate(self._heads(parts[1], spec.num_kv_heads, f"{prefix}.k_norm"), new_key)
        self._transposed(self._split(parts[2], spec.num_kv_heads), new_value)
        key, value = (
            self._placed(past, new) for past, new in zip(io.past_names(layer), (new_key, new_value), strict=True)
        )
        shape = [1, spec.num_kv_heads, self._sharing * rows, spec.head_dim]
        grouped = self._reshape(query, f"{prefix}.grouped", shape)
        scaled = graph.op("Mul", [grouped, graph.scalar("scale", spec.head_dim**-0.5)], f"{prefix}.scaled")
        turned = graph.op("Transpose", [key], f"{key}.turned", perm=[0, 1, 3, 2])
        scores = graph.op("MatMul", [scaled, turned], f"{prefix}.scores")
        biased = graph.op("Add", [scores, bias], f"{prefix}.biased")
        weights = graph.op("Softmax", [biased], f"{prefix}.weights", axis=-1)
        mixed = graph.op("MatMul", [weights, value], f"{prefix}.mixed")
        heads = self._reshape(mixed, f"{prefix}.heads", [1, spec.num_heads, rows, spec.head_dim])
        joined = graph.op("Transpose", [heads], f"{prefix}.turned", perm=[0, 2, 1, 3])
        flat = self._reshape(joined, f"{prefix}.flat", [1, rows, spec.q_size])
        out = self.linear(flat, f"{prefix}.out", f"{prefix}.result")
        return graph.op("Add", [hidden, out], f"{prefix}.hidden")

    def _heads(self, value: str, heads: int, norm: str) -> str:
        """Queries or keys by heads, normed where the model does so: (S, heads h) -> (1, heads, S, h)."""
        spec = self._spec
        if spec.whole_norm:
            value = self.norm(value, norm)
        split = self._split(value, heads)
        if spec.qk_norm and not spec.whole_norm:
            split = self.norm(split, norm)
        return self._transposed(split, f"{value}.heads")

    def _split(self, value: str, heads: int) -> str:
        return self._reshape(value, f"{value}.split", [1, self._rows, heads, self._spec.head_dim])

    def _transposed(self, value: str, result: str) -> str:
        return self._graph.op("Transpose", [value], result, perm=[0, 2, 1, 3])

    def _rotate(self, value: str, result: str) -> str:
        """Rotates the first dimensions of every head in halves, as edgeinfer.nn.arithmetic.rotate does."""
        graph, half = self._graph, self._spec.rope.dim // 2
        rest = self._spec.head_dim - 2 * half
        parts = [f"{result}.{part}" for part in ("a", "b", "rest")[: 3 if rest else 2]]
        graph.ops("Split", [value, graph.constant([half, half, *([rest] if rest else [])])], parts, axis=3)
        a, b = parts[:2]
        products = {
            name: graph.op("Mul", [part, rows], f"{result}.{name}")
            for name, part, rows in (
                ("a_cos", a, io.COS_ROWS),
                ("b_sin", b, io.SIN_ROWS),
                ("b_cos", b, io.COS_ROWS),
                ("a_sin", a, io.SIN_ROWS),
            )
        }
        first = graph.op("Sub", [products["a_cos"], products["b_sin"]], f"{result}.first")
        second = graph.op("Add", [products["b_cos"], products["a_sin"]], f"{result}.second")
        return graph.op("Concat", [first, second, *parts[2:]], result, axis=3)

    def _placed(self, past: str, new: str) -> str:
        """The cache with the new rows in place."""
        return self._graph.op("ScatterND", [past, io.NEW_PLACES, new], f"{new}.placed")

    def _mlp(self, layer: int, hidden: str) -> str:
        prefix = f"layers.{layer}.mlp"
        product = self.gated(self.norm(hidden, f"layers.{layer}.mlp_norm"), prefix)
        out = self.linear(product, f"{prefix}.down", f"{prefix}.result")
        return self._graph.op("Add", [hidden, out], f"{prefix}.hidden")


_log = logging.getLogger("edgeinfer")
_LAYER = re.compile(r"layers\.(\d+)\.")


def export_static(source: Path, out: Path, config: ExportConfig, progress: Progress | None = None) -> Path:
    assert config.static is not None, "what is asked for here"
    hf_config = read_config(source)
    family = find_architecture(hf_config)
    sidecar = read_sidecar(source, hf_config)
    with Checkpoint(source) as checkpoint:
        family = family.placed(checkpoint.names)
        spec = read_spec(hf_config, family, checkpoint)
        require_plain(spec, "Static bundles", "Leave out --static.")
        if spec.moe is not None:
            message = "Mixtures of experts cannot be exported with static shapes: which experts run is not fixed."
            raise UsageError(message, "Leave --static out.")
        stored = describe(spec, hf_config, family, checkpoint)
        graphs = config.static.graphs(spec)
        described = _keep_layers(stored, graphs)
        spec, plans = described.spec, described.plans
        config = with_defaults(config, described)
        planned = PlannedTensors(checkpoint, plans)
        weights = plan_weights(config, sidecar, described, planned, described.parameters, progress)
        weights = dataclasses.replace(weights, quant=_storable(described, weights.quant))
        tensors = _table(described, weights.quant)
        by_name = {tensor.name: tensor for tensor in tensors}
        manifest = Manifest(
            name=config.name or source.resolve().name,
            architecture=hf_config.architecture or hf_config.model_type,
            backend=BACKEND,
            geometry=spec.geometry,
            parameters=described.parameters,
            capabilities=Capabilities(layer_skip=False, hidden=False, tree=True),
            decoder=spec,
            tensors=tensors,
            layout=STATIC,
            layout_version=LAYOUT_VERSIONS[STATIC],
            export=config.options,
            plan=weights.record(),
            static=graphs,
        )
        with write_bundle(out, replace_existing=config.force) as work:
            sidecar.write(work)
            with (work / WEIGHTS).open("wb") as file:
                write_weights(file, spec, planned, tensors[: len(plans)], weights, progress)
                embedding, head, path = by_name["embed"], by_name["head"], work / WEIGHTS
                if spec.tied and embedding.bits < 32:
                    file.flush()
                    CODECS[STATIC].write(
                        file, head, lambda first, last: CODECS[PORTABLE].read(path, embedding, first, last)
                    )
            for shape in graphs.all:
                model = build_static_graph(spec, by_name, shape)
                (work / shape.file).write_bytes(model.SerializeToString(deterministic=True))
            seal(work, manifest)
    return out


def _keep_layers(described: Described, graphs: StaticGraphs) -> Described:
    """The decoder of the kept layers, renumbered, with the graphs' context."""
    spec = described.spec
    place = {layer: index for index, layer in enumerate(graphs.layers)}
    windows = tuple(spec.windows[layer] for layer in graphs.layers) if spec.windows else ()
    kept = []
    for plan in described.plans:
        found = _LAYER.match(plan.name)
        if found is None:
            kept.append(plan)
        elif (layer := int(found[1])) in place:
            name = f"layers.{place[layer]}.{plan.name[found.end() :]}"
            kept.append(dataclasses.replace(plan, name=name))
    fixed = dataclasses.replace(spec, num_layers=len(place), windows=windows, max_positions=graphs.context)
    return Described(fixed, tuple(kept))


def _storable(described: Described, quant: QuantPlan) -> QuantPlan:
    """The plan with wider matrices where the static layout has none so narrow: rows of (K, N) end with bytes, and K is
    a multiple of the block, as OpenVINO requires."""
    schemes: dict[str, QuantScheme | None] = dict(quant.schemes)
    # An embedding is stored by rows; a tied one by columns besides.
    by_columns = {plan.name: plan.shape for plan in described.plans if plan.name != "embed" or described.spec.tied}
    for name, shape in by_columns.items():
        scheme = schemes.get(name)
        if scheme is not None and shape[1] % scheme.block_size:
            _log.warning("%s has %d columns, which is not a multiple of 32; it stays float32.", name, shape[1])
            schemes[name] = None
        elif scheme is not None and scheme.bits == 4 and shape[0] % 2:
            _log.warning("%s has an odd number of rows, %d; it gets 8 bits instead of 4.", name, shape[0])
            schemes[name] = dataclasses.replace(scheme, bits=8)
    return dataclasses.replace(quant, schemes=schemes, kept=frozenset())


def _table(described: Described, quant: QuantPlan) -> tuple[TensorEntry, ...]:
    """The tensor table. A quantized tied head is stored by columns in addition to the embedding's rows."""
    outlines = [outline(plan, quant.scheme(plan.name)) for plan in described.plans]
    if described.spec.tied:
        embedding = next(o for o in outlines if o.name == "embed")
        shares = "" if embedding.quantized else "embed"
        outlines.append(Outline("head", embedding.shape, embedding.quantized, shares=shares))
    return lay_out(outlines, STATIC)
