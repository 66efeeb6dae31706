"""Qwen3-MoE: Qwen3 with a mixture of experts in most or all layers."""

from __future__ import annotations

from edgeinfer.bundle import DecoderSpec, MoESpec
from edgeinfer.export.architectures.base import Architecture, common_spec
from edgeinfer.export.hf_config import HFConfig

__all__ = ["QWEN3_MOE"]


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
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


QWEN3_MOE = Architecture(classes=("Qwen3MoeForCausalLM",), model_types=("qwen3_moe",), read=_read)
