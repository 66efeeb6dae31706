"""llama.cpp's architectures of mixtures beside a shared expert, or with layers without experts, and of gpt-oss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.gguf.architectures import GgufArchitecture, Tensor
from edgeinfer.export.gguf.mixtures import GgufMixture
from edgeinfer.export.source.hf_config import HFConfig

COHERE = (("logit_scale", "logit_scale", 0.0625),)

_SIGMOID = GgufMixture(
    None,
    leading=True,
    router="sigmoid",
    gating=True,
    scale=True,
    groups=True,
    shared="count",
    parts=("choice_bias",),
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
        tensors={
            "attn.gate": ("attn_gate.weight",),
            "attn_post_norm": ("post_attention_norm.weight",),
            "mlp_post_norm": ("post_ffw_norm.weight",),
        },
        parts=("post_norm", "output_gate", "rope_layers"),
        full_every=4,
        unrotated_every=4,
        mixture=GgufMixture(
            None, leading=True, router="sigmoid", gating=True, scale=True, shared="count", parts=("choice_bias",)
        ),
        lacks=_afmoe_lacks,
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
    ),
    "glm4_moe": GgufArchitecture(
        "glm4moe",
        partial_rope=True,
        free_heads=True,
        tensors={"mlp_norm": ("post_attention_norm.weight",)},
        mixture=_SIGMOID,
    ),
    "dots1": GgufArchitecture(
        "dots1",
        free_heads=True,
        grouped=False,
        own_head=True,
        qkv_bias=False,
        mixture=_SIGMOID,
    ),
    "ernie4_5_moe": GgufArchitecture(
        "ernie4_5-moe",
        neighbours=True,
        free_heads=True,
        qkv_bias=False,
        parts=("interleaved",),
        mixture=GgufMixture(True, leading=True, shared="both", parts=("choice_bias",)),
        keys=_ernie_keys,
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
