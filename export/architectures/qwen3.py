"""Qwen3: a norm on every query and key head, and a head width of its own."""

from __future__ import annotations

from edgeinfer.bundle import DecoderSpec
from edgeinfer.export.architectures.base import Architecture, common_spec
from edgeinfer.export.hf_config import HFConfig

__all__ = ["QWEN3"]


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    bias = config.flag("attention_bias")
    windows = config.windows_by_layer()
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows)


QWEN3 = Architecture(classes=("Qwen3ForCausalLM",), model_types=("qwen3",), read=_read)
