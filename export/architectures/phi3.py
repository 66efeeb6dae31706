"""Phi-3, Phi-3.5 and Phi-4-mini: projections packed in the checkpoint, LongRoPE, partial rotation."""

from __future__ import annotations

from edgeinfer.bundle import DecoderSpec
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec
from edgeinfer.export.hf_config import HFConfig

__all__ = ["PHI3"]


def _read(config: HFConfig, tied: bool) -> DecoderSpec:
    return common_spec(config, tied, windows=config.uniform_windows())


PHI3 = Architecture(
    classes=("Phi3ForCausalLM",),
    model_types=("phi3",),
    read=_read,
    naming=Naming(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
)
