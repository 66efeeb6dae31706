"""Families with mixtures of experts that no other file describes: Mixtral, Phi-3.5-MoE, OLMoE and GraniteMoE."""

from __future__ import annotations

import dataclasses
import math

from edgeinfer.bundle.mixture import MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec
from edgeinfer.export.architectures.mixture_plans import MixtureNaming
from edgeinfer.export.architectures.plans import TensorPlan
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig

# Experts of a token that Phi-3.5-MoE's router chooses.
_MIXED = 2


def _read_mixtral(config: HFConfig, tied: bool) -> DecoderSpec:
    """Mixtral: Mistral whose MLPs are mixtures of experts, all of them renormalised."""
    moe = MoESpec(
        experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        expert_size=config.integer("intermediate_size"),
    )
    return common_spec(config, tied, windows=config.uniform_windows(), moe=moe)


_MIXTRAL_NAMES = MixtureNaming(
    router="block_sparse_moe.gate.weight",
    gate_up=("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
    down="block_sparse_moe.experts.{expert}.w2.weight",
)
MIXTRAL = Architecture(
    classes=("MixtralForCausalLM",), model_types=("mixtral",), read=_read_mixtral, naming=Naming(mixture=_MIXTRAL_NAMES)
)


def _read_phimoe(config: HFConfig, tied: bool) -> DecoderSpec:
    """Phi-3.5-MoE: layer norms, and two experts of a token that are weighted one after the other.

    Where a rotation is scaled, its sines and cosines are multiplied as the config says. Transformers 5.24 rotates texts
    beyond LongRoPE's border by the short factors, where the model's makers take the long ones, as this does.
    """
    rope, bias = config.rope(config.head_dim()), config.flag("attention_bias")
    if config.integer("num_experts_per_tok", _MIXED) != _MIXED:
        raise UnsupportedArchitectureError("Phi-3.5-MoE with other than two experts is not supported.", OPTIMUM_HINT)
    if rope.type != "default":
        short, long = config.rope_number("short_mscale"), config.rope_number("long_mscale")
        if short != long:
            message = f"Rotations with short_mscale={short} and long_mscale={long} are not supported."
            raise UnsupportedArchitectureError(message, OPTIMUM_HINT)
        rope = dataclasses.replace(rope, attention_factor=short)
    moe = MoESpec(
        experts=config.experts(),
        top_k=_MIXED,
        expert_size=config.integer("intermediate_size"),
        router="sparsemixer",
        renormalize=False,
        jitter=config.number("router_jitter_noise", 0.01),
    )
    return common_spec(
        config,
        tied,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        head_bias=config.flag("lm_head_bias"),
        windows=config.uniform_windows(),
        rope=rope,
        moe=moe,
    )


PHIMOE = Architecture(
    classes=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    model_types=("phimoe",),
    read=_read_phimoe,
    naming=Naming(mixture=_MIXTRAL_NAMES),
)


def _read_olmoe(config: HFConfig, tied: bool) -> DecoderSpec:
    """OLMoE: many small experts whose weights are not renormalised, and a norm over all heads together."""
    if config.get("clip_qkv") is not None:
        raise UnsupportedArchitectureError(
            "Queries, keys and values clipped by clip_qkv are not supported.", OPTIMUM_HINT
        )
    moe = MoESpec(
        experts=config.experts(),
        top_k=config.integer("num_experts_per_tok"),
        expert_size=config.integer("intermediate_size"),
        renormalize=config.flag("norm_topk_prob"),
    )
    bias = config.flag("attention_bias")
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, qk_norm=True, whole_norm=True, moe=moe)


OLMOE = Architecture(classes=("OlmoeForCausalLM",), model_types=("olmoe",), read=_read_olmoe)


def read_granite_moe(config: HFConfig, tied: bool) -> DecoderSpec:
    """GraniteMoE, with or without a shared expert: stacked experts, and four multipliers that go into the weights."""
    shared = config.get("shared_intermediate_size")
    moe = MoESpec(
        experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        expert_size=config.integer("intermediate_size"),
        shared_size=config.integer("shared_intermediate_size") if shared else 0,
    )
    bias = config.flag("attention_bias")
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, moe=moe)


def refine_granite_moe(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
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


GRANITE_MOE_NAMES = MixtureNaming(
    router="block_sparse_moe.router.layer.weight",
    stacked_gate_up="block_sparse_moe.input_linear.weight",
    stacked_down="block_sparse_moe.output_linear.weight",
    shared_gate_up=("shared_mlp.input_linear.weight",),
    shared_down="shared_mlp.output_linear.weight",
)
GRANITE_MOE = Architecture(
    classes=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    model_types=("granitemoe", "granitemoeshared"),
    read=read_granite_moe,
    naming=Naming(mixture=GRANITE_MOE_NAMES),
    refine=refine_granite_moe,
)
