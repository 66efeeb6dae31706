"""The weighted parts of a decoder's graph in standard operators on float32 weights, activations and experts included.
Each layout of quantized weights has a subclass, which takes over where a weight is quantized: `PortableOperators` and
`NativeOperators`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgeinfer.bundle import graph as io
from edgeinfer.bundle.manifest import Blob, TensorEntry
from edgeinfer.bundle.packing import expert_biases, expert_tensor
from edgeinfer.bundle.parts import MoESpec
from edgeinfer.bundle.spec import Activation, DecoderSpec
from edgeinfer.export.graph.builder import MICROSOFT, GraphBuilder


class Operators:
    """Adds nodes to a graph or branch."""

    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, TensorEntry]) -> None:
        self._spec = spec
        self._tensors = tensors

    def declare_inputs(self, graph: GraphBuilder) -> None:
        """Declares the graph inputs that only these operators read."""

    def embed(self, graph: GraphBuilder) -> str:
        return self.rows(graph, "embed", io.INPUT_IDS, "embedded")

    def rows(self, graph: GraphBuilder, table: str, ids: str, result: str) -> str:
        return graph.op("Gather", [graph.weight(table, self._tensors[table].data), ids], result)

    def vector(self, graph: GraphBuilder, name: str) -> str:
        """The initializer of a vector; empty where the model has none."""
        entry = self._tensors.get(name)
        return "" if entry is None else graph.weight(name, entry.data)

    def norm(self, graph: GraphBuilder, value: str, name: str, result: str = "") -> str:
        """Norms the last axis as the decoder does; `result` names the outcome where a norm occurs more than once."""
        inputs, result = [value, self.vector(graph, name)], result or f"{name}.out"
        attributes: dict[str, Any] = {"axis": -1, "epsilon": self._spec.norm_eps, "stash_type": 1}
        if self._spec.norm == "layer":
            return graph.op("LayerNormalization", [*inputs, self.vector(graph, f"{name}_bias")], result, **attributes)
        bias = self.vector(graph, f"{name}_bias")
        if not bias:
            return graph.op("RMSNormalization", inputs, result, **attributes)
        scaled = graph.op("RMSNormalization", inputs, f"{name}.scaled", **attributes)
        return graph.op("Add", [scaled, bias], result)

    def add_normed(self, graph: GraphBuilder, residual: str, value: str, norm: str, result: str) -> str:
        """Norms a value and adds it to the residual."""
        return graph.op("Add", [residual, self.norm(graph, value, norm)], result)

    @property
    def masked(self) -> bool:
        """Whether operators skip themselves by the layer mask, without an `If` around them."""
        return False

    def linear(
        self,
        graph: GraphBuilder,
        value: str,
        name: str,
        result: str,
        *,
        norm: str = "",
        residual: str = "",
        part: int | None = None,
    ) -> str:
        """Multiplies by a matrix and adds its bias, if any; `part` is the place in the layer mask, None always runs."""
        if norm:
            value = self.norm(graph, value, norm)
        product = self._product(graph, value, name, f"{name}.result" if residual else result)
        return graph.op("Add", [residual, product], result) if residual else product

    def heads(self, graph: GraphBuilder, value: str, name: str, result: str, heads: int, part: int | None) -> str:
        """Multiplies each head by a matrix of its own: (1, S, heads K) by (heads N, K) to (1, S, heads N)."""
        raise NotImplementedError("Products of heads are computed by our own operators.")

    def inner(
        self,
        graph: GraphBuilder,
        value: str,
        prefix: str,
        norm: str = "",
        part: int | None = None,
        *,
        gated: bool | None = None,
        cut: float = 0.0,
    ) -> str:
        """The first half of an MLP, normed before where a norm is named: act(gate) * up of the value, or act(up); by
        default gated as the decoder's own MLPs are."""
        gated = self._spec.gated if gated is None else gated
        name = f"{prefix}.gate_up" if gated else f"{prefix}.up"
        product = self.linear(graph, value, name, f"{name}.result", norm=norm, part=part)
        return self._activated(graph, product, prefix, gated=gated, cut=cut)

    def activation(self, graph: GraphBuilder, name: str, value: str, result: str, times: str = "") -> str:
        activated = add_activation(graph, name, value, f"{result}.activated" if times else result)
        return graph.op("Mul", [activated, times], result) if times else activated

    def gate(self, graph: GraphBuilder, gate: str, value: str, result: str) -> str:
        """A value times the logistic function of a gate, of each channel or of each head."""
        share = add_activation(graph, "sigmoid", gate, f"{result}.share")
        if self._spec.output_gate == "channel":
            return graph.op("Mul", [value, share], result)
        heads = graph.op("Reshape", [value, graph.constant([0, 0, self._spec.num_heads, -1])], f"{result}.heads")
        each = graph.op("Unsqueeze", [share, graph.constant([-1])], f"{result}.each")
        gated = graph.op("Mul", [heads, each], f"{result}.gated")
        return graph.op("Reshape", [gated, graph.constant([0, 0, self._spec.q_size])], result)

    def softcap(self, graph: GraphBuilder, value: str, cap: float, result: str) -> str:
        scaled = graph.op("Div", [value, graph.scalar(f"cap_{cap:g}", cap)], f"{result}.scaled")
        bent = graph.op("Tanh", [scaled], f"{result}.bent")
        return graph.op("Mul", [bent, graph.scalar(f"cap_{cap:g}", cap)], result)

    def _activated(self, graph: GraphBuilder, product: str, prefix: str, *, gated: bool, cut: float) -> str:
        assert not cut, "rows are cut by our own operators"
        activation, constants = self._spec.activation, self.vector(graph, f"{prefix}.xielu")
        if not gated:
            return add_activation(graph, activation, product, f"{prefix}.product", constants)
        gate, up = f"{prefix}.gate_up.gate", f"{prefix}.gate_up.up"
        graph.ops("Split", [product], [gate, up], axis=-1, num_outputs=2)
        if activation == "swiglu_oai":
            return add_gated_oai(graph, gate, up, f"{prefix}.product")
        activated = add_activation(graph, activation, gate, f"{prefix}.activated", constants)
        return graph.op("Mul", [activated, up], f"{prefix}.product")

    def expert_counts(self, experts: Experts) -> tuple[int, ...]:
        """Numbers of experts of a token that need an operator of their own, ascending."""
        return experts.counts

    def experts(self, graph: GraphBuilder, mixing: Mixing) -> str:
        """Adds the weighted results of the chosen experts to the residual."""
        return float_experts(graph, mixing)

    def _product(self, graph: GraphBuilder, value: str, name: str, result: str) -> str:
        entry, bias = self._tensors[name], self._bias(graph, name)
        weight = graph.weight(self._table(entry), entry.data)
        if not entry.transposed:
            return graph.op("Gemm", [value, weight, bias], result, transB=1)
        if not bias:
            return graph.op("MatMul", [value, weight], result)
        product = graph.op("MatMul", [value, weight], f"{result}.product")
        return graph.op("Add", [product, bias], result)

    def _bias(self, graph: GraphBuilder, name: str) -> str:
        return self.vector(graph, f"{name}_bias")

    def _table(self, entry: TensorEntry) -> str:
        """Name of a matrix's initializers: a tied head shares the embedding's, so that its bytes are mapped once."""
        return "embed" if entry.name == "head" and self._spec.tied else entry.name


