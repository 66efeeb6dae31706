"""The Qwen families: Qwen2, Qwen3 and their mixtures, and the hybrids Qwen3-Next and Qwen3.5 with gated delta rules."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgeinfer.bundle.parts import DeltaSpec, Mixer, MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.architectures.base import (
    ATTENTION_BIASES,
    MTP,
    Architecture,
    Naming,
    common_spec,
    flag,
    mixture,
    reader,
    rope_fields,
)
from edgeinfer.export.architectures.shared_mixtures import dense_layers
from edgeinfer.export.architectures.tensors import Source, TensorPlan
from edgeinfer.export.source.hf_config import CONFIG_HINT, HFConfig

_ROOTS = (("model.", ""), ("model.language_model.", ""))
_IGNORABLE = ("*.rotary_emb.inv_freq", "*visual.*")


# Qwen2 and Qwen2.5: biases on queries, keys and values, windows on some layers.
QWEN2 = Architecture(
    classes=("Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    model_types=("qwen2", "qwen2_vl_text", "qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl"),
    read=reader(qkv_bias=True, windows=HFConfig.windows_by_layer),
    roots=_ROOTS,
    ignorable=_IGNORABLE,
)
# A norm on every query and key head, and a head width of its own.
QWEN3 = Architecture(
    classes=("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"),
    model_types=("qwen3", "qwen3_vl_text", "qwen3_vl"),
    read=reader(**ATTENTION_BIASES, qk_norm=True, windows=HFConfig.windows_by_layer),
    roots=_ROOTS,
    ignorable=_IGNORABLE,
)


def _with_shared(config: HFConfig, **parts: Any) -> MoESpec:
    """Experts that a router chooses, and one with a gate that every token uses."""
    size = config.integer("shared_expert_intermediate_size")
    return mixture(config, "moe_intermediate_size", shared_size=size, shared_gate=True, **parts)


def _chosen(config: HFConfig) -> dict[str, Any]:
    return {"renormalize": config.flag("norm_topk_prob"), "dense_layers": config.dense_layers()}


# Qwen1.5-MoE and Qwen2-MoE. Configurations older than the field of biases are of models that have them.
QWEN2_MOE = Architecture(
    classes=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    read=reader(
        qkv_bias=flag("qkv_bias", True),
        windows=HFConfig.windows_by_layer,
        moe=lambda config: _with_shared(config, **_chosen(config)),
    ),
)
QWEN3_MOE = Architecture(
    classes=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    read=reader(
        **ATTENTION_BIASES,
        qk_norm=True,
        windows=lambda config: config.uniform_windows() if config.flag("use_sliding_window") else (),
        moe=lambda config: mixture(config, "moe_intermediate_size", **_chosen(config)),
    ),
)


def _read_mellum(config: HFConfig, tied: bool) -> DecoderSpec:
    """Mellum 2: Qwen3's mixture with windows in some layers, which have a rotation of their own."""
    slides = config.slides() if config.get("layer_types") is not None else []
    whole, local = (config.rope(config.head_dim(), kind) for kind in ("full_attention", "sliding_attention"))
    moe = mixture(
        config,
        "moe_intermediate_size",
        renormalize=config.flag("norm_topk_prob", True),
        dense_layers=dense_layers(config, 0),
    )
    ropes = rope_fields(whole, local, slides)
    windows = config.windows_of(slides) if any(slides) else ()
    return reader(**ATTENTION_BIASES, qk_norm=True, windows=windows, moe=moe, **ropes)(config, tied)


MELLUM = Architecture(classes=("MellumForCausalLM",), model_types=("mellum",), read=_read_mellum, predicts=MTP)


_MIXERS: dict[str, Mixer] = {"full_attention": "attention", "linear_attention": "delta"}
# Where config.json does not say: every fourth layer attends, and rotates a quarter of each head.
_INTERVAL, _PARTIAL = 4, 0.25


