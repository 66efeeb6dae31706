"""`edgeinfer export --format gguf` and `edgeinfer convert` of a .gguf file: arguments, output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeinfer.apps.cli.main import main
from tests.factories import make_checkpoint

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.opening import open_bundle

pytestmark = pytest.mark.gguf

TEXT = "Once upon a time there was a little dog. She said: the cat is not here, is it?\n" * 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, "llama", intermediate_size=128, num_hidden_layers=4)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, "utf-8")
    return path


def export(checkpoint: Path, out: Path, *options: str) -> int:
    return main(["export", str(checkpoint), str(out), "--format", "gguf", *options])


def kinds(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.type.name for tensor in read_gguf(path).tensors}


@pytest.mark.parametrize(
    ("options", "kind"),
    [([], "Q4_0"), (["--bits", "8"], "Q8_0"), (["--bits", "16"], "F16"), (["--type", "q5_1"], "Q5_1")],
)
def test_a_type_by_name_or_by_bits(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], kind: str
) -> None:
    assert export(checkpoint, tmp_path / "out", "--json", *options) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["bundle"] == str(tmp_path / "out") and data["bytes"] > 0
    assert kinds(tmp_path / "out" / "model.gguf")["blk.0.ffn_up.weight"] == kind
    assert open_bundle(tmp_path / "out").manifest.export["type"] == kind


def test_a_size_with_a_calibration_text(
    checkpoint: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--target-size", "190KB", "--calibration", str(text), "--calibration-tokens", "256", "--show-plan"]
    assert export(checkpoint, tmp_path / "out", *options, "--json") == 0
    facts = json.loads(capsys.readouterr().out)["plan"]
    assert facts["method"] == "llama.cpp" and facts["predicted_kl"] > 0
    assert facts["types"]["token_embd.weight"] == kinds(tmp_path / "out" / "model.gguf")["token_embd.weight"]
    assert 0.95 * 190_000 < (tmp_path / "out" / "model.gguf").stat().st_size <= 190_000
    plan = open_bundle(tmp_path / "out").manifest.plan
    assert plan is not None and plan.calibration_tokens == 256 and plan.budget_bytes is not None
    assert export(checkpoint, tmp_path / "out", *options, "--force") == 0
    assert "blk.*.attn_q.weight" in capsys.readouterr().out


def test_single_tensors_and_fewer_layers(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--type", "Q4_0", "--bits-for", "blk.*.attn_v.weight=Q8_0", "--bits-for", "blk.1.attn_v.weight=16"]
    assert export(checkpoint, tmp_path / "out", *options, "--prune-layers", "0,3") == 0
    found = kinds(tmp_path / "out" / "model.gguf")
    # Layers are named as they are numbered in the file.
    assert (found["blk.0.attn_v.weight"], found["blk.1.attn_v.weight"]) == ("Q8_0", "F16")
    manifest = open_bundle(tmp_path / "out").manifest
    assert manifest.geometry.num_layers == 2 and manifest.export["pruned_layers"] == "0 3"


def test_the_layers_that_are_missed_least(checkpoint: Path, tmp_path: Path, text: Path) -> None:
    options = ["--type", "F16", "--calibration", str(text), "--calibration-tokens", "256"]
    assert export(checkpoint, tmp_path / "out", *options, "--prune-layers", "auto:2") == 0
    manifest = open_bundle(tmp_path / "out").manifest
    pruned = str(manifest.export["pruned_layers"]).split()
    assert len(pruned) == 2 and manifest.geometry.num_layers == 2


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--type", "Q9"], 2, "Choose one of"),
        (["--type", "IQ2_XS", "--no-calibration"], 2, "--no-calibration"),
        (["--type", "Q4_0", "--bits", "4"], 2, "not allowed with"),
        (["--type", "Q4_0", "--bits-for", "blk.*.nothing=Q8_0"], 2, "matches no matrix"),
        (["--bits-for", "blk.*=Q7"], 2, "Q7"),
        (["--group-size", "64"], 2, "--type Q4_K_M"),
        (["--method", "rtn"], 2, "--type Q4_K_M"),
        (["--portable"], 2, "--type Q4_K_M"),
        (["--exporter", "optimum"], 2, "GGUF"),
        (["--prune-layers", "9"], 2, "no layer 9"),
        (["--prune-layers", "auto:4"], 2, "Not all 4"),
        (["--prune-layers", "auto:none"], 2, "auto:2"),
        (["--target-size", "1KB"], 4, "allow as much"),
    ],
)
def test_requests_that_cannot_be_met(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, said: str
) -> None:
    assert export(checkpoint, tmp_path / "out", *options) == code
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [["--type", "Q4_0"], ["--prune-layers", "1"], ["--bits-for", "layers.*=Q8_0"]])
def test_onnx_models_have_no_such_options(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["export", str(checkpoint), str(tmp_path / "out"), *options]) == 2
    assert "--format gguf" in capsys.readouterr().err


@pytest.fixture(scope="module")
def floats(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats")
    assert export(checkpoint, folder / "out", "--bits", "16") == 0
    return folder / "out" / "model.gguf"


def test_a_file_is_converted(floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    out = tmp_path / "q8.gguf"
    assert main(["convert", str(floats), str(out), "--type", "q8_0", "-t", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["file"] == str(out) and data["bytes"] == out.stat().st_size
    assert kinds(out)["blk.0.ffn_up.weight"] == "Q8_0"
    assert main(["convert", str(out), str(tmp_path / "short.gguf"), "--prune-layers", "1,2"]) == 0
    assert read_gguf(tmp_path / "short.gguf").metadata["llama.block_count"] == 2
    assert main(["convert", str(out), str(tmp_path / "q4.gguf"), "--type", "Q4_0", "--requantize"]) == 0
    assert main(["convert", str(floats), str(out), "--type", "Q4_0", "--force"]) == 0
    assert kinds(out)["blk.0.ffn_up.weight"] == "Q4_0"


def test_a_file_becomes_a_bundle(floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    out = tmp_path / "bundle"
    assert main(["convert", str(floats), str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["bundle"] == str(out) and open_bundle(out).manifest.name == "bundle"
    assert main(["convert", str(floats), str(out)]) == 5
    assert main(["convert", str(floats), str(out), "--force"]) == 0
    assert main(["convert", str(floats), str(tmp_path / "other"), "--to", "portable"]) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["bundle"]
    capsys.readouterr()
    assert main(["convert", str(floats), str(tmp_path / "q8.gguf"), "--type", "Q8_0"]) == 0
    assert main(["convert", str(tmp_path / "q8.gguf"), str(tmp_path / "q8")]) == 0
    assert main(["inspect", str(tmp_path / "q8"), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "whose types it keeps" in shown and any(
        "attn.qkv " in line and "Q8_0" in line for line in shown.splitlines()
    )
    again = tmp_path / "again.gguf"
    assert main(["convert", str(out), str(again)]) == 0 and again.read_bytes() == floats.read_bytes()
    assert main(["convert", str(out), str(again)]) == 5
    assert main(["convert", str(out), str(again), "--type", "Q8_0", "--force"]) == 2


def test_conversions_that_cannot_be(floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantized = tmp_path / "q8.gguf"
    assert main(["convert", str(floats), str(quantized), "--type", "Q8_0"]) == 0
    bundle = floats.parent
    capsys.readouterr()
    for source, out, options, code, said in (
        (quantized, "x.gguf", ["--type", "Q4_0"], 2, "quantizing twice loses more"),
        (floats, "q8.gguf", ["--type", "Q4_0"], 5, "--force"),
        (floats, "x.gguf", [], 2, "--type TYPE"),
        (floats, "x.gguf", ["--to", "native"], 2, "--type Q4_K_M"),
        (floats, "x.gguf", ["--type", "IQ2_XS"], 2, "--calibration"),
        (floats, "x.gguf", ["--type", "Q4_0", "-t", "0"], 2, "threads"),
        (floats, "x.gguf", ["--prune-layers", "auto:1"], 2, "edgeinfer export --prune-layers"),
        (floats, "x", ["--type", "Q4_0"], 2, "x.gguf"),
        (tmp_path / "none.gguf", "x.gguf", ["--type", "Q4_0"], 3, "none.gguf"),
        (bundle, "x", ["--type", "Q4_0"], 2, "the .gguf file itself"),
        (bundle, "x", [], 2, "--to native"),
    ):
        assert main(["convert", str(source), str(tmp_path / out), *options]) == code, (source, options)
        assert said in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q8.gguf"]
