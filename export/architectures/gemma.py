"""The Gemmas: 1, 2, the text models of 3, 3n and 4, and VaultGemma. Gemma stores norms minus one and scales embeddings
by sqrt(D). Gemma 3n has streams of hidden states, augmented residuals and sparse MLPs. Gemma 4 shares per-layer
embeddings and shared caches with it, and has other heads in layers that attend to everything."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from edgeinfer.bundle.parts import HeadsSpec, MoESpec, PerLayerSpec, RopeSpec, StreamsSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.architectures.base import (
    SEEING_IGNORABLE,
    SEEING_ROOTS,
    Architecture,
    Naming,
    common_spec,
    flag,
    reader,
    rope_fields,
)
from edgeinfer.export.architectures.tensors import MixtureNaming, TensorPlan
from edgeinfer.export.source.hf_config import CONFIG_HINT, OPTIMUM_HINT, HFConfig

# Every second layer of Gemma 2 and every sixth of Gemma 3 sees everything.
_GEMMA2_PATTERN, _GEMMA3_PATTERN = 2, 6
_NAMING = Naming(mlp_norm="pre_feedforward_layernorm.weight")


def _read_gemma2(config: HFConfig, tied: bool) -> DecoderSpec:
    """Gemma 2: norms before and after, soft caps, a scale of its own, windows on every other layer."""
    return _with_norms(config, tied, config.slides(_GEMMA2_PATTERN))


def _read_vault(config: HFConfig, tied: bool) -> DecoderSpec:
    """VaultGemma: Gemma 2 without norms after attention and MLP."""
    return dataclasses.replace(_read_gemma2(config, tied), post_norm=False)


def _read_gemma3(config: HFConfig, tied: bool) -> DecoderSpec:
    """Gemma 3: Gemma 2 with norms of queries and keys instead of caps, and two rotations."""
    slides, head_dim = config.slides(_GEMMA3_PATTERN), config.head_dim()
    whole, local = config.rope(head_dim, "full_attention"), config.local_rope(head_dim)
    spec = _with_norms(config, tied, slides, qk_norm=True, **rope_fields(whole, local, slides))
    return dataclasses.replace(spec, attention_softcap=0.0)


def _cap(config: HFConfig, name: str) -> float:
    return 0.0 if config.get(name) is None else config.number(name)


def _with_norms(config: HFConfig, tied: bool, slides: list[bool], **parts: Any) -> DecoderSpec:
    return common_spec(
        config,
        tied,
        activation=config.activation("hidden_activation"),
        post_norm=True,
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_bias"),
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=_cap(config, "attn_logit_softcapping"),
        logit_softcap=_cap(config, "final_logit_softcapping"),
        windows=config.windows_of(slides),
        **parts,
    )


def _refine(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    root = math.sqrt(spec.hidden_size)
    if plan.name == "embed":
        return plan.changed(scale=root)
    if plan.name == "final_norm":
        # A tied head has grown with the embedding.
        return plan.changed(offset=1.0, scale=1 / root if spec.tied else 1.0)
    return plan.changed(offset=1.0) if plan.name.endswith("norm") else plan


# Llama with the tanh approximation of GELU, whatever name old configurations have for it.
GEMMA = Architecture(
    classes=("GemmaForCausalLM",),
    model_types=("gemma",),
    read=reader(activation="gelu_tanh", qkv_bias=flag("attention_bias")),
    refine=_refine,
)
GEMMA2 = Architecture(
    classes=("Gemma2ForCausalLM",), model_types=("gemma2",), read=_read_gemma2, naming=_NAMING, refine=_refine
)
VAULT_GEMMA = Architecture(
    classes=("VaultGemmaForCausalLM",), model_types=("vaultgemma",), read=_read_vault, naming=_NAMING, refine=_refine
)
GEMMA3 = Architecture(
    classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    model_types=("gemma3_text", "gemma3"),
    read=_read_gemma3,
    naming=_NAMING,
    refine=_refine,
    roots=SEEING_ROOTS,
    ignorable=SEEING_IGNORABLE,
)


# Where config.json does not say: layers of which the last sees everything, and how many of those first are sparse, and
# how much, in models that have more.
_GEMMA3N_PATTERN, _SPARSE_LAYERS, _SPARSITY = 5, 10, 0.95
_THETA, _LOCAL_THETA = 1e6, 1e4
HEARING_IGNORABLE = (*SEEING_IGNORABLE, "*audio_tower.*", "*embed_vision.*", "*embed_audio.*")
SHARED_IGNORABLE = ("*.self_attn.k_proj.weight", "*.self_attn.v_proj.weight", "*.self_attn.k_norm.weight")


def _for_each_layer(config: HFConfig, name: str, usual: list[float]) -> list[float]:
    """Values of a field with one number per layer, or one for all."""
    given = config.get(name)
    if given is None:
        return usual
    numbers = given if isinstance(given, list) else [given] * len(usual)
    right = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
    if len(numbers) != len(usual) or not right:
        message = f"config.json: {name}={given!r} must have a number for each of {len(usual)} layers."
        raise CheckpointError(message, CONFIG_HINT)
    return numbers


def _ropes_gemma3n(config: HFConfig) -> tuple[RopeSpec, RopeSpec]:
    """The rotation of layers that attend to everything, and that of the others."""
    size = config.head_dim()
    if config.get("rope_parameters") is not None:
        return config.rope(size, "full_attention"), config.rope(size, "sliding_attention")
    whole = HFConfig({"rope_theta": _THETA, **config.values}).rope(size)
    return whole, RopeSpec("default", config.number("rope_local_base_freq", _LOCAL_THETA), size)


def _read_gemma3n(config: HFConfig, tied: bool) -> DecoderSpec:
    if config.get("altup_active_idx"):
        message = f"A Gemma 3n with altup_active_idx={config.get('altup_active_idx')} is not supported."
        raise UnsupportedArchitectureError(message, OPTIMUM_HINT)
    slides, layers = config.slides(_GEMMA3N_PATTERN), config.integer("num_hidden_layers")
    sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
    usual = [_SPARSITY] * sparse + [0.0] * (layers - sparse)
    sparsity = tuple(map(float, _for_each_layer(config, "activation_sparsity_pattern", usual)))
    listed = isinstance(config.get("intermediate_size"), list)
    wide = [int(size) for size in _for_each_layer(config, "intermediate_size", [0.0] * layers)]
    whole, local = _ropes_gemma3n(config)
    return common_spec(
        config,
        tied,
        intermediate_size=wide[0] if listed else config.integer("intermediate_size"),
        mlp_sizes=tuple(wide) if listed and len(set(wide)) > 1 else (),
        windows=config.windows_of(slides),
        streams=StreamsSpec(
            config.integer("altup_num_inputs", 4),
            config.integer("laurel_rank", 64),
            config.flag("altup_correct_scale", True),
        ),
        sparsity=sparsity if any(sparsity) else (),
        **rope_fields(whole, local, slides),
        **shared_fields(config, slides),
    )


def _refine_gemma3n(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """The router reads hidden states divided by their width."""
    if plan.name.endswith(".streams.router_norm"):
        return plan.changed(scale=1 / spec.hidden_size)
    return refine_gemma4(config, spec, plan)


GEMMA3N = Architecture(
    classes=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    model_types=("gemma3n_text", "gemma3n"),
    read=_read_gemma3n,
    naming=_NAMING,
    refine=_refine_gemma3n,
    roots=SEEING_ROOTS,
    # The scale is not used by every configuration that stores it.
    ignorable=(*HEARING_IGNORABLE, *SHARED_IGNORABLE, "*.altup.correct_output_scale"),
)


# Of models that hear as well: their other tensors; and keys and values of layers that read those of others.
_GEMMA4_PATTERN = 6  # layers of which the last sees everything, where config.json does not say
_FULL_HEAD_DIM, _WINDOW = 512, 512  # likewise


def _kv_sources(config: HFConfig, slides: list[bool]) -> tuple[int, ...]:
    """The layer whose keys and values each layer reads: its own, or for the last `num_kv_shared_layers` the last before
    them of the same kind."""
    layers = len(slides)
    if not config.get("num_kv_shared_layers"):
        return ()
    first = layers - config.integer("num_kv_shared_layers")
    own = {slides[layer]: layer for layer in range(max(first, 0))}
    if set(own) != set(slides):
        message = f"config.json: num_kv_shared_layers={layers - first} leaves no layer of some kind to share."
        raise CheckpointError(message, CONFIG_HINT)
    return tuple(layer if layer < first else own[slides[layer]] for layer in range(layers))


def _per_layer(config: HFConfig) -> PerLayerSpec | None:
    if config.get("hidden_size_per_layer_input") == 0 or config.model_type.startswith("gemma4_unified"):
        return None
    size = config.integer("hidden_size_per_layer_input", 256)
    return PerLayerSpec(size, config.integer("vocab_size_per_layer_input", config.integer("vocab_size")))


def shared_fields(config: HFConfig, slides: list[bool]) -> dict[str, Any]:
    """Fields that Gemma 3n and Gemma 4 share."""
    return {
        "activation": config.activation("hidden_activation"),
        "post_norm": True,
        "qk_norm": True,
        "value_norm": True,
        "qkv_bias": config.flag("attention_bias"),
        "output_bias": config.flag("attention_bias"),
        "attention_scale": 1.0,
        "logit_softcap": _cap(config, "final_logit_softcapping"),
        "kv_sources": _kv_sources(config, slides),
        "per_layer": _per_layer(config),
    }


def _refine_per_layer(spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """Scales the per-layer table by the root of its width, and the mean of both parts by the root of two."""
    half = math.sqrt(0.5)
    if spec.per_layer is None:
        return plan
    if plan.name == "embed.per_layer":
        return plan.changed(scale=math.sqrt(spec.per_layer.size) * half)
    if plan.name == "per_layer.projection":
        return plan.changed(scale=spec.hidden_size**-0.5)
    return plan.changed(scale=half) if plan.name == "per_layer.norm" else plan


def _full_heads(config: HFConfig, slides: list[bool]) -> HeadsSpec:
    """Heads of the layers that attend to everything, from before or after `per_layer_config` in transformers."""
    given, shared = config.get("per_layer_config"), config.flag("attention_k_eq_v")
    usual = config.integer("num_key_value_heads", config.integer("num_attention_heads"))
    if given is None:
        kv_heads = config.integer("num_global_key_value_heads", usual) if shared else usual
        return HeadsSpec(kv_heads, config.integer("global_head_dim", _FULL_HEAD_DIM), shared)
    layers = {str(layer) for layer, slide in enumerate(slides) if not slide}
    values = list(given.values()) if isinstance(given, dict) and set(given) == layers else [None]
    if not isinstance(values[0], dict) or any(each != values[0] for each in values):
        message = f"config.json: per_layer_config={given!r} must say the same of every layer that sees everything."
        raise CheckpointError(message, CONFIG_HINT)
    own = HFConfig(values[0])
    return HeadsSpec(own.integer("num_key_value_heads", usual), own.integer("head_dim", config.head_dim()), shared)


def _ropes_gemma4(config: HFConfig, slides: list[bool], full_head_dim: int) -> dict[str, Any]:
    """The rotation of layers that attend to everything, and that of the others."""
    given, size = config.get("rope_parameters") is not None, config.head_dim()
    proportional = RopeSpec("proportional", 1e6, full_head_dim, turned=full_head_dim // 8)
    full = config.rope(full_head_dim, "full_attention") if given else proportional
    plain = RopeSpec("default", 1e4, size)
    local = config.rope(size, "sliding_attention") if given and any(slides) else plain
    return rope_fields(full, local, slides)


def _experts(config: HFConfig) -> MoESpec:
    """Experts in addition to the MLP of every layer."""
    return MoESpec(
        experts=config.integer("num_experts"),
        top_k=config.integer("top_k_experts"),
        expert_size=config.integer("moe_intermediate_size"),
        with_mlp=True,
    )


def _read_gemma4(config: HFConfig, tied: bool) -> DecoderSpec:
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedArchitectureError("Attention to later tokens is not supported.", OPTIMUM_HINT)
    slides = config.slides(_GEMMA4_PATTERN)
    slides[-1] = False
    full, window = _full_heads(config, slides), config.integer("sliding_window", _WINDOW)
    fields, wide = shared_fields(config, slides), config.integer("intermediate_size")
    sources = fields["kv_sources"]
    doubled = bool(sources) and config.flag("use_double_wide_mlp")
    return common_spec(
        config,
        tied,
        windows=tuple(window if slide else 0 for slide in slides) if any(slides) else (),
        full_heads=full,
        mlp_sizes=tuple(wide * (1 + (s != i)) for i, s in enumerate(sources)) if doubled else (),
        layer_scales=True,
        moe=_experts(config) if config.flag("enable_moe_block") else None,
        **fields,
        **_ropes_gemma4(config, slides, full.head_dim),
    )


def refine_gemma4(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """Scales embeddings by the root of their width, and per-layer embeddings."""
    root = math.sqrt(spec.hidden_size)
    if plan.name == "embed":
        return plan.changed(scale=root)
    if plan.name == "final_norm" and spec.tied:
        # A tied head has grown with the embedding.
        return plan.changed(scale=1 / root)
    if plan.name.endswith(".router_input_norm"):
        return plan.changed(scale=1 / root)
    return _refine_per_layer(spec, plan)


# With those whose images and sounds go through linear layers (Gemma 4 12B).
GEMMA4 = Architecture(
    classes=(
        *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        *("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    ),
    model_types=("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
    read=_read_gemma4,
    naming=Naming(
        mlp_norm="pre_feedforward_layernorm.weight",
        mixture=MixtureNaming(
            router="router.proj.weight",
            gate_up=(),
            stacked_gate_up="experts.gate_up_proj",
            stacked_down="experts.down_proj",
        ),
    ),
    refine=refine_gemma4,
    roots=SEEING_ROOTS,
    ignorable=(*HEARING_IGNORABLE, *SHARED_IGNORABLE),
)
