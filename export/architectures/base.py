"""What an architecture family is: how its config reads, and which checkpoint tensors make up each of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.bundle.parts import LatentSpec, MoESpec, RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.tables import PER_LAYER_TABLE
from edgeinfer.export.architectures.tensors import (
    MixtureNaming,
    Source,
    TensorPlan,
    mixture_plans,
    plan,
    recurrent_tensors,
)
from edgeinfer.export.source.hf_config import HFConfig
from edgeinfer.export.source.packed import ternary_packing

# Where a module for multi-token prediction may lie: under this name, or as the layer behind the last.
MTP, NEXT_LAYER = "mtp", "next layer"

# Of models that see: what the names of their language model, and of its head, may begin with, and their other tensors.
SEEING_ROOTS = (("model.", ""), ("language_model.model.", "language_model."), ("model.language_model.", ""))
SEEING_IGNORABLE = ("*.rotary_emb.inv_freq", "*vision_tower.*", "*multi_modal_projector.*")
# The same of checkpoints of a base model alone, as AutoModel saves them.
_BASE_ROOTS = (("", ""), ("language_model.", ""))
# The matrices of hidden states in several streams, and the checkpoint's modules.
_STREAMS = {"enter": "altup_projections", "leave": "altup_unembed_projections"}


@dataclass(frozen=True)
class Naming:
    """Names of a family's checkpoint tensors; packed ones list one name for each part of the checkpoint's, in the order
    of their rows. A norm's bias is named after its weight.

    `gate` is that of DecoderSpec.output_gate, `q_a`, `q_a_norm` and `q_b` are those of latent attention, `mixer` is a
    recurrence's, and `streams` the prefix of the matrices by which streams are entered and left.
    """

    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    head_bias: str = "lm_head.bias"
    layer: str = "model.layers.{layer}."
    attn_norm: str = "input_layernorm.weight"
    attn_post_norm: str = "post_attention_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    mlp_post_norm: str = "post_feedforward_layernorm.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    sinks: str = "self_attn.sinks"
    gate: str = "self_attn.gate_proj"
    q: str = "self_attn.q_proj"
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm.weight"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm.weight"
    kv_b: str = "self_attn.kv_b_proj.weight"
    attn_inner_norm: str = "self_attn.attn_sub_norm.weight"
    out: str = "self_attn.o_proj"
    mixer: str = "conv"
    up: str = "mlp.up_proj"
    mlp_inner_norm: str = "mlp.ffn_sub_norm.weight"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    xielu: tuple[str, str] = ("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n")
    layer_scale: str = "layer_scalar"
    per_layer_table: str = "model.embed_tokens_per_layer.weight"
    per_layer_projection: str = "model.per_layer_model_projection.weight"
    per_layer_norm: str = "model.per_layer_projection_norm.weight"
    per_layer_gate: str = "per_layer_input_gate.weight"
    per_layer_out: str = "per_layer_projection.weight"
    per_layer_post_norm: str = "post_per_layer_input_norm.weight"
    streams: str = "model."
    mixture: MixtureNaming = field(default_factory=MixtureNaming)


# Names outside of the layers, and what precedes those inside.
_PLACED = ("embed", "final_norm", "layer", "streams", "per_layer_table", "per_layer_projection", "per_layer_norm")
# The matrices that a checkpoint of ternary weights packs.
_TERNARY = (".attn.qkv", ".attn.out", ".mlp.gate_up", ".mlp.up", ".mlp.down")


@dataclass(frozen=True)
class Architecture:
    classes: tuple[str, ...]  # transformers' model classes
    model_types: tuple[str, ...]  # transformers' family names, used where config.json names no class
    # Turns a config into a spec; the flag says whether embedding and head are tied.
    read: Callable[[HFConfig, bool], DecoderSpec]
    naming: Naming = field(default_factory=Naming)
    # Replacements of "model." in names, and prefixes of the head; the first pair that finds the embedding.
    roots: tuple[tuple[str, str], ...] = (("model.", ""),)
    # Old checkpoints store the rotary frequencies, which the config gives.
    ignorable: tuple[str, ...] = ("*.rotary_emb.inv_freq",)  # patterns of checkpoint tensors that carry no weights
    # Changes a tensor by what else the config says, such as a factor.
    refine: Callable[[HFConfig, DecoderSpec, TensorPlan], TensorPlan] | None = None
    # Where checkpoints may have a module for multi-token prediction: MTP, NEXT_LAYER, or "" for nowhere.
    predicts: str = ""

    def module_root(self, layers: int) -> str:
        """Prefix of the names of a module for multi-token prediction."""
        return self.naming.layer.format(layer=layers) if self.predicts == NEXT_LAYER else f"{MTP}."

    def unread(self, layers: int) -> tuple[str, ...]:
        """Patterns of checkpoint tensors that are not read; a tied checkpoint may store a copy as its head."""
        module = (f"{self.module_root(layers)}*",) if self.predicts else ()
        return (*self.ignorable, self.naming.head, *module)

    def placed(self, stored: Collection[str]) -> Architecture:
        """This family with the names that a checkpoint's tensors have."""
        for body, head in (*self.roots, *_BASE_ROOTS):
            names = {n: body + getattr(self.naming, n).removeprefix("model.") for n in _PLACED}
            names |= {name: head + getattr(self.naming, name) for name in ("head", "head_bias")}
            if names["embed"] in stored:
                return dataclasses.replace(self, naming=dataclasses.replace(self.naming, **names))
        return self

    def tensors(self, config: HFConfig, spec: DecoderSpec, stored: Collection[str] = ()) -> tuple[TensorPlan, ...]:
        """Every tensor of the bundle in the order it is written."""
        names = self.naming
        hidden, vocab = spec.hidden_size, spec.vocab_size
        plans = [plan("embed", (names.embed, (vocab, hidden))), *_model_plans(spec, names)]
        plans += _model_streams(spec, names.streams)
        for layer in range(spec.num_layers):
            plans += self._layer(spec, layer, stored)
        plans += _norm_plans(spec, "final_norm", names.final_norm)
        if not spec.tied:
            plans.append(plan("head", (names.head, (vocab, hidden))))
        if spec.head_bias:
            plans.append(plan("head_bias", (names.head_bias, (vocab,))))
        refine, packing = self.refine, ternary_packing(config)
        if packing:
            plans = [p.packed(packing) if p.name.endswith(_TERNARY) else p for p in plans]
        return tuple(plans if refine is None else (refine(config, spec, p) for p in plans))

    def _layer(self, spec: DecoderSpec, layer: int, stored: Collection[str]) -> list[TensorPlan]:
        names, hidden, prefix = self.naming, spec.hidden_size, f"layers.{layer}"
        root = names.layer.format(layer=layer)

        def vector(name: str, source: str, size: int) -> TensorPlan:
            return plan(f"{prefix}.{name}", (root + source, (size,)))

        def linear(name: str, modules: tuple[str, ...], rows: tuple[int, ...], inputs: int, bias: bool) -> None:
            plans.extend(_linear_plans(f"{prefix}.{name}", root, modules, rows, inputs, bias))

        def norm(name: str, source: str, size: int = hidden) -> None:
            plans.extend(_norm_plans(spec, f"{prefix}.{name}", root + source, size))

        plans: list[TensorPlan] = []
        if spec.pre_norm and spec.mixer(layer) != "none":
            norm("attn_norm", names.attn_norm)
        plans += (*_layer_streams(spec, layer, root), *recurrent_tensors(spec, layer, f"{root}{names.mixer}."))
        if spec.latent is not None:
            plans += self._latent_attention(spec, spec.latent, prefix, root)
        elif spec.attends(layer):
            heads = spec.heads(layer)
            modules = names.qkv[: len(heads.products)] if len(names.qkv) == 3 else names.qkv
            linear("attn.qkv", modules, heads.products, hidden, spec.qkv_bias)
            if spec.qk_norm:
                plans.append(vector("attn.q_norm", names.q_norm, heads.q_size if spec.whole_norm else heads.size))
            if spec.qk_norm and heads.owns:
                plans.append(vector("attn.k_norm", names.k_norm, heads.kv_size if spec.whole_norm else heads.size))
            if spec.sinks:
                plans.append(vector("attn.sinks", names.sinks, spec.num_heads))
            if spec.output_gate:
                rows = heads.q_size if spec.output_gate == "channel" else spec.num_heads
                linear("attn.gate", (names.gate,), (rows,), hidden, False)
            if spec.inner_norms:
                norm("attn.inner_norm", names.attn_inner_norm, heads.q_size)
            linear("attn.out", (names.out,), (hidden,), heads.q_size, spec.output_bias)
        if spec.post_norm:
            norm("attn_post_norm", names.attn_post_norm)
        if layer in spec.no_mlp:
            return plans
        if spec.pre_norm and not spec.parallel:
            norm("mlp_norm", names.mlp_norm)
        if spec.post_norm:
            norm("mlp_post_norm", names.mlp_post_norm)
        if spec.per_layer is not None:
            plans += _per_layer_plans(spec, spec.per_layer.size, names, prefix, root)
        moe = spec.experts_of(layer)
        plans += [] if moe is None else mixture_plans(names.mixture, moe, hidden, layer, root, stored)
        if moe is not None and not moe.with_mlp:
            return plans
        wide = spec.mlp_size(layer)
        if spec.gated:
            linear("mlp.gate_up", names.gate_up, (wide, wide), hidden, spec.mlp_bias)
        else:
            linear("mlp.up", (names.up,), (wide,), hidden, spec.mlp_bias)
        if spec.activation == "xielu":
            plans.append(_xielu_plan(f"{prefix}.mlp.xielu", [root + each for each in names.xielu]))
        if spec.inner_norms:
            norm("mlp.inner_norm", names.mlp_inner_norm, wide)
        linear("mlp.down", (names.down,), (hidden,), wide, spec.mlp_bias)
        return plans

    def _latent_attention(self, spec: DecoderSpec, latent: LatentSpec, prefix: str, root: str) -> list[TensorPlan]:
        names, hidden = self.naming, spec.hidden_size

        def linear(name: str, module: str, rows: int, inputs: int, bias: bool) -> list[TensorPlan]:
            return _linear_plans(f"{prefix}.attn.{name}", root, (module,), (rows,), inputs, bias)

        def norm(name: str, source: str, size: int) -> TensorPlan:
            return plan(f"{prefix}.attn.{name}", (root + source, (size,)))

        if latent.query_rank:
            plans = linear("q_a", names.q_a, latent.query_rank, hidden, spec.qkv_bias)
            plans.append(norm("q_a_norm", names.q_a_norm, latent.query_rank))
            plans += linear("q_b", names.q_b, spec.q_size, latent.query_rank, False)
        else:
            plans = linear("q", names.q, spec.q_size, hidden, False)
        plans += linear("kv_a", names.kv_a, latent.met_size, hidden, spec.qkv_bias)
        plans.append(norm("kv_norm", names.kv_norm, latent.rank))
        plans += _of_heads(spec, latent, prefix, root + names.kv_b)
        return plans + linear("out", names.out, hidden, spec.heads_size, spec.output_bias)


