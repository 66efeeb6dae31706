"""The families of checkpoints that are exported, with small configurations of each; docs/families.md lists them.

A family is added by a line here: transformers' name of its classes, and what its configurations set. The sizes that
all share are those of `tests.factories`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.factories import MIXTURES, VARIANTS

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A family."""

    title: str  # as its makers call it
    name: str  # of transformers' classes, without what follows it
    settings: tuple[Settings, ...]  # of the configurations that are tried; the fast tier tries the first
    portable: bool = True  # whether ONNX Runtime's own operators can compute it too
    # Error of logits of 4 bits, of their norm, where activations are rounded to int8 before every product.
    rounded: float = 0.06


def _family(title: str, name: str, first: Settings, *more: Settings) -> Family:
    """A family whose other configurations are the first with something else."""
    return Family(title, name, (first, *({**first, **settings} for settings in more)))


def _native(title: str, name: str, *settings: Settings, rounded: float = 0.06) -> Family:
    """A family with recurrent layers, latent attention or shared caches, as `_family`."""
    return dataclasses.replace(_family(title, name, *settings), portable=False, rounded=rounded)


# What heads of a recurrence give is normalised however small it is, and with it what rounding made of it.
_NORMED = 0.12


# Rotations whose factors change with a text's length have tests of their own.
_LONG = {"original_max_position_embeddings"}


def _known(title: str, name: str) -> Family:
    """A family whose configurations other tests share."""
    known = (VARIANTS | MIXTURES).values()
    return Family(
        title, name, tuple(settings for class_, settings in known if class_ == name and not _LONG & set(settings))
    )


def _default(theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


_TIED = {"tie_word_embeddings": True}
_CONVS = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32}
_DELTA = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 32}
_DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
_DELTA |= {"linear_value_head_dim": 24}
_LATE = ["linear_attention", "linear_attention", "full_attention"]
_MIXED = ["conv", "sliding_attention", "full_attention", "conv"]
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_GROWING = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4}
_LOCAL = {"rope_type": "default", "rope_theta": 1e3}
_BY_TYPE = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}, "sliding_attention": _LOCAL}
_GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5}
_WINDOWS = {"sliding_window": 5, "layer_types": _SLIDING}
# Two layers of each kind have keys and values of their own, and two read those.
_SHARING: dict[str, Any] = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 5, "head_dim": 16}
_SHARING |= {"layer_types": [*_SLIDING, "full_attention", *_SLIDING[:2]], "hidden_size_per_layer_input": 24}
_SHARING |= {"vocab_size_per_layer_input": 320, "num_key_value_heads": 1, "global_head_dim": 32}
_ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 1.8}
_ROUTED |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_COHERE_ROUTED = {"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2, "head_dim": 16}
_COHERE_ROUTED |= {"intermediate_size": 32, "prefix_dense_intermediate_size": 80}
_LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
_LATENT |= {"num_key_value_heads": 4}
_SHORT_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
_SHORT_LONG |= {"short_factor": [1.0, 1.1, 1.3, 1.4], "long_factor": [2.0, 2.5, 3.0, 3.5]}
_MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.1}
_OSS = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32}
_MSCALED = {"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.2, "long_mscale": 1.2, "factor": 2.0}
_MSCALED |= {"short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)]}
_MSCALED |= {"original_max_position_embeddings": 64}
_ERNIE = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2}
_TRINITY: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}
_TRINITY |= {"num_dense_layers": 1, "route_scale": 1.8}
_SCAN = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
_NEMOTRON: dict[str, Any] = {"mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
_NEMOTRON |= {"head_dim": 32}
# Transformers' class goes by the former, whatever the latter says.
_NEMOTRON |= {"time_step_min": 0.7, "time_step_limit": (0.0, 1.0)}
_NEMOTRON_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 2,
}
_NEMOTRON_EXPERTS |= {"moe_shared_expert_intermediate_size": 64, "topk_group": 2, "routed_scaling_factor": 1.8}
_GRANITE4 = ["linear_attention", "full_attention", "linear_attention"]
_MULTIPLIED = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "mlp_multipliers": [0.7, 1.4]}
_MULTIPLIED |= {"attention_in_multiplier": 1.3, "attention_out_multiplier": 0.6, "key_multiplier": 0.8}
_MULTIPLIED |= {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.5, "ssm_multipliers": [0.9, 1.1, 0.7, 1.5, 0.6]}

