"""llama.cpp's architectures of Gemma 3n and Gemma 4: per-layer embeddings, shared caches, heads by layer, streams."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from edgeinfer.bundle.parts import HeadsSpec, PerLayerSpec, RopeSpec, StreamsSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.tensors import Shape, TensorPlan
from edgeinfer.export.gguf.architectures import GgufArchitecture, GgufForm, GgufMixture, Tensor
from edgeinfer.export.gguf.keys import GgufKeys, unread
from edgeinfer.export.source.hf_config import HFConfig

# What llama.cpp's Gemma 3n has and no key gives (src/llama-hparams.h, src/models/gemma3n.cpp): sizes, layers before
# those that share caches, sparse layers at the beginning and how sparse, and where logits are capped.
_CAP = 30.0
_STREAMS, _RANK, _VECTOR, _OWN_CACHES, _SPARSE_LAYERS, _SPARSITY = 4, 64, 256, 20, 10, 0.95
_TENSORS = {"attn_post_norm": ("post_attention_norm.weight",), "mlp_post_norm": ("post_ffw_norm.weight",)}
_EXPERTS = {
    "mlp.expert_scale": ("ffn_down_exps.scale",),
    "mlp.router_input_norm": ("ffn_gate_inp.scale",),
    "mlp.experts_norm": ("pre_ffw_norm_2.weight",),
    "mlp.experts_post_norm": ("post_ffw_norm_2.weight",),
    "mlp.dense_post_norm": ("post_ffw_norm_1.weight",),
    "experts.gate_up": ("ffn_gate_up_exps.weight",),
}
_STREAM_TENSORS = {
    "streams.router_norm": ("altup_router_norm.weight",),
    "streams.router": ("altup_router.weight",),
    "streams.predict": ("altup_predict_coef.weight",),
    "streams.correct": ("altup_correct_coef.weight",),
    "streams.scale": ("altup_correct_scale.weight",),
    "laurel.down": ("laurel_l.weight",),
    "laurel.up": ("laurel_r.weight",),
    "laurel.norm": ("laurel_post_norm.weight",),
}


def _by_token(spec: DecoderSpec, shape: Shape) -> GgufForm:
    """A row for each token, with the vectors of all layers; tokens without vectors get the first one's, as in
    transformers."""
    layers, vocabulary = spec.num_layers, spec.vocab_size
    extra = vocabulary - shape[0] // layers
    return GgufForm((vocabulary, layers * shape[1]), parts=((0, shape[0]), *(((0, layers),) * extra)))


def _stacked(spec: DecoderSpec, shape: Shape) -> GgufForm:
    """Matrices of all streams except the first, along an axis of their own."""
    return GgufForm((shape[0] // shape[1], shape[1], shape[1]))


def _rewrite(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> Iterator[TensorPlan]:
    """The factor of a layer's result is a tensor of the layer."""
    if plan.name != "layer_scales":
        yield plan
        return
    for layer, source in enumerate(plan.sources):
        yield TensorPlan(f"layers.{layer}.layer_output_scale.weight", (source,))


def _shared_lacks(spec: DecoderSpec) -> Iterator[str]:
    if spec.per_layer is not None and spec.per_layer.vocab_size > spec.vocab_size:
        yield f"per-layer embeddings of {spec.per_layer.vocab_size} tokens in a vocabulary of {spec.vocab_size}"
    if spec.windows and spec.rope_layers != tuple(int(window > 0) for window in spec.windows):
        yield "rotations that do not follow its windows"
    own = spec.num_layers - _caches(spec)
    if _caches(spec) and (own < 2 or [window > 0 for window in spec.windows[own - 2 : own]] != [True, False]):
        yield "shared caches but of a layer with a window and one without, the last two that have their own"


def _caches(spec: DecoderSpec) -> int:
    """Number of layers at the end that read the keys and values of others."""
    return sum(source != layer for layer, source in enumerate(spec.kv_sources))


def _keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    writer.add_shared_kv_layers(_caches(spec))
    writer.add_embedding_length_per_layer_input(0 if spec.per_layer is None else spec.per_layer.size)


def _gemma4_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    _keys(writer, config, spec, tensor)
    for rope in spec.more_ropes:
        writer.add_rope_dimension_count_swa(rope.dim)
    if not spec.logit_softcap:
        # Without the key llama.cpp caps them.
        writer.add_final_logit_softcapping(0.0)


def _shared_fields(keys: GgufKeys, known: Mapping[str, Any], caches: int) -> dict[str, Any]:
    """Caches that layers share, and embeddings of each layer."""
    layers, windows = known["num_layers"], known.get("windows") or (0,) * known["num_layers"]
    first, size = layers - caches, keys.integer("embedding_length_per_layer_input", 0)
    own = {windows[layer] > 0: layer for layer in range(max(first, 0))}
    last = (own.get(window > 0, 0) for window in windows)
    sources = tuple(layer if layer < first else each for layer, each in enumerate(last)) if caches else ()
    vectors = PerLayerSpec(size, known["vocab_size"]) if size else None
    return {"value_norm": True, "kv_sources": sources, "per_layer": vectors}


