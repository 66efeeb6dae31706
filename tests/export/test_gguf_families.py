"""GGUF files of all families, run by llama.cpp, against transformers."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from edgeinfer.core.errors import UnsupportedArchitectureError
from tests.factories import make_checkpoint

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.export.gguf.writer import write_gguf
from tests.export.gguf_cases import (
    COHERE_ROUTED,
    CONVS,
    DELTA,
    FALCON,
    GEMMA,
    GGUF_CASES,
    GROUPED,
    LATENT,
    MAMBA,
    MINICPM3,
    ROUTED,
    TIED,
    TRINITY,
    YARN,
    layers,
)
from tests.export.passes import TOKENS, expected_logits
from tests.gguf_models import GgufModel

pytestmark = pytest.mark.gguf

# What is asked of every format; most are far below.
TOLERANCE = 1e-4
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("Gemma2", GEMMA | layers(2, 3) | {"final_logit_softcapping": None}, "gemma2 has no form without logit_softcap"),
    ("Gemma2", GEMMA | layers(2, 3) | {"query_pre_attn_scalar": 24}, "gemma2 has no scale of scores of 0.204124"),
    ("SmolLM3", {"no_rope_layers": [1, 1, 0]}, "smollm3 has no rotation of these layers"),
    ("Arcee", {"attention_bias": True}, "arcee has no biases of queries, keys and values"),
    ("Starcoder2", {"use_bias": False}, "starcoder2 has no form without output_bias"),
    ("Exaone4", {"sliding_window": 5, **layers(2, 3)}, "exaone4 has no windows in models of 3 layers"),
    ("DeepseekV3", LATENT | ROUTED | {"q_lora_rank": None}, "3 layers whose queries have no small vector"),
    ("DeepseekV3", LATENT | ROUTED | {"rope_interleave": False}, "deepseek2 has no rotation of halves"),
    ("DeepseekV3", LATENT | ROUTED | {"rope_parameters": YARN}, "whose mscale differs from its mscale_all_dim"),
    ("DeepseekV2", LATENT | ROUTED | GROUPED | {"topk_method": "group_limited_greedy"}, "ranked by their best"),
    ("Glm4MoeLite", LATENT | ROUTED | {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "layers without experts"),
    ("MiniCPM3", MINICPM3 | {"scale_emb": 3.0}, "minicpm3 has no scale_emb but 12"),
    ("Cohere2Moe", TIED | COHERE_ROUTED | {"shared_expert_combination_strategy": "sum"}, "sum of what experts"),
    ("FalconH1", FALCON | {"attention_bias": True}, "falcon-h1 has no bias of the attention's output"),
    ("FalconH1", FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "no norm before the gate"),
    ("Mamba2", MAMBA | {"time_step_limit": (0.5, 0.9)}, "mamba2 has no limits of time steps"),
    ("Qwen3_5", DELTA | {"linear_value_head_dim": 24}, "heads of 24 channels of values and 16 of keys"),
    ("Qwen3_5", DELTA | {"layer_types": ["linear_attention"] * 3}, "qwen35 has no form without attention"),
    ("Lfm2", CONVS | {"conv_bias": True}, "lfm2 has no biases of convolutions"),
    ("Afmoe", TRINITY | {"mup_enabled": False}, "afmoe has no embeddings that do not grow"),
    ("VaultGemma", GEMMA, "soft caps without norms after attention and MLP"),
    ("Phimoe", {"num_local_experts": 6}, "Phimoe"),
)


class HalfGelu(torch.nn.Module):
    """GELU's tanh approximation as ggml looks it up: by float16, in float16 (ggml_vec_gelu_f32)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, found))


def with_half_gelu(model: Any) -> Any:
    for module in model.modules():
        for name, child in module.named_children():
            if "gelu" in type(child).__name__.lower():
                setattr(module, name, HalfGelu())
    return model


def without_curve(model: Any, folder: Path) -> Any:
    """The model with gates so large that GELU passes them on or gives zero, and rounds nothing.

    Float16 turns a difference of float32's rounding into one of 5e-4 where it falls between two values, and Gemma's
    large embeddings make that a thousand times what is tolerated here.
    """
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight *= 2.0**14
            layer.mlp.down_proj.weight *= 2.0**-14
            if getattr(layer, "experts", None) is not None:
                layer.experts.gate_up_proj[:, : layer.experts.gate_up_proj.shape[1] // 2] *= 2.0**14
                layer.experts.down_proj *= 2.0**-14
            if getattr(layer, "per_layer_input_gate", None) is not None:
                layer.per_layer_input_gate.weight *= 2.0**14
                layer.per_layer_projection.weight *= 2.0**-14
    model.save_pretrained(folder)
    return model


def sparse_as_there(mlp: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Gemma 3n's sparse MLP with a deviation of n - 1 values, as llama.cpp computes it, where transformers' is of n."""
    usual = statistics.NormalDist().inv_cdf(mlp.activation_sparsity)
    cutoff = inputs.mean(-1, keepdim=True) + inputs.std(-1, keepdim=True) * usual
    return torch.nn.functional.relu(inputs - cutoff)


@pytest.mark.parametrize(("name", "settings"), GGUF_CASES, ids=[name for name, _ in GGUF_CASES])
def test_logits_match_transformers(
    name: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gemma3nTextMLP, "_gaussian_topk", sparse_as_there)
    model = make_checkpoint(tmp_path / "checkpoint", name, **settings)
    model = without_curve(model, tmp_path / "checkpoint") if name.startswith("Gemma") else with_half_gelu(model)
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", vocabulary=False)
    metadata = read_gguf(tmp_path / "model.gguf").metadata
    arch = metadata.text("general.architecture")
    tokens = TOKENS[: metadata.integer(f"{arch}.context_length")]
    with GgufModel(tmp_path / "model.gguf", 256) as written:
        found = np.concatenate([rows.copy() for rows in written.logits(tokens.tolist())])
    difference = np.abs(found - expected_logits(model, tokens)).max()
    print(f"{name} as {arch}: {difference:.1e}, {len(tokens)} tokens")
    assert difference <= TOLERANCE


@pytest.mark.parametrize(("name", "settings", "says"), REFUSED)
def test_what_a_graph_lacks_is_refused(name: str, settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", name, **settings)
    with pytest.raises(UnsupportedArchitectureError, match=says):
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", vocabulary=False)
    assert not (tmp_path / "model.gguf").exists()
