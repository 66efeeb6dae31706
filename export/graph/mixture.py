"""Mixtures of experts in a graph: what a caller chooses by, routers, the shared expert."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeinfer.bundle import graph as io
from edgeinfer.bundle.parts import MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.graph.builder import GraphBuilder
from edgeinfer.export.graph.operators import Experts, Mixing, Operators, Routing

# Ids of a layer without experts, made once for all.
NO_EXPERTS = "no_experts"
# Added to what an expert is judged by whose group was not chosen, as to one that the caller bars.
_BARRED = -1e9
# What every expert that may be chosen is judged above.
_LEAST = -1e8


def _bias(layer: int) -> str:
    return f"{io.EXPERT_BIAS}.{layer}"


def runs_few(layer: int, part: int = 1) -> str:
    return f"runs_few.{2 * layer + part}"


def runs_many(layer: int, part: int = 1) -> str:
    return f"runs_many.{2 * layer + part}"


def declare_choice(graph: GraphBuilder, spec: DecoderSpec, moe: MoESpec, *, by_count: bool) -> None:
    """Declares the inputs by which a caller chooses experts, and derives what all layers need."""
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


@dataclass(frozen=True)
class Entering:
    value: str
    norm: str  # before it; empty for none
    residual: str
    post_norm: str  # of the result before it is added; empty for none


def mixture(ops: Operators, graph: GraphBuilder, experts: Experts, count: int, entering: Entering) -> tuple[str, str]:
    """Adds a mixture's result to the hidden states; returns the sum (1, S, D) and the chosen experts' ids (1, S, K)."""
    prefix, moe = f"layers.{experts.layer}.mlp", experts.moe
    if moe.with_mlp:
        return _with_mlp(ops, graph, experts, count, entering)
    normed = ops.norm(graph, entering.value, entering.norm) if entering.norm else entering.value
    routing = _route(ops, graph, experts, normed)
    residual = "" if entering.post_norm else entering.residual
    if moe.shared_size:
        residual = _shared(ops, graph, experts, residual, normed)
    result = f"{prefix}.mixed_experts" if entering.post_norm else f"{prefix}.added"
    mixed = ops.experts(graph, Mixing(experts, count, normed, routing, residual, result))
    if entering.post_norm:
        mixed = ops.add_normed(graph, entering.residual, mixed, entering.post_norm, f"{prefix}.added")
    return mixed, routing.ids


def _with_mlp(ops: Operators, graph: GraphBuilder, experts: Experts, count: int, entering: Entering) -> tuple[str, str]:
    """Adds the results of a mixture and of an additional MLP; returns as `mixture`."""
    prefix, value = f"layers.{experts.layer}.mlp", entering.value
    inner = ops.inner(graph, value, prefix, entering.norm)
    dense = ops.norm(graph, ops.linear(graph, inner, f"{prefix}.down", f"{prefix}.dense"), f"{prefix}.dense_post_norm")
    routing = _route(ops, graph, experts, ops.norm(graph, value, f"{prefix}.router_input_norm"))
    normed = ops.norm(graph, value, f"{prefix}.experts_norm")
    mixed = ops.experts(graph, Mixing(experts, count, normed, routing, "", f"{prefix}.mixed_experts"))
    both = ops.add_normed(graph, dense, mixed, f"{prefix}.experts_post_norm", f"{prefix}.both")
    added = ops.add_normed(graph, entering.residual, both, entering.post_norm, f"{prefix}.added")
    return added, routing.ids


def _shared(ops: Operators, graph: GraphBuilder, experts: Experts, residual: str, normed: str) -> str:
    """Adds the shared expert's result to the residual, if there is one."""
    prefix = f"layers.{experts.layer}.mlp.shared"
    product = ops.inner(graph, normed, prefix, gated=experts.moe.gated)
    if not experts.moe.shared_gate:
        return ops.linear(graph, product, f"{prefix}.down", f"{prefix}.added", residual=residual)
    result = ops.linear(graph, product, f"{prefix}.down", f"{prefix}.result")
    score = ops.linear(graph, normed, f"{prefix}.gate", f"{prefix}.score")
    share = graph.op("Sigmoid", [score], f"{prefix}.share")
    shared = graph.op("Mul", [result, share], f"{prefix}.shared")
    return graph.op("Add", [residual, shared], f"{prefix}.added") if residual else shared


