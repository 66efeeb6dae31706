"""llama.cpp's architectures of multi-head latent attention, which split what each head makes of the small vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from edgeinfer.bundle.parts import LatentSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.tensors import Shape, Source, TensorPlan
from edgeinfer.export.gguf.architectures import GgufArchitecture, GgufForm, GgufMixture, Tensor
from edgeinfer.export.gguf.keys import GgufKeys
from edgeinfer.export.source.hf_config import HFConfig

# What llama.cpp's graph of MiniCPM3 multiplies by: of embeddings, of results, and the width that the head was made for.
_MINICPM3 = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256.0}


def _sizes(spec: DecoderSpec) -> LatentSpec:
    assert spec.latent is not None, "a family with latent attention has its sizes"
    return spec.latent


def _keys_by_head(spec: DecoderSpec, shape: Shape) -> GgufForm:
    latent = _sizes(spec)
    return GgufForm((spec.num_heads, latent.rank, latent.plain_size))


def _values_by_head(spec: DecoderSpec, shape: Shape) -> GgufForm:
    latent = _sizes(spec)
    return GgufForm((spec.num_heads, latent.value_size, latent.rank))


def _rewrite(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> Iterator[TensorPlan]:
    """Value rows of a head are columns in our matrix."""
    if plan.name.endswith("attn.v_b"):
        [source] = plan.sources
        plan = TensorPlan(plan.name, (replace(source, heads=0),))
    yield plan


def _joined(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> Iterator[TensorPlan]:
    """Keys and values of all heads in one matrix, as in the checkpoint."""
    latent = _sizes(spec)
    if plan.name.endswith("attn.k_b"):
        rows = spec.num_heads * (latent.plain_size + latent.value_size)
        yield TensorPlan(
            plan.name.replace("attn.k_b", "attn_kv_b.weight"), (Source(plan.sources[0].name, (rows, latent.rank)),)
        )
    elif not plan.name.endswith("attn.v_b"):
        yield plan


def _add_sizes(writer: Any, spec: DecoderSpec) -> None:
    latent = _sizes(spec)
    if latent.query_rank:
        writer.add_q_lora_rank(latent.query_rank)
    writer.add_kv_lora_rank(latent.rank)


def _deepseek_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    """Keys of a cache that holds the small vector: its width, and that of heads."""
    latent = _sizes(spec)
    _add_sizes(writer, spec)
    writer.add_key_length_mla(spec.head_dim)
    writer.add_value_length_mla(latent.value_size)
    if spec.moe is None:
        writer.add_leading_dense_block_count(spec.num_layers)
        writer.add_expert_feed_forward_length(spec.intermediate_size)
        writer.add_expert_shared_count(0)
    if spec.rope.type == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * _mscale(spec))


def _mscale(spec: DecoderSpec) -> float:
    """`mscale_all_dim` of a stretched rotation, from its effect on the scores."""
    factor = math.sqrt(spec.attention_scale * math.sqrt(spec.head_dim))
    return round((factor - 1) / (0.1 * math.log(spec.rope.factor)), 6)


def _mistral_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    _deepseek_keys(writer, config, spec, tensor)
    if spec.rope.query_beta:
        writer.add_attn_temperature_scale(spec.rope.query_beta)
        writer.add_attn_temperature_length(spec.rope.original_max_positions)


def _deepseek_fields(keys: GgufKeys, known: Mapping[str, Any]) -> dict[str, Any]:
    """Heads of a cache that holds the small vector, and the scale of scores of a stretched rotation."""
    wide, rotary, rope = keys.integer("attention.key_length_mla"), known["rope"].dim, known["rope"]
    keys.ignore("attention.value_length")
    sizes = (keys.integer("attention.kv_lora_rank"), max(wide - rotary, 0), rotary)
    latent = LatentSpec(keys.integer("attention.q_lora_rank", 0), *sizes, keys.integer("attention.value_length_mla"))
    grown = 1.0
    if rope.type == "yarn":
        grown += keys.number("rope.scaling.yarn_log_multiplier", 0.0) * math.log(rope.factor)
        rope = replace(rope, attention_factor=1.0)
    beta = keys.number("attention.temperature_scale", 0.0)
    if beta:
        keys.expect("attention.temperature_length", rope.original_max_positions)
        rope = replace(rope, query_beta=beta)
    scale = wide**-0.5 * grown**2
    return {"head_dim": wide, "num_kv_heads": 1, "latent": latent, "attention_scale": scale, "rope": rope}


def _deepseek_lacks(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    if not _sizes(spec).query_rank and spec.num_layers not in (26, 27):
        yield f"form of {spec.num_layers} layers whose queries have no small vector"
    if not spec.rope.interleaved:
        yield "rotation of halves"
    if spec.rope.type == "yarn" and not math.isclose(spec.rope.attention_factor, 1.0, rel_tol=1e-6):
        yield "rotation whose mscale differs from its mscale_all_dim"
    if spec.moe is not None and spec.moe.groups > 1 and not spec.moe.choice_bias:
        yield "groups of experts that are ranked by their best"


def _minicpm_keys(writer: Any, config: HFConfig, spec: DecoderSpec, tensor: Tensor) -> None:
    _add_sizes(writer, spec)


def _minicpm_lacks(config: HFConfig, spec: DecoderSpec) -> Iterator[str]:
    if not _sizes(spec).query_rank:
        yield "form whose queries have no small vector"
    for name, known in _MINICPM3.items():
        if not math.isclose(config.number(name, 1.0), known):
            yield f"{name} but {known:g}"


_DEEPSEEK = GgufArchitecture(
    "deepseek2",
    neighbours=True,
    ropes=("default", "yarn"),
    partial_rope=True,
    free_heads=True,
    qkv_bias=False,
    tensors={"attn.k_b": ("attn_k_b.weight",), "attn.v_b": ("attn_v_b.weight",)},
    forms={"attn.k_b": _keys_by_head, "attn.v_b": _values_by_head},
    parts=("latent", "interleaved", "attention_scale"),
    compressed=True,
    mixture=GgufMixture(
        None, leading=True, gating=True, scale=True, groups=True, shared="count", parts=("choice_bias",)
    ),
    rewrite=_rewrite,
    keys=_deepseek_keys,
    fields=_deepseek_fields,
    lacks=_deepseek_lacks,
)
_MISTRAL = replace(_DEEPSEEK, name="mistral4", parts=(*_DEEPSEEK.parts, "query_beta"), keys=_mistral_keys)
LATENT = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "youtu": _DEEPSEEK,
    "mistral4": _MISTRAL,
    "minicpm3": GgufArchitecture(
        "minicpm3",
        ropes=("default", "longrope"),
        partial_rope=True,
        free_heads=True,
        qkv_bias=False,
        parts=("latent", "attention_scale"),
        rewrite=_joined,
        keys=_minicpm_keys,
        lacks=_minicpm_lacks,
    ),
}
