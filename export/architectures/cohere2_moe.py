"""Cohere 2 MoE: Command R7B's layers, with experts in all but the first ones."""

from __future__ import annotations

import dataclasses

from edgeinfer.bundle.mixture import MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures.base import Architecture, Naming
from edgeinfer.export.architectures.layer_norm import read_cohere2, refine_cohere
from edgeinfer.export.architectures.plans import TensorPlan
from edgeinfer.export.architectures.shared_mixtures import SHARED_EXPERTS, dense_layers
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig

_AVERAGE = "average"


def _says(config: HFConfig, name: str, *known: str) -> str:
    """One of the known values of a field, of which the first is what a silent configuration means."""
    value = known[0] if config.get(name) is None else config.get(name)
    if value not in known:
        raise UnsupportedArchitectureError(f"config.json: {name}={value!r} is not supported.", OPTIMUM_HINT)
    return str(value)


def _halved(config: HFConfig) -> bool:
    """Whether a layer gives the mean of what its experts and its shared expert give."""
    shared = config.get("num_shared_experts")
    return bool(shared) and _says(config, "shared_expert_combination_strategy", _AVERAGE, "sum") == _AVERAGE


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    spec, size = read_cohere2(config, tied), config.integer("intermediate_size")
    by_sigmoid = _says(config, "expert_selection_fn", "softmax", "sigmoid") == "sigmoid"
    divided = not by_sigmoid or config.get("norm_topk_prob") is None or config.flag("norm_topk_prob")
    moe = MoESpec(
        experts=config.experts(),
        top_k=config.integer("num_experts_per_tok"),
        expert_size=size,
        shared_size=size * config.integer("num_shared_experts") if config.get("num_shared_experts") else 0,
        router="sigmoid" if by_sigmoid else "softmax",
        renormalize=divided,
        dense_layers=dense_layers(config, 0),
        scale=0.5 if _halved(config) else 1.0,
    )
    rotated = spec.rope_layers
    if config.integer("prefix_dense_sliding_window_pattern", 1) == 1:
        # The first layers rotate whatever they see.
        rotated = tuple(0 if layer in moe.dense_layers else index for layer, index in enumerate(rotated))
    spec = dataclasses.replace(
        spec, moe=moe, rope_layers=rotated, intermediate_size=config.integer("prefix_dense_intermediate_size", size)
    )
    if config.get("rms_norm_eps") is None:
        return spec
    return dataclasses.replace(spec, norm="rms", norm_eps=config.number("rms_norm_eps"))


def _refine(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    if plan.name.endswith(".shared.down") and _halved(config):
        return plan.changed(scale=0.5)
    return refine_cohere(config, spec, plan)


COHERE2_MOE = Architecture(
    classes=("Cohere2MoeForCausalLM",),
    model_types=("cohere2_moe",),
    read=_read,
    naming=Naming(mixture=SHARED_EXPERTS),
    refine=_refine,
)
