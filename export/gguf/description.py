"""The decoder that a GGUF file's metadata and tensors describe, with llama.cpp's values of what a file leaves out.

What is known by a tensor that is there, such as a bias, is read from the table of tensors. llama.cpp's defaults are
those of `load_hparams` (src/llama-model.cpp) and of each architecture's `load_arch_hparams` (src/models).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.metadata import damaged
from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.bundle.parts import MoESpec, RopeSpec, Router
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import BundleError
from edgeinfer.export.gguf.architectures import GATING, YARN_SCALE, GgufArchitecture, GgufMixture, every
from edgeinfer.export.gguf.keys import GgufKeys, unread, written
from edgeinfer.export.gguf.tensors import ROPE_TENSORS, gguf_tensor_names

Shape = tuple[int, ...]
Fields = dict[str, Any]
# Keys on how files are made and on what else they hold.
_IGNORED = ("vocab_size", "tensor_data_layout", "use_parallel_residual", "rope.scaling.finetuned", "pooling_type")
# Keys that some files of models without experts have.
_OF_EXPERTS = (
    *("expert_used_count", "expert_group_count", "expert_group_used_count", "expert_weights_scale"),
    *("expert_weights_norm", "expert_gating_func", "expert_feed_forward_length", "expert_shared_count"),
    "leading_dense_block_count",
)


def read_decoder(gguf: GgufFile, arch: GgufArchitecture) -> DecoderSpec:
    """Reads the description; refuses keys that it does not understand."""
    keys = GgufKeys(gguf, arch.name, arch.defaults)
    there = _Tensors(gguf, arch, keys)
    fields = _sizes(keys, there)
    fields |= _parts(keys, there, fields)
    fields |= _windows(keys, arch, fields)
    fields |= _ropes(keys, gguf, arch, fields)
    if keys.integer("expert_count", 0):
        fields["moe"] = _mixture(keys, there, arch.mixture)
    else:
        keys.ignore(*_OF_EXPERTS)
    fields |= arch.always
    fields |= {} if arch.fields is None else arch.fields(keys, fields)
    keys.ignore(*_IGNORED)
    keys.expect("attention.causal", True)
    for _, key, usual in arch.multipliers:
        keys.number(key, usual)
    if keys.left:
        raise unread(f"{keys.left[0]} is not known")
    try:
        return DecoderSpec(**fields)
    except BundleError as error:
        raise damaged(gguf.path, error.message.rstrip(".")) from error


class _Tensors:
    """What a file has of our tensors, by our names in a layer."""

    def __init__(self, gguf: GgufFile, arch: GgufArchitecture, keys: GgufKeys) -> None:
        self.arch, self._gguf = arch, gguf
        self.layers = keys.integer("block_count") - keys.integer("nextn_predict_layers", 0)
        if not 0 < self.layers <= len(gguf.tensors):
            raise damaged(gguf.path, f"it has {len(gguf.tensors)} tensors, too few for {self.layers} layers")

    def names(self, part: str, layer: int) -> tuple[str, ...]:
        return gguf_tensor_names(f"layers.{layer}.{part}", self.arch.tensors)

    def layers_of(self, *parts: str) -> tuple[int, ...]:
        """The layers that have one of these tensors."""
        found = (layer for layer in range(self.layers) if any(self.shape(part, layer) for part in parts))
        return tuple(found)

    def has(self, *parts: str) -> bool:
        return bool(self.layers_of(*parts))

    def shape(self, part: str, layer: int) -> Shape | None:
        """The shape of the first of the tensors that hold one of ours; None where it is not there."""
        stored = [self._gguf.by_name.get(name) for name in self.names(part, layer)[:1]]
        return None if not stored or stored[0] is None else stored[0].shape

    def model(self, name: str) -> Shape | None:
        stored = self._gguf.by_name.get(gguf_tensor_names(name, self.arch.tensors)[0])
        return None if stored is None else stored.shape


def _sizes(keys: GgufKeys, there: _Tensors) -> Fields:
    embed, hidden, layers = there.model("embed"), keys.integer("embedding_length"), there.layers
    arch = there.arch
    heads = {count for count in keys.by_layer("attention.head_count", layers) if count} if arch.attention else {1}
    if len(heads) != 1:
        raise unread(f"{arch.name}.attention.head_count differs between layers")
    [num_heads] = heads
    kv_heads = set(keys.by_layer("attention.head_count_kv", layers, num_heads)) - {0}
    if len(kv_heads) != 1 and "full_heads" not in arch.parts:
        raise unread(f"{arch.name}.attention.head_count_kv differs between layers")
    head_dim = keys.integer("attention.key_length", hidden // num_heads)
    if not arch.compressed:
        keys.expect("attention.value_length", head_dim)
    wide = sorted(set(keys.by_layer("feed_forward_length", layers, 0)) - {0})
    return {
        "vocab_size": embed[0] if embed else 0,
        "hidden_size": hidden,
        "intermediate_size": wide[0] if wide else hidden,
        "num_layers": layers,
        "num_heads": num_heads,
        "num_kv_heads": min(kv_heads, default=1),
        "head_dim": head_dim,
        "max_positions": keys.integer("context_length"),
        "tied": there.model("head") is None,
    }


def _parts(keys: GgufKeys, there: _Tensors, sizes: Fields) -> Fields:
    """Biases, norms and factors, most of them known by their tensors."""
    arch, known = there.arch, there.arch.parts
    layer_norm = "norm" in known and "attention.layer_norm_epsilon" in keys
    epsilon = "attention.layer_norm_epsilon" if layer_norm else "attention.layer_norm_rms_epsilon"
    normed = there.layers_of("attn.q_norm")
    q_norm = there.shape("attn.q_norm", normed[0]) if normed else None
    pre_norm = there.has("attn_norm")
    fields: Fields = {
        "norm": "layer" if layer_norm else "rms",
        "norm_eps": keys.number(epsilon),
        "norm_bias": there.has("attn_norm_bias"),
        "activation": arch.activation,
        "qkv_bias": there.has("attn.qkv_bias"),
        "output_bias": there.has("attn.out_bias"),
        "mlp_bias": there.has("mlp.down_bias"),
        "qk_norm": q_norm is not None,
        "whole_norm": q_norm is not None and q_norm != (sizes["head_dim"],),
        "pre_norm": pre_norm,
        "post_norm": "attn_post_norm" in arch.tensors and there.has("attn_post_norm"),
        "inner_norms": there.has("attn.inner_norm"),
        "parallel": pre_norm and "parallel" in known and not there.has("mlp_norm"),
        "gated": "gated" not in known or there.has("mlp.gate_up", "mlp.experts.0.gate_up"),
        "head_bias": there.model("head_bias") is not None,
        "sinks": there.has("attn.sinks"),
        "output_gate": "channel" if "output_gate" in known and there.has("attn.gate") else "",
    }
    if "norm_after_rope" in known:
        fields["norm_after_rope"] = fields["qk_norm"]
    for name, key in (("attention_softcap", "attn_logit_softcapping"), ("logit_softcap", "final_logit_softcapping")):
        fields[name] = keys.number(key, 0.0)
    if "attention_scale" in known:
        scale = next((key for _, key, _ in arch.multipliers if key == "attention.scale"), "")
        fields["attention_scale"] = keys.number(scale, 0.0) if scale else arch.scale or sizes["head_dim"] ** -0.5
    return fields


def _windows(keys: GgufKeys, arch: GgufArchitecture, sizes: Fields) -> Fields:
    layers, period, pattern = sizes["num_layers"], arch.full_every, "attention.sliding_window_pattern"
    if not period:
        # Of a window that hides something it is not known which layers have it: the key is left, to be refused.
        found = keys.metadata.get(f"{arch.name}.attention.sliding_window", 0)
        if isinstance(found, int) and (found == 0 or found >= sizes["max_positions"]):
            keys.ignore("attention.sliding_window")
        return {}
    window = keys.integer("attention.sliding_window", 0)
    if keys.is_array(pattern):
        slides = keys.flags(pattern, layers)
    elif period > 0 or pattern in keys:
        slides = [not full for full in every(keys.integer(pattern, max(period, 0)), layers)]
    else:
        raise unread(f"{arch.name}.{pattern} is missing")
    # A window as long as the context hides nothing.
    if not any(slides) or not 0 < window < sizes["max_positions"]:
        return {}
    return {"windows": tuple(window if slide else 0 for slide in slides)}


def _ropes(keys: GgufKeys, gguf: GgufFile, arch: GgufArchitecture, known: Fields) -> Fields:
    """The rotations and the layers that have them."""
    if not arch.attention:
        return {"rope": RopeSpec("default", 1e4, known["head_dim"])}
    rope = _rope(keys, gguf, arch, known)
    windows, layers = known.get("windows", ()), known["num_layers"]
    base, size = keys.number("rope.freq_base_swa", rope.theta), keys.integer("rope.dimension_count_swa", rope.dim)
    fields: Fields = {"rope": rope}
    if "more_ropes" in arch.parts and windows:
        local = RopeSpec("default", base, size, interleaved=rope.interleaved)
        fields["more_ropes"], fields["rope_layers"] = (local,), tuple(int(window > 0) for window in windows)
    elif windows and (base, size) != (rope.theta, rope.dim):
        raise unread(f"{arch.name}.rope.freq_base_swa differs from rope.freq_base")
    if arch.unrotated_every:
        fields["rope_layers"] = tuple(-1 if still else 0 for still in every(arch.unrotated_every, layers))
    return fields


def _rope(keys: GgufKeys, gguf: GgufFile, arch: GgufArchitecture, known: Fields) -> RopeSpec:
    size, context = keys.integer("rope.dimension_count", known["head_dim"]), known["max_positions"]
    fields: Fields = {"theta": keys.number("rope.freq_base", 1e4), "dim": size}
    fields["interleaved"] = "interleaved" in arch.parts
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)) or 1.0
    original = keys.integer("rope.scaling.original_context_length", context)
    grown = keys.number("rope.scaling.attn_factor", 1.0)
    divisors = {name: _values(gguf, name) for name in ROPE_TENSORS if name in gguf.by_name}
    if divisors and factor != 1:
        raise unread(f"{arch.name}.rope.scaling.factor is {factor:g} next to {next(iter(divisors))}")
    if divisors:
        # Llama 3's four constants are not in the file: the divisors that they gave are.
        short, long = (divisors.get(name, divisors.get(ROPE_TENSORS[0])) for name in ROPE_TENSORS[:0:-1])
        if short is None or long is None:
            raise unread(f"{next(iter(divisors))} has no counterpart")
        lists: Fields = {"short_factors": tuple(short), "long_factors": tuple(long), "attention_factor": grown}
        return RopeSpec("longrope", factor=context / original, original_max_positions=original, **fields, **lists)
    if kind == "yarn" and factor != 1:
        usual = 1 + YARN_SCALE * math.log(factor) if factor > 1 else 1.0
        fast, slow = (keys.number(f"rope.scaling.yarn_beta_{end}", usual) for end, usual in (("fast", 32), ("slow", 1)))
        return RopeSpec(
            "yarn",
            factor=factor,
            original_max_positions=original,
            attention_factor=usual if grown == 1 else written(float(np.float32(usual * grown))),
            beta_fast=fast,
            beta_slow=slow,
            **fields,
        )
    if kind not in ("none", "linear", "yarn", "longrope") or grown != 1:
        raise unread(f"{arch.name}.rope.scaling.type is {kind}")
    return RopeSpec("default" if factor == 1 or kind == "none" else "linear", factor=factor, **fields)


def _values(gguf: GgufFile, name: str) -> list[float]:
    """The numbers of a small tensor."""
    tensor = gguf.by_name[name]
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise damaged(gguf.path, f"{name} is no list of 32-bit floats")
    with gguf.splits[tensor.split].path.open("rb") as file:
        file.seek(tensor.offset)
        found: NDArray[np.float32] = np.frombuffer(file.read(tensor.nbytes), "<f4")
    if not np.isfinite(found).all() or found.min(initial=1) <= 0:
        raise damaged(gguf.path, f"{name} has values that are not positive")
    return [float(value) for value in found]


def _mixture(keys: GgufKeys, there: _Tensors, mixture: GgufMixture | None) -> MoESpec:
    if mixture is None:
        raise unread(f"{there.arch.name}.expert_count is not known")
    routed = there.layers_of("mlp.router")
    first = routed[0] if routed else 0
    down = there.shape("mlp.experts.0.down", first)
    if down is None or len(down) != 3:
        raise unread(f"{there.names('mlp.experts.0.down', first)[0]} is missing or no stack of experts")
    experts, _, size = down
    keys.expect("expert_count", experts)
    keys.expect("expert_feed_forward_length", size)
    shared = there.shape("mlp.shared.down", first)
    wide = 0 if shared is None else shared[-1]
    keys.expect("expert_shared_feed_forward_length", wide)
    keys.expect("expert_shared_count", wide // size)
    no_mlp = () if "no_mlp" not in there.arch.parts else tuple(set(range(there.layers)) - {*there.layers_of("mlp.up")})
    dense = tuple(layer for layer in range(there.layers) if layer not in (*routed, *no_mlp))
    keys.expect("leading_dense_block_count", len(dense))
    router: dict[int, Router] = {number: name for name, number in GATING.items()}
    gating = keys.integer("expert_gating_func", GATING[mixture.router])
    if gating not in router:
        raise unread(f"{there.arch.name}.expert_gating_func is {gating}")
    norm, scale = keys.flag("expert_weights_norm", bool(mixture.renormalizes)), keys.number("expert_weights_scale", 0.0)
    groups, used = keys.integer("expert_group_count", 0), keys.integer("expert_group_used_count", 0)
    return MoESpec(
        experts=experts,
        top_k=keys.integer("expert_used_count"),
        expert_size=size,
        shared_size=wide,
        shared_gate=there.has("mlp.shared.gate"),
        router=router[gating],
        renormalize=norm,
        gated="gated" not in mixture.parts or there.has("mlp.experts.0.gate_up"),
        dense_layers=dense,
        router_bias=there.has("mlp.router_bias"),
        choice_bias=there.has("mlp.choice_bias"),
        expert_bias=there.has("mlp.experts.down_bias"),
        groups=max(groups, 1),
        group_top_k=used if groups > 1 else 1,
        scale=scale or 1.0,
        with_mlp="with_mlp" in mixture.parts,
    )