FAMILIES: tuple[Family, ...] = (
    _known("Llama, SmolLM", "Llama"),
    _known("Mistral", "Mistral"),
    _known("Qwen2, Qwen2.5", "Qwen2"),
    _known("Qwen3", "Qwen3"),
    _known("Phi-3, Phi-4-mini", "Phi3"),
    _family("Gemma", "Gemma", _TIED | {"head_dim": 32}, {"num_key_value_heads": 1}),
    _family(
        "VaultGemma",
        "VaultGemma",
        _TIED | _WINDOWS | {"head_dim": 32, "query_pre_attn_scalar": 24},
        {"final_logit_softcapping": None, "layer_types": ["full_attention"] * 3},
    ),
    _family(
        "Gemma 2",
        "Gemma2",
        _TIED | _WINDOWS | {"head_dim": 32, "query_pre_attn_scalar": 24},
        {"final_logit_softcapping": None},
    ),
    _family(
        "Gemma 3",
        "Gemma3",
        _TIED | _WINDOWS | {"head_dim": 32, "rope_parameters": _BY_TYPE},
        {"query_pre_attn_scalar": 24},
    ),
    _native(
        "Gemma 3n",
        "Gemma3n",
        _SHARING | _TIED | {"laurel_rank": 16, "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.9, 0.0]},
        {"num_kv_shared_layers": 3, "intermediate_size": [96, 64, 96, 128, 96, 64], "altup_correct_scale": False}
        | {"vocab_size_per_layer_input": 128, "tie_word_embeddings": False, "altup_num_inputs": 3},
        {"num_kv_shared_layers": 0, "sliding_window": 200, "num_key_value_heads": 2, "final_logit_softcapping": 20.0},
    ),
    _native(
        "Gemma 4 E2B, E4B",
        "Gemma4",
        _SHARING | _TIED | {"use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
        {"num_key_value_heads": 2, "use_double_wide_mlp": False, "tie_word_embeddings": False},
        {"num_kv_shared_layers": 4, "sliding_window": 200, "attention_k_eq_v": True, "num_global_key_value_heads": 4},
    ),
    _family(
        "Gemma 4",
        "Gemma4",
        _WINDOWS
        | {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "layer_types": ["full_attention", *_SLIDING[:2]]},
        {"attention_k_eq_v": False, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320} | _TIED,
    ),
    _native(
        "Gemma 4 with experts",
        "Gemma4",
        _WINDOWS
        | _TIED
        | _EXPERTS
        | {"enable_moe_block": True, "top_k_experts": 2, "num_experts_per_tok": None}
        | {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "final_logit_softcapping": 30.0},
        {"top_k_experts": 1, "moe_intermediate_size": 40, "tie_word_embeddings": False},
    ),
    _family(
        "Gemma 4 12B",
        "Gemma4Unified",
        _WINDOWS
        | {"head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "layer_types": ["full_attention", *_SLIDING[:2]]},
        {"attention_k_eq_v": False} | _TIED,
    ),
    _family("OLMo 2", "Olmo2", {}, {"attention_bias": True}, {"rope_parameters": _YARN}),
    _family(
        "OLMo 3", "Olmo3", _WINDOWS | {"rope_parameters": {"full_attention": _YARN, "sliding_attention": _LOCAL}}, _TIED
    ),
    _family("EXAONE 4", "Exaone4", _WINDOWS, {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    _family(
        "SmolLM3", "SmolLM3", {"no_rope_layers": [1, 1, 0]}, _TIED, {"use_sliding_window": True, "sliding_window": 5}
    ),
    _family("Ministral", "Ministral", _WINDOWS | {"head_dim": 32}, {"head_dim": 16}),
    _family("Ministral 3", "Ministral3", {"head_dim": 32, "rope_parameters": _YARN | _GROWING}),
    _family("Granite", "Granite", _GRANITE, _TIED | _BIASES),
    _family(
        "Granite SWA",
        "GraniteSWA",
        _GRANITE | _WINDOWS | {"layer_rope_theta": [1e4, 0, 1e3]},
        _TIED | _BIASES | {"layer_rope_theta": None, "sliding_window": 128, "layer_types": None},
    ),
    _family("GLM", "Glm", {"attention_bias": True, "head_dim": 32, **_default(partial_rotary_factor=0.5)}),
    _family("GLM 4", "Glm4", {"attention_bias": True, "head_dim": 32, **_default(partial_rotary_factor=0.5)}),
    _family("ERNIE 4.5", "Ernie4_5", {}, _TIED | {"use_bias": True, "head_dim": 32}),
    _family("Helium", "Helium", {"head_dim": 16}, {"head_dim": 16, "num_key_value_heads": 4}),
    _family("Arcee AFM", "Arcee", {}, _BIASES | {"head_dim": 32}),
    _family(
        "Seed-OSS", "SeedOss", {"attention_bias": True, "attention_out_bias": True, "head_dim": 32}, {"mlp_bias": True}
    ),
    _family(
        "Hunyuan",
        "HunYuanDenseV1",
        {"head_dim": 32},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}},
    ),
    _family("Apertus", "Apertus", {}, {"attention_bias": True}),
    _family("BitNet", "BitNet", _TIED | {"hidden_act": "relu2"}, {"attention_bias": True, "hidden_act": "silu"}),
    _family("Phi-1 to Phi-2", "Phi", _default(partial_rotary_factor=0.5), {"num_key_value_heads": 4}),
    _family(
        "StableLM",
        "StableLm",
        _default(partial_rotary_factor=0.25),
        {"use_qkv_bias": True},
        {"use_parallel_residual": True},
    ),
    _family("StarCoder 2", "Starcoder2", {"sliding_window": 5}, {"use_bias": False}),
    _family("Nemotron", "Nemotron", _default(partial_rotary_factor=0.5), _BIASES),
    _family("Command R", "Cohere", _TIED, {"attention_bias": True}),
    _family("Command R7B", "Cohere2", _TIED | _WINDOWS, {"logit_scale": 0.25}),
    _native(
        "LFM2",
        "Lfm2",
        _CONVS | _TIED,
        {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False},
        {"layer_types": ["full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    _native(
        "LFM2-MoE",
        "Lfm2Moe",
        _CONVS | _EXPERTS | {"num_dense_layers": 1, "routed_scaling_factor": 1.5},
        _TIED | {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
    ),
    _native(
        "LFM3",
        "Lfm3",
        {"layer_types": _MIXED, "num_hidden_layers": 4, "sliding_window": 5, "head_dim": 32},
        {"use_sandwich_norm": False, "use_attention_gate": False, "conv_L_cache": 3},
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "attention_bias": True},
    ),
    _native(
        "Qwen3-Next",
        "Qwen3Next",
        _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 64},
        {"mlp_only_layers": [1], "norm_topk_prob": False, "linear_num_key_heads": 4, "linear_key_head_dim": 8},
        _TIED | {"decoder_sparse_step": 2, "linear_conv_kernel_dim": 3, "layer_types": _LATE},
        rounded=_NORMED,
    ),
    _native(
        "Qwen3.5",
        "Qwen3_5",
        _DELTA,
        _TIED | {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_value_head_dim": 8},
        {"layer_types": None, "num_hidden_layers": 5, **_default(partial_rotary_factor=0.5)},
        rounded=_NORMED,
    ),
    _native(
        "Qwen3.5-MoE",
        "Qwen3_5Moe",
        _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 64},
        _TIED | {"linear_key_head_dim": 24, "linear_value_head_dim": 16, "num_key_value_heads": 1},
        rounded=_NORMED,
    ),
    _native(
        "Mamba-2",
        "Mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
        {"use_bias": True, "n_groups": 1, "tie_word_embeddings": True, "conv_kernel": 3},
        {"use_conv_bias": False, "num_heads": 4, "head_dim": 32, "state_size": 12, "time_step_limit": (0.5, 0.9)},
    ),
    _native(
        "Bamba",
        "Bamba",
        _SCAN | {"attn_layer_indices": [1]},
        _TIED | _BIASES | {"mamba_proj_bias": True, "mamba_n_groups": 1, "attn_layer_indices": [0, 2]},
    ),
    _native(
        "Falcon-H1",
        "FalconH1",
        _SCAN | _MULTIPLIED | {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16},
        _TIED | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 32},
        _BIASES
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_proj_bias": True}
        | {"projectors_bias": True, "mamba_d_ssm": None, "mamba_n_heads": 8},
    ),
    _native(
        "Nemotron-H",
        "NemotronH",
        _NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
        {"mlp_bias": True, "use_bias": True, "n_groups": 3, "head_dim": 16},
        {"layers_block_type": ["mlp", "linear_attention", "full_attention"], "use_conv_bias": False},
        _NEMOTRON_EXPERTS | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"]},
    ),
    _native(
        "Granite 4",
        "GraniteMoeHybrid",
        _SCAN | _GRANITE | {"layer_types": _GRANITE4, "num_local_experts": 0, "shared_intermediate_size": 96},
        _TIED | {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 64},
        {"mamba_proj_bias": True, "attention_bias": True, "position_embedding_type": "rope"},
    ),
    _family(
        "Cohere 2 MoE",
        "Cohere2Moe",
        _TIED | _WINDOWS | _COHERE_ROUTED | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        {"expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-3},
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 0},
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "prefix_dense_sliding_window_pattern": 2},
    ),
    _known("Mixtral", "Mixtral"),
    _known("Qwen2-MoE", "Qwen2Moe"),
    _known("Qwen3-MoE", "Qwen3Moe"),
    _family(
        "Mellum 2",
        "Mellum",
        _WINDOWS | _EXPERTS | {"head_dim": 32, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        _TIED | {"rope_parameters": {"full_attention": _YARN, "sliding_attention": _LOCAL}, "norm_topk_prob": False},
    ),
    _family(
        "MiniMax M2",
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32} | _default(partial_rotary_factor=0.5),
        _TIED | {"head_dim": 16},
    ),
    _known("OLMoE", "Olmoe"),
    _known("Granite 3 MoE", "GraniteMoe"),
    _known("Granite 3 MoE with a shared expert", "GraniteMoeShared"),
    _family(
        "Granite MoE SWA",
        "GraniteMoeSWA",
        _GRANITE | _WINDOWS | {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 64},
        _TIED | {"shared_intermediate_size": 0, "layer_rope_theta": [0, 1e3, 1e4]},
    ),
    _family(
        "gpt-oss",
        "GptOss",
        _WINDOWS | _OSS | {"rope_parameters": _YARN | {"truncate": False}},
        {"rope_parameters": _YARN, "num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size": 40},
        _TIED | {"attention_bias": False, "num_key_value_heads": 4, "head_dim": 16, "layer_types": None},
    ),
    _family(
        "Phi-3.5-MoE",
        "Phimoe",
        {"num_local_experts": 6, "router_jitter_noise": 0.4, "attention_bias": True, "lm_head_bias": True},
        {"router_jitter_noise": 0.01, "sliding_window": 5},
        {"lm_head_bias": False, "rope_parameters": _MSCALED, "original_max_position_embeddings": 64},
    ),
    _family("GLM 4.5", "Glm4Moe", _ROUTED | {"attention_bias": True}, {"use_qk_norm": True, "n_group": 2}),
    _family("dots.llm1", "Dots1", _ROUTED, _WINDOWS | {"norm_topk_prob": True, "n_group": 3, "topk_group": 2}),
    _family("ERNIE 4.5 MoE", "Ernie4_5_Moe", _ERNIE, {"moe_num_shared_experts": 0, "moe_layer_start_index": 0}),
    _family(
        "Arcee Trinity",
        "Afmoe",
        _WINDOWS | _TRINITY | {"num_shared_experts": 2, "mup_enabled": True},
        _TIED | {"num_shared_experts": 1, "num_dense_layers": 2, "head_dim": 32},
        {"mup_enabled": False, "layer_types": None, "global_attn_every_n_layers": 2, "num_key_value_heads": 4},
    ),
    _family("Hunyuan MoE", "HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    _native(
        "DeepSeek-V2",
        "DeepseekV2",
        _LATENT | _ROUTED | {"q_lora_rank": None, "topk_method": "greedy", "kv_lora_rank": 32, "v_head_dim": 16},
        {"q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
        {"rope_parameters": _YARN | _MSCALES, "attention_bias": True, "first_k_dense_replace": 2},
    ),
    _native(
        "DeepSeek-V3, Moonlight, Kimi K2",
        "DeepseekV3",
        _LATENT | _ROUTED | {"n_group": 3, "topk_group": 2, "rope_parameters": _YARN | _MSCALES},
        {"q_lora_rank": None, "rope_interleave": False, "qk_rope_head_dim": 24, "v_head_dim": 40},
        {"attention_bias": True, "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "num_attention_heads": 5},
    ),
    _native(
        "GLM 4.7 Flash",
        "Glm4MoeLite",
        _LATENT | _ROUTED | {"num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 32},
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None, "rms_norm_eps": 1e-3},
    ),
    _native("Mistral 4", "Mistral4", _LATENT | _ROUTED | {"rope_parameters": _YARN | _GROWING}),
    _native("Youtu-LLM", "Youtu", _LATENT | _TIED, {"qk_nope_head_dim": 40, "kv_lora_rank": 48}),
    _native(
        "MiniCPM3",
        "MiniCPM3",
        _LATENT | _TIED | {"scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 16},
        _BIASES | {"q_lora_rank": None, "tie_word_embeddings": False},
        {"rope_parameters": _SHORT_LONG},
    ),
    _family("FlexOLMo", "FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}, {"norm_topk_prob": True}),
)


def cases() -> list[tuple[Family, int]]:
    """Every configuration of every family."""
    return [(family, index) for family in FAMILIES for index in range(len(family.settings))]
