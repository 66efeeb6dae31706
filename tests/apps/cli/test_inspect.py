"""`edgeinfer inspect` and `pull`: arguments, output and exit codes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.gguf_bundle import manifest_of
from edgeinfer.bundle.manifest import CacheQuality, Capabilities, Manifest, PlannedTensor, PlanRecord, QualityRecord
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.writing import seal
from tests.gguf_builder import FLOAT32, STRING, UINT32, small_model
from tests.recorded import check_recorded


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with files that nothing here runs."""
    root = tmp_path / "bundle"
    root.mkdir()
    (root / "model.onnx").write_bytes(b"x" * 2048)
    (root / "tokenizer.json").write_text("{}")
    manifest = Manifest(
        name="toy",
        architecture="llama",
        backend="onnx",
        geometry=Geometry(vocab_size=512, hidden_size=8, num_layers=2, num_kv_heads=1, head_dim=8, max_positions=256),
        parameters=4096,
        capabilities=Capabilities(layer_skip=True, hidden=True, tree=False),
        exits=(1, 2),
        export={"bits": 4, "symmetric": False, "head_bits": None},
        figures={"perplexity": 3.25},
        quality=QualityRecord(512, 0.0123, 0.95, (CacheQuality("int8", 0.002),)),
    )
    seal(root, manifest)
    return root


def test_inspect_prints_the_plan(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle)]) == 0
    assert "predicted divergence" not in capsys.readouterr().out
    manifest = open_bundle(bundle).manifest
    planned = (
        PlannedTensor("layers.0.mlp.down", 4, 32, predicted_kl=0.25),
        PlannedTensor("layers.1.mlp.down", 8, 64, predicted_kl=0.125),
        PlannedTensor("embed", 32),
    )
    record = PlanRecord("gptq", planned, "0" * 64, 4096, 2_000_000)
    (bundle / "edgeinfer.json").write_text(dataclasses.replace(manifest, plan=record).to_json())
    assert main(["inspect", str(bundle)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    check_recorded("cli-inspect", out.splitlines()[1:])
    assert main(["inspect", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["tensors"][1]["bits"] == 8


def test_inspect_json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle), "--json", "--verify"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["name"] == "toy"
    assert data["kv_bytes_per_token"] > 0
    assert data["verified"] is True
    assert "tensors" not in data
    assert main(["inspect", str(bundle), "--json", "--tensors"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tensors"] == []
    assert "verified" not in data


def test_inspect_verify_finds_a_changed_file(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "model.onnx").write_bytes(b"y" * 2048)
    assert main(["inspect", str(bundle)]) == 0
    assert main(["inspect", str(bundle), "--verify"]) == 3
    assert "model.onnx does not match" in capsys.readouterr().err


def test_inspect_lists_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    builtin = Path(edgeinfer.__file__).parent / "builtin" / "tales"
    if not (builtin / "edgeinfer.json").is_file():
        pytest.skip("the built-in model has not been made")
    assert main(["inspect", "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "layers.0.attn.qkv" in out


def test_pull(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def update(name: str, *, revision: str | None, bits: int | None, **_: Any) -> Path:
        calls.append((name, revision, bits))
        return bundle

    monkeypatch.setattr(hub, "update", update)
    monkeypatch.setattr(hub, "find_model", lambda name: SimpleNamespace(here=bundle))
    assert main(["pull", "org/name", "--bits", "8"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{bundle}\n"
    assert "edgeinfer chat -m org/name" in err
    assert main(["pull", "org/name", "--revision", "v2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"repo": "org/name", "path": str(bundle), "kind": "bundle"}
    assert err == ""
    assert calls == [("org/name", None, 8), ("org/name", "v2", None)]


def test_pull_without_converting(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle / "edgeinfer.json").unlink()
    monkeypatch.setattr(hub, "pull", lambda *_, **__: bundle)
    assert main(["pull", "org/name", "--no-convert"]) == 0
    assert "edgeinfer export org/name name" in capsys.readouterr().err


_WIDE = {"llama__attention__key_length": (UINT32, 64), "llama__attention__value_length": (UINT32, 64)}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hub, "refusal", lambda _: "blk.0.ffn_up.weight is IQ2_XXS")
    monkeypatch.setattr("edgeinfer.apps.cli.inspect.find_spec", lambda _: None)
    texts = {"x__long": (STRING, "word " * 100), "x__escape": (STRING, "\x1b[2J"), "x__inf": (FLOAT32, float("inf"))}
    return small_model(**_WIDE, **texts).write(tmp_path / "some-model.gguf")


def test_facts(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == str(path)
    check_recorded("cli-inspect-gguf", lines[1:])


def test_tensors(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--tensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    offset = read_gguf(path).by_name["token_embd.weight"].offset
    (row,) = [line.split() for line in lines if line.startswith("token_embd.weight ")]
    assert row == ["token_embd.weight", "12", "x", "8", "F16", "192", "B", f"{offset:,}"]


def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data["path"] == str(path)
    assert data["gguf"]["files"] == [str(path)] and "tensors" not in data["gguf"]
    assert main(["inspect", str(path), "--json", "--tensors"]) == 0
    tensors = json.loads(capsys.readouterr().out)["gguf"]["tensors"]
    check_recorded("cli-inspect-gguf-json", data | {"tensors": tensors}, without=("path", "files"))


def test_caches_that_are_not_possible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(small_model().write(tmp_path / "m.gguf"))]) == 0
    assert "KV cache q8_0     not supported" in capsys.readouterr().out


def test_a_plain_file_is_verified_by_what_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_model().write(tmp_path / "m.gguf")
    assert main(["inspect", str(path), "--verify"]) == 0
    assert "as long as it does not change" in capsys.readouterr().err
    assert main(["inspect", str(path), "--verify"]) == 0
    assert "Every file matches" in capsys.readouterr().err
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["inspect", str(path), "--verify"]) == 3
    assert f"edgeinfer inspect {path} --accept" in capsys.readouterr().err
    assert main(["inspect", str(path), "--accept"]) == 0
    assert main(["inspect", str(path), "--verify"]) == 0
    capsys.readouterr()


def test_what_has_a_digest_is_not_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = read_gguf(small_model().write(tmp_path / "model.gguf"))
    seal(tmp_path, dataclasses.replace(manifest_of(gguf), files={}))
    assert main(["inspect", str(tmp_path), "--accept"]) == 2
    assert "has to match" in capsys.readouterr().err


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = read_gguf(small_model().write(tmp_path / "model.gguf"))
    seal(tmp_path, dataclasses.replace(manifest_of(gguf), name="mine", files={}))
    assert main(["inspect", str(tmp_path), "--verify"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == str(tmp_path)
    assert "mine" in out and "KV cache float16" in out
    assert "Every file matches" in err
