"""The keys that describe a decoder to llama.cpp, without those of its tokenizer; knows no tensors' contents."""

from __future__ import annotations

from typing import Any

from edgeinfer.bundle import DecoderSpec
from edgeinfer.bundle.spec import RopeSpec
from edgeinfer.export.gguf.architectures import GgufArchitecture
from edgeinfer.export.hf_config import HFConfig

__all__ = ["FILE_TYPES", "add_decoder", "context_length"]

# llama.cpp's numbers of whole files' types, LLAMA_FTYPE_*.
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
# Of the scheme that quantized blocks are stored in.
_QUANTIZATION_VERSION = 2


def context_length(spec: DecoderSpec) -> int:
    """Tokens of the longest context: no more than a sliding window shows, which llama.cpp's graphs do not have."""
    return min(spec.max_positions, spec.window_size or spec.max_positions)


def add_decoder(writer: Any, config: HFConfig, spec: DecoderSpec, arch: GgufArchitecture, name: str, kind: str) -> None:
    """Adds the keys of the model.

    Args:
        writer: of the gguf package.
        kind: a key of FILE_TYPES.
    """
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(_QUANTIZATION_VERSION)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(context_length(spec))
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(_feed_forward(spec, arch))
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    _add_rope(writer, spec.rope)
    _add_experts(writer, spec, arch)
    for field, key in arch.multipliers:
        writer.add_float32(f"{arch.name}.{key}", config.number(field, 1.0))


def _feed_forward(spec: DecoderSpec, arch: GgufArchitecture) -> int:
    """The MLP's width, which is that of the experts where they have no key of their own."""
    return spec.intermediate_size if spec.moe is None or arch.expert_length else spec.moe.expert_size


def _add_rope(writer: Any, rope: RopeSpec) -> None:
    """Llama3's and LongRoPE's factors are tensors, see edgeinfer.export.gguf.tensors."""
    writer.add_rope_dimension_count(rope.dim)
    writer.add_rope_freq_base(rope.theta)
    if rope.type == "linear":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(rope.factor)
    if rope.type == "longrope":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "longrope")
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_positions)
        writer.add_rope_scaling_attn_factors(rope.attention_factor)


def _add_experts(writer: Any, spec: DecoderSpec, arch: GgufArchitecture) -> None:
    moe = spec.moe
    if moe is None:
        return
    writer.add_expert_count(moe.experts)
    writer.add_expert_used_count(moe.top_k)
    if arch.expert_length:
        writer.add_expert_feed_forward_length(moe.expert_size)
    if moe.shared_size:
        writer.add_expert_shared_feed_forward_length(moe.shared_size)
