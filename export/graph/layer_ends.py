"""What a layer ends with in a graph, where it has any of it: its per-layer embedding, and the scale of its output."""

from __future__ import annotations

from edgeinfer.bundle import graph as io
from edgeinfer.bundle.parts import PerLayerSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.tables import PER_LAYER_TABLE
from edgeinfer.export.graph.builder import GraphBuilder
from edgeinfer.export.graph.operators import Operators


class LayerEnds:
    """Adds the ends of a decoder's layers, which go with their MLPs: where these are masked, so are they."""

    def __init__(self, spec: DecoderSpec, operators: Operators) -> None:
        self._spec, self._ops = spec, operators
        self.there = (spec.per_layer is not None and spec.streams is None) or spec.layer_scales

    def enter(self, graph: GraphBuilder, embedded: str) -> None:
        """Adds what all layers need, made of the tokens and of their embeddings, which are there in every pass."""
        spec = self._spec
        if spec.per_layer is not None:
            vectors = self._vectors(graph, embedded, spec.num_layers, spec.per_layer)
            names = [_vector(layer) for layer in range(spec.num_layers)]
            graph.ops("Split", [vectors], names, axis=-1, num_outputs=len(names))
        if spec.layer_scales:
            mlps = graph.constant(range(1, 2 * spec.num_layers, 2))
            runs = graph.op("Gather", [io.LAYER_MASK, mlps], "layer_scales.run")
            scales = self._ops.vector(graph, "layer_scales")
            scales = graph.op("Where", [runs, scales, graph.scalar("one", 1.0)], "layer_scales.masked")
            names = [_scale(layer) for layer in range(spec.num_layers)]
            graph.ops("Split", [scales], names, axis=0, num_outputs=len(names))

    def _vectors(self, graph: GraphBuilder, embedded: str, layers: int, per_layer: PerLayerSpec) -> str:  # (1, S, L P)
        """The vectors of all layers, one behind the other."""
        size, vocab_size = per_layer.size, per_layer.vocab_size
        product = self._ops.linear(graph, embedded, "per_layer.projection", "per_layer.product")
        apart = graph.op("Reshape", [product, graph.constant([0, 0, layers, size])], "per_layer.apart")
        normed = self._ops.norm(graph, apart, "per_layer.norm")
        # A token has a row of the table for each layer.
        each = graph.op("Unsqueeze", [self._known(graph, vocab_size), graph.constant([-1])], "per_layer.ids")
        first = graph.op("Mul", [each, graph.constant([layers])], "per_layer.first_rows")
        rows = graph.op("Add", [first, graph.table("per_layer.places", [range(layers)])], "per_layer.rows")
        looked_up = self._ops.rows(graph, PER_LAYER_TABLE, rows, "per_layer.looked_up")
        added = graph.op("Add", [normed, looked_up], "per_layer.added")
        return graph.op("Reshape", [added, graph.constant([0, 0, layers * size])], "per_layer.vectors")

    def _known(self, graph: GraphBuilder, vocab_size: int) -> str:
        """The tokens, with 0 in the place of those that the table does not have."""
        if vocab_size >= self._spec.vocab_size:
            return io.INPUT_IDS
        known = graph.op("Less", [io.INPUT_IDS, graph.constant([vocab_size])], "per_layer.known")
        return graph.op("Where", [known, io.INPUT_IDS, graph.constant([0])], "per_layer.known_ids")

    def leave(self, graph: GraphBuilder, layer: int, hidden: str, result: str, part: int | None = None) -> str:
        """Adds the end of a layer; returns `result`."""
        spec, prefix = self._spec, f"layers.{layer}.per_layer"
        if spec.per_layer is not None:
            name = f"{prefix}.added" if spec.layer_scales else result
            hidden = graph.op("Add", [hidden, self.given(graph, layer, hidden, part)], name)
        return graph.op("Mul", [hidden, _scale(layer)], result) if spec.layer_scales else hidden

    def given(self, graph: GraphBuilder, layer: int, hidden: str, part: int | None) -> str:  # (1, S, D) -> (1, S, D)
        """What a layer's per-layer embedding makes of hidden states."""
        ops, prefix = self._ops, f"layers.{layer}.per_layer"
        gate = ops.linear(graph, hidden, f"{prefix}.gate", f"{prefix}.gate.result", part=part)
        inner = ops.activation(graph, self._spec.activation, gate, f"{prefix}.inner", _vector(layer))
        return ops.norm(
            graph, ops.linear(graph, inner, f"{prefix}.out", f"{prefix}.given", part=part), f"{prefix}.norm"
        )


def _vector(layer: int) -> str:
    return f"per_layer.vector.{layer}"


def _scale(layer: int) -> str:
    return f"layer_scales.{layer}"
