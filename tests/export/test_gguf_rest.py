"""Bundles that were made of GGUF files become the same files again, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.opening import add_file, open_bundle
from edgeinfer.core.errors import BundleError, EdgeInferError, StorageError, UnsupportedArchitectureError, UsageError
from edgeinfer.export.gguf.reading import convert_model, read_model, restore_gguf
from edgeinfer.export.gguf.rest import REST
from edgeinfer.export.gguf.writer import write_gguf
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.export.source.sidecar import read_sidecar
from tests.cache import made
from tests.export.gguf_cases import EXPERTS, GEMMA, GGUF_CASES, layers
from tests.export.test_gguf_reading import UNREAD
from tests.export.test_graphs import export
from tests.factories import make_checkpoint

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}


def _make(folder: Path, name: str, changes: dict[str, Any], kind: str) -> None:
    make_checkpoint(folder / "checkpoint", name, **changes)
    write_gguf(folder / "checkpoint", folder / "model.gguf", kind, vocabulary=False)
    sidecar = read_sidecar(folder / "checkpoint", read_config(folder / "checkpoint"))
    convert_model(read_model(read_gguf(folder / "model.gguf")), sidecar, folder / "bundle")


@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        ("Llama", {}, "Q8_0"),
        ("Llama", {}, "F16"),
        ("Gemma3", GEMMA | layers(3, 3) | {"head_dim": 32}, "Q8_0"),
        ("Qwen3Moe", EXPERTS | {"moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True}, "Q8_0"),
        ("Qwen2", {}, "F32"),
    ],
)
@pytest.mark.every_case
def test_the_same_bytes_come_back(name: str, changes: dict[str, Any], kind: str, tmp_path: Path) -> None:
    folder = made(_make, name, changes | SIZES, kind)
    restore_gguf(open_bundle(folder / "bundle"), tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == (folder / "model.gguf").read_bytes()
    assert (folder / "bundle" / REST).stat().st_size < 0.2 * (folder / "model.gguf").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(("name", "changes"), [pytest.param(*case, id=case[0]) for case in GGUF_CASES])
@pytest.mark.slow
def test_the_bytes_of_every_family_come_back(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    kind = "F32" if name == "GptOss" else "Q8_0"  # only its MXFP4 keeps the rows of GPT-OSS's experts
    try:
        _make(tmp_path, name, changes, kind)
    except UnsupportedArchitectureError as error:
        # Which families are not read is tested where they are.
        assert any(error.message == each for each in UNREAD.values())
        return
    restore_gguf(open_bundle(tmp_path / "bundle"), tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def test_what_cannot_come_back_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    folder = made(_make, "Llama", SIZES, "Q8_0", copy_to=tmp_path / "copy")
    bundle, out = open_bundle(folder / "bundle"), tmp_path / "out.gguf"
    data = (folder / "bundle" / REST).read_bytes()
    for broken in (data[:9], data[:200], data[:16] + b"no zlib", data[:-40] + bytes(40)):
        with pytest.raises(EdgeInferError):
            restore_gguf(add_file(bundle, REST, broken), out)
    restored = add_file(bundle, REST, data)
    weights = (folder / "bundle" / "weights.bin").read_bytes()
    (folder / "bundle" / "weights.bin").write_bytes(bytes(len(weights)))
    with pytest.raises(BundleError, match="gives another file"):
        restore_gguf(restored, out)
    out.write_bytes(b"")
    with pytest.raises(StorageError, match="already exists"):
        restore_gguf(restored, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "out.gguf"]


def test_a_checkpoints_bundle_was_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"was not made of a \.gguf file"):
        restore_gguf(export("llama-tied", ExportConfig(bits=8)), tmp_path / "out.gguf")