def _linear_plans(
    name: str, root: str, modules: tuple[str, ...], rows: tuple[int, ...], inputs: int, bias: bool
) -> list[TensorPlan]:
    """A matrix and its bias, if any; a family that packs its projections has one module for all of them."""
    parts = rows if len(modules) == len(rows) else (sum(rows),)
    pairs = list(zip(modules, parts, strict=True))
    plans = [plan(name, *((f"{root}{m}.weight", (n, inputs)) for m, n in pairs))]
    if bias:
        plans.append(plan(f"{name}_bias", *((f"{root}{m}.bias", (n,)) for m, n in pairs)))
    return plans


def _of_heads(spec: DecoderSpec, latent: LatentSpec, prefix: str, name: str) -> list[TensorPlan]:
    """Two matrices for each head: the unrotated channels of its keys, which multiply queries, and its values."""
    heads, plain, given = spec.num_heads, latent.plain_size, latent.value_size
    keys = Source(name, (heads * plain, latent.rank), pieces=(plain + given, 0, plain), heads=heads)
    values = Source(name, (heads * given, latent.rank), pieces=(plain + given, plain, given))
    return [TensorPlan(f"{prefix}.attn.k_b", (keys,)), TensorPlan(f"{prefix}.attn.v_b", (values,))]


def _model_plans(spec: DecoderSpec, names: Naming) -> list[TensorPlan]:
    """Tensors that all layers share, except the embedding."""
    plans, layers = [], range(spec.num_layers)
    if spec.per_layer is not None:
        size, vocab = spec.per_layer.size, spec.per_layer.vocab_size
        table = Source(names.per_layer_table, (vocab * len(layers), size), split=len(layers))
        plans.append(TensorPlan(PER_LAYER_TABLE, (table,)))
        shape = (size * len(layers), spec.hidden_size)
        plans.append(plan("per_layer.projection", (names.per_layer_projection, shape)))
        plans.append(plan("per_layer.norm", (names.per_layer_norm, (size,))))
    if spec.layer_scales:
        sources = [(names.layer.format(layer=layer) + names.layer_scale, (1,)) for layer in layers]
        plans.append(plan("layer_scales", *sources))
    return plans


