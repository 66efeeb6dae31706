"""Dense families around Llama: Llama (and SmolLM), Mistral, Phi-3, Granite, GLM, OLMo 2, BitNet and others."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.architectures.base import (
    ALL_BIASES,
    ATTENTION_BIASES,
    SEEING_IGNORABLE,
    SEEING_ROOTS,
    Architecture,
    Naming,
    common_spec,
    flag,
    neighbours,
    reader,
    rope_fields,
)
from edgeinfer.export.architectures.mixtures import (
    GRANITE_MOE_NAMES,
    read_granite_moe,
    refine_granite,
    refine_granite_moe,
)
from edgeinfer.export.source.hf_config import CONFIG_HINT, HFConfig

# Llama and the models published under its class, SmolLM among them; and InternLM3, whose biases have other names.
LLAMA = Architecture(
    classes=("LlamaForCausalLM", "InternLM3ForCausalLM"),
    model_types=("llama", "internlm3"),
    read=reader(
        qkv_bias=lambda config: config.flag("attention_bias") or config.flag("qkv_bias"),
        output_bias=lambda config: config.flag("attention_bias") or config.flag("bias"),
        mlp_bias=lambda config: config.flag("mlp_bias") or config.flag("bias"),
    ),
)
# Llama with a sliding window on every layer.
MISTRAL = Architecture(
    classes=("MistralForCausalLM",), model_types=("mistral",), read=reader(windows=HFConfig.uniform_windows)
)
# Phi-3, Phi-3.5 and Phi-4-mini: projections packed in the checkpoint, LongRoPE, partial rotation.
PHI3 = Architecture(
    classes=("Phi3ForCausalLM",),
    model_types=("phi3",),
    read=reader(windows=HFConfig.uniform_windows),
    naming=Naming(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
)


# Every fourth layer of SmolLM3 does not rotate.
_SMOLLM3_INTERVAL = 4


def _read_smollm3(config: HFConfig, tied: bool) -> DecoderSpec:
    """SmolLM3: some layers do not rotate, and in some models have windows."""
    layers, given = config.integer("num_hidden_layers"), config.get("no_rope_layers")
    if given is None:
        interval = config.integer("no_rope_layer_interval", _SMOLLM3_INTERVAL)
        given = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(given, list) or len(given) != layers or not set(given) <= {0, 1}:
        raise CheckpointError(f"config.json: no_rope_layers must say 0 or 1 for each of {layers} layers.", CONFIG_HINT)
    slides = config.slides() if config.get("layer_types") is not None else [not each for each in given]
    windows = config.windows_of(slides) if config.flag("use_sliding_window") else ()
    return reader(**ALL_BIASES, rope_layers=tuple(each - 1 for each in given), windows=windows)(config, tied)


SMOLLM3 = Architecture(classes=("SmolLM3ForCausalLM",), model_types=("smollm3",), read=_read_smollm3)


def _read_ministral(config: HFConfig, tied: bool) -> DecoderSpec:
    """Ministral: Mistral with windows on some layers."""
    slides = config.slides() if config.get("layer_types") is not None else []
    return common_spec(config, tied, windows=config.windows_of(slides) if slides else config.uniform_windows())


MINISTRAL = Architecture(classes=("MinistralForCausalLM",), model_types=("ministral",), read=_read_ministral)


# Queries far into a text are multiplied by a factor of their position.
MINISTRAL3 = Architecture(
    classes=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    model_types=("ministral3",),
    read=reader(windows=HFConfig.uniform_windows),
    roots=SEEING_ROOTS,
    ignorable=SEEING_IGNORABLE,
)


read_granite = reader(**ALL_BIASES, attention_scale=lambda config: config.number("attention_multiplier", 1.0))
# Four multipliers, of which all but the scores' go into the weights.
GRANITE = Architecture(
    classes=("GraniteForCausalLM",), model_types=("granite",), read=read_granite, refine=refine_granite
)


# Half of each head is rotated, neighbours as pairs; biases of queries, keys and values.
_GLM: dict[str, Any] = {"qkv_bias": flag("attention_bias"), "rope": neighbours}
GLM = Architecture(
    classes=("GlmForCausalLM",), model_types=("glm",), read=reader(**_GLM), naming=Naming(gate_up=("mlp.gate_up_proj",))
)
# GLM-4-0414: GLM with norms after attention and MLP too.
GLM4 = Architecture(
    classes=("Glm4ForCausalLM",),
    model_types=("glm4",),
    read=reader(**_GLM, post_norm=True),
    naming=Naming(
        gate_up=("mlp.gate_up_proj",),
        attn_post_norm="post_self_attn_layernorm.weight",
        mlp_post_norm="post_mlp_layernorm.weight",
    ),
)
ERNIE4_5 = Architecture(
    classes=("Ernie4_5ForCausalLM",),
    model_types=("ernie4_5",),
    read=reader(**dict.fromkeys(ALL_BIASES, flag("use_bias")), rope=neighbours),
)
HELIUM = Architecture(
    classes=("HeliumForCausalLM",),
    model_types=("helium",),
    read=reader(qkv_bias=flag("attention_bias"), mlp_bias=flag("mlp_bias"), rope=neighbours),
)
# Arcee's AFM: squared ReLU without a gate.
ARCEE = Architecture(classes=("ArceeForCausalLM",), model_types=("arcee",), read=reader(**ALL_BIASES, gated=False))
# BitNet b1.58: squared ReLU behind a gate, and norms before the last products. Its own layers round activations to int8
# for each token; here they are rounded for each block of a product's inputs, where weights are not float32.
BITNET = Architecture(
    classes=("BitNetForCausalLM",), model_types=("bitnet",), read=reader(**ATTENTION_BIASES, inner_norms=True)
)
SEED_OSS = Architecture(
    classes=("SeedOssForCausalLM",),
    model_types=("seed_oss",),
    read=reader(**ALL_BIASES | {"output_bias": flag("attention_out_bias")}),
)
# Hunyuan's dense models: queries and keys are normed after their rotation.
HUNYUAN = Architecture(
    classes=("HunYuanDenseV1ForCausalLM",),
    model_types=("hunyuan_v1_dense",),
    read=reader(**ATTENTION_BIASES, qk_norm=True, norm_after_rope=True),
    naming=Naming(q_norm="self_attn.query_layernorm.weight", k_norm="self_attn.key_layernorm.weight"),
)
# xIELU without a gate, norms of query and key heads.
APERTUS = Architecture(
    classes=("ApertusForCausalLM",),
    model_types=("apertus",),
    read=reader(**ATTENTION_BIASES, gated=False, qk_norm=True),
    naming=Naming(attn_norm="attention_layernorm.weight", mlp_norm="feedforward_layernorm.weight"),
    ignorable=("*.rotary_emb.inv_freq", "*.mlp.act_fn.beta", "*.mlp.act_fn.eps"),
)


# Every fourth layer of OLMo 3 sees everything.
_PATTERN = 4


# OLMo 2: no norms before, and norms of all queries and of all keys together.
_OLMO2 = ATTENTION_BIASES | {"pre_norm": False, "post_norm": True, "qk_norm": True, "whole_norm": True}


def _read_olmo3(config: HFConfig, tied: bool) -> DecoderSpec:
    """OLMo 3: OLMo 2 with windows, and a scaled rotation in the other layers alone."""
    slides, head_dim = config.slides(_PATTERN), config.head_dim()
    whole, local = config.rope(head_dim, "full_attention"), config.local_rope(head_dim)
    ropes = rope_fields(whole, local, slides if whole != local else [])
    return reader(**_OLMO2, windows=config.windows_of(slides), **ropes)(config, tied)


def _read_exaone4(config: HFConfig, tied: bool) -> DecoderSpec:
    """EXAONE 4: norms of each query and key head; in models with a window, layers without it do not rotate."""
    slides = config.slides() if config.get("sliding_window") is not None else []
    windows, layers = config.windows_of(slides), tuple(0 if slide else -1 for slide in slides)
    return common_spec(config, tied, pre_norm=False, post_norm=True, qk_norm=True, windows=windows, rope_layers=layers)


OLMO2 = Architecture(classes=("Olmo2ForCausalLM",), model_types=("olmo2",), read=reader(**_OLMO2))
OLMO3 = Architecture(classes=("Olmo3ForCausalLM",), model_types=("olmo3",), read=_read_olmo3)
EXAONE4 = Architecture(classes=("Exaone4ForCausalLM",), model_types=("exaone4",), read=_read_exaone4)


_GRANITE_PATTERN = 4  # layers of which the first sees everything, where config.json does not say
_WINDOW = 128  # likewise


def _rotations(config: HFConfig, spec: DecoderSpec) -> dict[str, Any]:
    """A rotation for each base in `layer_rope_theta`; layers with a base of 0 do not rotate."""
    given = config.get("layer_rope_theta")
    if given is None:
        return {}
    if not isinstance(given, list) or len(given) != spec.num_layers:
        message = f"config.json: layer_rope_theta={given!r} must be a number for each of {spec.num_layers} layers."
        raise CheckpointError(message, CONFIG_HINT)
    bases = [HFConfig({"layer_rope_theta": theta}).number("layer_rope_theta") for theta in given if theta != 0]
    kinds = sorted(set(bases)) or [spec.rope.theta]
    first, *others = (dataclasses.replace(spec.rope, theta=theta) for theta in kinds)
    layers = tuple(kinds.index(theta) if theta else -1 for theta in given)
    return {"rope": first, "more_ropes": tuple(others), "rope_layers": layers if any(layers) else ()}


def _with_windows(config: HFConfig, spec: DecoderSpec) -> DecoderSpec:
    layers = range(spec.num_layers)
    usual = config.get("layer_types") is None
    slides = [bool(layer % _GRANITE_PATTERN) for layer in layers] if usual else config.slides()
    window = config.integer("sliding_window", _WINDOW)
    windows = tuple(window if slide else 0 for slide in slides) if any(slides) and window < spec.max_positions else ()
    return dataclasses.replace(spec, sinks=True, windows=windows, **_rotations(config, spec))


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    return _with_windows(config, read_granite(config, tied))


def _read_moe(config: HFConfig, tied: bool) -> DecoderSpec:
    return _with_windows(config, read_granite_moe(config, tied))


GRANITE_SWA = Architecture(
    classes=("GraniteSWAForCausalLM",), model_types=("granite_swa",), read=_read, refine=refine_granite
)
GRANITE_MOE_SWA = Architecture(
    classes=("GraniteMoeSWAForCausalLM",),
    model_types=("granitemoe_swa",),
    read=_read_moe,
    naming=Naming(
        mixture=dataclasses.replace(
            GRANITE_MOE_NAMES,
            router="block_sparse_moe.router.weight",
            stacked_gate_up="block_sparse_moe.experts.gate_up_proj",
            stacked_down="block_sparse_moe.experts.down_proj",
        )
    ),
    refine=refine_granite_moe,
)
