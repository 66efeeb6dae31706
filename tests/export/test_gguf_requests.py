"""What is asked of llama.cpp's quantizer, checked before it sees it: it ends the process on some of this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.core.errors import BundleError, UnsupportedArchitectureError, UsageError
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.gguf.pruning import check_layers, check_prunable, choose_layers
from edgeinfer.export.gguf.quantize import quantize_gguf
from edgeinfer.export.gguf.writer import open_gguf_source, write_gguf
from edgeinfer.export.options import ExportConfig, fitting
from edgeinfer.export.source.checkpoint import Checkpoint
from tests.export.gguf_cases import LATENT
from tests.factories import VARIANTS, make_block_ffn_checkpoint, make_checkpoint
from tests.gguf_builder import ARRAY, INT32, Builder, small_model
from tests.tables import each_row

DOWN = "blk.0.ffn_down.weight"  # 8 rows of 16 columns


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of two layers whose matrices are floats."""
    return small_model().write(tmp_path / "float.gguf")


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("Q9", {}, "Q4_K_M"),
        ("IQ2_XS", {}, "importance"),
        ("Q4_0", {"prune_layers": [3]}, "no layer 3"),
        ("Q4_0", {"prune_layers": [-1]}, "no layer -1"),
        ("COPY", {"prune_layers": [0, 1]}, "all 2"),
        ("F16", {"tensor_types": {DOWN: "Q8_0"}}, "type F16"),
        ("Q4_0", {"tensor_types": {DOWN: "Q8_1"}}, "Q8_1"),
        ("Q4_0", {"tensor_types": {"blk.9.ffn_down.weight": "Q8_0"}}, "no tensor"),
        ("Q4_0", {"tensor_types": {"token_embd.weight": "IQ1_S"}}, "without importance"),
        ("Q4_0", {"importance": {DOWN: np.ones(64, np.float32)}}, "have shape"),
        ("Q4_0", {"importance": {DOWN: np.full(16, np.nan, np.float32)}}, "finite"),
        ("Q4_0", {"importance": {"output_norm.weight": np.ones(8, np.float32)}}, "not a matrix"),
    ],
)
def test_what_is_impossible_is_refused_before_llama_cpp_sees_it(
    source: Path, kind: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        quantize_gguf(source, source.parent / "q.gguf", kind, **options)
    assert list(source.parent.iterdir()) == [source]


def test_files_that_hold_no_model_are_refused(source: Path) -> None:
    for made in (Builder({}, []), small_model(general__architecture=None)):
        with pytest.raises(BundleError):
            quantize_gguf(made.write(source.parent / "no-model.gguf"), source.parent / "q.gguf", "Q4_0")
    with pytest.raises(BundleError):
        quantize_gguf(source.parent / "nothing.gguf", source.parent / "q.gguf", "Q4_0")
    with pytest.raises(UsageError, match="the input file itself"):
        quantize_gguf(source, source, "Q4_0")


def test_types_fall_back_as_llama_cpp_decides() -> None:
    assert [fitting(kind, 96) for kind in ("Q4_K", "Q6_K", "IQ3_S", "Q2_K", "Q8_0")] == [
        *("Q5_0", "Q8_0", "IQ4_NL", "Q4_0", "Q8_0")
    ]
    assert fitting("Q4_K", 256) == "Q4_K" and fitting("Q4_0", 40) == fitting("Q4_K", 40) == "F16"


REFUSED = {
    "qwen3-tied-biases": "bias of the attention's output",
    "qwen2-moe-dense-layers": "layers without experts",
    "qwen3-moe-plain": "layers without experts",
    "olmoe": "queries that share keys",
}


@each_row(("arch", "what"), REFUSED.items())
def test_what_llama_cpp_cannot_express_is_refused(arch: str, what: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", arch)
    with pytest.raises(UnsupportedArchitectureError, match=what) as error:
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")
    assert "ONNX" in error.value.hint
    assert not (tmp_path / "model.gguf").exists()


@each_row(
    ("arch", "settings", "what"),
    [
        ("qwen3-moe", {"norm_topk_prob": False}, "not renormalized"),
        ("qwen2-moe", {"norm_topk_prob": True}, "renormalized"),
        ("qwen2", {"rope_parameters": VARIANTS["llama-llama3-rope"][1]["rope_parameters"]}, "type llama3"),
        ("qwen2", {"head_dim": 32}, "128 wide together with a hidden state of 64"),
    ],
)
def test_settings_that_a_graph_lacks_are_refused(
    arch: str, settings: dict[str, Any], what: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "checkpoint", arch, **settings)
    with pytest.raises(UnsupportedArchitectureError, match=what):
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")


def test_block_ffn_has_no_gguf(tmp_path: Path) -> None:
    make_block_ffn_checkpoint(tmp_path / "checkpoint", joined=True)
    with pytest.raises(UnsupportedArchitectureError, match="has no graph with a router"):
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")


def test_another_type_is_not_written_directly(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "Llama")
    with pytest.raises(UsageError, match="Q4_K_M"):
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "Q4_K_M")


def test_what_lies_otherwise_than_ours_is_not_calibrated(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "Youtu", **LATENT)
    config = ExportConfig(format="gguf", bits=4.5)
    with pytest.raises(UsageError, match="Calibrating GGUF files of deepseek2"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", config)
    assert not (tmp_path / "bundle").exists()


TEXTS = [np.array([0, 17, 45, 301, 8, 8, 120, 77, 200, 3, 19]), np.array([301, 8, 8, 120])]


def choose(folder: Path, count: int, told: Any = None) -> tuple[int, ...]:
    with Checkpoint(folder) as checkpoint:
        described = open_gguf_source(checkpoint)
        return choose_layers(described.spec, PlannedTensors(checkpoint, described.computing), TEXTS, count, told)


def loss(model: Any, pruned: tuple[int, ...]) -> float:
    """Divergence of transformers' model without some layers."""
    layers = model.model.layers
    total = []
    for ids in TEXTS:
        found = []
        for left in (list(layers), [layer for i, layer in enumerate(layers) if i not in pruned]):
            model.model.layers = torch.nn.ModuleList(left)
            with torch.no_grad():
                logits = model(torch.tensor([ids.tolist()]), use_cache=False).logits[0].double()
            found.append(torch.log_softmax(logits, -1))
            model.model.layers = layers
        total.append((found[0].exp() * (found[0] - found[1])).sum(-1))
    return float(torch.cat(total).mean())


@each_row("arch", ["llama", "qwen3", "granite-moe"])
def test_the_layer_that_is_missed_least_is_left_out_first(tmp_path: Path, arch: str) -> None:
    model = make_checkpoint(tmp_path, arch, num_hidden_layers=4)
    told: list[tuple[str, int, int]] = []
    pruned: tuple[int, ...] = ()
    for count in (1, 2):
        losses = {layer: loss(model, (*pruned, layer)) for layer in range(4) if layer not in pruned}
        pruned = tuple(sorted((*pruned, min(losses, key=losses.__getitem__))))
        told.clear()
        assert choose(tmp_path, count, lambda *step: told.append(step)) == pruned
    assert told[-1] == ("choosing layers", 8, 8)


@each_row("count", [0, 3, -1])
def test_some_layers_must_stay(tmp_path: Path, count: int) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(UsageError, match="cannot be left out"):
        choose(tmp_path, count)


def test_models_whose_layers_differ_lack_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gemma3"):
        check_layers("gemma3", 4, (1,))
    with pytest.raises(UsageError, match="no layer 4"):
        check_layers("llama", 4, (4,))
    with pytest.raises(UsageError, match="all 4"):
        check_layers("llama", 4, (0, 1, 2, 3))
    check_layers("llama", 4, (0, 3))


def test_files_that_say_something_of_each_layer_lack_none(tmp_path: Path) -> None:
    """llama.cpp keeps such an array as long as it was."""
    plain = read_gguf(small_model().write(tmp_path / "plain.gguf"))
    check_prunable(plain, (0,))
    each = read_gguf(
        small_model(llama__attention__head_count_kv=(ARRAY, (INT32, [1, 1]))).write(tmp_path / "each.gguf")
    )
    check_prunable(each, ())
    with pytest.raises(UsageError, match="head_count_kv has a value for every layer"):
        check_prunable(each, (0,))
