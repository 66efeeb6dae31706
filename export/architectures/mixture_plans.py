"""The tensors of mixtures of experts: their names in checkpoints, stored one by one or stacked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from edgeinfer.bundle.experts import expert_biases, expert_tensor
from edgeinfer.bundle.mixture import MoESpec
from edgeinfer.export.architectures.plans import Shape, Source, TensorPlan, plan
from edgeinfer.export.source.packed import MXFP4, mxfp4_tensors

# Of experts beside an MLP.
_BESIDE_NORMS = ("router_input_norm", "experts_norm", "experts_post_norm", "dense_post_norm")


@dataclass(frozen=True)
class MixtureNaming:
    """Names of the tensors of a mixture, after the layer's own prefix.

    A checkpoint stores every expert's matrices on their own, or one tensor that stacks them along a first axis, as
    floats or as blocks of MXFP4 with scales; all are accepted.

    Attributes:
        choice_bias_stacked: how many the tensor stacks along a first axis of its own; 0 where it is a vector.
        router_norm: of a "relu" router.
        gate_up: tensors whose rows, in this order, are gate and up of expert `{expert}`; one where there is no gate.
            Empty where they are always stacked.
        stacked_gate_up, stacked_down: names of the stacked tensors, where they are stacked; their biases end in
            "_bias" besides.
        turned: stacked floats have columns for rows.
        by_turns: the rows of gate and up that are stacked take turns.
        shared_gate_up: tensors whose rows, in this order, are gate and up of the shared expert.
        router_input_norm, experts_norm, experts_post_norm, dense_post_norm: of experts beside an MLP: norms of what
            the router reads, of what enters and leaves the experts, and of what leaves the MLP.
        expert_scale: likewise, what each expert's results are multiplied by.
    """

    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.gate.bias"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    choice_bias_stacked: int = 0
    router_norm: str = ""
    gate_up: tuple[str, ...] = ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight")
    down: str = "mlp.experts.{expert}.down_proj.weight"
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"
    turned: bool = False
    by_turns: bool = False
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight")
    shared_down: str = "mlp.shared_expert.down_proj.weight"
    shared_gate: str = "mlp.shared_expert_gate.weight"
    router_input_norm: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    experts_norm: str = "pre_feedforward_layernorm_2.weight"
    experts_post_norm: str = "post_feedforward_layernorm_2.weight"
    dense_post_norm: str = "post_feedforward_layernorm_1.weight"


def mixture_plans(
    names: MixtureNaming, moe: MoESpec, hidden: int, layer: int, root: str, stored: Collection[str]
) -> list[TensorPlan]:
    """Plans the tensors of a mixture in the order they are written."""
    prefix, experts = f"layers.{layer}.mlp", moe.experts
    plans = [plan(f"{prefix}.router", (root + names.router, (experts, hidden)))]
    if moe.router_bias:
        plans.append(plan(f"{prefix}.router_bias", (root + names.router_bias, (experts,))))
    if moe.choice_bias:
        bias = Source(root + names.choice_bias, (experts,), stacked=names.choice_bias_stacked)
        plans.append(TensorPlan(f"{prefix}.choice_bias", (bias,)))
    if moe.beside:
        for name, size in (("expert_scale", experts), *((norm, hidden) for norm in _BESIDE_NORMS)):
            plans.append(plan(f"{prefix}.{name}", (root + getattr(names, name), (size,))))
    if moe.router == "relu":
        plans.append(plan(f"{prefix}.router_norm", (root + names.router_norm, (experts,))))
    inner = "gate_up" if moe.gated else "up"
    for expert in range(experts):
        into, out = _matrices(names, moe, hidden, root, stored, expert)
        plans.append(TensorPlan(expert_tensor(layer, expert, inner), into))
        plans.append(TensorPlan(expert_tensor(layer, expert, "down"), (out,)))
    if moe.expert_bias:
        for part, name, size in (
            (inner, names.stacked_gate_up, moe.expert_size),
            ("down", names.stacked_down, hidden),
        ):
            sources = [_rows(f"{root}{name}_bias", (size,), names, part, e, experts) for e in range(experts)]
            plans.append(TensorPlan(expert_biases(layer, part), tuple(each for some in sources for each in some)))
    if moe.shared_size:
        part, rows = ("gate_up", 2 * moe.shared_size) if moe.gated else ("up", moe.shared_size)
        rows //= len(names.shared_gate_up)
        plans.append(plan(f"{prefix}.shared.{part}", *((root + n, (rows, hidden)) for n in names.shared_gate_up)))
        plans.append(plan(f"{prefix}.shared.down", (root + names.shared_down, (hidden, moe.shared_size))))
    if moe.shared_gate:
        plans.append(plan(f"{prefix}.shared.gate", (root + names.shared_gate, (1, hidden))))
    return plans


def _matrices(
    names: MixtureNaming, moe: MoESpec, hidden: int, root: str, stored: Collection[str], expert: int
) -> tuple[tuple[Source, ...], Source]:
    """What the hidden states enter of an expert, and what they leave by."""
    inner, experts = moe.expert_size, moe.experts
    up, down = root + names.stacked_gate_up, root + names.stacked_down
    packed = mxfp4_tensors(down)[0] in stored
    if packed or down in stored or not names.gate_up:
        how: dict[str, Any] = {"packing": MXFP4} if packed else {"turned": names.turned}
        into = _rows(up, (inner, hidden), names, "gate_up" if moe.gated else "up", expert, experts, **how)
        return into, Source(down, (hidden, inner), index=expert, stacked=experts, **how)
    rows = (2 if moe.gated else 1) * inner // len(names.gate_up)
    single = tuple(Source(root + name.format(expert=expert), (rows, hidden)) for name in names.gate_up)
    return single, Source(root + names.down.format(expert=expert), (hidden, inner))


def _rows(
    name: str, shape: Shape, names: MixtureNaming, part: str, expert: int, experts: int, **how: Any
) -> tuple[Source, ...]:
    """One part of an expert, of those that a tensor stacks; `shape` is that of gate and of up where it is of both."""
    if part == "gate_up" and names.by_turns:
        halves = ((2, half, 1) for half in (0, 1))
        return tuple(Source(name, shape, index=expert, stacked=experts, pieces=half, **how) for half in halves)
    whole = (2 * shape[0], *shape[1:]) if part == "gate_up" else shape
    return (Source(name, whole, index=expert, stacked=experts, **how),)
