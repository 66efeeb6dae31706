"""Families that are Llama with a part or two of their own: SmolLM3, Ministral, Granite, GLM, BitNet and others."""

from __future__ import annotations

import dataclasses

from edgeinfer.bundle.rope import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import CheckpointError
from edgeinfer.export.architectures.base import SEEING_IGNORABLE, SEEING_ROOTS, Architecture, Naming, common_spec
from edgeinfer.export.architectures.plans import TensorPlan
from edgeinfer.export.source.hf_config import HFConfig

# Every fourth layer of SmolLM3 does not rotate.
_SMOLLM3_INTERVAL = 4


def _neighbours(config: HFConfig) -> RopeSpec:
    """The rotation of neighbours as pairs."""
    return dataclasses.replace(config.rope(config.head_dim()), interleaved=True)


def _read_smollm3(config: HFConfig, tied: bool) -> DecoderSpec:
    """SmolLM3: some layers do not rotate, and in some models have windows."""
    layers, given = config.integer("num_hidden_layers"), config.get("no_rope_layers")
    if given is None:
        interval = config.integer("no_rope_layer_interval", _SMOLLM3_INTERVAL)
        given = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(given, list) or len(given) != layers or not set(given) <= {0, 1}:
        hint = "Check that config.json is complete and belongs to this model."
        raise CheckpointError(f"config.json: no_rope_layers must say 0 or 1 for each of {layers} layers.", hint)
    bias = config.flag("attention_bias")
    slides = config.slides() if config.get("layer_types") is not None else [not each for each in given]
    return common_spec(
        config,
        tied,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        rope_layers=tuple(each - 1 for each in given),
        windows=config.windows_of(slides) if config.flag("use_sliding_window") else (),
    )


SMOLLM3 = Architecture(classes=("SmolLM3ForCausalLM",), model_types=("smollm3",), read=_read_smollm3)


def _read_ministral(config: HFConfig, tied: bool) -> DecoderSpec:
    """Ministral: Mistral with windows on some layers."""
    slides = config.slides() if config.get("layer_types") is not None else []
    return common_spec(config, tied, windows=config.windows_of(slides) if slides else config.uniform_windows())


MINISTRAL = Architecture(classes=("MinistralForCausalLM",), model_types=("ministral",), read=_read_ministral)


def _read_ministral3(config: HFConfig, tied: bool) -> DecoderSpec:
    """Ministral 3: queries far into a text are multiplied by a factor of their position."""
    return common_spec(config, tied, windows=config.uniform_windows())


MINISTRAL3 = Architecture(
    classes=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    model_types=("ministral3",),
    read=_read_ministral3,
    roots=SEEING_ROOTS,
    ignorable=SEEING_IGNORABLE,
)


def read_granite(config: HFConfig, tied: bool) -> DecoderSpec:
    """Granite: four multipliers, of which all but the scores' go into the weights."""
    bias = config.flag("attention_bias")
    scale = config.number("attention_multiplier", 1.0)
    mlp_bias = config.flag("mlp_bias")
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, attention_scale=scale)


_LAST_PRODUCTS = (".attn.out", ".mixer.out", ".down")


