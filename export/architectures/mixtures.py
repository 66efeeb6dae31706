"""Mixtures of experts that no other file describes: Mixtral, OLMoE, GraniteMoE, Phi-3.5, gpt-oss, Cohere 2, BlockFFN.

MiniCPM3 is here too, as BlockFFN is published under MiniCPM's class: its multipliers go into the weights of the
embedding, of results before they are added, and of the hidden states before the head. MiniCPM's ordinary MLPs are
refused.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.parts import MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.architectures.base import ATTENTION_BIASES, Architecture, Naming, common_spec, mixture, reader
from edgeinfer.export.architectures.latent import latent_spec
from edgeinfer.export.architectures.layer_norm import read_cohere2, refine_cohere
from edgeinfer.export.architectures.shared_mixtures import SHARED_EXPERTS, dense_layers
from edgeinfer.export.architectures.tensors import MixtureNaming, TensorPlan
from edgeinfer.export.source.hf_config import CONFIG_HINT, OPTIMUM_HINT, HFConfig

# Experts of a token that Phi-3.5-MoE's router chooses.
_MIXED = 2


_MIXTRAL_NAMES = MixtureNaming(
    router="block_sparse_moe.gate.weight",
    gate_up=("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
    down="block_sparse_moe.experts.{expert}.w2.weight",
)
# Mistral whose MLPs are mixtures of experts, all of them renormalised.
MIXTRAL = Architecture(
    classes=("MixtralForCausalLM",),
    model_types=("mixtral",),
    read=reader(windows=HFConfig.uniform_windows, moe=mixture),
    naming=Naming(mixture=_MIXTRAL_NAMES),
)


def _read_phimoe(config: HFConfig, tied: bool) -> DecoderSpec:
    """Phi-3.5-MoE: layer norms, and two experts of a token that are weighted one after the other. Where a rotation is
    scaled, its sines and cosines are multiplied as the config says. Transformers 5.24 rotates texts beyond LongRoPE's
    border by the short factors, where the model's makers take the long ones, as this does."""
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
    moe = mixture(config, renormalize=config.flag("norm_topk_prob"))
    return reader(**ATTENTION_BIASES, qk_norm=True, whole_norm=True, moe=moe)(config, tied)


OLMOE = Architecture(classes=("OlmoeForCausalLM",), model_types=("olmoe",), read=_read_olmoe)


def read_granite_moe(config: HFConfig, tied: bool) -> DecoderSpec:
    """GraniteMoE, with or without a shared expert: stacked experts, and four multipliers that go into the weights."""
    shared = config.get("shared_intermediate_size") and config.integer("shared_intermediate_size")
    return reader(**ATTENTION_BIASES, moe=mixture(config, shared_size=shared or 0))(config, tied)


_LAST_PRODUCTS = (".attn.out", ".mixer.out", ".down")


