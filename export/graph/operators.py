"""The weighted pieces of a decoder's graph, in standard operators on float32 weights.

Each layout of quantized weights has a subclass, which takes over where a weight is quantized: `PortableOperators` and
`NativeOperators`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from edgeinfer.bundle import Blob, DecoderSpec, MoESpec, TensorEntry
from edgeinfer.bundle import graph as io
from edgeinfer.bundle.experts import expert_tensor
from edgeinfer.export.graph.builder import MICROSOFT, GraphBuilder

__all__ = [
    "NO_EXPERTS",
    "Experts",
    "Mixing",
    "Operators",
    "Routing",
    "declare_choice",
    "float_experts",
    "mixture",
    "quantized_experts",
    "runs_few",
    "runs_many",
]

# Ids of a layer without experts, made once for all.
NO_EXPERTS = "no_experts"
# Activations of QMoE are quantized to int8 per block, as those of MatMulNBits.
_INT8_ACTIVATIONS = 4
# silu(gate) * up, with the rows of gate and up by turns; other constants than these two bend the curve.
_SWIGLU = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0}


class Operators:
    """Adds nodes to whatever graph or branch it is handed.

    Args:
        tensors: the tensor table by canonical name; complete for the spec.
    """

    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, TensorEntry]) -> None:
        self._spec = spec
        self._tensors = tensors

    def declare_inputs(self, graph: GraphBuilder) -> None:
        """Declares the graph inputs that only these operators read."""

    def embed(self, graph: GraphBuilder) -> str:
        """Looks up the input tokens' rows of the embedding."""
        weight = graph.weight("embed", self._tensors["embed"].data)
        return graph.op("Gather", [weight, io.INPUT_IDS], "embedded")

    def norm(self, graph: GraphBuilder, value: str, name: str) -> str:
        """Root-mean-square normalisation over the last axis."""
        weight = graph.weight(name, self._tensors[name].data)
        return graph.op(
            "RMSNormalization", [value, weight], f"{name}.out", axis=-1, epsilon=self._spec.norm_eps, stash_type=1
        )

    @property
    def masked(self) -> bool:
        """Whether operators leave themselves out where the layer mask says so, and need no `If` around them."""
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
        """Multiplies by a matrix and adds its bias where the model has one.

        Args:
            norm: name of the norm that the value goes through before.
            residual: what is added to the product.
            result: name of the outcome.
            part: place in the layer mask, for operators that are masked; None always runs.
        """
        if norm:
            value = self.norm(graph, value, norm)
        product = self._product(graph, value, name, f"{name}.result" if residual else result)
        return graph.op("Add", [residual, product], result) if residual else product

    def gated(self, graph: GraphBuilder, value: str, prefix: str, norm: str = "", part: int | None = None) -> str:
        """The first half of a gated MLP: silu(gate) * up of the value, normalised before where a norm is named."""
        name = f"{prefix}.gate_up"
        gate_up = self.linear(graph, value, name, f"{name}.result", norm=norm, part=part)
        gate, up = f"{prefix}.gate_up.gate", f"{prefix}.gate_up.up"
        graph.ops("Split", [gate_up], [gate, up], axis=-1, num_outputs=2)
        # QuickGelu is x * sigmoid(alpha * x): SiLU, the only activation of a DecoderSpec, in one pass over the data.
        activated = graph.op("QuickGelu", [gate], f"{prefix}.activated", domain=MICROSOFT, alpha=1.0)
        return graph.op("Mul", [activated, up], f"{prefix}.product")

    def expert_counts(self, experts: Experts) -> tuple[int, ...]:
        """Numbers of experts of a token that need an operator of their own, ascending."""
        return experts.counts

    def experts(self, graph: GraphBuilder, mixing: Mixing) -> str:
        """Adds the results of the chosen experts, times their weights, to the residual."""
        return float_experts(graph, mixing)

    def _product(self, graph: GraphBuilder, value: str, name: str, result: str) -> str:
        """Multiplies by a matrix and adds its bias."""
        entry, bias = self._tensors[name], self._bias(graph, name)
        weight = graph.weight(self._table(entry), entry.data)
        if not entry.transposed:
            return graph.op("Gemm", [value, weight, bias], result, transB=1)
        if not bias:
            return graph.op("MatMul", [value, weight], result)
        product = graph.op("MatMul", [value, weight], f"{name}.product")
        return graph.op("Add", [product, bias], result)

    def _bias(self, graph: GraphBuilder, name: str) -> str:
        """The initializer of a matrix's bias; empty where it has none."""
        bias = self._tensors.get(f"{name}_bias")
        return graph.weight(bias.name, bias.data) if bias is not None else ""

    def _table(self, entry: TensorEntry) -> str:
        """Name of a matrix's initializers: a tied head shares the embedding's, so that its bytes are mapped once."""
        return "embed" if entry.name == "head" and entry.data == self._tensors["embed"].data else entry.name


