"""OLMoE: many small experts whose weights are not renormalised, and a norm over all heads together."""

from __future__ import annotations

from edgeinfer.bundle import DecoderSpec, MoESpec
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures.base import Architecture, common_spec
from edgeinfer.export.hf_config import OPTIMUM_HINT, HFConfig

__all__ = ["OLMOE"]


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    if config.get("clip_qkv") is not None:
        raise UnsupportedArchitectureError("Queries, keys and values cut at clip_qkv are not supported.", OPTIMUM_HINT)
    moe = MoESpec(
        experts=config.experts(),
        top_k=config.integer("num_experts_per_tok"),
        expert_size=config.integer("intermediate_size"),
        renormalize=config.flag("norm_topk_prob"),
    )
    bias = config.flag("attention_bias")
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, qk_norm=True, whole_norm=True, moe=moe)


OLMOE = Architecture(classes=("OlmoeForCausalLM",), model_types=("olmoe",), read=_read)
