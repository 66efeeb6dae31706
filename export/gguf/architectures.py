"""What an architecture of llama.cpp can express, and the keys that describe a decoder of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.bundle import DecoderSpec
from edgeinfer.bundle.spec import RopeSpec
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures import TensorPlan
from edgeinfer.export.source.hf_config import HFConfig

__all__ = ["FILE_TYPES", "ONNX_HINT", "GgufArchitecture", "add_decoder", "context_length"]

ONNX_HINT = "Export it to ONNX instead: leave out --format gguf."
# llama.cpp's own limits, at which it ends the process.
_MOST_LAYERS, _MOST_EXPERTS = 512, 1024
# llama.cpp's numbers of whole files' types, LLAMA_FTYPE_*.
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
# Of the scheme that quantized blocks are stored in.
_QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of llama.cpp.

    Attributes:
        name: `general.architecture`.
        neighbours: its rotary embedding turns neighbours of a head, where most of Hugging Face's turn halves.
        ropes: types of scaled rotary embedding that its graph has.
        partial_rope: some dimensions of a head may pass through.
        free_heads: all heads together may be wider or narrower than the hidden state.
        grouped: queries may share keys.
        qkv_bias, output_bias, mlp_bias: it has such tensors.
        own_head: it has no tied head, so that the embedding is stored twice.
        tensors: llama.cpp's names of a layer's tensors, by ours, where they are its own.
        activation: of its MLP.
        parts: later fields of a DecoderSpec (edgeinfer.bundle.spec) that its graph has.
        needs: fields of a DecoderSpec without which its graph has no meaning.
        full_every: every so many layers one sees everything and the others have a window; 0 where it has no windows.
        unrotated_every: every so many layers one does not rotate; 0 where all do.
        norm_offset: weights of norms that checkpoints store without, and llama.cpp with.
        renormalizes: whether the weights of a token's experts are made to sum to one; None without experts.
        expert_length: the width of experts has a key of its own.
        multipliers: fields of config.json, the keys of the metadata they become, and what they are where none is given.
    """

    name: str
    neighbours: bool = False
    ropes: tuple[str, ...] = ("default", "linear")
    partial_rope: bool = False
    free_heads: bool = False
    grouped: bool = True
    qkv_bias: bool = True
    output_bias: bool = False
    mlp_bias: bool = False
    own_head: bool = False
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    activation: str = "silu"
    parts: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    full_every: int = 0
    unrotated_every: int = 0
    norm_offset: float = 0.0
    renormalizes: bool | None = None
    expert_length: bool = False
    multipliers: tuple[tuple[str, str, float], ...] = ()

    def check(self, spec: DecoderSpec) -> None:
        """Refuses what would give another model, or end the process, in llama.cpp.

        Raises:
            UnsupportedArchitectureError: its graph cannot express the decoder.
        """
        for what in (*self._missing(spec), *self._missing_by_layer(spec), *self._missing_experts(spec)):
            raise UnsupportedArchitectureError(f"llama.cpp's {self.name} has no {what}.", ONNX_HINT)

    def planned(self, plans: tuple[TensorPlan, ...]) -> tuple[TensorPlan, ...]:
        """A checkpoint's tensors with the values that llama.cpp wants."""
        offset = self.norm_offset
        return tuple(plan.changed(offset=offset) if offset and plan.name.endswith("norm") else plan for plan in plans)

    def _missing(self, spec: DecoderSpec) -> Iterator[str]:
        if spec.activation != self.activation:
            yield f"activation {spec.activation}"
        if spec.rope.type not in self.ropes:
            yield f"rotary embedding of type {spec.rope.type}"
        if spec.rope.dim != spec.head_dim and not self.partial_rope:
            yield "rotary embedding of a part of each head"
        if spec.q_size != spec.hidden_size and not self.free_heads:
            yield f"heads that are {spec.q_size} wide together beside a hidden state of {spec.hidden_size}"
        if spec.num_kv_heads != spec.num_heads and not self.grouped:
            yield "queries that share keys"
        if spec.qkv_bias and not self.qkv_bias:
            yield "biases of queries, keys and values"
        if spec.output_bias and not self.output_bias:
            yield "bias of the attention's output"
        if spec.mlp_bias and not self.mlp_bias:
            yield "biases in its MLP"
        if spec.attention_scale and not self.multipliers and not math.isclose(spec.attention_scale**-2, spec.head_dim):
            yield f"scale of scores of {spec.attention_scale:.6g}"
        for name in self.needs:
            if not getattr(spec, name):
                yield f"form without {name}"
        if spec.num_layers > _MOST_LAYERS:
            yield f"room for {spec.num_layers} layers"

    def _missing_by_layer(self, spec: DecoderSpec) -> Iterator[str]:
        if self.full_every and spec.windows:
            window = max(spec.windows)
            if spec.windows != tuple(0 if seen else window for seen in _every(self.full_every, spec.num_layers)):
                yield "windows on these layers"
        if self.unrotated_every:
            still = tuple(-1 if each else 0 for each in _every(self.unrotated_every, spec.num_layers))
            if (spec.rope_layers or (0,) * spec.num_layers) != still:
                yield "rotation of these layers"
        for rope in spec.more_ropes:
            if rope.type != "default":
                yield f"second rotary embedding of type {rope.type}"

    def _missing_experts(self, spec: DecoderSpec) -> Iterator[str]:
        if spec.moe is not None:
            if spec.moe.dense_layers:
                yield "layers without experts beside others with them"
            if spec.moe.renormalize != self.renormalizes:
                yield "weights of experts that are " + ("renormalized" if spec.moe.renormalize else "not renormalized")
            if spec.moe.experts > _MOST_EXPERTS:
                yield f"room for {spec.moe.experts} experts"


def _every(count: int, layers: int) -> Iterator[bool]:
    """Whether each layer is the last of so many."""
    return ((layer + 1) % count == 0 for layer in range(layers))


def context_length(spec: DecoderSpec, arch: GgufArchitecture) -> int:
    """Tokens of the longest context: no more than a sliding window shows, where llama.cpp's graph has none."""
    shown = 0 if arch.full_every else spec.window_size
    return min(spec.max_positions, shown or spec.max_positions)


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
    writer.add_context_length(context_length(spec, arch))
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(_feed_forward(spec, arch))
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    (writer.add_layer_norm_rms_eps if spec.norm == "rms" else writer.add_layer_norm_eps)(spec.norm_eps)
    _add_rope(writer, spec.rope)
    _add_attention(writer, spec, arch)
    _add_experts(writer, spec, arch)
    for name_there, key, usual in arch.multipliers:
        writer.add_float32(f"{arch.name}.{key}", config.number(name_there, usual))


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


def _add_attention(writer: Any, spec: DecoderSpec, arch: GgufArchitecture) -> None:
    if arch.full_every:
        # Its graph has windows in any case: one as long as the context hides nothing.
        writer.add_sliding_window(max(spec.windows, default=0) or spec.max_positions)
    for rope in spec.more_ropes:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", rope.theta)
    if spec.attention_softcap:
        writer.add_attn_logit_softcapping(spec.attention_softcap)
    if spec.logit_softcap:
        writer.add_final_logit_softcapping(spec.logit_softcap)


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