def _bias(layer: int) -> str:
    return f"{io.EXPERT_BIAS}.{layer}"


def runs_few(layer: int, part: int = 1) -> str:
    """Whether a layer's MLP (part 1) runs in a pass of few experts."""
    return f"runs_few.{2 * layer + part}"


def runs_many(layer: int, part: int = 1) -> str:
    """Whether a layer's MLP (part 1) runs in any other pass."""
    return f"runs_many.{2 * layer + part}"


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

    @property
    def quantized(self) -> bool:
        """Whether the experts are quantized, which holds for all of a layer or none."""
        return self.entry(0, "down").bits < 32

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of experts of a token that there are operators for where an operator has a number of its own."""
        counts = {self.moe.draft_count, self.moe.top_k}
        return tuple(sorted(counts)) if self.moe.gated or self.quantized else (self.moe.top_k,)

    @property
    def into(self) -> str:
        """The part that the hidden states enter."""
        return "gate_up" if self.moe.gated else "up"

    def entry(self, expert: int, part: str) -> TensorEntry:
        """A matrix of an expert."""
        return self.tensors[expert_tensor(self.layer, expert, part)]

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
        residual: what the results of the chosen experts, times their weights, are added to.
        result: name of the sum.
    """

    experts: Experts
    count: int
    value: str
    routing: Routing
    residual: str
    result: str


def declare_choice(graph: GraphBuilder, spec: DecoderSpec, moe: MoESpec, *, by_count: bool) -> None:
    """Declares the inputs that a caller chooses experts by, and makes what all layers need of them.

    Args:
        by_count: some layer has an operator for few experts and one for many.
    """
    graph.input(io.EXPERT_COUNT, "int64", (1,))
    graph.input(io.EXPERT_BIAS, "float32", (spec.num_layers, moe.experts))
    biases = [_bias(layer) for layer in range(spec.num_layers)]
    graph.ops("Split", [io.EXPERT_BIAS], biases, axis=0, num_outputs=len(biases))
    size = graph.op("Shape", [io.POSITION_IDS], f"{NO_EXPERTS}.size")
    shape = graph.op("Concat", [size, io.EXPERT_COUNT], f"{NO_EXPERTS}.shape", axis=0)
    graph.op("Expand", [graph.constant([-1]), shape], NO_EXPERTS)
    if not by_count:
        return
    # Not an `If` for the number inside of the layer's own: weights used two levels deep are not packed, and QMoE then
    # takes four hundred times as long. So each of a layer's operators has an `If` of the main graph.
    few = graph.op("LessOrEqual", [io.EXPERT_COUNT, graph.constant([moe.draft_count])], "few_experts")
    many = graph.op("Not", [few], "many_experts")
    for chosen, name in ((few, runs_few), (many, runs_many)):
        runs = graph.op("And", [io.LAYER_MASK, chosen], f"{chosen}.mask")
        names = [name(layer, part) for layer in range(spec.num_layers) for part in (0, 1)]
        graph.ops("Split", [runs], names, axis=0, num_outputs=len(names))


def mixture(ops: Operators, graph: GraphBuilder, experts: Experts, count: int, hidden: str) -> tuple[str, str]:
    """Adds a mixture's result to the hidden states.

    Args:
        count: most experts of a token.

    Returns:
        Names of the sum (1, S, D) and of the chosen experts' ids (1, S, K).
    """
    prefix, moe = f"layers.{experts.layer}.mlp", experts.moe
    normed = ops.norm(graph, hidden, f"layers.{experts.layer}.mlp_norm")
    routing = _route(ops, graph, experts, normed)
    residual = hidden
    if moe.shared_size:
        residual = _shared(ops, graph, experts, hidden, normed)
    mixing = Mixing(experts, count, normed, routing, residual, f"{prefix}.added")
    return ops.experts(graph, mixing), routing.ids


def _shared(ops: Operators, graph: GraphBuilder, experts: Experts, hidden: str, normed: str) -> str:
    """Adds the shared expert's result to the hidden states."""
    prefix = f"layers.{experts.layer}.mlp.shared"
    product = ops.gated(graph, normed, prefix)
    if not experts.moe.shared_gate:
        return ops.linear(graph, product, f"{prefix}.down", f"{prefix}.added", residual=hidden)
    result = ops.linear(graph, product, f"{prefix}.down", f"{prefix}.result")
    score = ops.linear(graph, normed, f"{prefix}.gate", f"{prefix}.score")
    share = graph.op("Sigmoid", [score], f"{prefix}.share")
    shared = graph.op("Mul", [result, share], f"{prefix}.shared")
    return graph.op("Add", [hidden, shared], f"{prefix}.added")


