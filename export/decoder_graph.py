"""The ONNX graph of a decoder as edgeinfer.bundle.graph describes it; knows nothing of checkpoints or quantizers.

Weights are initializers of the main graph even where only an `If` branch uses them: ONNX Runtime then packs them once
and drops the raw pages.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from edgeinfer.bundle import DecoderSpec, TensorEntry
from edgeinfer.bundle import graph as io
from edgeinfer.export.graph_builder import GraphBuilder

__all__ = ["build_decoder_graph"]

# MatMulNBits: activations are quantized to int8 per block, the only level with fast kernels for all widths.
_INT8_ACTIVATIONS = 4


def build_decoder_graph(spec: DecoderSpec, tensors: Mapping[str, TensorEntry], weights: str) -> onnx.ModelProto:
    """Builds the graph of a decoder.

    Args:
        tensors: the tensor table by canonical name; complete for the spec.
        weights: name of the file the tensors lie in.
    """
    return _DecoderGraph(spec, tensors, weights).build()


class _DecoderGraph:
    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, TensorEntry], weights: str) -> None:
        self._spec = spec
        self._tensors = tensors
        self._graph = GraphBuilder(weights)

    def build(self) -> onnx.ModelProto:
        spec, graph = self._spec, self._graph
        self._declare_inputs()
        runs = [f"runs.{i}" for i in range(2 * spec.num_layers)]
        graph.ops("Split", [io.LAYER_MASK], runs, axis=0, num_outputs=len(runs))
        hidden = self._enter()
        for layer in range(spec.num_layers):
            hidden = self._attention(layer, hidden, runs[2 * layer])
            last = layer == spec.num_layers - 1
            hidden = self._mlp(layer, hidden, runs[2 * layer + 1], io.HIDDEN_OUT if last else f"layers.{layer}.hidden")
        self._head(hidden)
        self._declare_outputs()
        return graph.model("decoder")

    def _declare_inputs(self) -> None:
        spec, graph = self._spec, self._graph
        graph.input(io.INPUT_IDS, "int64", (1, "S"))
        graph.input(io.POSITION_IDS, "int64", (1, "S"))
        graph.input(io.COS_CACHE, "float32", ("P", spec.rope.dim // 2))
        graph.input(io.SIN_CACHE, "float32", ("P", spec.rope.dim // 2))
        graph.input(io.ATTENTION_BIAS, "float32", (1, 1, "S", "T"))
        if spec.window_size:
            graph.input(io.WINDOW_BIAS, "float32", (1, 1, "S", "T"))
        graph.input(io.SEQLENS_K, "int32", (1,))
        graph.input(io.TOTAL_LENGTH, "int32", ())
        graph.input(io.LAYER_MASK, "bool", (2 * spec.num_layers,))
        graph.input(io.HIDDEN_IN, "float32", (1, "Sh", spec.hidden_size))
        graph.input(io.USE_HIDDEN, "bool", (1,))
        graph.input(io.LOGIT_ROWS, "int64", ("R",))
        for layer in range(spec.num_layers):
            for name in io.past_names(layer):
                graph.input(name, "float32", self._cache_shape)

    def _declare_outputs(self) -> None:
        spec, graph = self._spec, self._graph
        graph.output(io.LOGITS, "float32", ("R", spec.vocab_size))
        graph.output(io.HIDDEN_OUT, "float32", (1, "S", spec.hidden_size))
        for layer in range(spec.num_layers):
            for name in io.present_names(layer):
                graph.output(name, "float32", self._cache_shape)

    @property
    def _cache_shape(self) -> tuple[int | str, ...]:
        return (1, self._spec.num_kv_heads, "C", self._spec.head_dim)

    @property
    def _hidden_shape(self) -> tuple[int | str, ...]:
        return (1, "S", self._spec.hidden_size)

    def _enter(self) -> str:
        """Embeds the tokens, or takes the hidden states that were handed in."""
        resume, embed = self._graph.branch(), self._graph.branch()
        resume.output(resume.op("Identity", [io.HIDDEN_IN], "resumed"), "float32", self._hidden_shape)
        embed.output(self._embed(embed), "float32", self._hidden_shape)
        self._graph.choose(io.USE_HIDDEN, resume, embed, ["hidden"])
        return "hidden"

    def _embed(self, graph: GraphBuilder) -> str:
        entry = self._tensors["embed"]
        if entry.bits == 32:
            return graph.op("Gather", [graph.weight("embed", entry.data), io.INPUT_IDS], "embedded")
        assert entry.scales is not None
        rows, blocks, width = entry.data.shape
        inputs = [graph.weight("embed", entry.data, (rows, blocks * width)), io.INPUT_IDS]
        inputs.append(graph.weight("embed.scales", entry.scales))
        if entry.zero_points is not None:
            inputs.append(graph.weight("embed.zero_points", entry.zero_points))
        hidden_size = self._spec.hidden_size
        padded = hidden_size % entry.block_size != 0
        name = "embedded.padded" if padded else "embedded"
        attributes = {"bits": entry.bits, "block_size": entry.block_size, "gather_axis": 0, "quantize_axis": 1}
        graph.op("GatherBlockQuantized", inputs, name, microsoft=True, **attributes)
        if not padded:
            return name
        bounds = [graph.constant([0]), graph.constant([hidden_size]), graph.constant([2])]
        return graph.op("Slice", [name, *bounds], "embedded")

    def _attention(self, layer: int, hidden: str, runs: str) -> str:
        prefix = f"layers.{layer}.attn"
        graph = self._graph.branch()
        normed = self._norm(graph, hidden, f"layers.{layer}.attn_norm")
        qkv = self._linear(graph, normed, f"{prefix}.qkv")
        query, key, value = self._heads(graph, qkv, prefix)
        past, present = io.past_names(layer), (f"{prefix}.present_key", f"{prefix}.present_value")
        lengths, window = [io.SEQLENS_K, io.TOTAL_LENGTH], self._spec.window(layer)
        rotary = [io.COS_CACHE, io.SIN_CACHE, io.POSITION_IDS] if self._fused_rotation else ["", "", ""]
        graph.ops(
            "GroupQueryAttention",
            [query, key, value, *past, *lengths, *rotary, io.WINDOW_BIAS if window else io.ATTENTION_BIAS],
            [f"{prefix}.heads", *present],
            microsoft=True,
            num_heads=self._spec.num_heads,
            kv_num_heads=self._spec.num_kv_heads,
            local_window_size=window + io.TREE_ROWS if window else -1,
            do_rotary=int(self._fused_rotation),
        )
        out = self._linear(graph, f"{prefix}.heads", f"{prefix}.out")
        graph.output(graph.op("Add", [hidden, out], f"{prefix}.added"), "float32", self._hidden_shape)
        skip = self._graph.branch()
        skip.output(skip.op("Identity", [hidden], f"{prefix}.skipped"), "float32", self._hidden_shape)
        for name, kept, source in zip(present, ("kept_key", "kept_value"), past, strict=True):
            graph.output(name, "float32", self._cache_shape)
            skip.output(skip.op("Identity", [source], f"{prefix}.{kept}"), "float32", self._cache_shape)
        self._graph.choose(runs, graph, skip, [f"{prefix}.hidden", *io.present_names(layer)])
        return f"{prefix}.hidden"

    @property
    def _fused_rotation(self) -> bool:
        """Whether GroupQueryAttention can rotate; its kernel takes tables whose width is a multiple of eight."""
        return self._spec.rope.dim % 16 == 0

    def _heads(self, graph: GraphBuilder, qkv: str, prefix: str) -> tuple[str, str, str]:
        """Queries, keys and values as GroupQueryAttention takes them: packed, unless something is done before it."""
        spec = self._spec
        if self._fused_rotation and not spec.qk_norm:
            return qkv, "", ""
        query, key, value = f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"
        sizes = graph.constant([spec.q_size, spec.kv_size, spec.kv_size])
        graph.ops("Split", [qkv, sizes], [query, key, value], axis=-1)
        if spec.qk_norm:
            query = self._norm_heads(graph, query, f"{prefix}.q_norm", spec.q_size)
            key = self._norm_heads(graph, key, f"{prefix}.k_norm", spec.kv_size)
        if not self._fused_rotation:
            query = self._rotate(graph, query, spec.num_heads)
            key = self._rotate(graph, key, spec.num_kv_heads)
        return query, key, value

    def _norm_heads(self, graph: GraphBuilder, value: str, norm: str, size: int) -> str:
        heads = graph.op("Reshape", [value, graph.constant([0, 0, -1, self._spec.head_dim])], f"{value}.heads")
        normed = self._norm(graph, heads, norm)
        return graph.op("Reshape", [normed, graph.constant([0, 0, size])], f"{value}.normed")

    def _rotate(self, graph: GraphBuilder, value: str, heads: int) -> str:
        inputs = [value, io.POSITION_IDS, io.COS_CACHE, io.SIN_CACHE]
        attributes = {"num_heads": heads, "rotary_embedding_dim": self._spec.rope.dim}
        return graph.op("RotaryEmbedding", inputs, f"{value}.rotated", microsoft=True, **attributes)

    def _mlp(self, layer: int, hidden: str, runs: str, result: str) -> str:
        prefix = f"layers.{layer}.mlp"
        graph = self._graph.branch()
        normed = self._norm(graph, hidden, f"layers.{layer}.mlp_norm")
        gate_up = self._linear(graph, normed, f"{prefix}.gate_up")
        graph.ops("Split", [gate_up], [f"{prefix}.gate", f"{prefix}.up"], axis=-1, num_outputs=2)
        # QuickGelu is x * sigmoid(alpha * x): SiLU, the only activation of a DecoderSpec, in one pass over the data.
        activated = graph.op("QuickGelu", [f"{prefix}.gate"], f"{prefix}.activated", microsoft=True, alpha=1.0)
        product = graph.op("Mul", [activated, f"{prefix}.up"], f"{prefix}.product")
        down = self._linear(graph, product, f"{prefix}.down")
        graph.output(graph.op("Add", [hidden, down], f"{prefix}.added"), "float32", self._hidden_shape)
        skip = self._graph.branch()
        skip.output(skip.op("Identity", [hidden], f"{prefix}.skipped"), "float32", self._hidden_shape)
        self._graph.choose(runs, graph, skip, [result])
        return result

    def _head(self, hidden: str) -> None:
        """Normalises the wanted rows only and multiplies them by the head; no rows give no logits."""
        graph = self._graph
        flat = graph.op("Squeeze", [hidden, graph.constant([0])], "flat")
        rows = graph.op("Gather", [flat, io.LOGIT_ROWS], "rows", axis=0)
        normed = self._norm(graph, rows, "final_norm")
        self._linear(graph, normed, "head", io.LOGITS)

    def _norm(self, graph: GraphBuilder, value: str, name: str) -> str:
        weight = graph.weight(name, self._tensors[name].data)
        return graph.op(
            "RMSNormalization", [value, weight], f"{name}.out", axis=-1, epsilon=self._spec.norm_eps, stash_type=1
        )

    def _linear(self, graph: GraphBuilder, value: str, name: str, result: str | None = None) -> str:
        """Multiplies by a matrix and adds its bias where the model has one."""
        entry, bias = self._tensors[name], self._tensors.get(f"{name}_bias")
        result = result or f"{name}.result"
        bias_name = graph.weight(bias.name, bias.data) if bias is not None else ""
        if entry.bits < 32:
            return self._quantized_linear(graph, value, entry, bias_name, result)
        # A tied head shares the embedding's initializer, so that its bytes are mapped once.
        weight = graph.weight("embed" if self._shares_embedding(entry) else name, entry.data)
        if not entry.transposed:
            return graph.op("Gemm", [value, weight, bias_name], result, transB=1)
        if not bias_name:
            return graph.op("MatMul", [value, weight], result)
        product = graph.op("MatMul", [value, weight], f"{name}.product")
        return graph.op("Add", [product, bias_name], result)

    def _quantized_linear(self, graph: GraphBuilder, value: str, entry: TensorEntry, bias: str, result: str) -> str:
        assert entry.scales is not None
        table = "embed" if self._shares_embedding(entry) else entry.name
        scales = graph.weight(f"{table}.scales", entry.scales)
        zeros = graph.weight(f"{table}.zero_points", entry.zero_points) if entry.zero_points is not None else ""
        # The data keeps a name of its own: the embedding sees the same bytes as two-dimensional.
        data = graph.weight(entry.name, entry.data)
        return graph.op(
            "MatMulNBits",
            [value, data, scales, zeros, "", bias],
            result,
            microsoft=True,
            N=entry.shape[0],
            K=entry.shape[1],
            bits=entry.bits,
            block_size=entry.block_size,
            accuracy_level=_INT8_ACTIVATIONS,
        )

    def _shares_embedding(self, entry: TensorEntry) -> bool:
        return entry.name == "head" and entry.data == self._tensors["embed"].data
