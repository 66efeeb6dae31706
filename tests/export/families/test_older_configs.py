"""Configurations as transformers 4 wrote them, in which published checkpoints come, are read as those of today."""

from __future__ import annotations

from typing import Any

import transformers

from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.source.hf_config import HFConfig, completed
from tests.factories import COMMON

_WINDOW = {"sliding_window": 64, "hidden_activation": "gelu_pytorch_tanh"}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 1.2}
_SCAN = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
OLDER: dict[str, dict[str, Any]] = {
    "Apertus": {"hidden_act": "xielu", "rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 64}},
    "Cohere2": _WINDOW | {"sliding_window_pattern": 4, "rope_theta": 5e4, "logit_scale": 0.25},
    "FalconH1": _SCAN | {"mamba_d_ssm": 96, "rope_theta": 1e11, "rope_scaling": None},
    "GraniteMoeHybrid": _SCAN
    | {"layer_types": ["mamba", "attention"] * 4, "position_embedding_type": "nope", "num_local_experts": 0}
    | {"mamba_expand": 2, "mamba_n_heads": 8, "shared_intermediate_size": 96},
    "NemotronH": {"hybrid_override_pattern": "M-M*-M-M", "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2}
    # Published configurations bring their own code along, whose time steps differ from those of transformers.
    | {"auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}},
    "Gemma": {"head_dim": 32, "hidden_act": "gelu", "hidden_activation": None},
    "Gemma2": _WINDOW
    | {"final_logit_softcapping": 30.0, "query_pre_attn_scalar": 24, "head_dim": 32}
    | {"attn_logit_softcapping": 50.0},
    "Gemma3": _WINDOW
    | {"rope_local_base_freq": 1e4, "rope_theta": 1e6, "sliding_window_pattern": 6, "head_dim": 32}
    | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "Glm4": {"partial_rotary_factor": 0.5, "head_dim": 32, "attention_bias": True},
    "HunYuanDenseV1": {"head_dim": 32, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "Olmo3": {"layer_types": [*["sliding_attention"] * 7, "full_attention"], "sliding_window": 64}
    | {"rope_scaling": _YARN, "rope_theta": 5e5},
    "Phi": {"partial_rotary_factor": 0.4, "hidden_act": "gelu_new", "rope_theta": 1e4, "rope_scaling": None},
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0] * 2, "rope_theta": 5e6, "use_sliding_window": False},
    "StableLm": {"partial_rotary_factor": 0.25, "use_qkv_bias": True, "rope_theta": 1e4},
}


def test_they_describe_the_same_decoder() -> None:
    for name in OLDER:
        older = COMMON | {"num_hidden_layers": 8} | OLDER[name] | {"architectures": [f"{name}ForCausalLM"]}
        class_ = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
        # What transformers of today makes of it has every field under its present name.
        today = class_(**older).to_dict() | {"architectures": older["architectures"]}
        family = find_architecture(HFConfig(older))
        read = family.read(HFConfig(completed(older, class_.model_type)), False)
        assert read == family.read(HFConfig(today), False), name
