"""Bundles with a GGUF file as exports make them: what is in them, and that there is nothing after a failure."""

from __future__ import annotations

import json
import logging
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import CheckpointError, StorageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from tests.factories import make_checkpoint

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

from gguf import GGUFReader, dequantize

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.export.gguf import route, writer
from tests.export.packed import make_mxfp4
from tests.export.test_gguf_parity import gguf_logits
from tests.gguf_models import GgufModel

pytestmark = pytest.mark.gguf

TEMPLATE = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
# Rows of 64 and 96 hold blocks of 32, not of 256.
TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16", "Q8_0": "Q8_0", "Q4_0": "Q4_0", "IQ4_NL": "IQ4_NL"}


def gguf(kind: str | None = None, **given: Any) -> ExportConfig:
    return ExportConfig(format="gguf", gguf_type=kind, **given)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, "Llama", chat_template=TEMPLATE)
    return folder


@pytest.mark.parametrize("kind", TYPES)
def test_a_bundle_of_each_type(kind: str, source: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    out = export_checkpoint(source, tmp_path / "out", gguf(kind), lambda what, done, of: steps.append((done, of)))
    bundle = open_bundle(out)
    bundle.verify()
    manifest = bundle.manifest
    small = {"tokenizer.json", "chat_template.jinja", "generation_config.json", "special_tokens.json"}
    assert set(manifest.files) == small | {"model.gguf"}
    assert bundle.read_text("chat_template.jinja") == TEMPLATE
    assert (manifest.backend, manifest.architecture) == ("llamacpp", "LlamaForCausalLM")
    assert manifest.export["format"] == "gguf" and manifest.export["type"] == kind
    assert manifest.export["tokenizer_differences"] == 0
    assert not manifest.capabilities.layer_skip and manifest.capabilities.tree
    assert bundle.gguf.by_name["blk.0.attn_q.weight"].type.name == TYPES[kind]
    assert all(0 <= done < of for done, of in steps) and steps


def test_a_mixtures_parameters_and_plain_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", "qwen3-moe", tie_word_embeddings=True)
    out = export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", gguf("F32", name="small"))
    manifest = open_bundle(out).manifest
    assert manifest.name == "small"
    assert manifest.parameters == sum(p.numel() for p in model.parameters())
    assert read_gguf(out / "model.gguf").metadata.text("general.name") == "small"


def test_the_float_file_between_is_of_the_checkpoints_type(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    kinds: list[str] = []

    def noted(*args: Any, **given: Any) -> None:
        kinds.append(args[4])
        writer.write_gguf_source(*args, **given)

    monkeypatch.setattr(route, "write_gguf_source", noted)
    import torch

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        make_checkpoint(tmp_path / str(dtype), "Llama", dtype=dtype)
        export_checkpoint(tmp_path / str(dtype), tmp_path / f"out {dtype}", gguf("Q4_0"))
    assert kinds == ["F32", "F16", "BF16"]


def test_a_window_is_the_whole_context(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "mistral")
    manifest = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", gguf("F16"))).manifest
    assert manifest.geometry.max_positions == manifest.export["context_of_window"] == 6


def test_quantizing_changes_little(source: Path, tmp_path: Path) -> None:
    tokens = np.array([0, 17, 300, 5, 42, 99])
    logits = {}
    for kind in ("F32", "Q8_0", "Q4_0"):
        logits[kind] = gguf_logits(export_checkpoint(source, tmp_path / kind, gguf(kind)) / "model.gguf", tokens)
    eight, four = (np.linalg.norm(logits[kind] - logits["F32"]) for kind in ("Q8_0", "Q4_0"))
    assert 0 < eight < four < 0.5 * np.linalg.norm(logits["F32"])


def test_nothing_is_left_after_an_interruption(source: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, of: int) -> None:
        if done > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(source, tmp_path / "out", gguf("Q4_0"), stop)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_where_it_will_not_fit(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(StorageError, match=r"takes 0\.0 GB of disk"):
        export_checkpoint(source, tmp_path / "out", gguf("Q4_0"))
    assert list(tmp_path.iterdir()) == []


def test_without_llama_cpp_plain_types_are_written_and_the_check_is_skipped(
    source: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(route, "find_spec", lambda name: None)
    manifest = open_bundle(export_checkpoint(source, tmp_path / "out", gguf("F16"))).manifest
    assert "skipped" in str(manifest.export["tokenizer_check"])


def test_rare_differences_of_the_tokenizer_are_told(
    source: Path, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from edgeinfer.export.gguf.route import TokenizerCheck

    monkeypatch.setattr(route, "check_tokenizer", lambda *args: TokenizerCheck(9, ("odd",)))
    with caplog.at_level(logging.WARNING, "edgeinfer"):
        manifest = open_bundle(export_checkpoint(source, tmp_path / "out", gguf("F16"))).manifest
    assert manifest.export["tokenizer_differences"] == 1
    assert "odd" in caplog.text


def test_a_checkpoint_without_a_tokenizer_is_refused(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", gguf("F16"))


def test_the_export_is_recorded_as_json(source: Path, tmp_path: Path) -> None:
    out = export_checkpoint(source, tmp_path / "out", gguf("Q8_0"))
    record = json.loads((out / "edgeinfer.json").read_text())
    assert record["export"]["type"] == "Q8_0" and record["decoder"] is None and record["tensors"] == []


def test_experts_in_mxfp4_are_kept(tmp_path: Path) -> None:
    """They are copied into float files and into a file of this type; other types quantize their values."""
    experts = make_mxfp4(tmp_path / "checkpoint").model.layers[1].mlp.experts
    wanted = {"gate": experts.gate_up_proj[..., ::2], "up": experts.gate_up_proj[..., 1::2], "down": experts.down_proj}
    for kind, found in (("BF16", "MXFP4"), ("MXFP4_MOE", "MXFP4"), ("Q8_0", "MXFP4"), ("Q4_0", "Q4_0")):
        out = export_checkpoint(tmp_path / "checkpoint", tmp_path / kind, gguf(kind))
        with GgufModel(out / "model.gguf", 64) as model:
            assert np.isfinite(np.concatenate([rows.copy() for rows in model.logits([3, 5, 9])])).all()
        tensors = {tensor.name: tensor for tensor in GGUFReader(out / "model.gguf").tensors}
        for part, values in wanted.items():
            tensor = tensors[f"blk.1.ffn_{part}_exps.weight"]
            assert tensor.tensor_type.name == found
            kept = dequantize(tensor.data, tensor.tensor_type)
            if found == "MXFP4":
                np.testing.assert_array_equal(kept, values.mT.detach().numpy())
