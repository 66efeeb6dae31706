"""The ONNX graphs of a decoder as edgeinfer.bundle.static_graph describes them; knows nothing of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from edgeinfer.bundle import WEIGHTS, DecoderSpec, TensorEntry
from edgeinfer.bundle import static_graph as io
from edgeinfer.bundle.static_graph import StaticGraph
from edgeinfer.export.graph_builder import GraphBuilder
from edgeinfer.export.static.operators import StaticOperators

__all__ = ["build_static_graph"]

# The first with DequantizeLinear in blocks and with types of four bits; what devices take lags behind ONNX.
_OPSET = 21


def build_static_graph(
    spec: DecoderSpec, tensors: Mapping[str, TensorEntry], shape: StaticGraph, weights: str = WEIGHTS
) -> onnx.ModelProto:
    """Builds one graph of a decoder without experts.

    Args:
        tensors: the tensor table by canonical name, in the static layout; complete for the spec.
        shape: rows of the graph and of its cache.
        weights: name of the file the tensors lie in.
    """
    graph = GraphBuilder(weights, opset=_OPSET)
    return _StaticDecoder(spec, graph, StaticOperators(graph, spec, tensors, shape.rows), shape).build()


class _StaticDecoder:
    def __init__(self, spec: DecoderSpec, graph: GraphBuilder, operators: StaticOperators, shape: StaticGraph) -> None:
        self._spec, self._graph, self._ops, self._shape = spec, graph, operators, shape
        self._rows, self._context = shape.rows, shape.context
        # Query heads that share a key/value head; their rows follow one another, so that nothing is repeated.
        self._sharing = spec.num_heads // spec.num_kv_heads

    def build(self) -> onnx.ModelProto:
        spec, graph = self._spec, self._graph
        for value in self._shape.inputs(spec):
            graph.input(value.name, value.dtype, value.shape)
        biases = {False: self._per_head(io.ATTENTION_BIAS)}
        if spec.window_size:
            biases[True] = self._per_head(io.WINDOW_BIAS)
        hidden = self._ops.embed()
        for layer in range(spec.num_layers):
            hidden = self._attention(layer, hidden, biases[spec.window(layer) > 0])
            hidden = self._mlp(layer, hidden)
        if self._shape.prompts:
            hidden = graph.op("Gather", [hidden, io.LOGIT_ROWS], "wanted", axis=1)
        normed = self._ops.norm(hidden, "final_norm")
        rows = self._reshape(normed, "rows", [self._shape.logit_rows, spec.hidden_size])
        self._ops.linear(rows, "head", io.LOGITS)
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
        qkv = self._ops.linear(
            self._ops.norm(hidden, f"layers.{layer}.attn_norm"), f"{prefix}.qkv", f"{prefix}.qkv.out"
        )
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
        out = self._ops.linear(flat, f"{prefix}.out", f"{prefix}.result")
        return graph.op("Add", [hidden, out], f"{prefix}.hidden")

    def _heads(self, value: str, heads: int, norm: str) -> str:
        """Queries or keys by heads, normed where the model does so: (S, heads h) -> (1, heads, S, h)."""
        spec = self._spec
        if spec.whole_norm:
            value = self._ops.norm(value, norm)
        split = self._split(value, heads)
        if spec.qk_norm and not spec.whole_norm:
            split = self._ops.norm(split, norm)
        return self._transposed(split, f"{value}.heads")

    def _split(self, value: str, heads: int) -> str:
        return self._reshape(value, f"{value}.split", [1, self._rows, heads, self._spec.head_dim])

    def _transposed(self, value: str, result: str) -> str:
        return self._graph.op("Transpose", [value], result, perm=[0, 2, 1, 3])

    def _rotate(self, value: str, result: str) -> str:
        """Rotates the first dimensions of every head, halves paired; as edgeinfer.bundle.arithmetic.rotate does."""
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
        """The cache with the new rows where they belong."""
        return self._graph.op("ScatterND", [past, io.NEW_PLACES, new], f"{new}.placed")

    def _mlp(self, layer: int, hidden: str) -> str:
        prefix = f"layers.{layer}.mlp"
        product = self._ops.gated(self._ops.norm(hidden, f"layers.{layer}.mlp_norm"), prefix)
        out = self._ops.linear(product, f"{prefix}.down", f"{prefix}.result")
        return self._graph.op("Add", [hidden, out], f"{prefix}.hidden")

    def _reshape(self, value: str, result: str, shape: list[int]) -> str:
        return self._graph.op("Reshape", [value, self._graph.constant(shape)], result)
