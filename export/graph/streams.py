"""Parts around a layer: hidden states in several streams, per-layer embeddings, and the scale of a layer's output.
Between layers the streams of a token follow one another (1, S, A D). A layer whose MLP the layer mask leaves out
predicts each stream unchanged and adds the attention's change to all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeinfer.bundle import graph as io
from edgeinfer.bundle.parts import PerLayerSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.tables import PER_LAYER_TABLE
from edgeinfer.export.graph.builder import GraphBuilder
from edgeinfer.export.graph.operators import Operators

# Source: transformers' Gemma3nTextModel: the least mean square that a stream is divided by the root of.
_LEAST_SQUARE = 1e-5


@dataclass(frozen=True)
class Predicted:
    """The streams at the beginning of a layer."""

    first: str  # the stream that it computes with (1, S, D)
    apart: str  # all of them (1, S, A, D)


class Streams:
    def __init__(self, spec: DecoderSpec, operators: Operators) -> None:
        assert spec.streams is not None, "only such decoders have streams"
        self._spec, self._ops, self._streams = spec, operators, spec.streams

    def declare(self, graph: GraphBuilder) -> None:
        """Makes values for all layers from the layer mask: 1 or 0 per MLP, and the weights of attention's result and of
        the augmented residual."""
        layers = self._spec.num_layers
        mlps = graph.constant(range(1, 2 * layers, 2))
        runs = graph.op("Gather", [io.LAYER_MASK, mlps], "streams.run")
        one, zero, half = graph.scalar("one", 1.0), graph.scalar("zero", 0.0), graph.scalar("root_half", math.sqrt(0.5))
        for kind, (then, otherwise) in {"runs": (one, zero), "kept": (half, one), "added": (half, zero)}.items():
            chosen = graph.op("Where", [runs, then, otherwise], f"streams.{kind}")
            names = [f"streams.{kind}.{layer}" for layer in range(layers)]
            graph.ops("Split", [chosen], names, axis=0, num_outputs=layers)

    def enter(self, graph: GraphBuilder, embedded: str) -> str:  # (1, S, D) -> (1, S, A D)
        """The streams of embeddings, of which the first is the embedding itself."""
        others = self._ops.linear(graph, embedded, "streams.enter", "streams.entered")
        apart = self._alike(graph, "streams.enter", embedded, others)
        joined = graph.op("Reshape", [apart, graph.constant([0, 0, -1])], "streams.enter.joined")
        return graph.op("Concat", [embedded, joined], "streams.started", axis=-1)

    def leave(self, graph: GraphBuilder, wanted: str) -> str:  # (R, A D) -> (R, D)
        """The mean of the streams, all but the first after a matrix of their own."""
        size, others = self._spec.hidden_size, self._streams.count - 1
        rows = graph.op("Unsqueeze", [wanted, graph.constant([0])], "streams.leave.rows")
        first, rest = "streams.leave.first", "streams.leave.rest"
        graph.ops("Split", [rows, graph.constant([size, others * size])], [first, rest], axis=-1)
        given = self._ops.heads(graph, rest, "streams.leave", "streams.leave.given", others, None)
        apart = self._alike(graph, "streams.leave", first, given)
        total = graph.op("ReduceSum", [apart, graph.constant([2])], "streams.leave.total", keepdims=0)
        added = graph.op("Add", [first, total], "streams.leave.added")
        mean = graph.op("Mul", [added, graph.scalar("streams.share", 1 / self._streams.count)], "streams.leave.mean")
        return graph.op("Squeeze", [mean, graph.constant([0])], "streams.left")

    def _alike(self, graph: GraphBuilder, prefix: str, first: str, others: str) -> str:
        """Streams (1, S, (A - 1) D) apart (1, S, A - 1, D), each with the magnitude of the first (1, S, D)."""
        size, count = self._spec.hidden_size, self._streams.count - 1
        apart = graph.op("Reshape", [others, graph.constant([0, 0, count, size])], f"{prefix}.apart")
        lead = graph.op("Unsqueeze", [first, graph.constant([2])], f"{prefix}.lead")
        wanted, own = (self._square(graph, each) for each in (lead, apart))
        safe = graph.op("Max", [own, graph.scalar("least_square", _LEAST_SQUARE)], f"{prefix}.safe")
        factors = graph.op("Sqrt", [graph.op("Div", [wanted, safe], f"{prefix}.ratio")], f"{prefix}.factors")
        return graph.op("Mul", [apart, factors], f"{prefix}.alike")

    @staticmethod
    def _square(graph: GraphBuilder, value: str) -> str:
        squares = graph.op("Mul", [value, value], f"{value}.squares")
        return graph.op("ReduceMean", [squares, graph.constant([-1])], f"{value}.square", keepdims=1)

    def predict(self, graph: GraphBuilder, layer: int, hidden: str) -> Predicted:  # (1, S, A D)
        size, count, prefix = self._spec.hidden_size, self._streams.count, f"layers.{layer}.streams"
        first, rest = f"{prefix}.first", f"{prefix}.rest"
        graph.ops("Split", [hidden, graph.constant([size, (count - 1) * size])], [first, rest], axis=-1)
        routed = self._routed(graph, layer, first, "before")
        weights = self._ops.linear(graph, routed, f"{prefix}.predict", f"{prefix}.weights")
        square = graph.op("Reshape", [weights, graph.constant([0, 0, count, count])], f"{prefix}.square")
        apart = graph.op("Reshape", [hidden, graph.constant([0, 0, count, size])], f"{prefix}.apart")
        change = graph.op("MatMul", [square, apart], f"{prefix}.change")
        predicted = graph.op("Add", [apart, change], f"{prefix}.predicted")
        lead = graph.op("Slice", [predicted, *map(graph.constant, ([0], [1], [2]))], f"{prefix}.lead")
        return Predicted(graph.op("Squeeze", [lead, graph.constant([2])], f"{prefix}.active"), predicted)

    def _routed(self, graph: GraphBuilder, layer: int, value: str, when: str) -> str:  # (1, S, D) -> (1, S, A)
        """The router's result; zeros where the layer's MLP is left out."""
        prefix = f"layers.{layer}.streams"
        normed = self._ops.norm(graph, value, f"{prefix}.router_norm", f"{prefix}.{when}.normed")
        scores = self._ops.linear(graph, normed, f"{prefix}.router", f"{prefix}.{when}.scores")
        bounded = self._ops.softcap(graph, scores, 1.0, f"{prefix}.{when}.bounded")
        return graph.op("Mul", [bounded, f"streams.runs.{layer}"], f"{prefix}.{when}.routed")

    def augment(self, graph: GraphBuilder, layer: int, normed: str, mixed: str) -> str:
        """Adds the augmented residual to attention's result."""
        prefix, part = f"layers.{layer}.laurel", 2 * layer + 1 if self._ops.masked else None
        inner = self._ops.linear(graph, normed, f"{prefix}.down", f"{prefix}.inner", part=part)
        given = self._ops.linear(graph, inner, f"{prefix}.up", f"{prefix}.given", part=part)
        laurel = self._ops.add_normed(graph, normed, given, f"{prefix}.norm", f"{prefix}.augmented")
        kept = graph.op("Mul", [mixed, f"streams.kept.{layer}"], f"{prefix}.kept")
        added = graph.op("Mul", [laurel, f"streams.added.{layer}"], f"{prefix}.added")
        return graph.op("Add", [kept, added], f"{prefix}.hidden")

    def correct(
        self, graph: GraphBuilder, layer: int, start: Predicted, hidden: str, ends: LayerEnds, result: str
    ) -> str:
        """The streams after a layer that made `hidden` of the first (1, S, D)."""
        spec, prefix = self._spec, f"layers.{layer}.streams"
        change = graph.op("Sub", [hidden, start.first], f"{prefix}.innovation")
        routed = self._routed(graph, layer, hidden, "after")
        weights = self._ops.linear(graph, routed, f"{prefix}.correct", f"{prefix}.corrections")
        shares = graph.op("Add", [weights, graph.scalar("one", 1.0)], f"{prefix}.shares")
        each = graph.op("Unsqueeze", [shares, graph.constant([-1])], f"{prefix}.each")
        spread = graph.op(
            "Mul", [graph.op("Unsqueeze", [change, graph.constant([2])], f"{prefix}.wide"), each], f"{prefix}.spread"
        )
        corrected = graph.op("Add", [start.apart, spread], f"{prefix}.corrected")
        lead = graph.op("Slice", [corrected, *map(graph.constant, ([0], [1], [2]))], f"{prefix}.corrected_lead")
        value = graph.op("Squeeze", [lead, graph.constant([2])], f"{prefix}.corrected_first")
        if self._streams.scaled:
            scale = self._ops.vector(graph, f"{prefix}.scale")
            value = graph.op("Mul", [value, scale], f"{prefix}.scaled")
        part = 2 * layer + 1 if self._ops.masked else None
        given = ends.given(graph, layer, value, part)
        wide = graph.op("Unsqueeze", [given, graph.constant([2])], f"{prefix}.given")
        others = graph.op("Mul", [self._others(graph), f"streams.runs.{layer}"], f"{prefix}.others")
        added = graph.op("Add", [corrected, graph.op("Mul", [wide, others], f"{prefix}.to_others")], f"{prefix}.ended")
        return graph.op("Reshape", [added, graph.constant([0, 0, self._streams.count * spec.hidden_size])], result)

    def _others(self, graph: GraphBuilder) -> str:  # (A, 1)
        return graph.column("streams.mask", [0.0] + [1.0] * (self._streams.count - 1))


class LayerEnds:
    """Adds the ends of a decoder's layers, which are masked together with their MLPs."""

    def __init__(self, spec: DecoderSpec, operators: Operators) -> None:
        self._spec, self._ops = spec, operators
        self.there = (spec.per_layer is not None and spec.streams is None) or spec.layer_scales

    def enter(self, graph: GraphBuilder, embedded: str) -> None:
        """Adds what all layers need, from the tokens and their embeddings."""
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
        """The vectors of all layers in one."""
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
        """The tokens, with 0 for those that the table lacks."""
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
        """The per-layer embedding's share of hidden states."""
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
