"""The experts of a layer: their matrices, and what runs those that a router chose, in ONNX Runtime's operators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeinfer.bundle.experts import expert_biases, expert_tensor
from edgeinfer.bundle.manifest import Blob, TensorEntry
from edgeinfer.bundle.mixture import MoESpec
from edgeinfer.bundle.spec import Activation
from edgeinfer.export.graph.activations import add_activation
from edgeinfer.export.graph.builder import MICROSOFT, GraphBuilder

# Activations of QMoE are quantized to int8 per block, as those of MatMulNBits.
_INT8_ACTIVATIONS = 4
# silu(gate) * up, with the rows of gate and up by turns; other constants bend the curve, as gpt-oss's do.
_SWIGLU = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0}
_OAI = _SWIGLU | {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 7.0}


@dataclass(frozen=True)
class Routing:
    """Names of what a router chose, by token and slot; a slot whose weight is zero has the id -1 in `ids`.

    Attributes:
        chosen: ids as chosen, whatever their weight.
    """

    ids: str
    chosen: str
    weights: str
    scores: str


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: a table of one format, or in the native layout of many."""

    layer: int
    moe: MoESpec
    tensors: Mapping[str, TensorEntry]
    activation: Activation

    @property
    def quantized(self) -> bool:
        """Whether the experts are quantized, which holds for all of a layer or none."""
        return self.entry(0, "down").bits < 32

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of experts of a token that there are operators for where an operator has a number of its own."""
        counts = {self.moe.draft_count, self.moe.top_k}
        return tuple(sorted(counts)) if self.chosen or self.quantized else (self.moe.top_k,)

    @property
    def chosen(self) -> bool:
        """Whether ONNX Runtime's operator computes the chosen ones of float32; otherwise all are computed."""
        return self.moe.gated and self.activation in ("silu", "swiglu_oai")

    @property
    def into(self) -> str:
        """The part that the hidden states enter."""
        return "gate_up" if self.moe.gated else "up"

    def entry(self, expert: int, part: str) -> TensorEntry:
        """A matrix of an expert."""
        return self.tensors[expert_tensor(self.layer, expert, part)]

    @property
    def swiglu(self) -> Mapping[str, Any]:
        """Attributes of ONNX Runtime's operators of gated experts."""
        return _OAI if self.activation == "swiglu_oai" else _SWIGLU

    def biases(self, graph: GraphBuilder, part: str) -> str:
        """The biases of a part of all experts one after the other; empty where they have none."""
        entry = self.tensors.get(expert_biases(self.layer, part))
        return "" if entry is None else graph.weight(entry.name, entry.data)

    def stacked_biases(self, graph: GraphBuilder, part: str) -> str:
        """The same (E, N) as ONNX Runtime's operators take them: those of gate and up by turns."""
        vector = self.biases(graph, part)
        if not vector:
            return ""
        if part == "gate_up":
            halves = graph.op("Reshape", [vector, graph.constant([self.moe.experts, 2, -1])], f"{vector}.halves")
            vector = graph.op("Transpose", [halves], f"{vector}.turns", perm=[0, 2, 1])
        return graph.op("Reshape", [vector, graph.constant([self.moe.experts, -1])], f"{vector}.stacked")

    def stacked(self, graph: GraphBuilder, part: str, blob: str = "data") -> str:
        """The initializer of what lies together: a part of all experts; empty where they have none."""
        first = getattr(self.entry(0, part), blob)
        if first is None:
            return ""
        rows, *rest = first.shape
        whole = Blob(first.offset, first.dtype, (self.moe.experts, rows, math.prod(rest)))
        suffix = "" if blob == "data" else f".{blob}"
        return graph.weight(f"layers.{self.layer}.mlp.experts.{part}{suffix}", whole)


@dataclass(frozen=True)
class Mixing:
    """What an operator of experts adds to what.

    Attributes:
        count: most experts of a token.
        value: what enters them, normalised.
        residual: what the results of the chosen experts, times their weights, are added to; empty for nothing.
        result: name of the sum.
    """

    experts: Experts
    count: int
    value: str
    routing: Routing
    residual: str
    result: str


def float_experts(graph: GraphBuilder, mixing: Mixing) -> str:
    """Experts of float32: ONNX Runtime's MoE where it can, else all of them, multiplied by their weights.

    MoE takes what its own softmax makes weights of: their logarithms, which give them divided by their sum.
    """
    experts, routing = mixing.experts, mixing.routing
    prefix = f"layers.{experts.layer}.mlp.experts"
    dense = _dense_weights(graph, routing, prefix)
    if not experts.chosen:
        mixed = _all_experts(graph, experts, mixing.value, dense)
    else:
        logarithms = graph.op("Log", [dense], f"{prefix}.logarithms")
        parts = [(experts.stacked(graph, part), experts.stacked_biases(graph, part)) for part in ("gate_up", "down")]
        inputs = [mixing.value, logarithms, *parts[0], *parts[1]]
        sizes = {"k": mixing.count, "normalize_routing_weights": 1}
        mixed = graph.op("MoE", inputs, f"{prefix}.mixed", domain=MICROSOFT, **sizes, **experts.swiglu)
        if not experts.moe.renormalize or experts.moe.scale != 1:
            total = graph.op("ReduceSum", [routing.weights, graph.constant([-1])], f"{prefix}.total", keepdims=1)
            mixed = graph.op("Mul", [mixed, total], f"{prefix}.weighted")
    return _added(graph, mixing, mixed)


