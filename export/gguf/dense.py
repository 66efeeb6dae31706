"""llama.cpp's architectures of attention with ordinary MLPs or with mixtures, by transformers' names of families.

What each graph has is what llama.cpp's sources build (src/llama-model.cpp, src/models), and the tests run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.tensors import TensorPlan
from edgeinfer.export.gguf.architectures import GATING, GgufArchitecture, GgufMixture, Tensor
from edgeinfer.export.gguf.keys import GgufKeys, unread
from edgeinfer.export.source.hf_config import HFConfig

_EVERY_ROPE = ("default", "linear", "llama3", "longrope")
GRANITE = (
    ("embedding_multiplier", "embedding_scale", 1.0),
    ("residual_multiplier", "residual_scale", 1.0),
    ("attention_multiplier", "attention.scale", 1.0),
    ("logits_scaling", "logit_scale", 1.0),
)
COHERE = (("logit_scale", "logit_scale", 0.0625),)
_PACKED_MLP = {"mlp.gate_up": ("ffn_up.weight",)}
_SANDWICH = {"attn_post_norm": ("post_attention_norm.weight",), "mlp_post_norm": ("post_ffw_norm.weight",)}
_LAYER_NORMS = ("norm", "norm_bias")
_GRANITE_MIXTURE = GgufMixture(True, length=False)
_PLAIN_MIXTURE = GgufMixture(True, length=False, shared="")

# Source: transformers' XIELUActivation.
XIELU_KEYS = ("xielu.alpha_p", "xielu.alpha_n")
_XIELU_BETA, _XIELU_EPS = 0.5, -1e-6
# EXAONE 4's graph has windows where a model has so many layers.
_SLIDING_EXAONE = 64


def _olmo_lacks(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    if any(rope.theta != spec.rope.theta for rope in spec.more_ropes):
        yield "second rotary embedding with a base of its own"
    if spec.windows and not spec.more_ropes and spec.rope.type != "default":
        yield f"rotary embedding of type {spec.rope.type} in layers with windows"


def _exaone_lacks(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    if bool(spec.windows) != (spec.num_layers == _SLIDING_EXAONE):
        yield f"{'windows' if spec.windows else 'full attention'} in models of {spec.num_layers} layers"


def _ministral_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    if spec.rope.query_beta:
        writer.add_attn_temperature_scale(spec.rope.query_beta)


def _bitnet_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    writer.add_string("bitnet.rope.scaling.type", "linear")
    writer.add_rope_scaling_factor(1.0)


def _granite_swa_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    """Says which layers rotate; where none has a window, gives all one that hides nothing, as the graph needs some."""
    rotates = [which >= 0 for which in spec.rope_layers or (0,) * spec.num_layers]
    writer.add_array("granite_swa.attention.rope_pattern", rotates)
    if not spec.windows:
        writer.add_sliding_window_pattern([True] * spec.num_layers)


def _granite_swa_lacks(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    if spec.more_ropes:
        yield "rotations of several bases"


def _apertus_rewrite(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> Iterator[TensorPlan]:
    """llama.cpp takes the softplus of the activation's parameters itself."""
    if plan.name.endswith("mlp.xielu"):
        sources = (dataclasses.replace(source, softplus=False, offset=0.0) for source in plan.sources)
        plan = TensorPlan(plan.name, tuple(sources))
    yield plan


def _apertus_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    learnt = [tensor(f"layers.{layer}.mlp.xielu").tolist() for layer in range(spec.num_layers)]
    positive, negative = zip(*learnt, strict=True)
    writer.add_xielu_alpha_p(positive)
    writer.add_xielu_alpha_n(negative)
    writer.add_xielu_beta([_XIELU_BETA] * spec.num_layers)
    writer.add_xielu_eps([_XIELU_EPS] * spec.num_layers)