def _route(ops: Operators, graph: GraphBuilder, experts: Experts, normed: str) -> Routing:
    """Chooses experts by the router's scores and the caller's bias; weights are of the unbiased scores."""
    prefix, moe = f"layers.{experts.layer}.mlp.router", experts.moe
    scores = ops.linear(graph, normed, prefix, f"{prefix}.scores")
    judged = scores
    if moe.router == "softmax" and not moe.renormalize:
        judged = graph.op("Softmax", [scores], f"{prefix}.shares", axis=-1)
    biased = graph.op("Add", [judged, _bias(experts.layer)], f"{prefix}.biased")
    values, chosen, weights = f"{prefix}.values", f"{prefix}.chosen", f"{prefix}.weights"
    graph.ops("TopK", [biased, io.EXPERT_COUNT], [values, chosen], axis=-1)
    # The bias of an expert that may be chosen is zero, so its value is its score; any other comes out as zero here.
    if moe.router == "relu":
        rectified = graph.op("Relu", [scores], f"{prefix}.rectified")
        shares = ops.norm(graph, rectified, f"{prefix}_norm")
        taken = graph.op("GatherElements", [shares, chosen], f"{prefix}.taken", axis=-1)
        positive = graph.op("Relu", [values], f"{prefix}.positive")
        allowed = graph.op("Sign", [positive], f"{prefix}.allowed")
        graph.op("Mul", [taken, allowed], weights)
    elif moe.renormalize:
        graph.op("Softmax", [values], weights, axis=-1)
    else:
        graph.op("Relu", [values], weights)
    used = graph.op("Cast", [weights], f"{prefix}.used", to=graph.type("bool"))
    ids = graph.op("Where", [used, chosen, graph.constant([-1])], f"{prefix}.ids")
    return Routing(ids, chosen, weights, scores)


def float_experts(graph: GraphBuilder, mixing: Mixing) -> str:
    """Experts of float32: ONNX Runtime's MoE where they are gated, else all of them, multiplied by their weights.

    MoE takes what its own softmax makes weights of: their logarithms, which give them divided by their sum.
    """
    experts, routing = mixing.experts, mixing.routing
    prefix = f"layers.{experts.layer}.mlp.experts"
    dense = _dense_weights(graph, routing, prefix)
    if not experts.moe.gated:
        mixed = _all_experts(graph, experts, mixing.value, dense)
    else:
        logarithms = graph.op("Log", [dense], f"{prefix}.logarithms")
        inputs = [mixing.value, logarithms, experts.stacked(graph, "gate_up"), "", experts.stacked(graph, "down")]
        sizes = {"k": mixing.count, "normalize_routing_weights": 1}
        mixed = graph.op("MoE", inputs, f"{prefix}.mixed", domain=MICROSOFT, **sizes, **_SWIGLU)
        if not experts.moe.renormalize:
            total = graph.op("ReduceSum", [routing.weights, graph.constant([-1])], f"{prefix}.total", keepdims=1)
            mixed = graph.op("Mul", [mixed, total], f"{prefix}.weighted")
    return graph.op("Add", [mixing.residual, mixed], mixing.result)


def _dense_weights(graph: GraphBuilder, routing: Routing, prefix: str) -> str:
    """The weight of every expert for every token (S, E), zero for those that were not chosen."""
    shape = graph.op("Shape", [routing.scores], f"{prefix}.shape")
    zeros = graph.op("ConstantOfShape", [shape], f"{prefix}.zeros")
    inputs = [zeros, routing.chosen, routing.weights]
    scattered = graph.op("ScatterElements", inputs, f"{prefix}.scattered", axis=-1)
    return graph.op("Squeeze", [scattered, graph.constant([0])], f"{prefix}.weights")


def _all_experts(graph: GraphBuilder, experts: Experts, value: str, dense: str) -> str:
    """The results of all experts, which are not gated, times their weights (S, E)."""
    prefix, moe = f"layers.{experts.layer}.mlp.experts", experts.moe
    up, down = experts.stacked(graph, "up"), experts.stacked(graph, "down")
    tokens = graph.op("Squeeze", [value, graph.constant([0])], f"{prefix}.tokens")
    columns = graph.op("Transpose", [tokens], f"{prefix}.columns", perm=[1, 0])
    inner = graph.op("MatMul", [up, columns], f"{prefix}.inner")  # (E, F, S)
    activated = graph.op("QuickGelu", [inner], f"{prefix}.activated", domain=MICROSOFT, alpha=1.0)
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
    inputs = [mixing.value, judged, *first[:2], "", *last[:2], "", "", "", "", first[2], last[2], "", dense]
    entry = experts.entry(0, into)
    activation = _SWIGLU if experts.moe.gated else {"activation_type": "silu"}
    formats = {"expert_weight_bits": entry.bits, "block_size": entry.block_size, "accuracy_level": _INT8_ACTIVATIONS}
    mixed = graph.op("QMoE", inputs, f"{prefix}.mixed", domain=MICROSOFT, k=mixing.count, **formats, **activation)
    return graph.op("Add", [mixing.residual, mixed], mixing.result)