def _gemma4_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    layers, windows = known["num_layers"], known.get("windows") or (0,) * known["num_layers"]
    size, full = keys.integer("attention.key_length_swa"), known["head_dim"]
    keys.expect("attention.value_length_swa", size)
    heads = keys.by_layer("attention.head_count_kv", layers)
    wide = keys.by_layer("feed_forward_length", layers)
    split = [{each for each, window in zip(heads, windows, strict=True) if bool(window) == slides} for slides in (1, 0)]
    if any(len(each) > 1 for each in split):
        raise unread("gemma4.attention.head_count_kv differs between layers of a kind")
    seen = next((layer for layer, window in enumerate(windows) if not window), 0)
    shared = f"blk.{seen}.attn_v.weight" not in keys.tensors
    rope, fields = known["rope"], _shared_fields(keys, known, keys.integer("attention.shared_kv_layers", 0))
    if rope.type == "longrope":
        turned = sum(each == 1 for each in rope.long_factors)
        rope = RopeSpec("proportional", rope.theta, rope.dim, turned=turned)
    return {
        **fields,
        "rope": rope,
        "head_dim": size,
        "num_kv_heads": min(split[0] or split[1]),
        "full_heads": HeadsSpec(min(split[1] or split[0]), full, shared),
        "mlp_sizes": tuple(wide) if len(set(wide)) > 1 else (),
        "intermediate_size": wide[0],
        "layer_scales": True,
        "whole_norm": False,
    }


def _gemma3n_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    layers = known["num_layers"]
    keys.expect("altup.active_idx", 0)
    keys.ignore("attention.shared_kv_layers", "altup.num_inputs")
    usual, sparsity = statistics.NormalDist(), (0.0,) * layers
    if "activation_sparsity_scale" in keys:
        scales = keys.numbers("activation_sparsity_scale", layers)
        sparsity = tuple(round(usual.cdf(scale), 6) for scale in scales)
    fields = _shared_fields(keys, known, max(0, layers - _OWN_CACHES))
    streams = StreamsSpec(_STREAMS, _RANK)
    return {**fields, "streams": streams, "sparsity": sparsity if any(sparsity) else (), "logit_softcap": _CAP}


def _gemma4_lacks(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    yield from _shared_lacks(spec)
    if spec.rope.type != "proportional":
        yield f"rotary embedding of type {spec.rope.type} in layers that see everything"
    if spec.full_heads is None:
        yield "heads that are alike in all layers"


def _widths(spec: DecoderSpec) -> list[int]:
    return list(spec.mlp_sizes) or [spec.intermediate_size] * spec.num_layers


def _gemma3n_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    _keys(writer, config, spec, tensor)
    assert spec.streams is not None, "a Gemma 3n has streams"
    writer.add_altup_active_idx(0)
    writer.add_altup_num_inputs(spec.streams.count)
    sparsity = spec.sparsity or (0.0,) * spec.num_layers
    usual = statistics.NormalDist()
    writer.add_activation_sparsity_scale([usual.inv_cdf(each) if each else float("-inf") for each in sparsity])


def _gemma3n_lacks(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    yield from _shared_lacks(spec)
    streams, vectors, layers = spec.streams, spec.per_layer, spec.num_layers
    assert streams is not None, "a Gemma 3n has streams"
    if streams.count != _STREAMS or streams.laurel_rank != _RANK or not streams.scaled:
        yield f"form without {_STREAMS} scaled streams and augmented residuals of rank {_RANK}"
    if spec.logit_softcap != _CAP:
        yield f"form without a cap of logits at {_CAP:g}"
    if vectors is None or vectors.size != _VECTOR:
        yield f"form without per-layer embeddings of {_VECTOR} channels"
    if _caches(spec) != max(0, layers - _OWN_CACHES):
        yield f"other number of layers with caches of their own than {_OWN_CACHES}"
    sparse = min(_SPARSE_LAYERS, layers)
    if spec.sparsity != (_SPARSITY,) * sparse + (0.0,) * (layers - sparse):
        yield f"MLPs that are sparse elsewhere than in its first {_SPARSE_LAYERS} layers"


_GEMMA4 = GgufArchitecture(
    "gemma4",
    ropes=("proportional",),
    partial_rope=True,
    free_heads=True,
    qkv_bias=False,
    activation="gelu_tanh",
    tensors=_TENSORS | _EXPERTS,
    parts=(
        *("post_norm", "attention_scale", "value_norm", "more_ropes", "rope_layers", "logit_softcap", "full_heads"),
        *("kv_sources", "mlp_sizes", "layer_scales", "per_layer", "turned"),
    ),
    needs=("windows", "qk_norm", "value_norm"),
    full_every=-1,
    scale=1.0,
    widths=_widths,
    mixture=GgufMixture(True, shared="", parts=("with_mlp",)),
    rewrite=_rewrite,
    forms={"per_layer": _by_token},
    keys=_gemma4_keys,
    defaults={"final_logit_softcapping": _CAP},
    fields=_gemma4_fields,
    lacks=_gemma4_lacks,
)
GEMMAS = {
    "gemma4_text": _GEMMA4,
    "gemma3n_text": dataclasses.replace(
        _GEMMA4,
        name="gemma3n",
        ropes=("default",),
        tensors=_TENSORS | _STREAM_TENSORS,
        parts=(
            *("post_norm", "attention_scale", "value_norm", "more_ropes", "rope_layers", "logit_softcap"),
            *("kv_sources", "per_layer", "streams", "sparsity"),
        ),
        widths=None,
        mixture=None,
        rewrite=None,
        forms={"per_layer": _by_token, "enter": _stacked, "leave": _stacked},
        keys=_gemma3n_keys,
        fields=_gemma3n_fields,
        lacks=_gemma3n_lacks,
    ),
}
