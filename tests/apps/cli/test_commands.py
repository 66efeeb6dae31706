"""`edgeinfer export`, `plan`, `eval` and `methods`: arguments, output and exit codes."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.manifest import Capabilities, Manifest, QualityRecord
from edgeinfer.bundle.writing import seal
from edgeinfer.core.errors import CheckpointError
from edgeinfer.core.methods import KINDS
from edgeinfer.export.exporter import Check
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.planning.facts import Configuration, Footprint
from edgeinfer.runtime.planning.plan import Alternative, BudgetPoint, MemoryPlan, SpeedCurve
from edgeinfer.runtime.planning.speed_model import Speed
from tests.cache import export_checkpoint, made
from tests.factories import make_checkpoint
from tests.methods import all_methods
from tests.recorded import check_recorded
from tests.tables import each_row

Progress = Callable[[str, int, int], None] | None


SIZE = Geometry(vocab_size=512, hidden_size=8, num_layers=2, num_kv_heads=1, head_dim=8, max_positions=256)
CAN = Capabilities(layer_skip=True, hidden=True, tree=False)
TOY = Manifest("toy", "Toy", "onnx", SIZE, 4096, CAN, quality=QualityRecord(100, 0.0234, 0.913))


def fake_plan(budget: int | None) -> MemoryPlan:
    """What edgeinfer.plan returns, of 300 MB."""
    chosen = Configuration(2048, 64, "int8", "mapped", 0, ("copy", "ngram"), 7, "kept")
    footprint = Footprint({"kv_cache": 50_000_000, "weights": 50_000_000, "loading": 0}, {"weights": 200_000_000})
    return MemoryPlan(
        configuration=chosen,
        layout="native",
        overflow="stop",
        prefix_cache=0,
        budget_bytes=budget,
        counted="resident",
        footprint=footprint,
        speed=Speed(12.34, 1000.0, False, 9.5),
        minimum_bytes=200_000_000,
        given_up=("drafts of 7 tokens at most instead of 15",),
        alternatives=(Alternative("float32 KV cache", chosen, 700_000_000, False, Speed(15.6, 900.0, False, 9.5)),),
        curve=SpeedCurve(
            (
                BudgetPoint(200_000_000, dataclasses.replace(chosen, draft_max=0), 8.0, 8.0),
                BudgetPoint(250_000_000, chosen, 10.0, 8.0),
                BudgetPoint(280_000_000, chosen, 12.34, 8.0),
            )
        ),
    )


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def plan(model: Any = None, **options: Any) -> MemoryPlan:
        calls.append((model, options))
        return fake_plan(options.get("memory"))

    monkeypatch.setattr(edgeinfer, "plan", plan, raising=False)
    monkeypatch.setattr(hub, "resolve", lambda model, **_: Path(model))
    monkeypatch.setattr(hub, "find_model", lambda _: SimpleNamespace(file=None))
    monkeypatch.setattr("edgeinfer.bundle.opening.open_bundle", lambda _: SimpleNamespace(manifest=TOY))
    return calls


def test_plan(planned: list[tuple[Any, dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-m", "toy", "--memory", "600MB", "-c", "1024"]) == 0
    assert planned == [("toy", {"memory": 600_000_000, "context": 1024})]
    assert main(["plan", "-m", "toy", "-v", "--curve"]) == 0
    check_recorded("cli-plan", capsys.readouterr().out.splitlines())


def test_plan_that_does_not_fit(planned: list[tuple[Any, dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "100MB", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_plan_without_a_budget(planned: list[tuple[Any, dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    assert "\nbudget " not in capsys.readouterr().out
    line = (
        "plan --kv int8 --weights streamed --prefix-cache 2MB --no-native --speculation copy,model --draft-model small"
    )
    assert main(line.split()) == 0
    options = {"kv": "int8", "weights": "streamed", "prefix_cache": 2_000_000, "native": False}
    assert planned[-1] == (None, options | {"speculation": "copy,model", "draft_model": "small"})


class FakeExport:
    """An exporter that takes no time."""

    def __init__(self) -> None:
        self.calls: list[tuple[Path, Path, ExportConfig]] = []
        self.fails: BaseException | None = None

    def export_checkpoint(
        self, source: Path, out: Path, config: ExportConfig, progress: Progress, check: Check
    ) -> Path:
        self.calls.append((source, out, config))
        if self.fails is not None:
            raise self.fails
        out.mkdir()
        (out / "weights.bin").write_bytes(b"w" * 1500)
        seal(out, TOY)
        return out


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch) -> FakeExport:
    fake = FakeExport()
    monkeypatch.setattr("edgeinfer.export.exporter.export_checkpoint", fake.export_checkpoint)
    return fake


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    return path


def test_export(export: FakeExport, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", str(checkpoint), str(out)]) == 0
    assert export.calls == [(checkpoint, out, ExportConfig())]
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert "Wrote 2." in stderr and "0.023 nats a token away on other text" in stderr and "91% of the time" in stderr
    assert f"edgeinfer run -m {out}" in stderr


def test_export_options(
    export: FakeExport, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--bits 8 --group-size 64 --symmetric --head-bits 8 --portable --exporter optimum --name toy --force --json"
    assert main(["export", str(checkpoint), str(tmp_path / "out"), *line.split()]) == 0
    assert export.calls[0][2] == ExportConfig(
        bits=8,
        group_size=64,
        symmetric=True,
        head_bits=8,
        layout="portable",
        exporter="optimum",
        name="toy",
        force=True,
    )
    data = json.loads(capsys.readouterr().out)
    assert data["bytes"] > 1500 and data["quality"]["top1"] == 0.913
    assert data["bundle"] == str(tmp_path / "out")


def test_export_options_of_bits(export: FakeExport, checkpoint: Path, tmp_path: Path) -> None:
    line = "--bits 3.5 --bits-for layers.*.down=8 --bits-for head=4 --method gptq --calibration a.txt"
    assert main(["export", str(checkpoint), str(tmp_path / "out"), *line.split(), "--calibration-tokens", "512"]) == 0
    config = export.calls[0][2]
    assert (config.bits, config.method, config.calibration_tokens) == (3.5, "gptq", 512)
    assert config.calibration == Path("a.txt")
    assert config.bits_for == (("layers.*.down", 8), ("head", 4))
    assert main(["export", str(checkpoint), str(tmp_path / "other"), "--target-size", "350MB"]) == 0
    assert export.calls[1][2].target_size == 350_000_000


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (CheckpointError("model.safetensors is truncated.", "Download it again."), 3),
        (ModuleNotFoundError("No module named 'optimum'", name="optimum.exporters"), 2),
        (ModuleNotFoundError("No module named 'edgeinfer.typo'", name="edgeinfer.typo"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_export_that_fails(
    export: FakeExport,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    failure: BaseException,
    code: int,
) -> None:
    export.fails = failure
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == code
    assert capsys.readouterr().err.count("\n") == (0 if code == 130 else 1)


@each_row(
    ("options", "says"),
    [
        ("--bits 64", "--bits"),
        ("--group-size 48", "--group-size"),
        ("--format pickle", "--format"),
        ("--symmetric --asymmetric", "not allowed with"),
        ("--bits-for head", "head"),
        ("--bits-for =4", "=4"),
        ("--bits-for head=many", "many"),
        ("--bits 4 --target-size 3MB", "--target-size"),
    ],
)
def test_export_bad_usage(
    export: FakeExport, checkpoint: Path, capsys: pytest.CaptureFixture[str], options: str, says: str
) -> None:
    assert main(["export", str(checkpoint), "out", *options.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
    assert export.calls == []


STORIES = "Once upon a time there was a little dog.<|endoftext|>\nShe said: the cat is not here, is it?\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, its 4-bit bundle and a text; temporary files are made in a folder of their own."""
    shutil.copytree(made(make_checkpoint_and_bundle), tmp_path, dirs_exist_ok=True)
    (tmp_path / "text").write_text(STORIES, "utf-8")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