def _mixers(config: HFConfig) -> tuple[Mixer, ...]:
    layers, types = config.integer("num_hidden_layers"), config.get("layer_types")
    if types is None:
        interval = config.integer("full_attention_interval", _INTERVAL)
        types = ["linear_attention" if layer % interval else "full_attention" for layer in range(1, layers + 1)]
    return config.mixers(types, _MIXERS)


def _hybrid(config: HFConfig, tied: bool, **parts: Any) -> DecoderSpec:
    """Most layers have a delta rule, the others attention with normed queries and keys and a gate per channel."""
    if config.flag("attention_bias"):
        raise CheckpointError("config.json: attention_bias of a hybrid Qwen is not supported.", CONFIG_HINT)
    mixers, delta = _mixers(config), None
    if mixers:
        fields = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        delta = DeltaSpec(*(config.integer(f"linear_{field}") for field in fields))
    if config.activation() != "silu":
        raise CheckpointError("config.json: hidden_act of a hybrid Qwen must be silu.", CONFIG_HINT)
    return common_spec(
        config,
        tied,
        rope=config.rope(config.head_dim(), partial=_PARTIAL),
        qk_norm=True,
        output_gate="channel",
        mixers=mixers,
        delta=delta,
        **parts,
    )


def _read_next(config: HFConfig, tied: bool) -> DecoderSpec:
    """Qwen3-Next: experts in most or all layers."""
    renormalize = config.flag("norm_topk_prob", True)
    moe = _with_shared(config, dense_layers=config.dense_layers(), renormalize=renormalize)
    return _hybrid(config, tied, moe=moe)


def _read_3_5_moe(config: HFConfig, tied: bool) -> DecoderSpec:
    """Qwen3.5 with experts in every layer; no MLP has a size."""
    moe = _with_shared(config)
    return _hybrid(config, tied, moe=moe, intermediate_size=moe.expert_size)


def _refine(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """Norms are stored minus one, and each query head has its gate after it."""
    size = spec.head_dim
    if plan.name.endswith("attn.qkv"):
        query, *others = plan.sources
        return TensorPlan(plan.name, (dataclasses.replace(query, pieces=(2 * size, 0, size)), *others))
    if plan.name.endswith("attn.gate"):
        return TensorPlan(plan.name, (dataclasses.replace(plan.sources[0], pieces=(2 * size, size, size)),))
    return plan.changed(offset=1.0) if plan.name.endswith("norm") and ".mixer." not in plan.name else plan


def _refine_next(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """Each key head of a delta rule is followed by its query, key, values and gates."""
    delta = spec.delta
    if delta is None or not plan.name.endswith(("mixer.in", "mixer.gates")):
        return _refine(config, spec, plan)
    root, hidden = plan.sources[0].name.rsplit("in_proj_", 1)[0], spec.hidden_size
    each = delta.value_heads // delta.key_heads
    wide = each * delta.value_size
    gates = plan.name.endswith("gates")
    name, shares = ("ba", [each, each]) if gates else ("qkvz", [delta.key_size, delta.key_size, wide, wide])
    sources, first = [], 0
    for share in shares:
        shape, pieces = (delta.key_heads * share, hidden), (sum(shares), first, share)
        sources.append(Source(f"{root}in_proj_{name}.weight", shape, pieces=pieces))
        first += share
    return TensorPlan(plan.name, tuple(sources))


_HYBRID: dict[str, Any] = {
    "naming": Naming(gate="self_attn.q_proj", mixer="linear_attn"),
    "ignorable": ("*.rotary_emb.inv_freq", "model.visual.*"),
    "predicts": MTP,
}

QWEN3_NEXT = Architecture(
    classes=("Qwen3NextForCausalLM",), model_types=("qwen3_next",), read=_read_next, refine=_refine_next, **_HYBRID
)
QWEN3_5 = Architecture(
    classes=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    model_types=("qwen3_5_text", "qwen3_5"),
    read=_hybrid,
    roots=_ROOTS,
    refine=_refine,
    **_HYBRID,
)
QWEN3_5_MOE = Architecture(
    classes=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    read=_read_3_5_moe,
    roots=_ROOTS,
    refine=_refine,
    **_HYBRID,
)
