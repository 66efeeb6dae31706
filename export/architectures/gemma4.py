"""Gemma 4's language models: per-layer embeddings, shared caches, and heads of their own in the layers that see all."""

from __future__ import annotations

import math
from typing import Any

from edgeinfer.bundle.mixture import MoESpec
from edgeinfer.bundle.parts import HeadsSpec, PerLayerSpec
from edgeinfer.bundle.rope import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.architectures.base import SEEING_IGNORABLE, SEEING_ROOTS, Architecture, Naming, common_spec
from edgeinfer.export.architectures.mixture_plans import MixtureNaming
from edgeinfer.export.architectures.plans import TensorPlan
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig

# Of models that hear as well: their other tensors; and keys and values of layers that read those of others.
HEARING_IGNORABLE = (*SEEING_IGNORABLE, "*audio_tower.*", "*embed_vision.*", "*embed_audio.*")
SHARED_IGNORABLE = ("*.self_attn.k_proj.weight", "*.self_attn.v_proj.weight", "*.self_attn.k_norm.weight")
_PATTERN = 6  # layers of which the last sees everything, where config.json does not say
_FULL_HEAD_DIM, _WINDOW = 512, 512  # likewise
_HINT = "Check that config.json is complete and belongs to this model."


def _kv_sources(config: HFConfig, slides: list[bool]) -> tuple[int, ...]:
    """The layers whose keys and values each reads: the last `num_kv_shared_layers` those of the last layer of their
    kind before them."""
    layers = len(slides)
    if not config.get("num_kv_shared_layers"):
        return ()
    first = layers - config.integer("num_kv_shared_layers")
    own = {slides[layer]: layer for layer in range(max(first, 0))}
    if set(own) != set(slides):
        message = f"config.json: num_kv_shared_layers={layers - first} leaves no layer of some kind to share."
        raise CheckpointError(message, _HINT)
    return tuple(layer if layer < first else own[slides[layer]] for layer in range(layers))


def _per_layer(config: HFConfig) -> PerLayerSpec | None:
    """Per-layer embeddings, where the model has any."""
    if config.get("hidden_size_per_layer_input") == 0:
        return None
    size = config.integer("hidden_size_per_layer_input", 256)
    return PerLayerSpec(size, config.integer("vocab_size_per_layer_input", config.integer("vocab_size")))


def shared_fields(config: HFConfig, slides: list[bool]) -> dict[str, Any]:
    """What Gemma 3n and Gemma 4 have alike."""
    capped = config.get("final_logit_softcapping") is not None
    return {
        "activation": config.activation("hidden_activation"),
        "post_norm": True,
        "qk_norm": True,
        "value_norm": True,
        "qkv_bias": config.flag("attention_bias"),
        "output_bias": config.flag("attention_bias"),
        "attention_scale": 1.0,
        "logit_softcap": config.number("final_logit_softcapping") if capped else 0.0,
        "kv_sources": _kv_sources(config, slides),
        "per_layer": _per_layer(config),
    }


def _refine_per_layer(spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """A vector is the mean of both its parts, times a root of two; the table's rows grow by the root of their width."""
    half = math.sqrt(0.5)
    if spec.per_layer is None:
        return plan
    if plan.name == "embed.per_layer":
        return plan.changed(scale=math.sqrt(spec.per_layer.size) * half)
    if plan.name == "per_layer.projection":
        return plan.changed(scale=spec.hidden_size**-0.5)
    return plan.changed(scale=half) if plan.name == "per_layer.norm" else plan


def _full_heads(config: HFConfig, slides: list[bool]) -> HeadsSpec:
    """The heads of the layers that see everything, as transformers wrote them before and after it had
    `per_layer_config`."""
    given, shared = config.get("per_layer_config"), config.flag("attention_k_eq_v")
    usual = config.integer("num_key_value_heads", config.integer("num_attention_heads"))
    if given is None:
        kv_heads = config.integer("num_global_key_value_heads", usual) if shared else usual
        return HeadsSpec(kv_heads, config.integer("global_head_dim", _FULL_HEAD_DIM), shared)
    layers = {str(layer) for layer, slide in enumerate(slides) if not slide}
    values = list(given.values()) if isinstance(given, dict) and set(given) == layers else [None]
    if not isinstance(values[0], dict) or any(each != values[0] for each in values):
        message = f"config.json: per_layer_config={given!r} must say the same of every layer that sees everything."
        raise CheckpointError(message, _HINT)
    own = HFConfig(values[0])
    return HeadsSpec(own.integer("num_key_value_heads", usual), own.integer("head_dim", config.head_dim()), shared)


def _ropes(config: HFConfig, slides: list[bool], full_head_dim: int) -> dict[str, Any]:
    """The rotation of the layers that see everything, and that of the others."""
    given, size = config.get("rope_parameters") is not None, config.head_dim()
    proportional = RopeSpec("proportional", 1e6, full_head_dim, turned=full_head_dim // 8)
    full = config.rope(full_head_dim, "full_attention") if given else proportional
    if not any(slides):
        return {"rope": full}
    local = config.rope(size, "sliding_attention") if given else RopeSpec("default", 1e4, size)
    return {"rope": full, "more_ropes": (local,), "rope_layers": tuple(map(int, slides))}


def _experts(config: HFConfig) -> MoESpec:
    """Experts that stand beside the MLP of every layer."""
    return MoESpec(
        experts=config.integer("num_experts"),
        top_k=config.integer("top_k_experts"),
        expert_size=config.integer("moe_intermediate_size"),
        beside=True,
    )


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedArchitectureError("Attention to later tokens is not supported.", OPTIMUM_HINT)
    slides = config.slides(_PATTERN)
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
        **_ropes(config, slides, full.head_dim),
    )


def refine_gemma4(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """Embeddings grow by the root of their width, and per-layer embeddings are made of what the checkpoint has."""
    root = math.sqrt(spec.hidden_size)
    if plan.name == "embed":
        return plan.changed(scale=root)
    if plan.name == "final_norm" and spec.tied:
        # A tied head has grown with the embedding.
        return plan.changed(scale=1 / root)
    if plan.name.endswith(".router_input_norm"):
        return plan.changed(scale=1 / root)
    return _refine_per_layer(spec, plan)


GEMMA4 = Architecture(
    classes=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    model_types=("gemma4_text", "gemma4"),
    read=_read,
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
