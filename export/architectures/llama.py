"""Llama and the models published under its class, SmolLM among them."""

from __future__ import annotations

from edgeinfer.bundle import DecoderSpec
from edgeinfer.export.architectures.base import Architecture, common_spec
from edgeinfer.export.hf_config import HFConfig

__all__ = ["LLAMA"]


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    bias = config.flag("attention_bias")
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


LLAMA = Architecture(classes=("LlamaForCausalLM",), model_types=("llama",), read=_read)