def _per_layer_plans(spec: DecoderSpec, size: int, names: Naming, prefix: str, root: str) -> list[TensorPlan]:
    return [
        plan(f"{prefix}.per_layer.gate", (root + names.per_layer_gate, (size, spec.hidden_size))),
        plan(f"{prefix}.per_layer.out", (root + names.per_layer_out, (spec.hidden_size, size))),
        *_norm_plans(spec, f"{prefix}.per_layer.norm", root + names.per_layer_post_norm),
    ]


def _norm_plans(spec: DecoderSpec, name: str, source: str, size: int = 0) -> list[TensorPlan]:
    """A norm of the hidden states, or of `size`, and its bias, if any."""
    shape = (size or spec.hidden_size,)
    plans = [plan(name, (source, shape))]
    if spec.norm_bias:
        plans.append(plan(f"{name}_bias", (source.removesuffix("weight") + "bias", shape)))
    return plans


# Source: transformers' XIELUActivation: alpha_n is the softplus of what is stored plus beta.
_XIELU_BETA = 0.5


def _xielu_plan(name: str, sources: list[str]) -> TensorPlan:
    positive, negative = (Source(each, (1,), softplus=True) for each in sources)
    return TensorPlan(name, (positive, dataclasses.replace(negative, offset=_XIELU_BETA)))


