"""The Qwen families: Qwen2, Qwen3, their mixtures of experts, and the language models of those that see."""

from __future__ import annotations

from edgeinfer.bundle.mixture import MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.base import Architecture, common_spec
from edgeinfer.export.source.hf_config import HFConfig

_ROOTS = (("model.", ""), ("model.language_model.", ""))
_IGNORABLE = ("*.rotary_emb.inv_freq", "*visual.*")


def _read_qwen2(config: HFConfig, tied: bool) -> DecoderSpec:
    """Qwen2 and Qwen2.5: biases on queries, keys and values, windows on some layers."""
    return common_spec(config, tied, qkv_bias=True, windows=config.windows_by_layer())


QWEN2 = Architecture(
    classes=("Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    model_types=("qwen2", "qwen2_vl_text", "qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl"),
    read=_read_qwen2,
    roots=_ROOTS,
    ignorable=_IGNORABLE,
)


def _read_qwen3(config: HFConfig, tied: bool) -> DecoderSpec:
    """Qwen3: a norm on every query and key head, and a head width of its own."""
    bias = config.flag("attention_bias")
    windows = config.windows_by_layer()
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows)


QWEN3 = Architecture(
    classes=("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"),
    model_types=("qwen3", "qwen3_vl_text", "qwen3_vl"),
    read=_read_qwen3,
    roots=_ROOTS,
    ignorable=_IGNORABLE,
)


def _read_qwen2_moe(config: HFConfig, tied: bool) -> DecoderSpec:
    """Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts that a router chooses and one that every token uses."""
    moe = MoESpec(
        experts=config.experts(),
        top_k=config.integer("num_experts_per_tok"),
        expert_size=config.integer("moe_intermediate_size"),
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        renormalize=config.flag("norm_topk_prob"),
        dense_layers=config.dense_layers(),
    )
    # Configurations older than the field are of models that have the biases.
    bias = config.get("qkv_bias") is None or config.flag("qkv_bias")
    return common_spec(config, tied, qkv_bias=bias, windows=config.windows_by_layer(), moe=moe)


QWEN2_MOE = Architecture(classes=("Qwen2MoeForCausalLM",), model_types=("qwen2_moe",), read=_read_qwen2_moe)


def _read_qwen3_moe(config: HFConfig, tied: bool) -> DecoderSpec:
    """Qwen3-MoE: Qwen3 with a mixture of experts in most or all layers."""
    moe = MoESpec(
        experts=config.experts(),
        top_k=config.integer("num_experts_per_tok"),
        expert_size=config.integer("moe_intermediate_size"),
        renormalize=config.flag("norm_topk_prob"),
        dense_layers=config.dense_layers(),
    )
    bias = config.flag("attention_bias")
    windows = config.uniform_windows() if config.flag("use_sliding_window") else ()
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows, moe=moe)


QWEN3_MOE = Architecture(classes=("Qwen3MoeForCausalLM",), model_types=("qwen3_moe",), read=_read_qwen3_moe)
