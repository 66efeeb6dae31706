"""Importance of a GGUF file's tensors: what a model run by transformers feeds its layers, experts for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgeinfer.errors import UsageError
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.gguf.allocation import Importance, gather_importance
from edgeinfer.export.gguf.writer import open_gguf_source
from edgeinfer.export.source.checkpoint import Checkpoint
from tests.factories import make_checkpoint
from tests.tables import each_row

TEXTS = [np.array([0, 17, 45, 301, 8, 8, 120, 77, 200, 3, 19]), np.array([301, 8, 8, 120])]


def gather(folder: Path, texts: list[NDArray[np.int64]] = TEXTS) -> Importance:
    with Checkpoint(folder) as checkpoint:
        described = open_gguf_source(checkpoint)
        reader = PlannedTensors(checkpoint, described.computing)
        return gather_importance(described.spec, reader, texts, described.tensors)


def watch(model: Any, modules: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """What enters some modules when transformers runs the texts."""
    seen: dict[str, list[NDArray[np.float32]]] = {name: [] for name in modules}
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _, x, name=name: seen[name].append(x[0].reshape(-1, x[0].shape[-1])))
    with torch.no_grad():
        for ids in TEXTS:
            model(torch.tensor([ids.tolist()]))
    return {name: np.concatenate(found) for name, found in seen.items()}


@each_row("arch", ["llama", "qwen2", "qwen3", "phi3", "mistral"])
def test_it_is_the_mean_square_of_what_enters(tmp_path: Path, arch: str) -> None:
    model = make_checkpoint(tmp_path, arch)
    layer = model.model.layers[1]
    packed = arch == "phi3"
    modules = {
        "attn_qkv" if packed else "attn_q": layer.self_attn.qkv_proj if packed else layer.self_attn.q_proj,
        "attn_output": layer.self_attn.o_proj,
        "ffn_up": layer.mlp.gate_up_proj if packed else layer.mlp.up_proj,
        "ffn_down": layer.mlp.down_proj,
    }
    seen = watch(model, modules | {"head": model.lm_head})
    found = gather(tmp_path)
    for name, rows in seen.items():
        key = "output.weight" if name == "head" else f"blk.1.{name}.weight"
        np.testing.assert_allclose(found[key], np.square(rows).mean(0), rtol=1e-4)
    assert len(found) == 3 * (4 if packed else 7) + 1


def test_a_shared_embedding_has_none(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama-tied")
    assert not {"token_embd.weight", "output.weight"} & gather(tmp_path).keys()


def test_experts_count_the_tokens_they_got(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3-moe")
    experts = model.model.layers[0].mlp.experts
    seen: list[Any] = []
    experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    with torch.no_grad():
        for ids in TEXTS:
            model(torch.tensor([ids.tolist()]))
    states = np.concatenate([inputs[0].numpy() for inputs in seen])
    choices = np.concatenate([inputs[1].numpy() for inputs in seen])
    found = gather(tmp_path)
    gates = found["blk.0.ffn_gate_exps.weight"].reshape(experts.num_experts, -1)
    for expert, values in enumerate(gates):
        rows = states[(choices == expert).any(axis=1)]
        # Columns next to nothing are raised, as llama.cpp divides by sums of them.
        np.testing.assert_allclose(values, np.square(rows).mean(0) if len(rows) else np.ones(64), rtol=1e-4, atol=1e-5)
    assert found["blk.0.ffn_down_exps.weight"].size == experts.num_experts * 32
    assert not any("gate_inp" in name for name in found)


def test_an_expert_that_no_token_reached_counts_all_columns_alike(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3-moe", num_experts=32, num_experts_per_tok=1)
    gates = gather(tmp_path, [np.array([5])])["blk.0.ffn_gate_exps.weight"].reshape(32, -1)
    assert (gates.std(axis=1) == 0).sum() == 31 and (gates > 0).all()


def test_multipliers_of_a_family_are_in_what_enters(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "granite-moe")
    seen = watch(model, {"attn_q": model.model.layers[1].self_attn.q_proj})
    found = gather(tmp_path)["blk.1.attn_q.weight"]
    np.testing.assert_allclose(found, np.square(seen["attn_q"]).mean(0), rtol=1e-4)


def test_texts_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(UsageError, match="outside the model"):
        gather(tmp_path, [np.array([320])])