def _added(graph: GraphBuilder, mixing: Mixing, mixed: str) -> str:
    inputs = [mixing.residual, mixed]
    return graph.op("Add", inputs, mixing.result) if mixing.residual else graph.op("Identity", [mixed], mixing.result)


def _dense_weights(graph: GraphBuilder, routing: Routing, prefix: str) -> str:
    """The weight of every expert for every token (S, E), zero for those that were not chosen."""
    shape = graph.op("Shape", [routing.scores], f"{prefix}.shape")
    zeros = graph.op("ConstantOfShape", [shape], f"{prefix}.zeros")
    inputs = [zeros, routing.chosen, routing.weights]
    scattered = graph.op("ScatterElements", inputs, f"{prefix}.scattered", axis=-1)
    return graph.op("Squeeze", [scattered, graph.constant([0])], f"{prefix}.weights")


def _all_experts(graph: GraphBuilder, experts: Experts, value: str, dense: str) -> str:
    """The results of all experts times their weights (S, E)."""
    prefix, moe = f"layers.{experts.layer}.mlp.experts", experts.moe
    up, down = experts.stacked(graph, experts.into), experts.stacked(graph, "down")
    tokens = graph.op("Squeeze", [value, graph.constant([0])], f"{prefix}.tokens")
    columns = graph.op("Transpose", [tokens], f"{prefix}.columns", perm=[1, 0])
    inner = graph.op("MatMul", [up, columns], f"{prefix}.inner")  # (E, F, S), or of gate and up by turns (E, 2 F, S)
    if moe.gated:
        pairs = graph.op("Reshape", [inner, graph.constant([moe.experts, moe.expert_size, 2, -1])], f"{prefix}.pairs")
        halves = [f"{prefix}.gate", f"{prefix}.up"]
        graph.ops("Split", [pairs], halves, axis=2, num_outputs=2)
        gate, factors = (graph.op("Squeeze", [h, graph.constant([2])], f"{h}.alone") for h in halves)
        share = add_activation(graph, experts.activation, gate, f"{prefix}.share")
        activated = graph.op("Mul", [share, factors], f"{prefix}.activated")
    else:
        activated = add_activation(graph, experts.activation, inner, f"{prefix}.activated")
    turned = graph.op("Transpose", [dense], f"{prefix}.turned", perm=[1, 0])
    each = graph.op("Reshape", [turned, graph.constant([moe.experts, 1, -1])], f"{prefix}.each")
    weighted = graph.op("Mul", [activated, each], f"{prefix}.weighted")
    results = graph.op("MatMul", [down, weighted], f"{prefix}.results")  # (E, D, S)
    total = graph.op("ReduceSum", [results, graph.constant([0])], f"{prefix}.total", keepdims=1)
    return graph.op("Transpose", [total], f"{prefix}.mixed", perm=[0, 2, 1])


def quantized_experts(graph: GraphBuilder, mixing: Mixing) -> str:
    """Experts of the portable layout: QMoE, whose weights are handed to it.

    Experts that are not gated are all computed by the whole model: their router may choose any number of them.
    """
    experts, routing = mixing.experts, mixing.routing
    prefix, into = f"layers.{experts.layer}.mlp.experts", experts.into
    dense = _dense_weights(graph, routing, prefix)
    # Weights of a norm may be negative: not the highest are chosen then, but those farthest from zero.
    judged = dense if experts.moe.router == "softmax" else graph.op("Abs", [dense], f"{prefix}.distances")
    first, last = ([experts.stacked(graph, p, b) for b in ("data", "scales", "zero_points")] for p in (into, "down"))
    biases = [experts.stacked_biases(graph, part) for part in (into, "down")]
    inputs = [
        mixing.value,
        judged,
        *first[:2],
        biases[0],
        *last[:2],
        biases[1],
        "",
        "",
        "",
        first[2],
        last[2],
        "",
        dense,
    ]
    entry = experts.entry(0, into)
    activation = experts.swiglu if experts.moe.gated else {"activation_type": "silu"}
    formats = {"expert_weight_bits": entry.bits, "block_size": entry.block_size, "accuracy_level": _INT8_ACTIVATIONS}
    mixed = graph.op("QMoE", inputs, f"{prefix}.mixed", domain=MICROSOFT, k=mixing.count, **formats, **activation)
    return _added(graph, mixing, mixed)
