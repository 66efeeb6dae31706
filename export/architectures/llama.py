"""Families of dense decoders around Llama: Llama itself (and SmolLM), Mistral and Phi-3."""

from __future__ import annotations

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec
from edgeinfer.export.source.hf_config import HFConfig


def _read_llama(config: HFConfig, tied: bool) -> DecoderSpec:
    """Llama and the models published under its class, SmolLM among them."""
    bias = config.flag("attention_bias")
    return common_spec(config, tied, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


LLAMA = Architecture(classes=("LlamaForCausalLM",), model_types=("llama",), read=_read_llama)


def _read_mistral(config: HFConfig, tied: bool) -> DecoderSpec:
    """Mistral: Llama with a sliding window on every layer."""
    return common_spec(config, tied, windows=config.uniform_windows())


MISTRAL = Architecture(classes=("MistralForCausalLM",), model_types=("mistral",), read=_read_mistral)


def _read_phi3(config: HFConfig, tied: bool) -> DecoderSpec:
    """Phi-3, Phi-3.5 and Phi-4-mini: projections packed in the checkpoint, LongRoPE, partial rotation."""
    return common_spec(config, tied, windows=config.uniform_windows())


PHI3 = Architecture(
    classes=("Phi3ForCausalLM",),
    model_types=("phi3",),
    read=_read_phi3,
    naming=Naming(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
)
