"""Multi-head latent attention: DeepSeek-V2 and V3, and the families that have it of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgeinfer.bundle.parts import LatentSpec, MoESpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures.base import NEXT_LAYER, Architecture, Naming, common_spec, flag, reader
from edgeinfer.export.architectures.shared_mixtures import SHARED_EXPERTS, by_sigmoid, dense_layers
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig, yarn_scale

_SHARE = "partial_rotary_factor"


def latent_spec(
    config: HFConfig, tied: bool, *, interleaved: bool, value_size: int | None = None, **parts: Any
) -> DecoderSpec:
    """A decoder with latent attention; `value_size` of a head is used where config.json has none."""
    plain, rotary = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    latent = LatentSpec(
        query_rank=0 if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        rank=config.integer("kv_lora_rank"),
        plain_size=plain,
        rotary_size=rotary,
        value_size=config.integer("v_head_dim", value_size),
    )
    bias = config.flag("attention_bias")
    return common_spec(
        config,
        tied,
        num_kv_heads=1,
        head_dim=plain + rotary,
        rope=dataclasses.replace(_whole(config).rope(rotary), interleaved=interleaved),
        attention_scale=(plain + rotary) ** -0.5 * _stretched(config) ** 2,
        qkv_bias=bias,
        output_bias=bias,
        latent=latent,
        **parts,
    )


def _whole(config: HFConfig) -> HFConfig:
    """Reads a config that does not say whether the share of rotated channels refers to whole heads."""
    values = {name: value for name, value in config.values.items() if name != _SHARE}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(given := values.get(name), dict):
            values[name] = {key: value for key, value in given.items() if key != _SHARE}
    return HFConfig(values)


def _stretched(config: HFConfig) -> float:
    """Factor of queries and keys of a stretched rotation (`mscale_all_dim`)."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(given, dict) or not given.get("mscale_all_dim"):
        return 1.0
    if given.get("rope_type", given.get("type", "default")) == "default":
        return 1.0
    rope = HFConfig(given)
    return yarn_scale(rope.number("factor"), rope.number("mscale_all_dim"))


def _by_softmax(config: HFConfig) -> MoESpec:
    """Softmax shares, which DeepSeek-V2 does not divide by their sum."""
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy") or config.flag("norm_topk_prob"):
        said = f"topk_method={method!r}, norm_topk_prob={config.get('norm_topk_prob')!r}"
        raise UnsupportedArchitectureError(f"Experts chosen by {said} are not supported.", OPTIMUM_HINT)
    groups: dict[str, Any] = {"groups": 1, "group_top_k": 1} if method == "greedy" else {}
    return dataclasses.replace(by_sigmoid(config), router="softmax", choice_bias=False, renormalize=False, **groups)


_NAMING = Naming(mixture=SHARED_EXPERTS)
DEEPSEEK2 = Architecture(
    classes=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    read=reader(latent_spec, interleaved=True, moe=_by_softmax, mlp_bias=flag("mlp_bias")),
    naming=_NAMING,
)
_interleaved = flag("rope_interleave", True)
# DeepSeek-V3, which Moonlight and Kimi K2 are too.
DEEPSEEK3 = Architecture(
    classes=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3", "kimi_k2"),
    read=reader(latent_spec, interleaved=_interleaved, moe=by_sigmoid),
    naming=_NAMING,
    predicts=NEXT_LAYER,
)


def _listed(config: HFConfig) -> MoESpec:
    """DeepSeek-V3's mixture with a list of the layers that have experts."""
    return dataclasses.replace(by_sigmoid(config), dense_layers=dense_layers(config, 1))


# GLM-4.7-Flash.
GLM4_MOE_LITE = Architecture(
    classes=("Glm4MoeLiteForCausalLM",),
    model_types=("glm4_moe_lite",),
    read=reader(latent_spec, interleaved=_interleaved, moe=_listed),
    naming=_NAMING,
    predicts=NEXT_LAYER,
)


def _read_mistral4(config: HFConfig, tied: bool) -> DecoderSpec:
    """Mistral 4: shares of a softmax, and queries that grow with their position."""
    moe = dataclasses.replace(by_sigmoid(config), router="softmax", choice_bias=False)
    if moe.groups > 1:
        # Without a bias groups are ranked by their best share here, by the sum of two there.
        raise UnsupportedArchitectureError(f"A Mistral 4 with n_group={moe.groups} is not supported.", OPTIMUM_HINT)
    return latent_spec(config, tied, interleaved=_interleaved(config), moe=moe)


MISTRAL4 = Architecture(
    classes=("Mistral4ForCausalLM",), model_types=("mistral4",), read=_read_mistral4, naming=_NAMING
)


# Youtu-LLM: DeepSeek-V3's attention with ordinary MLPs.
YOUTU = Architecture(
    classes=("YoutuForCausalLM",),
    model_types=("youtu", "youtu_llm"),
    read=reader(latent_spec, interleaved=_interleaved),
)
