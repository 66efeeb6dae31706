"""GraniteMoE, with or without a shared expert: stacked experts, and four multipliers that go into the weights.

Hidden states are multiplied after the embedding, results before they are added, scores of attention instead of one over
the root of the head's width, and logits divided at the end. A tied head is the multiplied embedding, so the final norm
takes that back besides.
"""

from __future__ import annotations

import dataclasses
import math

from edgeinfer.bundle import DecoderSpec, MoESpec
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec
from edgeinfer.export.architectures.mixtures import MixtureNaming
from edgeinfer.export.architectures.plans import TensorPlan
from edgeinfer.export.hf_config import HFConfig

__all__ = ["GRANITE_MOE"]


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    shared = config.get("shared_intermediate_size")
    moe = MoESpec(
        experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        expert_size=config.integer("intermediate_size"),
        shared_size=config.integer("shared_intermediate_size") if shared else 0,
    )
    bias = config.flag("attention_bias")
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, moe=moe)


def _refine(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    embedding, residual = config.number("embedding_multiplier", 1.0), config.number("residual_multiplier", 1.0)
    factor = 1.0
    if plan.name == "embed":
        factor = embedding
    elif plan.name == "final_norm":
        factor = 1 / (config.number("logits_scaling", 1.0) * (embedding if spec.tied else 1.0))
    elif plan.name.endswith((".attn.out", ".attn.out_bias", ".down")):
        factor = residual
    elif plan.name.endswith((".attn.qkv", ".attn.qkv_bias")):
        # The scores' own factor is one over the root of the head's width: queries bring the rest.
        query, *others = plan.sources
        scale = config.number("attention_multiplier", 1.0) * math.sqrt(spec.head_dim)
        return TensorPlan(plan.name, (dataclasses.replace(query, scale=scale), *others))
    return TensorPlan(plan.name, tuple(dataclasses.replace(s, scale=factor) for s in plan.sources))


_MIXTURE = MixtureNaming(
    router="block_sparse_moe.router.layer.weight",
    stacked_gate_up="block_sparse_moe.input_linear.weight",
    stacked_down="block_sparse_moe.output_linear.weight",
    shared_gate_up=("shared_mlp.input_linear.weight",),
    shared_down="shared_mlp.output_linear.weight",
)
GRANITE_MOE = Architecture(
    classes=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    model_types=("granitemoe", "granitemoeshared"),
    read=_read,
    naming=Naming(mixture=_MIXTURE),
    refine=_refine,
)