def refine_granite(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """Multiplies embedding, logits and blocks' results into the weights."""
    embedding, residual = config.number("embedding_multiplier", 1.0), config.number("residual_multiplier", 1.0)
    if plan.name == "embed":
        return plan.changed(scale=embedding)
    if plan.name == "final_norm":
        return plan.changed(scale=1 / (config.number("logits_scaling", 1.0) * (embedding if spec.tied else 1.0)))
    return plan.changed(scale=residual) if plan.name.removesuffix("_bias").endswith(_LAST_PRODUCTS) else plan


def refine_granite_moe(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    if not plan.name.endswith((".attn.qkv", ".attn.qkv_bias")):
        return refine_granite(config, spec, plan)
    # The scores' own factor is one over the root of the head's width: queries bring the rest.
    query, *others = plan.sources
    scale = config.number("attention_multiplier", 1.0) * math.sqrt(spec.head_dim)
    return TensorPlan(plan.name, (dataclasses.replace(query, scale=scale), *others))


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


# The constants of its activation, which transformers reads of the config and the kernel has of its own.
_ALPHA, _LIMIT = 1.702, 7.0
# Every second layer sees everything.
_PATTERN = 2


def _read_gpt_oss(config: HFConfig, tied: bool) -> DecoderSpec:
    """gpt-oss: experts are chosen by their scores, and weighed by the softmax of the chosen ones' alone."""
    for name, value in (("swiglu_alpha", _ALPHA), ("swiglu_limit", _LIMIT)):
        if config.number(name, value) != value:
            raise UnsupportedArchitectureError(
                f"Experts with {name}={config.get(name)} are not supported.", OPTIMUM_HINT
            )
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        raise CheckpointError("config.json: rope_parameters is missing.", CONFIG_HINT)
    moe = mixture(config, router_bias=True, expert_bias=True)
    biases: dict[str, Any] = dict.fromkeys(ATTENTION_BIASES, config.flag("attention_bias", True))
    windows = config.windows_of(config.slides(_PATTERN))
    return common_spec(config, tied, **biases, sinks=True, windows=windows, activation="swiglu_oai", moe=moe)


GPT_OSS = Architecture(
    classes=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    read=_read_gpt_oss,
    naming=Naming(
        mixture=MixtureNaming(
            router="mlp.router.weight", router_bias="mlp.router.bias", gate_up=(), turned=True, by_turns=True
        )
    ),
)


_AVERAGE = "average"


def _says(config: HFConfig, name: str, *known: str) -> str:
    """A field with known values, of which the first is the default."""
    value = known[0] if config.get(name) is None else config.get(name)
    if value not in known:
        raise UnsupportedArchitectureError(f"config.json: {name}={value!r} is not supported.", OPTIMUM_HINT)
    return str(value)


def _halved(config: HFConfig) -> bool:
    """Whether a layer gives the mean of the results of its experts and its shared expert."""
    shared = config.get("num_shared_experts")
    return bool(shared) and _says(config, "shared_expert_combination_strategy", _AVERAGE, "sum") == _AVERAGE


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    spec, size = read_cohere2(config, tied), config.integer("intermediate_size")
    by_sigmoid = _says(config, "expert_selection_fn", "softmax", "sigmoid") == "sigmoid"
    divided = not by_sigmoid or config.flag("norm_topk_prob", True)
    moe = mixture(
        config,
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


# What a configuration must say; the first is what transformers' code of the family takes where it is silent.
_KNOWN: dict[str, tuple[object, ...]] = {
    "attention_type": ("vanilla", "mla"),
    "ffn_type": ("vanilla", "block", "block_linear"),
    "router_act": ("relu",),
    "norm_after_router": ("sum", "rms"),
    "num_shared_experts": (0,),
}
_BLOCKS = ("block", "block_linear")


def _read_minicpm(config: HFConfig, tied: bool) -> DecoderSpec:
    given = {name: config.get(name) if config.get(name) is not None else known[0] for name, known in _KNOWN.items()}
    fits = all(given[name] in known for name, known in _KNOWN.items())
    if not fits or given["ffn_type"] not in _BLOCKS or given["norm_after_router"] != "rms":
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        raise UnsupportedArchitectureError(f"A MiniCPM with {said} is not supported.", OPTIMUM_HINT)
    experts = config.integer("num_experts")
    moe = MoESpec(
        experts=experts,
        top_k=experts,
        expert_size=config.integer("expert_size"),
        router="relu",
        renormalize=False,
        gated=False,
    )
    if given["attention_type"] == "mla":
        # Whatever the configuration says of the width of values, the published code does not read it.
        values = config.values | {"v_head_dim": config.integer("hidden_size") // config.integer("num_attention_heads")}
        return latent_spec(HFConfig(values), tied, interleaved=False, moe=moe)
    return reader(**ATTENTION_BIASES, moe=moe)(config, tied)


def _refine_minicpm(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    embedding, factor = config.number("scale_emb", 1.0), 1.0
    if plan.name == "embed":
        factor = embedding
    elif plan.name == "final_norm":
        factor = config.number("dim_model_base", 1.0) / (spec.hidden_size * (embedding if spec.tied else 1.0))
    elif plan.name.endswith((".attn.out", ".attn.out_bias", ".down", ".down_bias")):
        factor = config.number("scale_depth", 1.0) / math.sqrt(spec.num_layers)
    sources = tuple(dataclasses.replace(s, scale=factor) for s in plan.sources)
    expert = find_expert(plan.name)
    if expert is not None and config.get("ffn_type") == "block_linear":
        # The experts' rows, or columns, follow one another in one matrix.
        sources = tuple(dataclasses.replace(s, joined=int(expert.part == "down")) for s in sources)
    return TensorPlan(plan.name, sources)


_MIXTURE = MixtureNaming(
    router="mlp.router_proj.weight",
    router_norm="mlp.router_norm.weight",
    stacked_gate_up="mlp.up_proj",
    stacked_down="mlp.down_proj",
)
BLOCK_FFN = Architecture(
    classes=("MiniCPMForCausalLM",),
    model_types=("minicpm",),
    read=_read_minicpm,
    naming=Naming(mixture=_MIXTURE),
    refine=_refine_minicpm,
)


def _read_minicpm3(config: HFConfig, tied: bool) -> DecoderSpec:
    width = config.integer("hidden_size") // config.integer("num_attention_heads")
    return latent_spec(config, tied, interleaved=False, value_size=width, mlp_bias=config.flag("mlp_bias"))


MINICPM3 = Architecture(
    classes=("MiniCPM3ForCausalLM",), model_types=("minicpm3",), read=_read_minicpm3, refine=_refine_minicpm
)
