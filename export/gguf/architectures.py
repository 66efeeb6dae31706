"""What llama.cpp calls the architectures that are exported, the keys that describe them, and what it can express."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgeinfer.bundle import DecoderSpec
from edgeinfer.bundle.spec import RopeSpec
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures import Architecture
from edgeinfer.export.source.hf_config import HFConfig

__all__ = ["FILE_TYPES", "ONNX_HINT", "GgufArchitecture", "add_decoder", "context_length", "find_gguf_architecture"]

ONNX_HINT = "Export it to ONNX instead: leave out --format gguf."
# llama.cpp's own limits, at which it ends the process.
_MOST_LAYERS, _MOST_EXPERTS = 512, 1024
_EVERY_ROPE = ("default", "linear", "llama3", "longrope")
_GRANITE = (
    ("embedding_multiplier", "embedding_scale"),
    ("residual_multiplier", "residual_scale"),
    ("attention_multiplier", "attention.scale"),
    ("logits_scaling", "logit_scale"),
)
# llama.cpp's numbers of whole files' types, LLAMA_FTYPE_*.
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
# Of the scheme that quantized blocks are stored in.
_QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of llama.cpp.

    Attributes:
        name: `general.architecture`.
        neighbours: its rotary embedding turns neighbours of a head, where Hugging Face turns halves.
        ropes: types of scaled rotary embedding that its graph has.
        partial_rope: some dimensions of a head may pass through.
        free_heads: all heads together may be wider or narrower than the hidden state.
        grouped: queries may share keys.
        output_bias, mlp_bias: it has such tensors.
        own_head: it has no tied head, so that the embedding is stored twice.
        packed: queries, keys and values are one tensor, and so are gate and up.
        renormalizes: whether the weights of a token's experts are made to sum to one; None without experts.
        expert_length: the width of experts has a key of its own.
        multipliers: keys of the metadata, by the fields of config.json they come from.
    """

    name: str
    neighbours: bool = False
    ropes: tuple[str, ...] = ("default", "linear")
    partial_rope: bool = False
    free_heads: bool = False
    grouped: bool = True
    output_bias: bool = False
    mlp_bias: bool = False
    own_head: bool = False
    packed: bool = False
    renormalizes: bool | None = None
    expert_length: bool = False
    multipliers: tuple[tuple[str, str], ...] = ()

    def check(self, spec: DecoderSpec) -> None:
        """Refuses what would give another model, or end the process, in llama.cpp.

        Raises:
            UnsupportedArchitectureError: its graph cannot express the decoder.
        """
        for what in self._missing(spec):
            raise UnsupportedArchitectureError(f"llama.cpp's {self.name} has no {what}.", ONNX_HINT)

    def _missing(self, spec: DecoderSpec) -> Iterator[str]:
        if spec.rope.type not in self.ropes:
            yield f"rotary embedding of type {spec.rope.type}"
        if spec.rope.dim != spec.head_dim and not self.partial_rope:
            yield "rotary embedding of a part of each head"
        if spec.q_size != spec.hidden_size and not self.free_heads:
            yield f"heads that are {spec.q_size} wide together beside a hidden state of {spec.hidden_size}"
        if spec.num_kv_heads != spec.num_heads and not self.grouped:
            yield "queries that share keys"
        if spec.output_bias and not self.output_bias:
            yield "bias of the attention's output"
        if spec.mlp_bias and not self.mlp_bias:
            yield "biases in its MLP"
        if spec.num_layers > _MOST_LAYERS:
            yield f"room for {spec.num_layers} layers"
        if spec.moe is not None:
            if spec.moe.dense_layers:
                yield "layers without experts beside others with them"
            if spec.moe.renormalize != self.renormalizes:
                yield "weights of experts that are " + ("renormalized" if spec.moe.renormalize else "not renormalized")
            if spec.moe.experts > _MOST_EXPERTS:
                yield f"room for {spec.moe.experts} experts"


_LLAMA = GgufArchitecture(
    "llama", neighbours=True, ropes=_EVERY_ROPE, free_heads=True, output_bias=True, mlp_bias=True, renormalizes=True
)
# By transformers' name of the family. BlockFFN is missing: llama.cpp has no rectified router.
_BY_FAMILY = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3", free_heads=True),
    "phi3": GgufArchitecture("phi3", ropes=("default", "linear", "longrope"), partial_rope=True, packed=True),
    "qwen2_moe": GgufArchitecture("qwen2moe", own_head=True, renormalizes=False, expert_length=True),
    "qwen3_moe": GgufArchitecture("qwen3moe", free_heads=True, renormalizes=True, expert_length=True),
    "olmoe": GgufArchitecture("olmoe", grouped=False, own_head=True, renormalizes=False),
    "granitemoe": GgufArchitecture(
        "granitemoe",
        neighbours=True,
        ropes=_EVERY_ROPE,
        free_heads=True,
        output_bias=True,
        renormalizes=True,
        multipliers=_GRANITE,
    ),
}


def find_gguf_architecture(family: Architecture, spec: DecoderSpec) -> GgufArchitecture:
    """The architecture of llama.cpp that a family's checkpoint is written as.

    Raises:
        UnsupportedArchitectureError: there is none, or its graph cannot express this decoder.
    """
    found = _BY_FAMILY.get(family.model_types[0])
    if found is None:
        raise UnsupportedArchitectureError(f"llama.cpp has no architecture for {family.classes[0]}.", ONNX_HINT)
    found.check(spec)
    return found


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
