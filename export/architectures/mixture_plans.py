"""The tensors of mixtures of experts: their names in checkpoints, stored one by one or stacked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from edgeinfer.bundle import MoESpec
from edgeinfer.bundle.experts import expert_tensor
from edgeinfer.export.architectures.plans import Source, TensorPlan, plan

__all__ = ["MixtureNaming", "mixture_plans"]


@dataclass(frozen=True)
class MixtureNaming:
    """Names of the tensors of a mixture, after the layer's own prefix.

    A checkpoint stores every expert's matrices on their own, or one tensor that stacks them along a first axis; both
    are accepted.

    Attributes:
        choice_bias_stacked: how many the tensor stacks along a first axis of its own; 0 where it is a vector.
        router_norm: of a "relu" router.
        gate_up: tensors whose rows, in this order, are gate and up of expert `{expert}`; one where there is no gate.
        stacked_gate_up, stacked_down: names of the stacked tensors, where they are stacked.
        shared_gate_up: tensors whose rows, in this order, are gate and up of the shared expert.
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
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight")
    shared_down: str = "mlp.shared_expert.down_proj.weight"
    shared_gate: str = "mlp.shared_expert_gate.weight"


def mixture_plans(
    names: MixtureNaming, moe: MoESpec, hidden: int, layer: int, root: str, stored: Collection[str]
) -> list[TensorPlan]:
    """Plans the tensors of a mixture in the order they are written.

    Args:
        hidden: hidden size of the model.
        root: what precedes the names in the checkpoint.
        stored: names of the checkpoint's tensors.
    """
    prefix, experts = f"layers.{layer}.mlp", moe.experts
    plans = [plan(f"{prefix}.router", (root + names.router, (experts, hidden)))]
    if moe.router_bias:
        plans.append(plan(f"{prefix}.router_bias", (root + names.router_bias, (experts,))))
    if moe.choice_bias:
        bias = Source(root + names.choice_bias, (experts,), stacked=names.choice_bias_stacked)
        plans.append(TensorPlan(f"{prefix}.choice_bias", (bias,)))
    if moe.router == "relu":
        plans.append(plan(f"{prefix}.router_norm", (root + names.router_norm, (experts,))))
    stacked = root + names.stacked_down in stored
    for expert in range(experts):
        into, out = _stacked(names, root, expert, experts) if stacked else _single(names, root, expert)
        part, rows = ("gate_up", 2 * moe.expert_size) if moe.gated else ("up", moe.expert_size)
        shape = (rows // len(into), hidden)
        plans.append(TensorPlan(expert_tensor(layer, expert, part), tuple(_taken(taken, shape) for taken in into)))
        down = _taken(out, (hidden, moe.expert_size))
        plans.append(TensorPlan(expert_tensor(layer, expert, "down"), (down,)))
    if moe.shared_size:
        rows = 2 * moe.shared_size // len(names.shared_gate_up)
        plans.append(plan(f"{prefix}.shared.gate_up", *((root + n, (rows, hidden)) for n in names.shared_gate_up)))
        plans.append(plan(f"{prefix}.shared.down", (root + names.shared_down, (hidden, moe.shared_size))))
    if moe.shared_gate:
        plans.append(plan(f"{prefix}.shared.gate", (root + names.shared_gate, (1, hidden))))
    return plans


# A tensor's name, and which of how many are taken of it.
_Taken = tuple[str, tuple[int, int]]


def _taken(taken: _Taken, shape: tuple[int, int]) -> Source:
    name, (index, stacked) = taken
    return Source(name, shape, index=index, stacked=stacked)


def _single(names: MixtureNaming, root: str, expert: int) -> tuple[list[_Taken], _Taken]:
    into: list[_Taken] = [(root + name.format(expert=expert), (0, 0)) for name in names.gate_up]
    return into, (root + names.down.format(expert=expert), (0, 0))


def _stacked(names: MixtureNaming, root: str, expert: int, experts: int) -> tuple[list[_Taken], _Taken]:
    which = (expert, experts)
    return [(root + names.stacked_gate_up, which)], (root + names.stacked_down, which)
