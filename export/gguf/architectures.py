"""What an architecture of llama.cpp can express of a decoder and of its experts, and the metadata that say it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.parts import MoESpec, RopeSpec, Router
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures.tensors import Shape, TensorPlan
from edgeinfer.export.gguf.keys import GgufKeys
from edgeinfer.export.source.hf_config import HFConfig

Floats = NDArray[np.float32]
# Reads one of the file's tensors by our name.
Tensor = Callable[[str], Floats]

ONNX_HINT = "Export it to ONNX instead: leave out --format gguf."
# llama.cpp's own limit, at which it ends the process.
_MOST_LAYERS = 512


@dataclass(frozen=True)
class GgufForm:
    """The form of a tensor in a file."""

    shape: Shape  # as in numpy
    change: Callable[[Floats], Floats] | None = None  # of the values of some of our rows
    rows: int = 1  # the change takes a multiple of this number of rows
    parts: tuple[tuple[int, int], ...] = ()  # ranges of our rows in the file's order; empty for all in ours


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of llama.cpp: its name (`general.architecture`), and what its graph has."""

    name: str
    neighbours: bool = False  # rotates neighbouring channels of a head; Hugging Face mostly rotates halves
    ropes: tuple[str, ...] = ("default", "linear")  # types of scaled rotary embedding
    partial_rope: bool = False  # some channels of a head may pass through
    free_heads: bool = False  # all heads together may be wider or narrower than the hidden state
    grouped: bool = True  # queries may share keys
    qkv_bias: bool = True
    output_bias: bool = False
    mlp_bias: bool = False
    own_head: bool = False  # there is no tied head, so that the embedding is stored twice
    # Llama.cpp's names of a layer's tensors, by ours, where they differ from the usual ones.
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    activation: str = "silu"
    parts: tuple[str, ...] = ()  # optional fields of a DecoderSpec (edgeinfer.bundle.spec)
    needs: tuple[str, ...] = ()  # fields of a DecoderSpec without which the graph has no meaning
    # Period of layers without a window where no key says which; 0 without windows, -1 where a key says.
    full_every: int = 0
    always_slides: bool = True  # there are windows in any case
    unrotated_every: int = 0  # period of layers that do not rotate; 0 where all do
    scale: float = 0.0  # of scores; 0 is by the width of heads
    norm_offset: float = 0.0  # added to weights of norms, which checkpoints store without it
    compressed: bool = False  # the cache of latent attention holds the small vector
    attention: bool = True  # some layers attend
    # Layers without attention have no key heads; where False, another key says which layers these are.
    mixed_heads: bool = False
    widths: Callable[[DecoderSpec], list[int]] | None = None  # of the layers' MLPs, where they differ
    # Another architecture that some decoders of the family are written as.
    instead: Callable[[DecoderSpec], GgufArchitecture | None] | None = None
    others: tuple[GgufArchitecture, ...] = ()  # of those, what no other family is written as
    mixture: GgufMixture | None = None
    # Fields of config.json, their keys in the metadata, and their defaults.
    multipliers: tuple[tuple[str, str, float], ...] = ()
    # The family's changes of weights (Architecture.refine) are applied, instead of by multipliers.
    refined: bool = False
    # One of our tensors as those of the file; their names are ours, or llama.cpp's within a layer.
    rewrite: Callable[[HFConfig, DecoderSpec, TensorPlan], Iterator[TensorPlan]] | None = None
    # Of tensors whose forms differ from ours, by our names in a layer.
    forms: Mapping[str, Callable[[DecoderSpec, Shape], GgufForm]] = field(default_factory=dict)
    # Adds further keys, also from values of tensors.
    keys: Callable[[Any, HFConfig, DecoderSpec, Tensor], None] | None = None
    # Further parts of a decoder that are missing, in words.
    lacks: Callable[[HFConfig, DecoderSpec], Iterator[str]] | None = None
    # `defaults`, `always`, `facts`, `fields`: of files that are read: llama.cpp's values of keys that may be missing,
    # fields of every decoder, fields of every config.json, and further fields from keys, by those known before.
    defaults: Mapping[str, float] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    fields: Callable[[GgufKeys, Mapping[str, Any]], Mapping[str, Any]] | None = None

    @property
    def known(self) -> tuple[str, ...]:
        """Fields of a decoder's description that may differ from their defaults."""
        borders = ("beta_fast", "beta_slow") if "yarn" in self.ropes else ()
        return ("activation", *borders, *self.parts, *(self.mixture.known if self.mixture else ()))

    def check(self, config: HFConfig, spec: DecoderSpec) -> None:
        """Refuses decoders that llama.cpp would compute differently, or abort on."""
        for what in self.missing(config, spec):
            raise UnsupportedArchitectureError(f"llama.cpp's {self.name} has no {what}.", ONNX_HINT)

    def missing(self, config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
        """Parts of a decoder that its graph lacks, in words."""
        yield from self._missing(spec)
        yield from self._missing_by_layer(spec)
        yield from self.mixture.missing(spec) if self.mixture else ()
        yield from self.lacks(config, spec) if self.lacks else ()

    def planned(self, config: HFConfig, spec: DecoderSpec, plans: tuple[TensorPlan, ...]) -> tuple[TensorPlan, ...]:
        """A checkpoint's tensors with the values of the file."""
        if self.rewrite is not None:
            return tuple(written for plan in plans for written in self.rewrite(config, spec, plan))
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
            yield f"heads that are {spec.q_size} wide together with a hidden state of {spec.hidden_size}"
        if spec.num_kv_heads != spec.num_heads and not self.grouped:
            yield "queries that share keys"
        if spec.qkv_bias and not self.qkv_bias:
            yield "biases of queries, keys and values"
        if spec.output_bias and not self.output_bias:
            yield "bias of the attention's output"
        if spec.mlp_bias and not self.mlp_bias:
            yield "biases in its MLP"
        free = self.multipliers or self.refined or spec.rope.type == "yarn"
        fixed = self.scale or spec.head_dim**-0.5
        if spec.attention_scale and not free and not math.isclose(spec.attention_scale, fixed):
            yield f"scale of scores of {spec.attention_scale:.6g}"
        for name in self.needs:
            if not getattr(spec, name):
                yield f"form without {name}"
        if self.attention and not any(map(spec.attends, range(spec.num_layers))):
            yield "form without attention"
        if spec.num_layers > _MOST_LAYERS:
            yield f"room for {spec.num_layers} layers"

    def _missing_by_layer(self, spec: DecoderSpec) -> Iterator[str]:
        if spec.windows and self.full_every and spec.more_ropes:
            turned = tuple(int(window > 0) for window in spec.windows)
            if spec.rope_layers != turned:
                yield "rotations that do not follow its windows"
        if self.unrotated_every:
            still = tuple(-1 if each else 0 for each in every(self.unrotated_every, spec.num_layers))
            if (spec.rope_layers or (0,) * spec.num_layers) != still:
                yield "rotation of these layers"
        for rope in spec.more_ropes:
            if rope.type != "default":
                yield f"second rotary embedding of type {rope.type}"


def every(count: int, layers: int) -> Iterator[bool]:
    """Whether each layer is the last of so many."""
    return (count > 0 and (layer + 1) % count == 0 for layer in range(layers))


# llama.cpp's own limit, at which it ends the process.
_MOST_EXPERTS = 1024
# llama.cpp's numbers of how scores become shares (enum llama_expert_gating_func_type, src/llama-hparams.h).
GATING: dict[Router, int] = {"softmax": 1, "sigmoid": 2}


@dataclass(frozen=True)
class GgufMixture:
    """The mixture of an architecture of llama.cpp."""

    renormalizes: bool | None  # whether the weights of a token's experts sum to one; None where a key says so
    length: bool = True  # the width of experts has a key of its own
    leading: bool = False  # the first layers may have ordinary MLPs
    router: Router = "softmax"  # how scores become shares
    gating: bool = False  # a key says how, with `router` as its default
    scale: bool = False  # a key multiplies the weights
    groups: bool = False  # experts may be chosen among the best groups
    # Describes the shared expert: "length" by its width, "count" by its width in experts, "both" by both, "same" is as
    # wide as an expert, "" there is none.
    shared: str = "length"
    parts: tuple[str, ...] = ()  # optional fields of a MoESpec (edgeinfer.bundle.spec)

    @property
    def known(self) -> tuple[str, ...]:
        """Fields of a MoESpec that may differ from their defaults."""
        routers = ("router",) if self.gating or self.router != "softmax" else ()
        scale = ("scale",) if self.scale else ()
        return (*self.parts, *routers, *scale, *(("groups", "group_top_k") if self.groups else ()))

    def missing(self, spec: DecoderSpec) -> Iterator[str]:
        """Parts of a decoder's mixture that its graph lacks, in words."""
        moe = spec.moe
        if moe is None:
            return
        first = tuple(range(len(moe.dense_layers)))
        if moe.dense_layers and not (self.leading and moe.dense_layers == first):
            yield "layers without experts and others with them"
        if self.renormalizes is not None and moe.renormalize != self.renormalizes:
            yield "weights of experts that are " + ("renormalized" if moe.renormalize else "not renormalized")
        if moe.router != self.router and not (self.gating and moe.router in GATING):
            yield f"router of type {moe.router}"
        if moe.shared_size and self.shared in ("count", "both") and moe.shared_size % moe.expert_size:
            yield f"shared expert that is {moe.shared_size} wide next to others of {moe.expert_size}"
        if moe.shared_size and not self.shared:
            yield "shared expert"
        if moe.experts > _MOST_EXPERTS:
            yield f"room for {moe.experts} experts"

    def add_keys(self, writer: Any, moe: MoESpec) -> None:
        writer.add_expert_count(moe.experts)
        writer.add_expert_used_count(moe.top_k)
        if self.length:
            writer.add_expert_feed_forward_length(moe.expert_size)
        if moe.shared_size and self.shared in ("length", "both"):
            writer.add_expert_shared_feed_forward_length(moe.shared_size)
        if self.shared in ("count", "both"):
            writer.add_expert_shared_count(moe.shared_size // moe.expert_size)
        if self.leading:
            writer.add_leading_dense_block_count(len(moe.dense_layers))
        if self.gating:
            writer.add_uint32(f"{writer.arch}.expert_gating_func", GATING[moe.router])
        if self.scale:
            writer.add_expert_weights_scale(moe.scale)
        if self.renormalizes is None:
            writer.add_expert_weights_norm(moe.renormalize)
        if self.groups:
            writer.add_expert_group_count(moe.groups)
            writer.add_expert_group_used_count(moe.group_top_k)


# llama.cpp's numbers of whole files' types, LLAMA_FTYPE_*.
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
# Of the scheme that quantized blocks are stored in.
_QUANTIZATION_VERSION = 2
# What YaRN multiplies sine and cosine by, per logarithm of the factor (arXiv:2309.00071, equation 22).
YARN_SCALE = 0.1


def context_length(spec: DecoderSpec, arch: GgufArchitecture) -> int:
    """The longest context: at most a sliding window where llama.cpp's graph has none."""
    shown = 0 if arch.full_every else spec.window_size
    return min(spec.max_positions, shown or spec.max_positions)


def add_decoder(
    writer: Any, config: HFConfig, spec: DecoderSpec, arch: GgufArchitecture, name: str, kind: str, tensor: Tensor
) -> None:
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
    """The MLP's width: that of the experts where they have no key of their own; 0 for none."""
    if arch.widths is not None:
        return arch.widths(spec)
    if len(spec.no_mlp) == spec.num_layers:
        return 0
    return spec.moe.expert_size if spec.moe and arch.mixture and not arch.mixture.length else spec.intermediate_size


def _add_heads(writer: Any, spec: DecoderSpec, arch: GgufArchitecture) -> None:
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
        usual = 1 + YARN_SCALE * math.log(rope.factor) if rope.factor > 1 else 1.0
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
