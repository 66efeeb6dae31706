"""Mixtures of experts with a shared expert: GLM-4.5, dots.llm1, ERNIE 4.5, Hunyuan, AFMoE; FlexOLMo, without one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from edgeinfer.bundle.parts import MoESpec, RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.architectures.base import (
    ALL_BIASES,
    ATTENTION_BIASES,
    MTP,
    NEXT_LAYER,
    Architecture,
    Naming,
    common_spec,
    flag,
    mixture,
    neighbours,
    reader,
)
from edgeinfer.export.architectures.tensors import MixtureNaming, TensorPlan
from edgeinfer.export.source.hf_config import CONFIG_HINT, OPTIMUM_HINT, HFConfig

SHARED_EXPERTS = MixtureNaming(
    shared_gate_up=("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    shared_down="mlp.shared_experts.down_proj.weight",
)


def by_sigmoid(config: HFConfig) -> MoESpec:
    """DeepSeek-V3's mixture: shares by the logistic function, chosen with a bias among the best groups."""
    size = config.integer("moe_intermediate_size")
    shared = config.get("n_shared_experts") or 0
    return MoESpec(
        experts=config.integer("n_routed_experts"),
        top_k=config.integer("num_experts_per_tok"),
        expert_size=size,
        shared_size=size * config.integer("n_shared_experts") if shared else 0,
        router="sigmoid",
        renormalize=config.flag("norm_topk_prob"),
        dense_layers=dense_layers(config, 0),
        choice_bias=True,
        groups=config.integer("n_group", 1),
        group_top_k=config.integer("topk_group", 1),
        scale=config.number("routed_scaling_factor", 1.0),
    )


def dense_layers(config: HFConfig, first: int) -> tuple[int, ...]:
    """Layers without experts: by `mlp_layer_types`, else the first `first_k_dense_replace`, else the first so many."""
    layers, types = config.integer("num_hidden_layers"), config.get("mlp_layer_types")
    if types is None:
        given = config.get("first_k_dense_replace")
        first = first if given is None else given and config.integer("first_k_dense_replace")
        return tuple(range(min(first, layers)))
    known = isinstance(types, list) and all(kind in ("dense", "sparse") for kind in types)
    if not known or len(types) != layers:
        message = f"config.json: mlp_layer_types={types!r} is not dense or sparse for each of {layers} layers."
        raise CheckpointError(message, CONFIG_HINT)
    return tuple(layer for layer, kind in enumerate(types) if kind == "dense")


# GLM-4.5 and 4.6: half of each head is rotated, in some models after norms of queries and keys.
GLM4_MOE = Architecture(
    classes=("Glm4MoeForCausalLM",),
    model_types=("glm4_moe",),
    read=reader(
        qkv_bias=flag("attention_bias"),
        qk_norm=flag("use_qk_norm"),
        rope=lambda config: config.rope(config.head_dim(), partial=0.5),
        moe=by_sigmoid,
    ),
    naming=Naming(mixture=SHARED_EXPERTS),
    predicts=NEXT_LAYER,
)
# dots.llm1: norms of queries and keys, in some models windows.
DOTS1 = Architecture(
    classes=("Dots1ForCausalLM",),
    model_types=("dots1",),
    read=reader(
        **ATTENTION_BIASES,
        qk_norm=True,
        windows=lambda config: config.windows_of(config.slides()) if any(config.slides()) else (),
        moe=by_sigmoid,
    ),
    naming=Naming(mixture=SHARED_EXPERTS),
)


def _read_ernie_moe(config: HFConfig, tied: bool) -> DecoderSpec:
    """ERNIE 4.5 MoE: neighbours are rotated as pairs; experts are chosen by biased shares of a softmax."""
    layers, size = config.integer("num_hidden_layers"), config.integer("moe_intermediate_size")
    first, step = config.get("moe_layer_start_index") or 0, config.integer("moe_layer_interval", 1)
    last = config.get("moe_layer_end_index")
    last = layers - 1 if last in (None, -1) else last
    shared = config.get("moe_num_shared_experts") or 0
    moe = MoESpec(
        experts=config.integer("moe_num_experts"),
        top_k=config.integer("moe_k"),
        expert_size=size,
        shared_size=size * config.integer("moe_num_shared_experts") if shared else 0,
        dense_layers=tuple(i for i in range(layers) if (i + 1) % step or not first <= i <= last),
        choice_bias=True,
    )
    biases: dict[str, Any] = dict.fromkeys(ALL_BIASES, config.flag("use_bias"))
    return common_spec(config, tied, **biases, rope=neighbours(config), moe=moe)


ERNIE4_5_MOE = Architecture(
    classes=("Ernie4_5_MoeForCausalLM",),
    model_types=("ernie4_5_moe",),
    read=_read_ernie_moe,
    naming=Naming(
        mixture=dataclasses.replace(
            SHARED_EXPERTS, choice_bias="mlp.moe_statics.e_score_correction_bias", choice_bias_stacked=1
        )
    ),
)


