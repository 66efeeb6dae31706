"""Small checkpoints of every family that GGUF files are written of, in configurations that llama.cpp's graphs have."""

from __future__ import annotations

from typing import Any

GEMMA: dict[str, Any] = {"tie_word_embeddings": True, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5}
LOCAL: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e3}
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}, "sliding_attention": LOCAL}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
ROUTED_SWA: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GROWING: dict[str, Any] = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}
# llama.cpp takes LongRoPE's factors by the size of its context, of 256 tokens here, and transformers by the text's.
LONGROPE: dict[str, Any] = {
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0, 1.1, 1.3, 1.4],
        "long_factor": [2.0, 2.5, 3.0, 3.5],
    },
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.8,
}
ROUTED |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
GROUPED: dict[str, Any] = {"n_group": 3, "topk_group": 2}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
LATENT |= {"num_key_value_heads": 4}
MINICPM3: dict[str, Any] = LATENT | {"v_head_dim": 16, "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
# Sizes that llama.cpp's Gemma 3n has in any case; of its ten sparse layers it has as many as there are layers.
GEMMA3N: dict[str, Any] = {"num_kv_shared_layers": 0, "sliding_window": 5, "head_dim": 32, "laurel_rank": 64}
GEMMA3N |= {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 320}
GEMMA4: dict[str, Any] = {"sliding_window": 5, "head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": 320}
SHARED_CACHES = {"hidden_size_per_layer_input": 24, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
KEYS_AS_VALUES = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA_EXPERTS = {"enable_moe_block": True, "top_k_experts": 2, "num_experts_per_tok": None}
COHERE_ROUTED: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2, "head_dim": 16}
COHERE_ROUTED |= {"intermediate_size": 32, "prefix_dense_intermediate_size": 80, "sliding_window": 5}
TRINITY: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}
TRINITY |= {"sliding_window": 5, "route_scale": 1.8, "mup_enabled": True}
ERNIE: dict[str, Any] = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2}
OSS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": 5}

MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA: dict[str, Any] = MIXED | {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
QUARTER = {"layer_types": None, "num_hidden_layers": 4}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SCAN: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
MULTIPLIED: dict[str, Any] = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "mlp_multipliers": [0.7, 1.4]}
MULTIPLIED |= {"attention_in_multiplier": 1.3, "attention_out_multiplier": 0.6, "key_multiplier": 0.8}
MULTIPLIED |= {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.5, "ssm_multipliers": [0.9, 1.1, 0.7, 1.5, 0.6]}
MAMBA: dict[str, Any] = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16}
FALCON = SCAN | {"mamba_d_ssm": 96, "mamba_n_heads": 6, "head_dim": 32, "mamba_norm_before_gate": False}
NEMOTRON: dict[str, Any] = {"mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
NEMOTRON |= {"head_dim": 32, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
MOE = ["linear_attention", "moe", "full_attention", "moe"]
NEMOTRON_EXPERTS = ROUTED | {"moe_shared_expert_intermediate_size": 32, "n_shared_experts": 1}
CONVS: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32}


def half(rope_theta: float = 1e4) -> dict[str, Any]:
    """A rotation of half of each head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": rope_theta, "partial_rotary_factor": 0.5}}


def layers(full_every: int, count: int) -> dict[str, Any]:
    """Layers of which one in so many sees everything, and the others have windows."""
    kinds = ("sliding_attention", "full_attention")
    return {"num_hidden_layers": count, "layer_types": [kinds[(n + 1) % full_every == 0] for n in range(count)]}


def stretched(mscale: float) -> dict[str, Any]:
    """YaRN whose scores grow as DeepSeek's do."""
    return {"rope_parameters": YARN | {"mscale": mscale, "mscale_all_dim": mscale}}


GGUF_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Llama", {}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, **TIED}),
    ("Mistral", {"sliding_window": None}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 32}),
    ("Phi3", {}),
    ("Gemma", {"tie_word_embeddings": True, "head_dim": 32}),
    ("Gemma2", GEMMA | layers(2, 3)),
    ("Gemma2", GEMMA | layers(3, 3)),
    ("Gemma3", GEMMA | layers(6, 7) | {"rope_parameters": ROPES}),
    ("Gemma3", GEMMA | layers(3, 3) | {"rope_parameters": ROPES}),
    ("Gemma3n", GEMMA3N | TIED | layers(3, 4) | {"activation_sparsity_pattern": [0.95] * 4}),
    (
        "Gemma3n",
        GEMMA3N
        | layers(2, 2)
        | {"activation_sparsity_pattern": [0.95] * 2, "num_key_value_heads": 4, "vocab_size_per_layer_input": 300},
    ),
    ("Gemma4", GEMMA4 | TIED | SHARED_CACHES | layers(3, 6) | {"final_logit_softcapping": 30.0}),
    ("Gemma4", GEMMA4 | layers(3, 3) | KEYS_AS_VALUES),
    ("Gemma4", GEMMA4 | TIED | layers(3, 3) | KEYS_AS_VALUES | EXPERTS | GEMMA_EXPERTS),
    ("Olmo2", {}),
    ("Olmo2", {"rope_parameters": YARN}),
    ("Olmo3", {"sliding_window": 5, **layers(4, 5)}),
    (
        "Olmo3",
        {"sliding_window": 5, **layers(2, 3), "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    ),
    ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("Exaone4", {"sliding_window": 5, **layers(4, 64)}),
    ("Granite", GRANITE),
    ("Granite", GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("GraniteSWA", GRANITE | TIED | layers(2, 3) | {"sliding_window": 5, "layer_rope_theta": [1e3, 0, 1e3]}),
    ("GraniteSWA", GRANITE | layers(1, 3) | {"attention_bias": True, "mlp_bias": True, "sliding_window": 5}),
    ("GraniteMoeSWA", GRANITE | ROUTED_SWA | layers(3, 3) | {"shared_intermediate_size": 64}),
    ("GraniteMoeSWA", GRANITE | TIED | ROUTED_SWA | layers(2, 3) | {"shared_intermediate_size": 0}),
    ("Helium", {"head_dim": 16}),
    ("Helium", TIED | {"head_dim": 16, "num_key_value_heads": 4}),
    ("SmolLM3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    ("Ministral", {"sliding_window": 5, "head_dim": 32, **layers(2, 3)}),
    ("Ministral3", {"rope_parameters": YARN | GROWING | {"beta_fast": 8.0}}),
    ("Ministral3", {"rope_parameters": YARN | GROWING | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("SeedOss", {"attention_bias": True, "attention_out_bias": False, "head_dim": 32}),
    ("Arcee", {"head_dim": 32}),
    ("Apertus", {}),
    ("Apertus", TIED),
    ("BitNet", TIED | {"hidden_act": "silu"}),
    ("Ernie4_5", {"head_dim": 32}),
    ("HunYuanDenseV1", {"head_dim": 32, "tie_word_embeddings": True}),
    ("Glm", {"attention_bias": True, "head_dim": 16, **half()}),
    ("Glm4", {"attention_bias": True, "head_dim": 32, **half()}),
    ("Starcoder2", {"sliding_window": 5}),
    ("StableLm", {"use_qkv_bias": True, **half()}),
    ("StableLm", {"use_parallel_residual": True, **half()}),
    ("Nemotron", {"attention_bias": True, "mlp_bias": True, **half()}),
    ("Phi", half()),
    ("Cohere", {"tie_word_embeddings": True}),
    ("Cohere2", {"tie_word_embeddings": True, "sliding_window": 5, "head_dim": 16, **layers(4, 5)}),
    ("Cohere2Moe", TIED | COHERE_ROUTED | layers(2, 3) | {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    ("Cohere2Moe", TIED | COHERE_ROUTED | layers(2, 3) | {"expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-3}),
    ("Mixtral", {"num_local_experts": 6, "sliding_window": None}),
    (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "head_dim": 32,
        },
    ),
    ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    ("GraniteMoe", GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}),
    ("GraniteMoeShared", GRANITE | {"num_local_experts": 6, "shared_intermediate_size": 64}),
    ("GptOss", OSS | layers(2, 3) | {"rope_parameters": YARN}),
    ("GptOss", OSS | layers(3, 3) | {"intermediate_size": 40, "rope_parameters": PLAIN}),
    ("Glm4Moe", ROUTED | {"attention_bias": True}),
    ("Glm4Moe", ROUTED | GROUPED | {"use_qk_norm": True}),
    ("Afmoe", TRINITY | layers(4, 5) | {"num_dense_layers": 1}),
    ("Afmoe", TRINITY | TIED | layers(4, 4) | {"num_dense_layers": 2, "num_shared_experts": 1}),
    ("Dots1", ROUTED | {"num_key_value_heads": 4}),
    ("Dots1", ROUTED | GROUPED | TIED | {"num_key_value_heads": 4, "norm_topk_prob": True}),
    ("Ernie4_5_Moe", ERNIE),
    ("Ernie4_5_Moe", ERNIE | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0}),
    ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    ("DeepseekV2", LATENT | ROUTED | {"topk_method": "greedy", "q_lora_rank": None, "num_hidden_layers": 27}),
    ("DeepseekV3", LATENT | ROUTED | GROUPED | stretched(1.0)),
    ("DeepseekV3", LATENT | ROUTED | stretched(0.7) | {"norm_topk_prob": False}),
    ("Glm4MoeLite", LATENT | ROUTED | {"num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 32}),
    ("Mistral4", LATENT | ROUTED | {"rope_parameters": YARN | GROWING | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("Youtu", LATENT | {"tie_word_embeddings": True}),
    ("MiniCPM3", MINICPM3 | {"tie_word_embeddings": True}),
    ("MiniCPM3", MINICPM3 | LONGROPE),
    ("Lfm2", CONVS | TIED),
    ("Lfm2", CONVS | {"conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    ("Lfm2Moe", CONVS | EXPERTS | TIED | {"num_dense_layers": 1}),
    ("Lfm2Moe", CONVS | EXPERTS | {"num_dense_layers": 0}),
    ("Qwen3Next", DELTA | EXPERTS | {"shared_expert_intermediate_size": 64}),
    ("Qwen3Next", DELTA | EXPERTS | TIED | {"shared_expert_intermediate_size": 32, "linear_num_value_heads": 2}),
    ("Qwen3_5", DELTA),
    ("Qwen3_5", DELTA | TIED | {"linear_num_key_heads": 1, "linear_num_value_heads": 3, **QUARTER}),
    ("Qwen3_5Moe", DELTA | EXPERTS | {"shared_expert_intermediate_size": 64}),
    ("Mamba2", MAMBA),
    ("Mamba2", TIED | {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16, "conv_kernel": 3}),
    ("Bamba", SCAN | {"attn_layer_indices": [1]}),
    ("GraniteMoeHybrid", SCAN | GRANITE | MIXED | {"num_local_experts": 0, "shared_intermediate_size": 96}),
    ("GraniteMoeHybrid", SCAN | GRANITE | MIXED | TIED | {"num_local_experts": 6, "shared_intermediate_size": 64}),
    ("GraniteMoeHybrid", SCAN | GRANITE | MIXED | {"num_local_experts": 0, "position_embedding_type": "rope"}),
    (
        "GraniteMoeHybrid",
        GRANITE
        | TIED
        | {"layer_types": ["full_attention"] * 3, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    ("FalconH1", FALCON | MULTIPLIED),
    ("FalconH1", FALCON | {"mamba_rms_norm": True, "mlp_bias": True}),
    ("NemotronH", NEMOTRON),
    ("NemotronH", NEMOTRON | NEMOTRON_EXPERTS | {"layers_block_type": MOE}),
)