def _scale_by_width(keys: GgufKeys, known: Mapping[str, Any], large: int) -> dict[str, Any]:
    """The scale of scores in the largest model, which llama.cpp knows by its number of layers."""
    if known["num_layers"] != large:
        return {}
    return {"attention_scale": (known["hidden_size"] // known["num_heads"]) ** -0.5}


def _slide_everywhere(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    """Windows that llama.cpp's graph lacks, and the checkpoint had."""
    window = keys.integer("attention.sliding_window", 0)
    return {"windows": (window,) * known["num_layers"]} if 0 < window < known["max_positions"] else {}


def _rotate_in_windows(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without a window do not rotate, where others have one."""
    return {"rope_layers": tuple(0 if window else -1 for window in known.get("windows", ()))}


def _cohere_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    """The first layers rotate whatever they see; a layer gives the mean of its experts and the shared one."""
    layers, moe = known["num_layers"], known["moe"]
    windows = known.get("windows", (0,) * layers)
    turned = (0 if window or layer in moe.dense_layers else -1 for layer, window in enumerate(windows))
    return {"rope_layers": tuple(turned), "moe": dataclasses.replace(moe, scale=0.5 if moe.shared_size else 1.0)}


def _exaone_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    return _rotate_in_windows(keys, known) if known["num_layers"] == _SLIDING_EXAONE else {"windows": ()}


def _olmo_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    """One rotation where both are alike."""
    return {"more_ropes": (), "rope_layers": ()} if known.get("more_ropes", ()) == (known["rope"],) else {}


def _ministral_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope": dataclasses.replace(known["rope"], query_beta=keys.number("attention.temperature_scale", 0.0))}


def _apertus_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    usual = {"xielu.beta": np.float32(_XIELU_BETA), "xielu.eps": np.float32(_XIELU_EPS)}
    for name in (*XIELU_KEYS, *usual):
        found = keys.metadata.array(name, "float32").numbers()
        if len(found) != known["num_layers"] or (name in usual and (found != usual[name]).any()):
            raise unread(f"{name} is not what is known")
    return {}


def _granite_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    keys.expect("rope.scaling.finetuned", True)
    return {}


def _granite_swa_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    layers = known["num_layers"]
    turns = keys.flags("attention.rope_pattern", layers) if keys.is_array("attention.rope_pattern") else [True]
    return {} if all(turns) else {"rope_layers": tuple(0 if each else -1 for each in turns)}


def _ernie_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    keys.expect("interleave_moe_layer_step", 1)
    return {}


_LLAMA = GgufArchitecture(
    "llama",
    neighbours=True,
    ropes=_EVERY_ROPE,
    free_heads=True,
    output_bias=True,
    mlp_bias=True,
    mixture=_PLAIN_MIXTURE,
    fields=_slide_everywhere,
)
_OLMO = GgufArchitecture(
    "olmo2",
    ropes=("default", "linear", "yarn"),
    qkv_bias=False,
    tensors=_SANDWICH,
    parts=("pre_norm", "post_norm", "more_ropes", "rope_layers"),
    full_every=4,
    always_slides=False,
    lacks=_olmo_lacks,
    fields=_olmo_fields,
)
_GEMMA = GgufArchitecture("gemma", free_heads=True, qkv_bias=False, activation="gelu_tanh", norm_offset=1.0)
_GRANITE = GgufArchitecture(
    "granite",
    neighbours=True,
    ropes=_EVERY_ROPE,
    free_heads=True,
    output_bias=True,
    mlp_bias=True,
    parts=("attention_scale",),
    multipliers=GRANITE,
    fields=_granite_fields,
)
_GRANITE_SWA = dataclasses.replace(
    _GRANITE,
    name="granite_swa",
    ropes=("default", "linear"),
    tensors={"mlp.shared.gate_up": ("ffn_up_shexp.weight",)},
    parts=("attention_scale", "sinks", "rope_layers"),
    full_every=-1,
    mixture=_GRANITE_MIXTURE,
    keys=_granite_swa_keys,
    lacks=_granite_swa_lacks,
    fields=_granite_swa_fields,
)
# By transformers' name of the family.
DENSE = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "ministral": _LLAMA,
    "helium": dataclasses.replace(_LLAMA, parts=("interleaved",)),
    "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3", free_heads=True),
    "phi3": GgufArchitecture(
        "phi3",
        fields=_slide_everywhere,
        ropes=("default", "linear", "longrope"),
        partial_rope=True,
        tensors={"attn.qkv": ("attn_qkv.weight",), **_PACKED_MLP},
    ),
    "qwen2_moe": GgufArchitecture("qwen2moe", own_head=True, mixture=GgufMixture(False)),
    "qwen3_moe": GgufArchitecture("qwen3moe", free_heads=True, mixture=GgufMixture(True, shared="")),
    "olmoe": GgufArchitecture(
        "olmoe", grouped=False, own_head=True, mixture=GgufMixture(False, length=False, shared="")
    ),
    "granitemoe": dataclasses.replace(_GRANITE, name="granitemoe", mlp_bias=False, mixture=_GRANITE_MIXTURE),
    "granite_swa": _GRANITE_SWA,
    "granitemoe_swa": _GRANITE_SWA,
    "gemma": _GEMMA,
    "gemma2": dataclasses.replace(
        _GEMMA,
        name="gemma2",
        tensors=_SANDWICH,
        parts=("post_norm", "attention_scale", "attention_softcap", "logit_softcap"),
        needs=("attention_softcap", "logit_softcap"),
        full_every=2,
        defaults={"attention.sliding_window": 4096, "attn_logit_softcapping": 50, "final_logit_softcapping": 30},
        fields=partial(_scale_by_width, large=46),
    ),
    "gemma3_text": dataclasses.replace(
        _GEMMA,
        name="gemma3",
        tensors=_SANDWICH,
        parts=("post_norm", "attention_scale", "more_ropes", "rope_layers"),
        needs=("more_ropes",),
        full_every=6,
        defaults={"rope.freq_base_swa": 1e4},
        fields=partial(_scale_by_width, large=62),
    ),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "exaone4": GgufArchitecture(
        "exaone4",
        ropes=_EVERY_ROPE,
        free_heads=True,
        tensors=_SANDWICH,
        parts=("pre_norm", "post_norm", "rope_layers"),
        full_every=4,
        always_slides=False,
        lacks=_exaone_lacks,
        defaults={"attention.sliding_window": 4096},
        fields=_exaone_fields,
    ),
    "ministral3": GgufArchitecture(
        "mistral3",
        neighbours=True,
        ropes=("yarn",),
        free_heads=True,
        qkv_bias=False,
        parts=("query_beta",),
        keys=_ministral_keys,
        fields=_ministral_fields,
    ),
    "glm": GgufArchitecture("chatglm", neighbours=True, partial_rope=True, tensors=_PACKED_MLP, parts=("interleaved",)),
    "apertus": GgufArchitecture(
        "apertus",
        ropes=_EVERY_ROPE,
        free_heads=True,
        qkv_bias=False,
        own_head=True,
        activation="xielu",
        tensors={"mlp.xielu": ()},
        parts=("gated",),
        rewrite=_apertus_rewrite,
        keys=_apertus_keys,
        fields=_apertus_fields,
    ),
    "bitnet": GgufArchitecture(
        "bitnet",
        qkv_bias=False,
        tensors={"attn.inner_norm": ("attn_sub_norm.weight",), "mlp.inner_norm": ("ffn_sub_norm.weight",)},
        parts=("inner_norms",),
        needs=("tied",),
        keys=_bitnet_keys,
    ),
    "granite": _GRANITE,
    "smollm3": GgufArchitecture(
        "smollm3", neighbours=True, free_heads=True, qkv_bias=False, parts=("rope_layers",), unrotated_every=4
    ),
    "seed_oss": GgufArchitecture("seed_oss", free_heads=True, tensors={"mlp_norm": ("post_attention_norm.weight",)}),
    "arcee": GgufArchitecture(
        "arcee", neighbours=True, free_heads=True, qkv_bias=False, activation="relu2", parts=("gated",)
    ),
    "ernie4_5": GgufArchitecture("ernie4_5", neighbours=True, free_heads=True, qkv_bias=False, parts=("interleaved",)),
    "hunyuan_v1_dense": GgufArchitecture("hunyuan-dense", free_heads=True, qkv_bias=False, parts=("norm_after_rope",)),
    "glm4": GgufArchitecture(
        "glm4",
        neighbours=True,
        partial_rope=True,
        free_heads=True,
        tensors={**_SANDWICH, **_PACKED_MLP},
        parts=("post_norm", "interleaved"),
    ),
    "starcoder2": GgufArchitecture(
        "starcoder2",
        output_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
        parts=(*_LAYER_NORMS, "gated"),
        needs=("output_bias",),
    ),
    "stablelm": GgufArchitecture("stablelm", partial_rope=True, parts=(*_LAYER_NORMS, "parallel")),
    "nemotron": GgufArchitecture(
        "nemotron",
        partial_rope=True,
        output_bias=True,
        mlp_bias=True,
        activation="relu2",
        parts=(*_LAYER_NORMS, "gated"),
        norm_offset=1.0,
    ),
    "phi": GgufArchitecture(
        "phi2",
        partial_rope=True,
        output_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
        parts=(*_LAYER_NORMS, "parallel", "gated", "head_bias"),
    ),
    "cohere": GgufArchitecture(
        "command-r", neighbours=True, qkv_bias=False, parts=("norm", "parallel", "interleaved"), multipliers=COHERE
    ),
    "cohere2": GgufArchitecture(
        "cohere2",
        neighbours=True,
        free_heads=True,
        parts=("norm", "parallel", "interleaved", "rope_layers"),
        full_every=4,
        unrotated_every=4,
        multipliers=COHERE,
    ),
}


_SIGMOID = GgufMixture(
    None, leading=True, router="sigmoid", gating=True, scale=True, groups=True, shared="count", parts=("choice_bias",)
)


def _ernie_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    writer.add_interleave_moe_layer_step(1)


def _cohere_lacks(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    if spec.moe is not None and spec.moe.shared_size and spec.moe.scale == 1.0:
        yield "sum of what experts and the shared one give"
    seen = tuple(0 if window else -1 for window in spec.windows)
    if spec.rope_layers and spec.moe is not None:
        dense = len(spec.moe.dense_layers)
        if any(a != b for a, b in zip(spec.rope_layers[dense:], seen[dense:], strict=True)):
            yield "rotation of these layers"


def _afmoe_lacks(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    if not config.flag("mup_enabled"):
        yield "embeddings that do not grow"


SHARED_MIXTURES = {
    "afmoe": GgufArchitecture(
        "afmoe",
        free_heads=True,
        qkv_bias=False,
        tensors=_SANDWICH | {"attn.gate": ("attn_gate.weight",)},
        parts=("post_norm", "output_gate", "rope_layers"),
        full_every=4,
        unrotated_every=4,
        mixture=dataclasses.replace(_SIGMOID, groups=False),
        lacks=_afmoe_lacks,
        facts={"mup_enabled": True},
    ),
    "cohere2_moe": GgufArchitecture(
        "cohere2moe",
        neighbours=True,
        free_heads=True,
        qkv_bias=False,
        parts=("norm", "parallel", "interleaved", "rope_layers"),
        full_every=-1,
        mixture=GgufMixture(None, leading=True, gating=True, shared="both", parts=("scale",)),
        multipliers=COHERE,
        lacks=_cohere_lacks,
        defaults={"expert_gating_func": GATING["sigmoid"]},
        facts={"num_shared_experts": 1},
        fields=_cohere_fields,
    ),
    "glm4_moe": GgufArchitecture(
        "glm4moe",
        partial_rope=True,
        free_heads=True,
        tensors={"mlp_norm": ("post_attention_norm.weight",)},
        mixture=_SIGMOID,
    ),
    "dots1": GgufArchitecture("dots1", free_heads=True, grouped=False, own_head=True, qkv_bias=False, mixture=_SIGMOID),
    "ernie4_5_moe": GgufArchitecture(
        "ernie4_5-moe",
        neighbours=True,
        free_heads=True,
        qkv_bias=False,
        parts=("interleaved",),
        mixture=GgufMixture(True, leading=True, shared="both", parts=("choice_bias",)),
        keys=_ernie_keys,
        fields=_ernie_fields,
    ),
    "hunyuan_v1_moe": GgufArchitecture(
        "hunyuan-moe", free_heads=True, parts=("norm_after_rope",), mixture=GgufMixture(True, shared="both")
    ),
    "gpt_oss": GgufArchitecture(
        "gpt-oss",
        ropes=("default", "yarn"),
        free_heads=True,
        output_bias=True,
        activation="swiglu_oai",
        tensors={"mlp_norm": ("post_attention_norm.weight",)},
        parts=("sinks", "truncate"),
        needs=("output_bias",),
        full_every=2,
        mixture=GgufMixture(True, shared="", parts=("router_bias", "expert_bias")),
    ),
}
