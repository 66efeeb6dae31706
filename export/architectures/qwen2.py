"""Qwen2 and Qwen2.5: biases on queries, keys and values, windows on some layers."""

from __future__ import annotations

from edgeinfer.bundle import DecoderSpec
from edgeinfer.export.architectures.base import Architecture, common_spec
from edgeinfer.export.hf_config import HFConfig

__all__ = ["QWEN2"]


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    return common_spec(config, tied, qkv_bias=True, windows=config.windows_by_layer())


QWEN2 = Architecture(classes=("Qwen2ForCausalLM",), model_types=("qwen2",), read=_read)