def _route(ops: Operators, graph: GraphBuilder, experts: Experts, normed: str) -> Routing:
    """Chooses experts by the router's scores and the caller's bias; weights are of the unbiased scores."""
    prefix, moe = f"layers.{experts.layer}.mlp.router", experts.moe
    scores = ops.linear(graph, normed, prefix, f"{prefix}.scores")
    by_softmax = _by_shares if moe.by_shares else _by_scores
    rules = {"relu": _by_sign, "sigmoid": _by_shares, "softmax": by_softmax, "sparsemixer": _by_nearness}
    chosen, weights = rules[moe.router](ops, graph, experts, scores)
    if moe.scale != 1:
        weights = graph.op("Mul", [weights, graph.scalar("experts_scale", moe.scale)], f"{prefix}.scaled")
    if moe.with_mlp:
        scales = ops.vector(graph, f"layers.{experts.layer}.mlp.expert_scale")
        each = graph.op("Gather", [scales, chosen], f"{prefix}.expert_scales")
        weights = graph.op("Mul", [weights, each], f"{prefix}.by_expert")
    used = graph.op("Cast", [weights], f"{prefix}.used", to=graph.type("bool"))
    ids = graph.op("Where", [used, chosen, graph.constant([-1])], f"{prefix}.ids")
    return Routing(ids, chosen, weights, scores)


def _choose(graph: GraphBuilder, experts: Experts, judged: str) -> tuple[str, str]:
    """The values and ids of the experts that are best by `judged` and the caller's bias. The bias of an expert that may
    be chosen is zero, so its value is its score."""
    prefix = f"layers.{experts.layer}.mlp.router"
    biased = graph.op("Add", [judged, _bias(experts.layer)], f"{prefix}.biased")
    if experts.moe.groups > 1:
        biased = _best_groups(graph, experts.moe, biased, prefix)
    values, chosen = f"{prefix}.values", f"{prefix}.chosen"
    graph.ops("TopK", [biased, io.EXPERT_COUNT], [values, chosen], axis=-1)
    return values, chosen


def _best_groups(graph: GraphBuilder, moe: MoESpec, judged: str, prefix: str) -> str:
    """A number below all others for experts outside the best groups."""
    grouped = graph.op("Reshape", [judged, graph.constant([0, 0, moe.groups, -1])], f"{prefix}.grouped")
    tops, places = f"{prefix}.group_tops", f"{prefix}.group_places"
    graph.ops("TopK", [grouped, graph.constant([2 if moe.choice_bias else 1])], [tops, places], axis=-1)
    ranks = graph.op("ReduceSum", [tops, graph.constant([-1])], f"{prefix}.group_ranks", keepdims=0)
    best, groups = f"{prefix}.group_best", f"{prefix}.groups"
    graph.ops("TopK", [ranks, graph.constant([moe.group_top_k])], [best, groups], axis=-1)
    shape = graph.op("Shape", [ranks], f"{prefix}.group_shape")
    barred = graph.op("Expand", [graph.scalar("barred", _BARRED), shape], f"{prefix}.group_barred")
    ones = graph.op("Shape", [best], f"{prefix}.group_chosen_shape")
    allowed = graph.op("Expand", [graph.scalar("zero", 0.0), ones], f"{prefix}.group_allowed")
    mask = graph.op("ScatterElements", [barred, groups, allowed], f"{prefix}.group_mask", axis=-1)
    wide = graph.op("Unsqueeze", [mask, graph.constant([-1])], f"{prefix}.group_wide")
    kept = graph.op("Add", [grouped, wide], f"{prefix}.group_kept")
    return graph.op("Reshape", [kept, graph.constant([0, 0, -1])], f"{prefix}.in_groups")


def _by_scores(ops: Operators, graph: GraphBuilder, experts: Experts, scores: str) -> tuple[str, str]:
    """Weights are the softmax of the chosen scores, or of all."""
    prefix, moe = f"layers.{experts.layer}.mlp.router", experts.moe
    weights = f"{prefix}.weights"
    if moe.renormalize:
        values, chosen = _choose(graph, experts, scores)
        return chosen, graph.op("Softmax", [values], weights, axis=-1)
    values, chosen = _choose(graph, experts, graph.op("Softmax", [scores], f"{prefix}.shares", axis=-1))
    return chosen, graph.op("Relu", [values], weights)


