"""Mistral: Llama with a sliding window on every layer."""

from __future__ import annotations

from edgeinfer.bundle import DecoderSpec
from edgeinfer.export.architectures.base import Architecture, common_spec
from edgeinfer.export.hf_config import HFConfig

__all__ = ["MISTRAL"]


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    return common_spec(config, tied, windows=config.uniform_windows())


MISTRAL = Architecture(classes=("MistralForCausalLM",), model_types=("mistral",), read=_read)
