"""Configurations of every family drawn at random: sizes, orders of layers, optional parts, as published ones vary.

A drawn configuration is one of the table's with other values. Fields that have a meaning alone are drawn from FIELDS
where the family's class has them; those that depend on each other by the functions below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from hypothesis import strategies as st

from tests.export.families.table import Family

Draw = Callable[[st.SearchStrategy[Any]], Any]

_YES_OR_NO = (False, True)
_FLAGS = """
attention_bias mlp_bias use_bias attention_out_bias tie_word_embeddings norm_topk_prob use_qk_norm use_qkv_bias
use_parallel_residual conv_bias use_conv_bias mamba_conv_bias use_expert_bias rope_interleave mup_enabled
use_attention_gate use_sandwich_norm lm_head_bias altup_correct_scale use_double_wide_mlp mamba_rms_norm
mamba_norm_before_gate
"""
_EPSILONS = "rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon"
FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_FLAGS.split(), _YES_OR_NO),
    **dict.fromkeys(_EPSILONS.split(), (1e-6, 1e-5, 1e-3)),
    "attention_multiplier": (0.1, 0.25),
    "attn_logit_softcapping": (None, 5.0, 50.0),
    "conv_L_cache": (2, 3, 5),
    "conv_kernel": (2, 3, 4),
    "decoder_sparse_step": (1, 2),
    "dim_model_base": (16, 64),
    "embedding_multiplier": (1.0, 3.0),
    "expert_selection_fn": ("softmax", "sigmoid"),
    "final_logit_softcapping": (None, 2.0, 30.0),
    "first_k_dense_replace": (0, 1, 2),
    "intermediate_size": (40, 64, 96, 100),
    "linear_conv_kernel_dim": (2, 3, 4),
    "logit_scale": (0.0625, 1.0),
    "logits_scaling": (1.0, 2.5),
    "mamba_d_conv": (2, 3, 4),
    "mlp_only_layers": ([], [0]),
    "moe_intermediate_size": (24, 32, 40),
    "moe_shared_expert_intermediate_size": (24, 40, 64),
    "no_rope_layer_interval": (1, 2, 3),
    "num_dense_layers": (0, 1, 2),
    "position_embedding_type": ("rope", "nope"),
    "query_pre_attn_scalar": (16, 24, 64),
    "residual_multiplier": (0.4, 1.0),
    "routed_scaling_factor": (1.0, 2.5),
    "scale_depth": (0.7, 1.4),
    "scale_emb": (1, 3),
    "shared_expert_combination_strategy": ("average", "sum"),
    "shared_expert_intermediate_size": (32, 40),
    "shared_intermediate_size": (32, 40, 64),
    "time_step_min": (0.001, 0.5, 1.0),
    "use_sliding_window": _YES_OR_NO,
}
# Of these one follows from another, or another part of the family's code takes it for granted.
_LEFT_OUT = {"Gemma3n": ("intermediate_size",), "Gemma4": ("attention_bias",)}
_EXPERTS = {"num_experts": "num_experts_per_tok", "num_local_experts": "num_experts_per_tok"}
_EXPERTS |= {"n_routed_experts": "num_experts_per_tok", "moe_num_experts": "moe_k"}
_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types")
# Families whose layers share caches with each other, in an order of their own.
_ORDERED = ("Gemma3n",)
# Those whose code takes the width of a head for granted, whose rotations are the table's, and that have no groups.
_DERIVED = ("Helium",)
_ROTATED = ("Phi3", "Phimoe")
_UNGROUPED = ("Mistral4",)


def configurations(family: Family) -> st.SearchStrategy[dict[str, Any]]:
    """Settings of a family, as the table's."""

    @st.composite
    def drawn(draw: Draw) -> dict[str, Any]:
        settings = dict(draw(st.sampled_from(family.settings)))
        for part in (_fields, _layers, _rotation, _attention, _experts, _recurrence):
            settings |= part(draw, family, settings)
        return settings

    return drawn()


def _one(draw: Draw, *values: Any) -> Any:
    return draw(st.sampled_from(values))


def _class_fields(family: Family) -> Mapping[str, Any]:
    """Defaults of the fields of the family's configuration class."""
    return {field.name: field.default for field in dataclasses.fields(_config_class(family))}


def _config_class(family: Family) -> Any:
    return getattr(transformers, f"{family.name}ForCausalLM").config_class


def _fields(draw: Draw, family: Family, settings: dict[str, Any]) -> dict[str, Any]:
    names = sorted((FIELDS.keys() & _class_fields(family).keys()) - {*_LEFT_OUT.get(family.name, ())})
    changed = draw(st.lists(st.sampled_from(names), unique=True, max_size=len(names)))
    return {name: _one(draw, *FIELDS[name]) for name in changed}


