"""GGUF files of the families beside Llama's and Qwen's, run by llama.cpp, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer.errors import UnsupportedArchitectureError
from tests.factories import make_checkpoint

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.export.gguf.writer import write_gguf
from tests.export.passes import TOKENS, expected_logits
from tests.gguf_logits import GgufModel

pytestmark = pytest.mark.gguf

# What is asked of every format; most are far below.
TOLERANCE = 1e-4
GEMMA = {"tie_word_embeddings": True, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5}
LOCAL = {"rope_type": "default", "rope_theta": 1e3}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": LOCAL,
}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


def layers(full_every: int, count: int) -> dict[str, Any]:
    """Layers of which one in so many sees everything, and the others have windows."""
    kinds = ("sliding_attention", "full_attention")
    return {"num_hidden_layers": count, "layer_types": [kinds[(n + 1) % full_every == 0] for n in range(count)]}


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Gemma", {"tie_word_embeddings": True, "head_dim": 32}),
    ("Gemma2", GEMMA | layers(2, 3)),
    ("Gemma3", GEMMA | layers(6, 7) | {"rope_parameters": ROPES}),
    ("Olmo2", {}),
    ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("Granite", GRANITE),
    ("Granite", GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("SmolLM3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    ("Ministral", {"sliding_window": 5, "head_dim": 32, **layers(2, 3)}),
    ("SeedOss", {"attention_bias": True, "attention_out_bias": False, "head_dim": 32}),
    ("Arcee", {"head_dim": 32}),
    ("Ernie4_5", {"head_dim": 32}),
    ("HunYuanDenseV1", {"head_dim": 32, "tie_word_embeddings": True}),
    ("Glm4", {"attention_bias": True, "head_dim": 32, **HALF}),
    ("Starcoder2", {"sliding_window": 5}),
    ("StableLm", {"use_qkv_bias": True, **HALF}),
    ("StableLm", {"use_parallel_residual": True, **HALF}),
    ("Nemotron", {"attention_bias": True, "mlp_bias": True, **HALF}),
    ("Phi", HALF),
    ("Cohere", {"tie_word_embeddings": True}),
    ("Cohere2", {"tie_word_embeddings": True, "sliding_window": 5, "head_dim": 16, **layers(4, 5)}),
)
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("Gemma2", GEMMA | layers(2, 3) | {"final_logit_softcapping": None}, "gemma2 has no form without logit_softcap"),
    ("Gemma2", GEMMA | layers(3, 3), "gemma2 has no windows on these layers"),
    ("Gemma2", GEMMA | layers(2, 3) | {"query_pre_attn_scalar": 24}, "gemma2 has no scale of scores of 0.204124"),
    ("Gemma3", GEMMA | layers(3, 3) | {"rope_parameters": ROPES}, "gemma3 has no windows on these layers"),
    ("SmolLM3", {"no_rope_layers": [1, 1, 0]}, "smollm3 has no rotation of these layers"),
    ("Arcee", {"attention_bias": True}, "arcee has no biases of queries, keys and values"),
    ("Starcoder2", {"use_bias": False}, "starcoder2 has no form without output_bias"),
    ("Exaone4", {"sliding_window": 5, **layers(2, 3)}, "rope_layers"),
    ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "GGUF files of a decoder with mixers"),
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
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("name", "settings"), CASES, ids=[name for name, _ in CASES])
def test_logits_match_transformers(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
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
