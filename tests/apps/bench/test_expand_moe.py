"""Cost-expanded mixture-of-experts checkpoints compute what the small one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from edgeinfer.apps.bench.expand_moe import MoEGrowth, expand_moe
from edgeinfer.errors import CheckpointError, UsageError


def make_moe(folder: Path) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    }
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings))
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model


def test_the_function_stays_and_the_sizes_grow(tmp_path: Path) -> None:
    small = make_moe(tmp_path / "small")
    expand_moe(tmp_path / "small", tmp_path / "large", MoEGrowth(hidden=96, expert_size=40, layers=6))
    large: Any = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "large")
    tokens = torch.tensor([[3, 9, 27, 60, 1, 0, 33]])
    with torch.inference_mode():
        torch.testing.assert_close(large(tokens).logits, small(tokens).logits, atol=1e-4, rtol=1e-4)
    assert large.num_parameters() > 10 * small.num_parameters()


@pytest.mark.parametrize("growth", [MoEGrowth(80, 40, 6), MoEGrowth(96, 8, 6), MoEGrowth(96, 40, 5)])
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, growth: MoEGrowth) -> None:
    make_moe(tmp_path / "small")
    with pytest.raises(UsageError, match="cannot be expanded"):
        expand_moe(tmp_path / "small", tmp_path / "large", growth)


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="Qwen3-MoE"):
        expand_moe(tmp_path, tmp_path / "large", MoEGrowth(96, 40, 6))