# Source: transformers' GptOssExperts and XIELUActivation.
_OAI_LIMIT, _OAI_ALPHA = 7.0, 1.702
_XIELU_BETA, _XIELU_EPS = 0.5, -1e-6


def add_activation(graph: GraphBuilder, name: str, value: str, result: str, constants: str = "") -> str:
    """Adds an activation, or "sigmoid", and returns `result`; swiglu_oai needs both factors, xielu alpha_p and alpha_n
    (2,)."""
    if name == "xielu":
        return _xielu(graph, value, result, constants)
    return _FUNCTIONS[name](graph, value, result)


def _relu2(graph: GraphBuilder, value: str, result: str) -> str:
    positive = graph.op("Relu", [value], f"{result}.positive")
    return graph.op("Mul", [positive, positive], result)


def _xielu(graph: GraphBuilder, value: str, result: str, constants: str) -> str:
    alphas = [f"{result}.alpha_p", f"{result}.alpha_n"]
    graph.ops("Split", [constants], alphas, axis=0, num_outputs=2)
    square = graph.op("Mul", [value, value], f"{result}.square")
    above = graph.op("Mul", [square, alphas[0]], f"{result}.above")
    low = graph.op("Min", [value, graph.scalar("xielu_eps", _XIELU_EPS)], f"{result}.low")
    grown = graph.op("Exp", [low], f"{result}.exp")
    less_one = graph.op("Sub", [grown, graph.scalar("one", 1.0)], f"{result}.expm1")
    rest = graph.op("Sub", [less_one, value], f"{result}.rest")
    below = graph.op("Mul", [rest, alphas[1]], f"{result}.below")
    positive = graph.op("Greater", [value, graph.scalar("zero", 0.0)], f"{result}.positive")
    bent = graph.op("Where", [positive, above, below], f"{result}.bent")
    line = graph.op("Mul", [value, graph.scalar("xielu_beta", _XIELU_BETA)], f"{result}.line")
    return graph.op("Add", [bent, line], result)


_FUNCTIONS: Mapping[str, Callable[[GraphBuilder, str, str], str]] = {
    # QuickGelu is x * sigmoid(alpha * x): SiLU in one pass over the data.
    "silu": lambda graph, value, result: graph.op("QuickGelu", [value], result, domain=MICROSOFT, alpha=1.0),
    "gelu": lambda graph, value, result: graph.op("Gelu", [value], result, approximate="none"),
    "gelu_tanh": lambda graph, value, result: graph.op("Gelu", [value], result, approximate="tanh"),
    "relu2": _relu2,
    "sigmoid": lambda graph, value, result: graph.op("Sigmoid", [value], result),
}


