"""The architectures of llama.cpp that families of checkpoints are written as.

What each graph has is what llama.cpp's sources build (src/llama-model.cpp, src/models), and the tests run.
"""

from __future__ import annotations

from edgeinfer.bundle import DecoderSpec
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures import Architecture
from edgeinfer.export.architectures.described import require_plain
from edgeinfer.export.gguf.architectures import ONNX_HINT, GgufArchitecture

__all__ = ["GGUF_ARCHITECTURES", "find_gguf_architecture"]

_EVERY_ROPE = ("default", "linear", "llama3", "longrope")
_GRANITE = (
    ("embedding_multiplier", "embedding_scale", 1.0),
    ("residual_multiplier", "residual_scale", 1.0),
    ("attention_multiplier", "attention.scale", 1.0),
    ("logits_scaling", "logit_scale", 1.0),
)
_COHERE = (("logit_scale", "logit_scale", 0.0625),)
_PACKED_MLP = {"mlp.gate_up": ("ffn_up.weight",)}
_SANDWICH = {"attn_post_norm": ("post_attention_norm.weight",), "mlp_post_norm": ("post_ffw_norm.weight",)}
_LAYER_NORMS = ("norm", "norm_bias")

_LLAMA = GgufArchitecture(
    "llama", neighbours=True, ropes=_EVERY_ROPE, free_heads=True, output_bias=True, mlp_bias=True, renormalizes=True
)
# By transformers' name of the family. BlockFFN is missing: llama.cpp has no rectified router.
GGUF_ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "ministral": _LLAMA,
    "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3", free_heads=True),
    "phi3": GgufArchitecture(
        "phi3",
        ropes=("default", "linear", "longrope"),
        partial_rope=True,
        tensors={"attn.qkv": ("attn_qkv.weight",), **_PACKED_MLP},
    ),
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
    "gemma": GgufArchitecture("gemma", free_heads=True, qkv_bias=False, activation="gelu_tanh", norm_offset=1.0),
    "gemma2": GgufArchitecture(
        "gemma2",
        free_heads=True,
        qkv_bias=False,
        activation="gelu_tanh",
        tensors=_SANDWICH,
        parts=("post_norm", "attention_scale", "attention_softcap", "logit_softcap"),
        needs=("attention_softcap", "logit_softcap"),
        full_every=2,
        norm_offset=1.0,
    ),
    "gemma3_text": GgufArchitecture(
        "gemma3",
        free_heads=True,
        qkv_bias=False,
        activation="gelu_tanh",
        tensors=_SANDWICH,
        parts=("post_norm", "attention_scale", "more_ropes", "rope_layers"),
        needs=("more_ropes",),
        full_every=6,
        norm_offset=1.0,
    ),
    "olmo2": GgufArchitecture("olmo2", qkv_bias=False, tensors=_SANDWICH, parts=("pre_norm", "post_norm")),
    "exaone4": GgufArchitecture("exaone4", free_heads=True, tensors=_SANDWICH, parts=("pre_norm", "post_norm")),
    "granite": GgufArchitecture(
        "granite",
        neighbours=True,
        ropes=_EVERY_ROPE,
        free_heads=True,
        output_bias=True,
        mlp_bias=True,
        parts=("attention_scale",),
        multipliers=_GRANITE,
    ),
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
        "command-r",
        neighbours=True,
        qkv_bias=False,
        parts=("norm", "parallel", "interleaved"),
        multipliers=_COHERE,
    ),
    "cohere2": GgufArchitecture(
        "cohere2",
        neighbours=True,
        free_heads=True,
        parts=("norm", "parallel", "interleaved", "rope_layers"),
        full_every=4,
        unrotated_every=4,
        multipliers=_COHERE,
    ),
}


def find_gguf_architecture(family: Architecture, spec: DecoderSpec) -> GgufArchitecture:
    """The architecture of llama.cpp that a family's checkpoint is written as.

    Raises:
        UnsupportedArchitectureError: there is none, or its graph cannot express this decoder.
    """
    found = GGUF_ARCHITECTURES.get(family.model_types[0])
    require_plain(spec, "GGUF files", ONNX_HINT, () if found is None else ("activation", *found.parts))
    if found is None:
        raise UnsupportedArchitectureError(f"llama.cpp has no architecture for {family.classes[0]}.", ONNX_HINT)
    found.check(spec)
    return found
