"""Checkpoints as GGUF: llama.cpp predicts what transformers does, and quantizes with importance data or without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgeinfer.apps.bench.gguf_checkpoint import gguf_name, write_float_gguf
from edgeinfer.apps.bench.gguf_model import GgufModel
from edgeinfer.apps.bench.gguf_quantize import FILE_TYPES, quantize_gguf, tensor_sizes
from edgeinfer.apps.bench.importance import importance_of
from edgeinfer.errors import BackendError, CheckpointError, UsageError
from tests.factories import make_checkpoint

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

IDS = [0, 17, 45, 301, 8, 8, 120, 77, 200, 3, 19]
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama-tied", {}),
    "llama-head-dim": ("llama-head-dim", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3-moe", {"tie_word_embeddings": True}),
}


def predict(path: Path) -> NDArray[np.float32]:
    with GgufModel(path, 256) as model:
        return np.concatenate([rows.copy() for rows in model.logits(IDS)])


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    """A checkpoint whose rows hold a block of llama.cpp's small types, and its float GGUF."""
    model = make_checkpoint(tmp_path / "model", "llama", intermediate_size=128)
    write_float_gguf(tmp_path / "float.gguf", tmp_path / "model")
    return model


@pytest.mark.parametrize("name", _SHAPES)
def test_llama_cpp_predicts_what_transformers_does(tmp_path: Path, name: str) -> None:
    variant, overrides = _SHAPES[name]
    model = make_checkpoint(tmp_path / "model", variant, **overrides)
    write_float_gguf(tmp_path / "float.gguf", tmp_path / "model")
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0].numpy()
    np.testing.assert_allclose(predict(tmp_path / "float.gguf"), wanted, atol=2e-3)
    weights, size, kinds = tensor_sizes(tmp_path / "float.gguf")
    # A tied head is not counted twice.
    assert weights == sum(p.numel() for p in model.parameters())
    assert (size, kinds) == (4 * weights, {"F32": weights})


def test_a_long_text_is_read_in_pieces(tmp_path: Path, llama: Any) -> None:
    ids = (IDS * 12)[:128]
    with torch.no_grad():
        wanted = llama(torch.tensor([ids])).logits[0].numpy()
    with GgufModel(tmp_path / "float.gguf", 128) as model:
        for _ in range(2):
            found = np.concatenate([rows.copy() for rows in model.logits(ids)])
            np.testing.assert_allclose(found, wanted, atol=2e-3)
        with pytest.raises(BackendError, match="larger context"):
            list(model.logits(IDS * 40))


def test_fewer_bits_are_smaller_and_further_away(tmp_path: Path, llama: Any) -> None:
    plain = predict(tmp_path / "float.gguf")
    found = []
    for kind in ("Q8_0", "Q4_0"):
        quantize_gguf(tmp_path / "float.gguf", tmp_path / f"{kind}.gguf", kind)
        weights, size, kinds = tensor_sizes(tmp_path / f"{kind}.gguf")
        assert kind in kinds and sum(kinds.values()) == weights
        found.append((size, -float(np.abs(predict(tmp_path / f"{kind}.gguf") - plain).mean())))
    assert found[0] > found[1]
    assert tensor_sizes(tmp_path / "float.gguf")[1] > 3 * found[0][0]


def test_importance_data_reaches_the_quantizer(tmp_path: Path, llama: Any) -> None:
    """What matters alone is kept: a column of great importance ends nearer to its values."""
    import gguf

    name = "blk.0.ffn_down.weight"
    importance = {name: np.full(128, 1e-4, np.float32)}
    importance[name][::2] = 1e4
    errors = []
    for given in (None, importance):
        quantize_gguf(tmp_path / "float.gguf", tmp_path / "q.gguf", "Q4_0", given)
        (tensor,) = (t for t in gguf.GGUFReader(tmp_path / "q.gguf").tensors if t.name == name)
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        weight = llama.model.layers[0].mlp.down_proj.weight.detach().numpy()
        errors.append(float(np.square(values - weight)[:, ::2].mean()))
    assert errors[1] < 0.9 * errors[0]


def test_importance_is_the_mean_square_of_what_enters(tmp_path: Path, llama: Any) -> None:
    texts = [IDS, IDS[3:9]]
    entered: list[NDArray[np.float32]] = []
    llama.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda module, x: entered.append(x[0][0].numpy()))
    with torch.no_grad():
        for ids in texts:
            llama(torch.tensor([ids]))
    found = importance_of(tmp_path / "model", texts)
    np.testing.assert_allclose(found["blk.1.ffn_down.weight"], np.square(np.concatenate(entered)).mean(0), rtol=1e-4)
    assert len(found) == 3 * 7 and "output.weight" not in found


def test_importance_of_experts_is_over_the_tokens_they_got(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3-moe")
    experts = model.model.layers[0].mlp.experts
    seen: list[Any] = []
    experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    with torch.no_grad():
        model(torch.tensor([IDS]))
    states, choices = seen[0][0].numpy(), seen[0][1].numpy()
    found = importance_of(tmp_path / "model", [IDS])
    gates = found["blk.0.ffn_gate_exps.weight"].reshape(experts.num_experts, -1)
    for expert, values in enumerate(gates):
        rows = states[(choices == expert).any(axis=1)]
        np.testing.assert_allclose(values, np.square(rows).mean(0) if len(rows) else np.ones(64), rtol=1e-4)
    assert found["blk.0.ffn_down_exps.weight"].size == experts.down_proj[:, 0].numel()
    write_float_gguf(tmp_path / "float.gguf", tmp_path / "model")
    quantize_gguf(tmp_path / "float.gguf", tmp_path / "q.gguf", "Q4_0", found)
    assert tensor_sizes(tmp_path / "q.gguf")[1] < tensor_sizes(tmp_path / "float.gguf")[1] / 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_type": "phi3"},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"model_type": "qwen3_moe", "norm_topk_prob": False},
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path: Path, llama: Any, wrong: dict[str, Any]) -> None:
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(CheckpointError, match="cannot be written as GGUF"):
        write_float_gguf(tmp_path / "other.gguf", tmp_path / "model")


def test_unknown_names_are_refused(tmp_path: Path, llama: Any) -> None:
    with pytest.raises(UsageError, match="Q4_K_M"):
        quantize_gguf(tmp_path / "float.gguf", tmp_path / "q.gguf", "Q5")
    with pytest.raises(BackendError, match="cannot quantize"):
        quantize_gguf(tmp_path / "nothing.gguf", tmp_path / "q.gguf", FILE_TYPES[-1])
    with pytest.raises(BackendError, match="cannot load"):
        GgufModel(tmp_path / "nothing.gguf", 16)
    with pytest.raises(CheckpointError, match="no name"):
        gguf_name("model.layers.0.dream.weight", {"model_type": "llama", "num_hidden_layers": 3})