def make_checkpoint_and_bundle(folder: Path) -> None:
    make_checkpoint(folder / "checkpoint", "llama")
    export_checkpoint(
        folder / "checkpoint", folder / "small", ExportConfig(bits=4, keep_small=False, calibration="none")
    )


def command(folder: Path, what: str, *more: str) -> list[str]:
    return ["eval", what, "-m", str(folder / "small"), "--text", str(folder / "text"), "-t", "1", *more]


def test_perplexity_needs_no_reference(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, "ppl", "--json")) == 0
    data = json.loads(capsys.readouterr().out)
    wanted = edgeinfer.evaluate(folder / "small", [text.strip() for text in STORIES.split("<|endoftext|>")], threads=1)
    assert data == wanted.to_dict()
    assert data["windows"] == 2
    check_recorded("eval", data, rel=2e-2, without=("model", "seconds"))
    assert main(command(folder, "ppl")) == 0
    out = capsys.readouterr().out
    assert f"{wanted.perplexity:.4f}" in out and "bits each" in out


@pytest.mark.parametrize(("what", "line"), [("kld", "p99"), pytest.param("agree", "likeliest", marks=pytest.mark.slow)])
def test_a_checkpoint_is_a_reference(folder: Path, capsys: pytest.CaptureFixture[str], what: str, line: str) -> None:
    reference = ("--reference", str(folder / "checkpoint"))
    assert main(command(folder, what, *reference)) == 0
    assert line in capsys.readouterr().out
    assert list((folder / "temporary").iterdir()) == []
    assert main(command(folder, what, *reference, "--json", "--top-k", "3")) == 0
    found = json.loads(capsys.readouterr().out)["divergence"]
    export_checkpoint(folder / "checkpoint", folder / "float", ExportConfig(bits=32))
    assert main(command(folder, what, "--reference", str(folder / "float"), "--json", "--top-k", "3")) == 0
    assert json.loads(capsys.readouterr().out)["divergence"] == found
    check_recorded(f"eval-{what}", found, rel=5e-2)
    assert found["top"] == 3 and 0 < found["mean"] < found["p99"] <= found["max"]