def _read_hunyuan_moe(config: HFConfig, tied: bool) -> DecoderSpec:
    """Hunyuan's mixtures: queries and keys are normed after their rotation; the shared expert is no wider."""
    experts, count, size = config.get("num_experts"), config.get("moe_topk"), config.integer("intermediate_size")
    if isinstance(experts, list) or (isinstance(count, list) and len(set(count)) > 1):
        message = "Layers with different numbers of experts are not supported."
        raise UnsupportedArchitectureError(message, OPTIMUM_HINT)
    top_k = count[0] if isinstance(count, list) and count else config.integer("moe_topk")
    moe = MoESpec(experts=config.integer("num_experts"), top_k=top_k, expert_size=size, shared_size=size)
    bias = config.flag("attention_bias")
    norms: dict[str, Any] = {"qk_norm": True, "norm_after_rope": True}
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, moe=moe, **norms)


HUNYUAN_MOE = Architecture(
    classes=("HunYuanMoEV1ForCausalLM",),
    model_types=("hunyuan_v1_moe",),
    read=_read_hunyuan_moe,
    naming=Naming(
        q_norm="self_attn.query_layernorm.weight",
        k_norm="self_attn.key_layernorm.weight",
        mixture=MixtureNaming(
            router="mlp.gate.wg.weight",
            shared_gate_up=("mlp.shared_mlp.gate_proj.weight", "mlp.shared_mlp.up_proj.weight"),
            shared_down="mlp.shared_mlp.down_proj.weight",
        ),
    ),
)


# FlexOLMo: OLMo 2's norms, with experts that are as wide as its MLP.
FLEX_OLMO = Architecture(
    classes=("FlexOlmoForCausalLM",),
    model_types=("flex_olmo",),
    read=reader(
        **ATTENTION_BIASES,
        pre_norm=False,
        post_norm=True,
        qk_norm=True,
        whole_norm=True,
        moe=lambda config: mixture(config, renormalize=config.flag("norm_topk_prob")),
    ),
)


# MiniMax M2: a sigmoid's shares, chosen with a bias; norms of all queries and of all keys; a part of each head rotates.
def _partial(config: HFConfig) -> RopeSpec:
    size = config.head_dim()
    return config.rope(size, partial=config.integer("rotary_dim", size) / size)


MINIMAX_M2 = Architecture(
    classes=("MiniMaxM2ForCausalLM",),
    model_types=("minimax_m2",),
    read=reader(
        qk_norm=True,
        whole_norm=True,
        rope=_partial,
        moe=lambda config: mixture(config, router="sigmoid", choice_bias=True),
    ),
    naming=Naming(
        mixture=MixtureNaming(
            router="block_sparse_moe.gate.weight",
            choice_bias="block_sparse_moe.e_score_correction_bias",
            gate_up=("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
            down="block_sparse_moe.experts.{expert}.w2.weight",
        )
    ),
    predicts=MTP,
)


# Every fourth layer of AFMoE sees everything.
_AFMOE_PATTERN = 4


def _read_afmoe(config: HFConfig, tied: bool) -> DecoderSpec:
    """Arcee's Trinity: norms before and after, a gate of the heads' results, no rotation in layers without a window."""
    scores = config.get("score_func")
    if scores not in (None, "sigmoid"):
        raise UnsupportedArchitectureError(f"config.json: score_func={scores!r} is not supported.", OPTIMUM_HINT)
    shared, dense = (
        config.integer(name) if config.get(name) else 0 for name in ("num_shared_experts", "num_dense_layers")
    )
    moe = mixture(
        config,
        "moe_intermediate_size",
        shared_size=config.integer("moe_intermediate_size") * shared,
        router="sigmoid",
        dense_layers=tuple(range(min(dense, config.integer("num_hidden_layers")))),
        choice_bias=True,
        scale=config.number("route_scale", 1.0),
    )
    slides = config.slides(config.integer("global_attn_every_n_layers", _AFMOE_PATTERN))
    return common_spec(
        config,
        tied,
        post_norm=True,
        qk_norm=True,
        output_gate="channel",
        windows=config.windows_of(slides),
        rope_layers=tuple(0 if slide else -1 for slide in slides),
        moe=moe,
    )


def _refine_afmoe(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """Embeddings may grow by sqrt(D), and a tied head with them."""
    root = math.sqrt(spec.hidden_size) if config.flag("mup_enabled") else 1.0
    if plan.name == "embed":
        return plan.changed(scale=root)
    return plan.changed(scale=1 / root) if plan.name == "final_norm" and spec.tied else plan


AFMOE = Architecture(
    classes=("AfmoeForCausalLM",),
    model_types=("afmoe",),
    read=_read_afmoe,
    refine=_refine_afmoe,
    naming=Naming(
        mlp_norm="pre_mlp_layernorm.weight",
        mlp_post_norm="post_mlp_layernorm.weight",
        mixture=dataclasses.replace(SHARED_EXPERTS, router="mlp.router.gate.weight", choice_bias="mlp.expert_bias"),
    ),
)