def refine_granite(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """The multipliers of embedding, logits and what blocks give, in the weights."""
    embedding, residual = config.number("embedding_multiplier", 1.0), config.number("residual_multiplier", 1.0)
    if plan.name == "embed":
        return plan.changed(scale=embedding)
    if plan.name == "final_norm":
        return plan.changed(scale=1 / (config.number("logits_scaling", 1.0) * (embedding if spec.tied else 1.0)))
    return plan.changed(scale=residual) if plan.name.removesuffix("_bias").endswith(_LAST_PRODUCTS) else plan


GRANITE = Architecture(
    classes=("GraniteForCausalLM",), model_types=("granite",), read=read_granite, refine=refine_granite
)


def _read_glm(config: HFConfig, tied: bool) -> DecoderSpec:
    """GLM: half of each head is rotated, neighbours as pairs; biases of queries, keys and values."""
    return common_spec(config, tied, qkv_bias=config.flag("attention_bias"), rope=_neighbours(config))


def _read_glm4(config: HFConfig, tied: bool) -> DecoderSpec:
    """GLM-4-0414: GLM with norms after attention and MLP too."""
    return dataclasses.replace(_read_glm(config, tied), post_norm=True)


GLM = Architecture(
    classes=("GlmForCausalLM",), model_types=("glm",), read=_read_glm, naming=Naming(gate_up=("mlp.gate_up_proj",))
)
GLM4 = Architecture(
    classes=("Glm4ForCausalLM",),
    model_types=("glm4",),
    read=_read_glm4,
    naming=Naming(
        gate_up=("mlp.gate_up_proj",),
        attn_post_norm="post_self_attn_layernorm.weight",
        mlp_post_norm="post_mlp_layernorm.weight",
    ),
)


def _read_ernie(config: HFConfig, tied: bool) -> DecoderSpec:
    """ERNIE 4.5: neighbours are rotated as pairs."""
    bias = config.flag("use_bias")
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, mlp_bias=bias, rope=_neighbours(config))


ERNIE4_5 = Architecture(classes=("Ernie4_5ForCausalLM",), model_types=("ernie4_5",), read=_read_ernie)


def _read_helium(config: HFConfig, tied: bool) -> DecoderSpec:
    """Helium: neighbours are rotated as pairs."""
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    return common_spec(config, tied, qkv_bias=bias, mlp_bias=mlp_bias, rope=_neighbours(config))


HELIUM = Architecture(classes=("HeliumForCausalLM",), model_types=("helium",), read=_read_helium)


def _read_arcee(config: HFConfig, tied: bool) -> DecoderSpec:
    """Arcee's AFM: squared ReLU without a gate."""
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    return common_spec(config, tied, gated=False, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


ARCEE = Architecture(classes=("ArceeForCausalLM",), model_types=("arcee",), read=_read_arcee)


def _read_bitnet(config: HFConfig, tied: bool) -> DecoderSpec:
    """BitNet b1.58: squared ReLU behind a gate, and norms before the last products.

    Its own layers round activations to int8 for each token; here they are rounded for each block of a product's inputs,
    where weights are not float32.
    """
    bias = config.flag("attention_bias")
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, inner_norms=True)


BITNET = Architecture(classes=("BitNetForCausalLM",), model_types=("bitnet",), read=_read_bitnet)


def _read_seed_oss(config: HFConfig, tied: bool) -> DecoderSpec:
    """Seed-OSS: biases that each have a field of their own."""
    return common_spec(
        config,
        tied,
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_out_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )


SEED_OSS = Architecture(classes=("SeedOssForCausalLM",), model_types=("seed_oss",), read=_read_seed_oss)


def _read_hunyuan(config: HFConfig, tied: bool) -> DecoderSpec:
    """Hunyuan's dense models: queries and keys are normed after their rotation."""
    bias = config.flag("attention_bias")
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, qk_norm=True, norm_after_rope=True)


HUNYUAN = Architecture(
    classes=("HunYuanDenseV1ForCausalLM",),
    model_types=("hunyuan_v1_dense",),
    read=_read_hunyuan,
    naming=Naming(q_norm="self_attn.query_layernorm.weight", k_norm="self_attn.key_layernorm.weight"),
)


def _read_apertus(config: HFConfig, tied: bool) -> DecoderSpec:
    """Apertus: xIELU without a gate, norms of query and key heads."""
    bias = config.flag("attention_bias")
    return common_spec(config, tied, gated=False, qk_norm=True, qkv_bias=bias, output_bias=bias)


APERTUS = Architecture(
    classes=("ApertusForCausalLM",),
    model_types=("apertus",),
    read=_read_apertus,
    naming=Naming(attn_norm="attention_layernorm.weight", mlp_norm="feedforward_layernorm.weight"),
    ignorable=("*.rotary_emb.inv_freq", "*.mlp.act_fn.beta", "*.mlp.act_fn.eps"),
)
