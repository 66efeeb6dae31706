"""The Liquid families: LFM2 and LFM3, of short convolutions and attention, and LFM2-MoE, which has experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgeinfer.bundle.parts import ConvSpec, Mixer
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec, mixture, rope_fields
from edgeinfer.export.architectures.tensors import MixtureNaming
from edgeinfer.export.source.hf_config import CONFIG_HINT, HFConfig

_MIXERS: dict[str, Mixer] = {"full_attention": "attention", "sliding_attention": "attention", "conv": "conv"}
_THETA = 1e6  # where config.json does not say


def _mixers(config: HFConfig) -> tuple[Mixer, ...]:
    """Mixers by `layer_types`, or in older configurations by the list of attention layers."""
    layers, types = config.integer("num_hidden_layers"), config.get("layer_types")
    if types is None:
        attends = config.get("full_attn_idxs")
        indices = range(layers) if attends is None else attends
        if not isinstance(indices, list | range):
            raise CheckpointError(f"config.json: full_attn_idxs={attends!r} is not a list of layers.", CONFIG_HINT)
        types = ["full_attention" if layer in indices else "conv" for layer in range(layers)]
    return config.mixers(types, _MIXERS)


def _inner_size(config: HFConfig) -> int:
    """Width of the MLPs; the configured one may be meant for an MLP without a gate."""
    wide = config.integer("intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim")
    if config.get("block_auto_adjust_ff_dim") is not None and not config.flag("block_auto_adjust_ff_dim"):
        return wide
    multiple = config.integer("block_multiple_of", 256)
    wide = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * wide / 3))
    return multiple * -(-wide // multiple)


def _hybrid(config: HFConfig, tied: bool, width: int = 3, **parts: Any) -> DecoderSpec:
    """Most layers have a convolution over the last tokens, the others attention with normed queries and keys."""
    mixers = _mixers(config)
    if "rope" not in parts:
        rope = config.rope(config.head_dim())
        says = config.get("rope_parameters") is not None or config.get("rope_theta") is not None
        parts["rope"] = rope if says else dataclasses.replace(rope, theta=_THETA)
    conv = ConvSpec(config.integer("conv_L_cache", width), config.flag("conv_bias")) if mixers else None
    return common_spec(config, tied, norm_eps="norm_eps", qk_norm=True, mixers=mixers, conv=conv, **parts)


def _read_lfm2(config: HFConfig, tied: bool) -> DecoderSpec:
    return dataclasses.replace(_hybrid(config, tied), intermediate_size=_inner_size(config))


_NAMING = Naming(
    final_norm="model.embedding_norm.weight",
    attn_norm="operator_norm.weight",
    mlp_norm="ffn_norm.weight",
    q_norm="self_attn.q_layernorm.weight",
    k_norm="self_attn.k_layernorm.weight",
    out="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)
LFM2 = Architecture(classes=("Lfm2ForCausalLM",), model_types=("lfm2",), read=_read_lfm2, naming=_NAMING)


def _read_lfm2_moe(config: HFConfig, tied: bool) -> DecoderSpec:
    """LFM2-MoE: all but the first layers have experts, with shares by the logistic function."""
    layers, first = config.integer("num_hidden_layers"), config.get("num_dense_layers")
    dense = config.integer("num_dense_layers", 2) if first != 0 else 0
    moe = mixture(
        config,
        "moe_intermediate_size",
        router="sigmoid",
        renormalize=config.flag("norm_topk_prob", True),
        dense_layers=tuple(range(min(dense, layers))),
        choice_bias=config.flag("use_expert_bias", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )
    return _hybrid(config, tied, moe=moe)


LFM2_MOE = Architecture(
    classes=("Lfm2MoeForCausalLM",),
    model_types=("lfm2_moe",),
    read=_read_lfm2_moe,
    naming=dataclasses.replace(
        _NAMING,
        mixture=MixtureNaming(
            router="feed_forward.gate.weight",
            choice_bias="feed_forward.expert_bias",
            gate_up=("feed_forward.experts.{expert}.w1.weight", "feed_forward.experts.{expert}.w3.weight"),
            down="feed_forward.experts.{expert}.w2.weight",
            stacked_gate_up="feed_forward.experts.gate_up_proj",
            stacked_down="feed_forward.experts.down_proj",
        ),
    ),
)


def _read_lfm3(config: HFConfig, tied: bool) -> DecoderSpec:
    """LFM3: wider convolutions, windows in some layers, norms before and after, and a gate for each head."""
    if config.get("layer_types") is None:
        cycle = ("sliding_attention", "conv", "full_attention", "conv")
        listed = [cycle[layer % 4] if layer else "conv" for layer in range(config.integer("num_hidden_layers"))]
        config = HFConfig(config.values | {"layer_types": listed})
    types, head_dim = config.get("layer_types"), config.head_dim()
    slides = [kind == "sliding_attention" for kind in types] if isinstance(types, list) else []
    attends = [kind == "full_attention" for kind in types] if isinstance(types, list) else []
    # The rotation of the layers there are comes first, so that every table is read.
    kinds = [kind for kind, there in (("full_attention", attends), ("sliding_attention", slides)) if any(there)]
    ropes = [config.rope(head_dim, kind) for kind in kinds] or [config.rope(head_dim, "full_attention")]
    bias = config.flag("attention_bias")
    return _hybrid(
        config,
        tied,
        width=7,
        windows=config.windows_of(slides),
        qkv_bias=bias,
        output_bias=bias,
        output_gate="head" if config.flag("use_attention_gate", True) else "",
        post_norm=config.flag("use_sandwich_norm", True),
        **rope_fields(ropes[0], ropes[-1], slides if len(ropes) == 2 else []),
    )


LFM3 = Architecture(
    classes=("Lfm3ForCausalLM",),
    model_types=("lfm3",),
    read=_read_lfm3,
    naming=Naming(
        final_norm="model.embedding_norm.weight",
        attn_norm="operator_norm.weight",
        attn_post_norm="post_operator_norm.weight",
        mlp_norm="ffn_norm.weight",
        mlp_post_norm="post_ffn_norm.weight",
        gate_up=_NAMING.gate_up,
        down=_NAMING.down,
    ),
)
