"""The ONNX graph of an encoder, which reads several texts in a pass and gives a pooled vector of each; inputs and
outputs are those of edgeinfer.bundle.graph. Products are those of the layout, attention is ONNX Runtime's operators."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from edgeinfer.bundle import graph as io
from edgeinfer.bundle.layouts import LAYOUTS, Layout, model_name, weights_name
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.parts import EncoderSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.tables import POSITIONS, TOKEN_TYPES, convert_table
from edgeinfer.export.graph.attention import BufferedAttention
from edgeinfer.export.graph.builder import GraphBuilder
from edgeinfer.export.graph.decoder import OPERATORS
from edgeinfer.export.graph.operators import add_activation


def encoder_graphs(spec: DecoderSpec, tensors: tuple[TensorEntry, ...], stored: Layout) -> dict[str, bytes]:
    """The graphs of a bundle as files by name: one for each layout."""
    graphs, quantized = {}, any(t.bits < 32 for t in tensors)
    for layout in LAYOUTS:
        table = tensors if layout == stored else convert_table(tensors, layout)
        weights = weights_name(stored, layout, quantized=quantized)
        graph = _EncoderGraph(spec, GraphBuilder(weights), {t.name: t for t in table}, layout).build()
        graphs[model_name(stored, layout)] = graph.SerializeToString(deterministic=True)
    return graphs


class _WholeAttention(BufferedAttention):
    """Attention of every token to those that the biases leave, of all texts of a pass at once."""

    def declare_inputs(self, graph: GraphBuilder) -> None:
        graph.input(io.ATTENTION_BIAS, "float32", ("B", 1, 1, "S"))
        if self._spec.window_size:
            graph.input(io.WINDOW_BIAS, "float32", ("B", 1, "S", "S"))

    def attend(self, graph: GraphBuilder, layer: int, qkv: str, rows: str = io.ROWS) -> str:
        prefix, spec, heads = f"layers.{layer}.attn", self._spec, self._spec.heads(layer)
        query, key, value = self._heads(graph, layer, qkv)
        if not key:
            query, key, value = f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"
            graph.ops("Split", [qkv, graph.constant(list(heads.products))], [query, key, value], axis=-1)
        # Heads that share keys and values lie side by side, as rows of one product.
        share = heads.heads // heads.kv_heads
        bias = io.WINDOW_BIAS if spec.window(layer) else io.ATTENTION_BIAS
        if share == 1:
            shapes, turned = [[0, 0, heads.heads, heads.size]] * 2, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
        else:
            shapes = [[0, 0, heads.kv_heads, share, heads.size], [0, 0, heads.kv_heads, 1, heads.size]]
            turned = ([0, 2, 3, 1, 4], [0, 2, 3, 4, 1], [0, 2, 3, 1, 4])
            bias = graph.op("Unsqueeze", [bias, graph.constant([1])], f"{prefix}.bias")
        parts = []
        for name, shape, order in zip((query, key, value), (shapes[0], shapes[1], shapes[1]), turned, strict=True):
            apart = graph.op("Reshape", [name, graph.constant(shape)], f"{name}.apart")
            parts.append(graph.op("Transpose", [apart], f"{name}.turned", perm=order))
        scale = spec.attention_scale or heads.size**-0.5
        scaled = graph.op("Mul", [parts[0], graph.scalar(f"scale_{scale:g}", scale)], f"{prefix}.scaled")
        scores = graph.op("MatMul", [scaled, parts[1]], f"{prefix}.scores")
        if spec.attention_softcap:
            scores = self._ops.softcap(graph, scores, spec.attention_softcap, f"{prefix}.capped")
        biased = graph.op("Add", [scores, bias], f"{prefix}.biased")
        shares = graph.op("Softmax", [biased], f"{prefix}.shares", axis=-1)
        mixed = graph.op("MatMul", [shares, parts[2]], f"{prefix}.mixed")
        back = [0, 2, 1, 3] if share == 1 else [0, 3, 1, 2, 4]
        turned_back = graph.op("Transpose", [mixed], f"{prefix}.mixed.turned", perm=back)
        return graph.op("Reshape", [turned_back, graph.constant([0, 0, heads.q_size])], f"{prefix}.heads")

    def _fuses_rotation(self, rope: object) -> bool:
        return False


class _EncoderGraph:
    """The graph of an encoder while it is built, part by part."""

    def __init__(
        self, spec: DecoderSpec, graph: GraphBuilder, tensors: Mapping[str, TensorEntry], layout: Layout
    ) -> None:
        assert spec.encoder is not None, "only encoders have this graph"
        self._spec, self._graph, self._tensors = spec, graph, tensors
        self._encoder: EncoderSpec = spec.encoder
        self._ops = OPERATORS[layout](spec, tensors)
        self._attention = _WholeAttention(spec, tensors, self._ops)

    def build(self) -> onnx.ModelProto:
        spec, graph, ops = self._spec, self._graph, self._ops
        self._declare_inputs()
        hidden = self._enter()
        for layer in range(spec.num_layers):
            hidden = self._layer(layer, hidden)
        if spec.pre_norm:
            hidden = ops.norm(graph, hidden, "final_norm")
        pooled = graph.op("MatMul", [io.POOLING, hidden], "pooled.hidden")
        size = spec.hidden_size
        for place, each in enumerate(self._encoder.dense):
            name, size = f"dense.{place}", each.size
            pooled = ops.linear(graph, pooled, name, f"{name}.result")
            if each.activation == "tanh":
                pooled = graph.op("Tanh", [pooled], f"{name}.activated")
            elif each.activation:
                pooled = add_activation(graph, each.activation, pooled, f"{name}.activated")
            if each.norm:
                pooled = ops.norm(graph, pooled, f"{name}_norm", f"{name}.normed")
        graph.op("Identity", [pooled], io.POOLED)
        graph.output(io.POOLED, "float32", ("B", 1, size))
        return graph.model("encoder")

    def _declare_inputs(self) -> None:
        graph, spec = self._graph, self._spec
        graph.input(io.INPUT_IDS, "int64", ("B", "S"))
        if self._encoder.positions or self._rotates:
            graph.input(io.POSITION_IDS, "int64", ("B", "S"))
        if self._encoder.token_types:
            graph.input(io.TOKEN_TYPES, "int64", ("B", "S"))
        for index, rope in enumerate(spec.ropes if self._rotates else ()):
            for name in io.rotary_names(index):
                graph.input(name, "float32", ("P", rope.dim // 2))
        graph.input(io.POOLING, "float32", ("B", 1, "S"))
        self._attention.declare_inputs(graph)
        self._ops.declare_inputs(graph)

    @property
    def _rotates(self) -> bool:
        return any(self._spec.rope_index(layer) >= 0 for layer in range(self._spec.num_layers))

    def _enter(self) -> str:
        graph, ops, encoder = self._graph, self._ops, self._encoder
        hidden = ops.embed(graph)
        tables = ((encoder.positions, POSITIONS, io.POSITION_IDS), (encoder.token_types, TOKEN_TYPES, io.TOKEN_TYPES))
        for rows, table, ids in tables:
            if rows:
                hidden = graph.op("Add", [hidden, ops.rows(graph, table, ids, f"{table}.rows")], f"{table}.added")
        return ops.norm(graph, hidden, "embed_norm") if encoder.embed_norm else hidden

    def _layer(self, layer: int, hidden: str) -> str:
        """Attention and MLP, with norms of the sums, or before each and of their results."""
        graph, ops, prefix = self._graph, self._ops, f"layers.{layer}"
        norms = [name if name in self._tensors else "" for name in (f"{prefix}.attn_norm", f"{prefix}.mlp_norm")]
        qkv = ops.linear(graph, hidden, f"{prefix}.attn.qkv", f"{prefix}.attn.qkv.result", norm=norms[0])
        heads = self._attention.attend(graph, layer, qkv)
        hidden = self._add(hidden, heads, f"{prefix}.attn.out", f"{prefix}.attn_post_norm")
        inner = ops.inner(graph, hidden, f"{prefix}.mlp", norm=norms[1])
        return self._add(hidden, inner, f"{prefix}.mlp.down", f"{prefix}.mlp_post_norm")

    def _add(self, residual: str, value: str, matrix: str, norm: str) -> str:
        graph, ops, result = self._graph, self._ops, f"{matrix}.added"
        if self._encoder.sums_normed:
            return ops.norm(graph, ops.linear(graph, value, matrix, result, residual=residual), norm)
        if not self._spec.post_norm:
            return ops.linear(graph, value, matrix, result, residual=residual)
        return ops.add_normed(graph, residual, ops.linear(graph, value, matrix, f"{matrix}.result"), norm, result)
