"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts that a router chooses and one that every token uses."""

from __future__ import annotations

from edgeinfer.bundle import DecoderSpec, MoESpec
from edgeinfer.export.architectures.base import Architecture, common_spec
from edgeinfer.export.hf_config import HFConfig

__all__ = ["QWEN2_MOE"]


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
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


QWEN2_MOE = Architecture(classes=("Qwen2MoeForCausalLM",), model_types=("qwen2_moe",), read=_read)