def add_gated_oai(graph: GraphBuilder, gate: str, up: str, result: str) -> str:
    limit, below = graph.scalar("oai_limit", _OAI_LIMIT), graph.scalar("oai_below", -_OAI_LIMIT)
    capped = graph.op("Min", [gate, limit], f"{result}.gate")
    swish = graph.op("QuickGelu", [capped], f"{result}.swish", domain=MICROSOFT, alpha=_OAI_ALPHA)
    bounded = graph.op("Clip", [up, below, limit], f"{result}.bounded")
    raised = graph.op("Add", [bounded, graph.scalar("one", 1.0)], f"{result}.raised")
    return graph.op("Mul", [swish, raised], result)


# Activations of QMoE are quantized to int8 per block, as those of MatMulNBits.
_INT8_ACTIVATIONS = 4
# silu(gate) * up, with the rows of gate and up by turns; other constants bend the curve, as gpt-oss's do.
_SWIGLU = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0}
_OAI = _SWIGLU | {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 7.0}


@dataclass(frozen=True)
class Routing:
    """A router's choice by token and slot; a slot with weight zero has the id -1 in `ids`."""

    ids: str
    chosen: str  # ids as chosen, whatever their weight
    weights: str
    scores: str


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: in a table of one format, or in the native layout of many."""

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
        """Numbers of experts of a token with an operator of their own."""
        counts = {self.moe.draft_count, self.moe.top_k}
        return tuple(sorted(counts)) if self.chosen or self.quantized else (self.moe.top_k,)

    @property
    def chosen(self) -> bool:
        """Whether ONNX Runtime's operator computes the chosen float32 experts; otherwise all are computed."""
        return self.moe.gated and self.activation in ("silu", "swiglu_oai")

    @property
    def into(self) -> str:
        return "gate_up" if self.moe.gated else "up"

    def entry(self, expert: int, part: str) -> TensorEntry:
        return self.tensors[expert_tensor(self.layer, expert, part)]

    @property
    def swiglu(self) -> Mapping[str, Any]:
        """Attributes of ONNX Runtime's operators of gated experts."""
        return _OAI if self.activation == "swiglu_oai" else _SWIGLU

    def biases(self, graph: GraphBuilder, part: str) -> str:
        """The biases of a part of all experts; empty where they have none."""
        entry = self.tensors.get(expert_biases(self.layer, part))
        return "" if entry is None else graph.weight(entry.name, entry.data)

    def stacked_biases(self, graph: GraphBuilder, part: str) -> str:
        """The biases (E, N) for ONNX Runtime's operators, with gate and up alternating."""
        vector = self.biases(graph, part)
        if not vector:
            return ""
        if part == "gate_up":
            halves = graph.op("Reshape", [vector, graph.constant([self.moe.experts, 2, -1])], f"{vector}.halves")
            vector = graph.op("Transpose", [halves], f"{vector}.turns", perm=[0, 2, 1])
        return graph.op("Reshape", [vector, graph.constant([self.moe.experts, -1])], f"{vector}.stacked")

    def stacked(self, graph: GraphBuilder, part: str, blob: str = "data") -> str:
        """The initializer of a part of all experts; empty where they have none."""
        first = getattr(self.entry(0, part), blob)
        if first is None:
            return ""
        rows, *rest = first.shape
        whole = Blob(first.offset, first.dtype, (self.moe.experts, rows, math.prod(rest)))
        suffix = "" if blob == "data" else f".{blob}"
        return graph.weight(f"layers.{self.layer}.mlp.experts.{part}{suffix}", whole)


@dataclass(frozen=True)
class Mixing:
    experts: Experts
    count: int  # most experts of a token
    value: str  # normed input
    routing: Routing
    residual: str  # added to the weighted results; empty for nothing
    result: str  # name of the sum


def float_experts(graph: GraphBuilder, mixing: Mixing) -> str:
    """Experts of float32: ONNX Runtime's MoE where it can, else all of them, multiplied by their weights. MoE makes
    weights by its own softmax; logarithms of the weights give the weights divided by their sum."""
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
    """The weight of every expert for every token (S, E), zero for experts that were not chosen."""
    shape = graph.op("Shape", [routing.scores], f"{prefix}.shape")
    zeros = graph.op("ConstantOfShape", [shape], f"{prefix}.zeros")
    inputs = [zeros, routing.chosen, routing.weights]
    scattered = graph.op("ScatterElements", inputs, f"{prefix}.scattered", axis=-1)
    return graph.op("Squeeze", [scattered, graph.constant([0])], f"{prefix}.weights")


def _all_experts(graph: GraphBuilder, experts: Experts, value: str, dense: str) -> str:
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
    """Experts of the portable layout: QMoE, which gets their weights as inputs. Experts that are not gated are all
    computed by the whole model: their router may choose any number of them."""
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
