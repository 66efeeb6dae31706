"""The metadata that describe a decoder to llama.cpp."""

from __future__ import annotations

import math
from typing import Any

from edgeinfer.bundle.rope import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.gguf.architectures import GgufArchitecture, Tensor, every
from edgeinfer.export.source.hf_config import HFConfig

# llama.cpp's numbers of whole files' types, LLAMA_FTYPE_*.
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
# Of the scheme that quantized blocks are stored in.
_QUANTIZATION_VERSION = 2
# What YaRN multiplies sine and cosine by, per logarithm of the factor (arXiv:2309.00071, equation 22).
_YARN_SCALE = 0.1


def context_length(spec: DecoderSpec, arch: GgufArchitecture) -> int:
    """Tokens of the longest context: no more than a sliding window shows, where llama.cpp's graph has none."""
    shown = 0 if arch.full_every else spec.window_size
    return min(spec.max_positions, shown or spec.max_positions)


def add_decoder(
    writer: Any, config: HFConfig, spec: DecoderSpec, arch: GgufArchitecture, name: str, kind: str, tensor: Tensor
) -> None:
    """Adds the keys of the model."""
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(_QUANTIZATION_VERSION)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(context_length(spec, arch))
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(_feed_forward(spec, arch))
    _add_heads(writer, spec, arch)
    (writer.add_layer_norm_rms_eps if spec.norm == "rms" else writer.add_layer_norm_eps)(spec.norm_eps)
    if arch.attention:
        _add_rope(writer, spec.rope, arch.compressed)
    _add_attention(writer, spec, arch)
    if spec.moe is not None and arch.mixture is not None:
        arch.mixture.add_keys(writer, spec.moe)
    for name_there, key, usual in arch.multipliers:
        writer.add_float32(f"{arch.name}.{key}", config.number(name_there, usual))
    if arch.keys is not None:
        arch.keys(writer, config, spec, tensor)


def _feed_forward(spec: DecoderSpec, arch: GgufArchitecture) -> int | list[int]:
    """The MLP's width, which is that of the experts where they have no key of their own; 0 where there is none."""
    if arch.widths is not None:
        return arch.widths(spec)
    if len(spec.no_mlp) == spec.num_layers:
        return 0
    return spec.moe.expert_size if spec.moe and arch.mixture and not arch.mixture.length else spec.intermediate_size


def _add_heads(writer: Any, spec: DecoderSpec, arch: GgufArchitecture) -> None:
    """What the cache holds of a token."""
    if not arch.attention:
        writer.add_head_count(0)
        return
    writer.add_head_count(spec.num_heads)
    latent = spec.latent
    if latent is None:
        each = [spec.num_kv_heads if spec.attends(layer) else 0 for layer in range(spec.num_layers)]
        mixed, full = arch.mixed_heads, spec.full_heads
        if full is not None:
            each = [spec.heads(layer).kv_heads for layer in range(spec.num_layers)]
            mixed = len(set(each)) > 1
            writer.add_key_length_swa(spec.head_dim)
            writer.add_value_length_swa(spec.head_dim)
        writer.add_head_count_kv(each if mixed else spec.num_kv_heads)
        writer.add_key_length(spec.head_dim if full is None else full.head_dim)
        writer.add_value_length(spec.head_dim if full is None else full.head_dim)
    elif arch.compressed:
        writer.add_head_count_kv(1)
        writer.add_key_length(latent.met_size)
        writer.add_value_length(latent.rank)
    else:
        writer.add_head_count_kv(spec.num_heads)
        writer.add_key_length(spec.head_dim)


def _add_rope(writer: Any, rope: RopeSpec, compressed: bool) -> None:
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
    if rope.type == "yarn":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "yarn")
        writer.add_rope_scaling_factor(rope.factor)
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_positions)
        writer.add_rope_scaling_yarn_beta_fast(rope.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(rope.beta_slow)
        usual = 1 + _YARN_SCALE * math.log(rope.factor) if rope.factor > 1 else 1.0
        if not compressed and not math.isclose(rope.attention_factor, usual, rel_tol=1e-6):
            writer.add_rope_scaling_attn_factors(rope.attention_factor / usual)


def _add_attention(writer: Any, spec: DecoderSpec, arch: GgufArchitecture) -> None:
    if arch.full_every and (spec.windows or arch.always_slides):
        # Its graph has windows in any case: one as long as the context hides nothing.
        window = spec.window_size
        writer.add_sliding_window(window or spec.max_positions)
        full = every(arch.full_every, spec.num_layers)
        known = arch.full_every > 0 and spec.windows == tuple(0 if seen else window for seen in full)
        if spec.windows and not known:
            writer.add_sliding_window_pattern([each > 0 for each in spec.windows])
    for rope in spec.more_ropes:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", rope.theta)
    if spec.attention_softcap:
        writer.add_attn_logit_softcapping(spec.attention_softcap)
    if spec.logit_softcap:
        writer.add_final_logit_softcapping(spec.logit_softcap)
