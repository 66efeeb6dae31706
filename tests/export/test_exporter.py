"""Bundles that exporting makes, some as recorded, and bad checkpoints that it refuses before anything is written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.torch import load_file, save_file

from edgeinfer.bundle import bfloat16, graph
from edgeinfer.bundle.geometry import PAGED_KV
from edgeinfer.bundle.layouts import MODEL, NATIVE, PORTABLE, WEIGHTS, Layout
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.core.errors import (
    BudgetError,
    CheckpointError,
    EdgeInferError,
    StorageError,
    UsageError,
)
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig, StaticOptions
from tests.cache import made
from tests.cli import TIME_LIMIT
from tests.factories import make_checkpoint
from tests.recorded import check_recorded
from tests.tables import each_row

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def make_tiny(folder: Path) -> None:
    make_checkpoint(folder, "llama-tied", chat_template=TEMPLATE)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return made(make_tiny, copy_to=tmp_path / "tiny")


def edit_config(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(checkpoint: Path, change: Any) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_bundle_says_what_it_holds(checkpoint: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    config = ExportConfig(bits=4, keep_small=False, calibration="none")
    bundle = open_bundle(export_checkpoint(checkpoint, tmp_path / "out", config, lambda *step: seen.append(step)))
    manifest = bundle.manifest
    bundle.verify()
    assert (manifest.name, manifest.architecture, manifest.backend) == ("tiny", "LlamaForCausalLM", "onnx")
    assert manifest.parameters == sum(t.numel() for t in load_file(checkpoint / "model.safetensors").values())
    assert manifest.exits == (1, 2, 3)
    assert manifest.capabilities.row_multiple == 1
    bits = {t.name.removeprefix("layers.0."): t.bits for t in manifest.tensors}
    assert {bits[n] for n in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")} == {4}
    assert (bits["embed"], bits["head"], bits["final_norm"]) == (8, 8, 32)
    assert manifest.tensor("head").data == manifest.tensor("embed").data
    assert manifest.export["bits"] == 4 and manifest.export["head_bits"] == 8
    assert {step[0] for step in seen} == {"rounding"} and len({step[1] for step in seen}) > 5
    assert np.diff([step[1] for step in seen]).min() >= 0
    assert {step[2] for step in seen} == {seen[-1][1]}
    assert all(t.data.offset % 64 == 0 for t in manifest.tensors)


def test_the_small_files_are_carried_over(checkpoint: Path, tmp_path: Path) -> None:
    generation = {"eos_token_id": [1, 5], "temperature": 0.7, "transformers_version": "x"}
    (checkpoint / "generation_config.json").write_text(json.dumps(generation))
    bundle = open_bundle(export_checkpoint(checkpoint, tmp_path / "out"))
    assert bundle.read_text("chat_template.jinja") == TEMPLATE
    assert json.loads(bundle.read_text("generation_config.json")) == {
        "bos_token_id": 0,
        "eos_token_id": [1, 5],
        "pad_token_id": 0,
        "temperature": 0.7,
    }
    assert json.loads(bundle.read_text("special_tokens.json"))["eos_token"] == "</s>"
    theirs = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))
    ours = bundle.read_object("tokenizer.json")
    assert ours["added_tokens"] == theirs["added_tokens"] and ours["model"]["vocab"] == theirs["model"]["vocab"]


def test_what_is_not_quantized_has_one_weights_file_for_both_graphs(checkpoint: Path, tmp_path: Path) -> None:
    bundle = open_bundle(export_checkpoint(checkpoint, tmp_path / "out", ExportConfig(bits=32)))
    assert (bundle.manifest.layout, bundle.layouts) == (PORTABLE, (PORTABLE, NATIVE))
    assert [name for name in bundle.manifest.files if name.endswith(".onnx")] == ["model.native.onnx", MODEL]
    assert bundle.kv_types(PORTABLE) == ("float32",) and bundle.kv_types(NATIVE) == PAGED_KV
    for layout in (NATIVE, PORTABLE):
        assert bundle.weights_file(layout).name == WEIGHTS
        model = onnx.load(str(bundle.model_file(layout)), load_external_data=False)
        assert {e.value for i in model.graph.initializer for e in i.external_data if e.key == "location"} == {WEIGHTS}
        onnx.checker.check_model(str(bundle.model_file(layout)))


@each_row("stored", [NATIVE, PORTABLE])
def test_a_quantized_bundle_has_the_graphs_of_both_layouts(checkpoint: Path, tmp_path: Path, stored: Layout) -> None:
    out = export_checkpoint(
        checkpoint, tmp_path / "out", ExportConfig(bits=4, keep_small=False, layout=stored, calibration="none")
    )
    bundle, other = open_bundle(out), PORTABLE if stored == NATIVE else NATIVE
    assert (bundle.manifest.layout, bundle.layouts) == (stored, (stored, other))
    assert bundle.model_file(stored).name == MODEL and bundle.model_file(other).name == f"model.{other}.onnx"
    assert set(bundle.graphs) == {name for name in bundle.manifest.files if name.endswith(".onnx")}
    assert bundle.kv_types(NATIVE) == PAGED_KV and bundle.kv_types(PORTABLE) == ("float32",)
    assert bundle.manifest.capabilities_in(NATIVE).paged and not bundle.manifest.capabilities_in(PORTABLE).paged
    assert bundle.weights_file(stored).is_file() and not bundle.weights_file(other).exists()
    for layout in (stored, other):
        model = onnx.load(str(bundle.model_file(layout)), load_external_data=False)
        named = {e.value for i in model.graph.initializer for e in i.external_data if e.key == "location"}
        assert named == {bundle.weights_file(layout).name}
        domains = {opset.domain for opset in model.opset_import}
        assert (graph.NATIVE_DOMAIN in domains) == (layout == NATIVE)
    onnx.checker.check_model(str(out / MODEL))


def test_both_layouts_hold_the_same_numbers(checkpoint: Path, tmp_path: Path) -> None:
    for bits in (2, 3, 4, 8):
        bundles = [
            open_bundle(
                export_checkpoint(
                    checkpoint, tmp_path / f"{layout}-{bits}", ExportConfig(bits, layout=layout, calibration="none")
                )
            )
            for layout in (NATIVE, PORTABLE)
        ]
        native, portable = bundles
        assert native.manifest.export == portable.manifest.export
        for entry in portable.manifest.tensors:
            np.testing.assert_array_equal(native.tensor(entry.name), portable.tensor(entry.name))
            if entry.scales is not None:
                assert bfloat16.is_representable(portable.rows(entry, 0, entry.shape[0]).scales)


@each_row(("group_size", "multiple"), [(32, 1), (64, 2)])
def test_row_multiple_follows_the_blocks_and_the_layout(
    checkpoint: Path, tmp_path: Path, group_size: int, multiple: int
) -> None:
    for layout in (NATIVE, PORTABLE):
        config = ExportConfig(bits=4, group_size=group_size, layout=layout, calibration="none")
        manifest = open_bundle(export_checkpoint(checkpoint, tmp_path / layout, config)).manifest
        assert manifest.capabilities == manifest.capabilities_in(layout)
        assert manifest.capabilities_in(PORTABLE).row_multiple == multiple
        assert manifest.capabilities_in(NATIVE).row_multiple == 1


@pytest.mark.parametrize(
    ("options", "planes"),
    [
        ({"bits": 8, "keep_small": False}, True),
        ({"bits": 4}, True),  # these small layers stay at 8 bits
        ({"bits": 4, "keep_small": False, "head_bits": 8}, False),
        ({"bits": 8, "head_bits": 8}, False),  # and these at 32
    ],
)
def test_layers_of_eight_bits_are_elastic(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], planes: bool
) -> None:
    bundle = open_bundle(export_checkpoint(checkpoint, tmp_path / "out", ExportConfig(**options, calibration="none")))
    assert bundle.manifest.capabilities.high_planes is planes
    assert bundle.manifest.capabilities_in(PORTABLE).high_planes is False
    inputs = {
        layout: {i.name for i in onnx.load(str(bundle.model_file(layout)), load_external_data=False).graph.input}
        for layout in bundle.layouts
    }
    assert (graph.PLANES in inputs[NATIVE]) is planes
    buffered = {graph.ATTENTION_BIAS, graph.SEQLENS_K, graph.TOTAL_LENGTH}
    buffered |= {name for layer in range(3) for name in graph.past_names(layer)}
    paged = {graph.KV_POOL, graph.KV_LAYOUT, graph.KV_PAGES, graph.ROWS, graph.PATH_SLOTS}
    assert inputs[NATIVE] - {graph.PLANES} - paged == inputs[PORTABLE] - buffered
    assert paged <= inputs[NATIVE] and buffered <= inputs[PORTABLE]


def refused(checkpoint: Path, error: type[EdgeInferError], says: str) -> EdgeInferError:
    """Exports, and checks that the right error came and nothing was written."""
    before = sorted(checkpoint.parent.iterdir())
    with pytest.raises(error, match=says) as caught:
        export_checkpoint(checkpoint, checkpoint.parent / "out")
    assert sorted(checkpoint.parent.iterdir()) == before
    assert caught.value.message and caught.value.hint
    return caught.value


def test_stored_rotary_frequencies_and_a_tied_head_are_ignored(checkpoint: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"].clone()
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(checkpoint, change)
    out = export_checkpoint(checkpoint, checkpoint.parent / "out")
    assert "head" in {t.name for t in open_bundle(out).manifest.tensors}


@pytest.mark.parametrize(
    ("change", "says"),
    [({"num_key_value_heads": 3}, "num_heads"), ({"rms_norm_eps": None}, "rms_norm_eps"), ({"vocab_size": 321}, "321")],
)
def test_a_config_that_does_not_fit(checkpoint: Path, change: dict[str, Any], says: str) -> None:
    edit_config(checkpoint, **change)
    refused(checkpoint, CheckpointError, says)


def test_a_gguf_file_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is a GGUF file.* edgeinfer convert"):
        export_checkpoint(tmp_path / "some.gguf", tmp_path / "out")


def test_a_missing_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    refused(checkpoint, CheckpointError, r"no tokenizer\.json")
    (checkpoint / "vocab.json").write_bytes(b"{}")
    assert "AutoTokenizer" in refused(checkpoint, CheckpointError, r"vocab\.json").hint
    (checkpoint / "tokenizer.model").write_bytes(b"")
    assert "AutoTokenizer" in refused(checkpoint, CheckpointError, "SentencePiece").hint


def test_an_existing_bundle_is_replaced_only_when_told(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "out")
    with pytest.raises(StorageError, match="already exists"):
        export_checkpoint(checkpoint, tmp_path / "out")
    export_checkpoint(checkpoint, tmp_path / "out", ExportConfig(bits=32, force=True))
    assert open_bundle(tmp_path / "out").manifest.export["bits"] == 32


@pytest.mark.parametrize("layout", [NATIVE, pytest.param(PORTABLE, marks=pytest.mark.slow)])
def test_a_budget_is_kept_and_recorded(checkpoint: Path, tmp_path: Path, layout: Layout) -> None:
    config = ExportConfig(target_size=90_000, bits_for=(("layers.1.mlp.down", 8),), layout=layout, calibration="none")
    bundle = open_bundle(export_checkpoint(checkpoint, tmp_path / "out", config))
    assert (bundle.path / WEIGHTS).stat().st_size <= 90_000
    plan = bundle.manifest.plan
    assert plan is not None and plan.predicted_kl is not None
    assert plan.budget_bytes == 90_000
    bits = {tensor.name: tensor.bits for tensor in bundle.manifest.tensors}
    # 5.5 bits of a type of GGUF are codes of 5 with their scales.
    assert {tensor.name: int(tensor.bits) for tensor in plan.tensors}.items() <= bits.items()
    assert bits["layers.1.mlp.down"] == 8


def test_an_impossible_budget_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        export_checkpoint(checkpoint, tmp_path / "out", ExportConfig(bits=1.5))
    assert caught.value.minimum_bytes > 0
    assert not (tmp_path / "out").exists()


def test_without_onnx_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['onnx'] = None\nimport edgeinfer.export"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    assert "edgeinfer.core.errors.UsageError" in result.stderr
    assert "pip install onnx" in result.stderr


WORDS = ["cat", "dog", "sun", "moon", "tree", "house", "runs", "sleeps", "sees", "the", "a", "red", "big"]
# Checkpoints with what only they have, and options that take them through every quantizer, layout and kind of plan.
EXPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama-tied", {"bits": 4}),
    "portable": ("qwen2", {"bits": 4, "keep_small": False, "layout": "portable", "group_size": 32}),
    "symmetric": ("qwen3-moe-tied-odd", {"bits": 2, "keep_small": False, "symmetric": True}),
    "patterns": ("phi3-window", {"bits": 8, "keep_small": False, "bits_for": (("layers.1.*", 4), ("embed", 32))}),
    "gptq": ("qwen2-moe", {"bits": 8, "bits_for": (("layers.*", 2),), "keep_small": False, "calibration": True}),
    "budget": ("llama-tied", {"bits": 5.1, "calibration": True, "method": "rtn"}),
    "size": ("granite-moe", {"target_size": 150_000}),
    "static": ("llama", {"bits": 4, "static": StaticOptions(48, 16, (1, 4))}),
}


def text_of(folder: Path) -> Path:
    """A text by which weights are weighed."""
    chance = np.random.default_rng(0)
    path = folder / "text.txt"
    path.write_text("".join(" ".join(chance.choice(WORDS, 12)) + ".\n" for _ in range(60)), "utf-8")
    return path


def operators(path: Path) -> dict[str, int]:
    """How often a graph has each operator with its attributes."""
    found: Counter[str] = Counter()
    for node in onnx.load(path, load_external_data=False).graph.node:
        values = ((a.name, onnx.helper.get_attribute_value(a)) for a in node.attribute)
        # What is zero an operator does not have, and operators learn of more.
        shown = (f"{name}={value}" for name, value in values if isinstance(value, int | float | list | tuple) and value)
        found[f"{node.domain} {node.op_type} {' '.join(sorted(shown))}".strip()] += 1
    return dict(sorted(found.items()))


def described(bundle: Bundle) -> dict[str, Any]:
    """A bundle as a record has it."""
    manifest = bundle.manifest
    tensors = {}
    for entry in manifest.tensors:
        values = bundle.tensor(entry.name).astype(np.float64)
        sums = [np.square(values).sum()]
        # Where a text decides, another CPU's matrix product may move a weight by a step of its grid.
        if manifest.plan is None or not manifest.plan.calibration_tokens:
            # Neither an exchange of rows nor one of columns leaves the last sum as it was.
            sums += [values.sum(), (values.reshape(-1) * np.cos(np.arange(values.size))).sum()]
        blobs = [[blob.offset, blob.nbytes] for blob in entry.blobs]
        form = [entry.shape, entry.bits, entry.block_size, blobs, entry.paired, entry.interleaved]
        tensors[entry.name] = [*form, *sums]
    written = json.loads((bundle.path / MANIFEST).read_text("utf-8"))
    return {
        **{part: written.get(part) for part in ("decoder", "geometry", "exits", "capabilities", "plan")},
        "export": {key: value for key, value in manifest.export.items() if isinstance(value, bool | int | float)},
        "graphs": {name: operators(bundle.file(name)) for name in manifest.files if name.endswith(".onnx")},
        "tensors": tensors,
    }


def test_exports_hold_what_they_held(tmp_path: Path) -> None:
    for name, (arch, options) in EXPORTS.items():
        make_checkpoint(tmp_path / name / "tiny", arch)
        if options.get("calibration"):
            options = options | {"calibration": text_of(tmp_path), "calibration_tokens": 256}
        else:
            options = options | {"calibration": "none"}
        bundle = open_bundle(
            export_checkpoint(tmp_path / name / "tiny", tmp_path / name / "out", ExportConfig(**options))
        )
        check_recorded(
            f"export-{name}", described(bundle), rel=0.05 if options.get("calibration") else 5e-4, least=1e-3
        )