def common_spec(config: HFConfig, tied: bool, *, norm_eps: str = "rms_norm_eps", **parts: Any) -> DecoderSpec:
    """Reads the config fields that all families share."""
    heads = config.integer("num_attention_heads")
    usual: dict[str, Callable[[], Any]] = {
        "head_dim": config.head_dim,
        "num_kv_heads": lambda: config.integer("num_key_value_heads", heads),
        "rope": lambda: config.rope(parts["head_dim"]),
        "activation": config.activation,
        "intermediate_size": lambda: config.integer("intermediate_size"),
    }
    for name, read in usual.items():
        if name not in parts:
            parts[name] = read()
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        max_positions=config.integer("max_position_embeddings"),
        norm_eps=config.number(norm_eps),
        tied=tied,
        **parts,
    )


def reader(make: Callable[..., DecoderSpec] = common_spec, /, **parts: Any) -> Callable[[HFConfig, bool], DecoderSpec]:
    """Returns the `read` of a family: `make` with these parts, which are values or functions of a config."""

    def read(config: HFConfig, tied: bool) -> DecoderSpec:
        return make(config, tied, **{name: part(config) if callable(part) else part for name, part in parts.items()})

    return read


def flag(name: str, default: bool = False) -> Callable[[HFConfig], bool]:
    return lambda config: config.flag(name, default)


# Biases of attention alone, and of the MLP as well, by the fields that most families have for them.
ATTENTION_BIASES: dict[str, Any] = dict.fromkeys(("qkv_bias", "output_bias"), flag("attention_bias"))
ALL_BIASES = ATTENTION_BIASES | {"mlp_bias": flag("mlp_bias")}


def neighbours(config: HFConfig) -> RopeSpec:
    """The rotation of families that rotate neighbouring channels as pairs."""
    return dataclasses.replace(config.rope(config.head_dim()), interleaved=True)


def rope_fields(whole: RopeSpec, local: RopeSpec, slides: list[bool]) -> dict[str, Any]:
    """One rotation, and another of the layers that slide, if any does."""
    others = {"more_ropes": (local,), "rope_layers": tuple(map(int, slides))} if any(slides) else {}
    return {"rope": whole, **others}


def mixture(config: HFConfig, size: str = "intermediate_size", **parts: Any) -> MoESpec:
    """Experts of the usual fields, with their width in the field `size`."""
    return MoESpec(config.experts(), config.integer("num_experts_per_tok"), config.integer(size), **parts)


def _model_streams(spec: DecoderSpec, root: str) -> Iterator[TensorPlan]:
    """The matrices by which embeddings enter the streams and hidden states leave them, if there are streams."""
    if spec.streams is None:
        return
    shape = (spec.hidden_size, spec.hidden_size)
    for name, module in _STREAMS.items():
        sources = ((f"{root}{module}.{place}.weight", shape) for place in range(spec.streams.count - 1))
        yield plan(f"streams.{name}", *sources)


def _layer_streams(spec: DecoderSpec, layer: int, root: str) -> Iterator[TensorPlan]:
    """The tensors that predict and correct the streams in a layer and augment its residual, if there are streams."""
    if spec.streams is None:
        return
    hidden, count, rank = spec.hidden_size, spec.streams.count, spec.streams.laurel_rank
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "streams.router_norm": ("altup.router_norm", (hidden,)),
        "streams.router": ("altup.modality_router", (count, hidden)),
        "streams.predict": ("altup.prediction_coefs", (count * count, count)),
        "streams.correct": ("altup.correction_coefs", (count, count)),
        "laurel.down": ("laurel.linear_left", (rank, hidden)),
        "laurel.up": ("laurel.linear_right", (hidden, rank)),
        "laurel.norm": ("laurel.post_laurel_norm", (hidden,)),
    }
    for name, (module, shape) in tensors.items():
        yield plan(f"layers.{layer}.{name}", (f"{root}{module}.weight", shape))
    if spec.streams.scaled:
        yield plan(f"layers.{layer}.streams.scale", (f"{root}altup.correct_output_scale", (hidden,)))