def _by_shares(ops: Operators, graph: GraphBuilder, experts: Experts, scores: str) -> tuple[str, str]:
    """Weights are the chosen experts' shares; the choice has a bias of its own."""
    prefix, moe = f"layers.{experts.layer}.mlp.router", experts.moe
    if moe.router == "sigmoid":
        shares = ops.activation(graph, "sigmoid", scores, f"{prefix}.shares")
    else:
        shares = graph.op("Softmax", [scores], f"{prefix}.shares", axis=-1)
    judged = shares
    if moe.choice_bias:
        bias = ops.vector(graph, f"layers.{experts.layer}.mlp.choice_bias")
        judged = graph.op("Add", [shares, bias], f"{prefix}.judged")
    values, chosen = _choose(graph, experts, judged)
    taken = graph.op("GatherElements", [shares, chosen], f"{prefix}.taken", axis=-1)
    # Neither barred by the caller nor of a group that was not chosen.
    allowed = graph.op("Greater", [values, graph.scalar("least", _LEAST)], f"{prefix}.allowed")
    weights = graph.op("Where", [allowed, taken, graph.scalar("zero", 0.0)], f"{prefix}.weights")
    if not moe.renormalize:
        return chosen, weights
    total = graph.op("ReduceSum", [weights, graph.constant([-1])], f"{prefix}.total", keepdims=1)
    safe = graph.op("Add", [total, graph.scalar("least_total", 1e-20)], f"{prefix}.safe_total")
    return chosen, graph.op("Div", [weights, safe], f"{prefix}.normalized")


def _by_nearness(ops: Operators, graph: GraphBuilder, experts: Experts, scores: str) -> tuple[str, str]:
    """The weight of each expert is its share among those near it that are not better."""
    prefix, moe = f"layers.{experts.layer}.mlp.router", experts.moe
    judged = graph.op("Add", [scores, _bias(experts.layer)], f"{prefix}.biased")
    sizes = graph.op("Abs", [judged], f"{prefix}.sizes")
    never, left, chosen, weights = graph.scalar("never", -math.inf), judged, [], []
    for slot in range(moe.top_k):
        name = f"{prefix}.{slot}"
        most, best = f"{name}.most", f"{name}.best"
        graph.ops("TopK", [left, graph.constant([1])], [most, best], axis=-1)
        larger = graph.op("Max", [sizes, most], f"{name}.larger")
        allowed = graph.op("Mul", [larger, graph.scalar("jitter", 2 * moe.jitter)], f"{name}.allowed")
        below = graph.op("Sub", [most, judged], f"{name}.below")
        far = graph.op("Greater", [below, allowed], f"{name}.far")
        shares = graph.op("Softmax", [graph.op("Where", [far, never, left], f"{name}.near")], f"{name}.shares", axis=-1)
        share = graph.op("GatherElements", [shares, best], f"{name}.share", axis=-1)
        there = graph.op("Greater", [most, graph.scalar("least", _LEAST)], f"{name}.there")
        weights.append(graph.op("Where", [there, share, graph.scalar("zero", 0.0)], f"{name}.weight"))
        chosen.append(best)
        gone = graph.op("Expand", [never, graph.op("Shape", [most], f"{name}.shape")], f"{name}.gone")
        left = graph.op("ScatterElements", [left, best, gone], f"{name}.left", axis=-1)
    bounds = [graph.constant([0]), io.EXPERT_COUNT, graph.constant([2])]
    both = (graph.op("Concat", part, f"{prefix}.all_{i}", axis=-1) for i, part in enumerate((chosen, weights)))
    ids, shares = (graph.op("Slice", [name, *bounds], f"{name}.counted") for name in both)
    return ids, shares


def _by_sign(ops: Operators, graph: GraphBuilder, experts: Experts, scores: str) -> tuple[str, str]:
    """Chooses every expert with a positive score, by the norm of the rectified scores; others get zero."""
    prefix = f"layers.{experts.layer}.mlp.router"
    values, chosen = _choose(graph, experts, scores)
    rectified = graph.op("Relu", [scores], f"{prefix}.rectified")
    shares = ops.norm(graph, rectified, f"{prefix}_norm")
    taken = graph.op("GatherElements", [shares, chosen], f"{prefix}.taken", axis=-1)
    positive = graph.op("Relu", [values], f"{prefix}.positive")
    allowed = graph.op("Sign", [positive], f"{prefix}.allowed")
    return chosen, graph.op("Mul", [taken, allowed], f"{prefix}.weights")
