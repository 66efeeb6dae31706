"""Types of a GGUF file's tensors by size: what they take, what they cost, and that the best ones are taken."""

from __future__ import annotations

import itertools
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.metadata import ggml_type
from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.manifest import Manifest
from edgeinfer.core.errors import BudgetError, UsageError
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.gguf import allocation
from edgeinfer.export.gguf.allocation import (
    Importance,
    RowQuantizer,
    TensorTypes,
    choose_types,
    gather_importance,
    tensor_bytes,
)
from edgeinfer.export.gguf.quantize import quantize_gguf
from edgeinfer.export.gguf.writer import open_gguf_source, write_gguf
from edgeinfer.export.source.checkpoint import Checkpoint
from tests.factories import make_checkpoint
from tests.tables import each_row

Floats = NDArray[np.float32]

TEXTS = [np.array([0, 17, 45, 301, 8, 8, 120, 77, 200, 3, 19]), np.array([301, 8, 8, 120])]


needs_llama = pytest.mark.skipif(find_spec("llama_cpp") is None or find_spec("gguf") is None, reason="needs llama.cpp")


class EvenSteps:
    """Stands in for llama.cpp's quantizer: as many even steps as a type has bits, of blocks of its size."""

    def approximate(self, rows: Floats, kind: str, importance: Floats | None = None) -> Floats:  # (N, K) -> (N, K)
        into = ggml_type(kind)
        assert rows.shape[1] % into.block_values == 0
        blocks = rows.reshape(len(rows), -1, into.block_values)
        step = 2 * np.abs(blocks).max(axis=2, keepdims=True) / 2**into.bits
        return np.asarray(np.rint(blocks / step) * step, np.float32).reshape(rows.shape)


@pytest.fixture
def even_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "RowQuantizer", EvenSteps)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 256 and of 128."""
    folder = tmp_path_factory.mktemp("wide")
    make_checkpoint(folder, "llama", hidden_size=256, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    return folder


def choose(folder: Path, budget: int, given: dict[str, str] | None = None) -> TensorTypes:
    with Checkpoint(folder) as opened:
        described = open_gguf_source(opened)
        reader = PlannedTensors(opened, described.computing)
        return choose_types(described.spec, reader, TEXTS, described.tensors, budget, given=given)


@pytest.mark.gguf
@needs_llama
def test_the_file_takes_what_was_planned(tmp_path: Path, checkpoint: Path) -> None:
    write_gguf(checkpoint, tmp_path / "float.gguf", vocabulary=False)
    parameters = sum(tensor.size for tensor in read_gguf(tmp_path / "float.gguf").tensors)
    costs = []
    for bits in (3.5, 4.6, 9.0):
        budget = math.floor(bits * parameters / 8)
        plan = choose(checkpoint, budget)
        quantize_gguf(tmp_path / "float.gguf", tmp_path / "q.gguf", plan.kind, tensor_types=plan.types)
        written = read_gguf(tmp_path / "q.gguf")
        assert {name: written.by_name[name].type.name for name in plan.types} == dict(plan.types)
        taken = written.size - written.splits[0].data_offset
        assert 0.97 * budget < taken <= budget
        costs.append(sum(plan.predicted.values()))
    assert costs[0] > costs[1] > costs[2] > 0


def test_wide_rows_may_have_k_types_and_narrow_ones_none(checkpoint: Path, even_steps: None) -> None:
    plan = choose(checkpoint, 290_000)
    down = {kind for name, kind in plan.types.items() if "ffn_down" in name}
    others = {kind for name, kind in plan.types.items() if "ffn_down" not in name}
    assert all(ggml_type(kind).block_values == 32 for kind in down)
    assert {ggml_type(kind).block_values for kind in others} == {256}
    assert not any("norm" in name for name in plan.types)


def test_types_that_are_given_hold(checkpoint: Path, even_steps: None) -> None:
    given = {"blk.0.attn_v.weight": "Q8_0", "blk.1.ffn_down.weight": "Q4_K"}
    plan = choose(checkpoint, 300_000, given)
    # Blocks of 256 do not fit 128 columns.
    assert (plan.types["blk.0.attn_v.weight"], plan.types["blk.1.ffn_down.weight"]) == ("Q8_0", "Q5_0")


def test_what_is_too_small_is_refused_before_the_model_is_probed(checkpoint: Path, even_steps: None) -> None:
    with pytest.raises(BudgetError) as caught:
        choose(checkpoint, 100_000)
    least = caught.value.minimum_bytes
    assert choose(checkpoint, least).types
    with pytest.raises(BudgetError):
        choose(checkpoint, least - 1)


def test_experts_share_a_type(tmp_path: Path, even_steps: None) -> None:
    make_checkpoint(tmp_path, "qwen3-moe")
    plan = choose(tmp_path, 160_000)
    assert plan.types.keys() >= {f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    assert "blk.0.ffn_gate_inp.weight" not in plan.types
    assert all(cost >= 0 for cost in plan.predicted.values())


def test_the_plan_is_for_the_manifest(checkpoint: Path, even_steps: None) -> None:
    plan = choose(checkpoint, 300_000)
    record = plan.record("ab" * 32, 15)
    assert record.budget_bytes == 300_000 and record.calibration_tokens == 15
    assert record.predicted_kl == pytest.approx(sum(plan.predicted.values()))
    entry = next(t for t in record.tensors if t.name == "token_embd.weight")
    kind = ggml_type(plan.types[entry.name])
    assert (entry.type, entry.bits, entry.block_size) == (kind.name, kind.bits, kind.block_values)
    assert Manifest.__dataclass_fields__["plan"].type == "PlanRecord | None"


@pytest.mark.gguf
@needs_llama
def test_rows_are_what_llama_cpp_makes_of_them() -> None:
    quantizer, chance = RowQuantizer(), np.random.default_rng(0)
    rows = chance.normal(size=(16, 256)).astype(np.float32)
    columns = np.where(np.arange(256) % 2, 1e-3, 1.0).astype(np.float32)
    errors = {}
    for kind in ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16"):
        plain = quantizer.approximate(rows, kind)
        assert plain.shape == rows.shape and plain.dtype == np.float32
        errors[kind] = float(np.square(plain - rows).sum())
    assert all(a > b for a, b in itertools.pairwise(errors.values()))
    weighed = np.square(quantizer.approximate(rows, "Q3_K", columns) - rows)[:, ::2].sum()
    assert weighed < np.square(quantizer.approximate(rows, "Q3_K") - rows)[:, ::2].sum()


def test_bytes_are_padded_rows_of_blocks() -> None:
    assert tensor_bytes((3, 256), "Q6_K") == 640  # 3 x 210 = 630
    assert tensor_bytes((2, 3, 64), "Q4_0") == 224  # 6 x 36 = 216


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