def _layers(draw: Draw, family: Family, settings: dict[str, Any]) -> dict[str, Any]:
    """Any number of layers, whose kinds come in any order."""
    if settings.get("num_kv_shared_layers") or family.name in _ORDERED:
        return {}
    count = draw(st.integers(1, 4))
    found: dict[str, Any] = {"num_hidden_layers": count}
    for name in _LAYERS:
        kinds = sorted({kind for each in family.settings for kind in each.get(name) or ()})
        if kinds and (settings.get(name) is not None or not _one(draw, *_YES_OR_NO)):
            found[name] = draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))
    if "sliding_window" in settings and settings["sliding_window"] is not None:
        found["sliding_window"] = _one(draw, 2, 5, 9, 200)
    if "attn_layer_indices" in settings:
        found["attn_layer_indices"] = sorted(draw(st.sets(st.integers(0, count - 1))))
    if settings.get("no_rope_layers") is not None:
        found["no_rope_layers"] = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    if settings.get("layer_rope_theta") is not None:
        bases = st.sampled_from((0, 1e3, 1e4))
        found["layer_rope_theta"] = draw(st.lists(bases, min_size=count, max_size=count))
    return found


def _rotation(draw: Draw, family: Family, settings: dict[str, Any]) -> dict[str, Any]:
    """Another base; another kind where the table has the plain one."""
    given = settings.get("rope_parameters") or {"rope_type": "default", "rope_theta": 1e4}
    usual = getattr(_config_class(family)(), "rope_parameters", {})
    if family.name in _ROTATED or "rope_theta" not in given or "rope_theta" not in usual:
        return {}
    plain = {"rope_theta": _one(draw, 1e3, 1e4, 1e6)}
    if given["rope_type"] != "default":
        return {"rope_parameters": given | plain}
    stretched = {"factor": 4.0, "original_max_position_embeddings": 16}
    kinds: tuple[dict[str, Any], ...] = (
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "yarn", **stretched},
        {"rope_type": "yarn", **stretched, "mscale": 0.7, "mscale_all_dim": 1.1},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **stretched},
    )
    return {"rope_parameters": given | plain | _one(draw, *kinds)}


def _attention(draw: Draw, family: Family, settings: dict[str, Any]) -> dict[str, Any]:
    """Heads, their widths, and the width of the hidden states."""
    if family.name == "Mamba2":
        return {}
    if "kv_lora_rank" in settings:
        heads = draw(st.integers(1, 5))
        found = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * _one(draw, 8, 16)}
        found |= {"qk_nope_head_dim": _one(draw, 8, 16, 24), "qk_rope_head_dim": _one(draw, 8, 16)}
        found |= {"v_head_dim": _one(draw, 8, 12, 16, 32), "kv_lora_rank": _one(draw, 16, 24, 40)}
        return found | {"q_lora_rank": None if settings.get("q_lora_rank") is None else _one(draw, 16, 20, 32)}
    per_group, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size, heads = _one(draw, 8, 16, 24, 32), per_group * groups
    found = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": heads * size}
    if "head_dim" in _class_fields(family):
        found["head_dim"] = size
        if family.name not in _DERIVED:
            found["hidden_size"] = heads * _one(draw, 8, 16, 20)
    return found


def _experts(draw: Draw, family: Family, settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if family.name == "Phimoe":  # whose tokens have two experts
        return {"num_local_experts": draw(st.integers(2, 6)), "num_experts_per_tok": 2}
    for name, chosen in _EXPERTS.items():
        if settings.get(name):
            grouped = "n_group" in settings and family.name not in _UNGROUPED
            groups = _one(draw, 1, 2, 3) if grouped else 1
            count = groups * draw(st.integers(2, 4))
            kept = draw(st.integers(1, groups))
            used = "moe_topk" if "moe_topk" in settings else chosen
            used = "top_k_experts" if "top_k_experts" in settings else used
            found |= {name: count, used: draw(st.integers(1, min(4, kept * count // groups)))}
            found |= {"n_group": groups, "topk_group": kept} if grouped else {}
    return found


def _recurrence(draw: Draw, family: Family, settings: dict[str, Any]) -> dict[str, Any]:
    """Heads of recurrences, and their groups."""
    groups, per_group, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), _one(draw, 8, 16, 24)
    heads, states, hidden = groups * per_group, _one(draw, 8, 12, 16), settings.get("hidden_size", 64)
    if "linear_num_key_heads" in settings:
        found = {"linear_num_key_heads": groups, "linear_num_value_heads": heads}
        return found | {"linear_key_head_dim": _one(draw, 8, 16, 24), "linear_value_head_dim": size}
    if family.name == "Mamba2":
        found = {"num_heads": 2 * heads, "head_dim": size, "hidden_size": heads * size}
        return found | {"n_groups": groups, "state_size": states}
    if "ssm_state_size" in settings:
        names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
        return dict(zip(names, (heads, size, groups, states), strict=True))
    if "mamba_d_ssm" in settings:
        found = {"mamba_n_heads": heads, "mamba_d_head": size, "mamba_d_ssm": heads * size}
        return found | {"mamba_n_groups": groups, "mamba_d_state": states}
    if "mamba_n_heads" in settings:
        heads = _one(draw, *(count for count in (1, 2, 4, 8) if not 2 * hidden % count))
        groups = _one(draw, *(count for count in (1, 2, 4) if not heads % count))
        found = {"mamba_n_heads": heads, "mamba_d_head": 2 * hidden // heads}
        return found | {"mamba_n_groups": groups, "mamba_d_state": states}
    return {}