def test_texts_are_parted_as_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def windows(*more: str) -> int:
        assert main(command(folder, "ppl", "--json", *more)) == 0
        return int(json.loads(capsys.readouterr().out)["windows"])

    (folder / "text").write_text("one two\n\nthree four\n\nfive", "utf-8")
    assert [windows(), windows("--paragraphs"), windows("--separator", "two")] == [1, 3, 2]
    assert windows("--context", "8") > 1 and windows("--paragraphs", "--tokens", "4") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("kld",), 2, "--reference"),
        (("agree",), 2, "--reference"),
        (("ppl", "--separator", ""), 2, "separator"),
        (("ppl", "--top-k", "0"), 2, "nothing to measure"),
        (("ppl", "--threads", "0"), 2, "threads"),
        (("kld", "--reference", "nowhere"), 3, "nowhere"),
    ],
)
def test_wrong_options(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, said: str
) -> None:
    assert main(command(folder, *arguments)) == code
    assert said in capsys.readouterr().err


def test_an_empty_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "text").write_text(" \n", "utf-8")
    assert main(command(folder, "ppl")) == 2
    assert "no text" in capsys.readouterr().err


def test_interrupting_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        assert len(list((folder / "temporary").iterdir())) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(edgeinfer, "evaluate", interrupted)
    assert main(command(folder, "kld", "--reference", str(folder / "checkpoint"))) == 130
    assert list((folder / "temporary").iterdir()) == []


def test_methods_are_listed_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    assert main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    for kind in KINDS:
        assert tuple(method["name"] for method in listed[kind]) == all_methods(kind)
        assert all(f"{method['name']} " in text and method["help"] in text for method in listed[kind])
    (medusa,) = (method for method in listed["drafters"] if method["name"] == "medusa")
    assert medusa["research"] and not listed["drafters"][0]["research"]
