"""`edgeinfer export`, `inspect`, `plan` and `pull`: arguments, output and exit codes."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle import Capabilities, Geometry, Manifest, open_bundle, seal
from edgeinfer.bundle.plan_record import PlannedTensor, PlanRecord
from edgeinfer.drafting import drafters_in
from edgeinfer.errors import CheckpointError, HubError
from edgeinfer.runtime.planning.configuration import Configuration, Footprint
from edgeinfer.runtime.planning.curve import BudgetPoint, SpeedCurve
from edgeinfer.runtime.planning.plan import Alternative, MemoryPlan
from edgeinfer.runtime.planning.speed_model import Speed
from tests.recorded import check_recorded
from tests.tables import each_row

Progress = Callable[[str, int, int], None] | None


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
        quality={"perplexity": 3.25},
    )
    seal(root, manifest)
    return root


def test_inspect_prints_the_plan(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle)]) == 0
    assert "predicted KL" not in capsys.readouterr().out
    manifest = open_bundle(bundle).manifest
    planned = (
        PlannedTensor("layers.0.mlp.down", 4, 32, predicted_kl=0.25),
        PlannedTensor("layers.1.mlp.down", 8, 64, predicted_kl=0.125),
        PlannedTensor("embed", 32),
    )
    record = PlanRecord("gptq", planned, "0" * 64, 4096, 2_000_000)
    (bundle / "edgeinfer.json").write_text(dataclasses.replace(manifest, plan=record).to_json())
    assert main(["inspect", str(bundle)]) == 0
    out = capsys.readouterr().out
    for fact in ("layers.*.mlp.down", "4 (1), 8 (1)", "0.375", "gptq, calibrated on 4,096 tokens", "2.0 MB"):
        assert fact in out
    check_recorded("cli-inspect", out.splitlines()[1:])
    assert main(["inspect", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["tensors"][1]["bits"] == 8


def test_inspect_prints_the_facts(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle)]) == 0
    out, err = capsys.readouterr()
    for fact in (
        "toy",
        "llama",
        "4,096",
        "2.0 KB",
        "bytes per token in float32; types float32",
        "layer skipping, early exit",
        "3.25",
    ):
        assert fact in out
    assert "draft trees" not in out
    assert err == ""
    rows = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line}
    assert (rows["bits"], rows["symmetric"], rows["head_bits"]) == ("4", "no", "none")


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


@pytest.mark.parametrize("text", ["", "{}", "[]", "{", '{"format": "edgeinfer-bundle", "format_version": 99}', "\xff"])
def test_inspect_of_a_malformed_manifest(bundle: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (bundle / "edgeinfer.json").write_text(text, "latin-1")
    assert main(["inspect", str(bundle)]) == 3
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_inspect_lists_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    builtin = Path(edgeinfer.__file__).parent / "builtin" / "tales"
    if not (builtin / "edgeinfer.json").is_file():
        pytest.skip("the built-in model has not been made")
    assert main(["inspect", "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "layers.0.attn.qkv" in out


def fake_plan(budget: int | None) -> MemoryPlan:
    """What edgeinfer.plan returns, of 300 MB."""
    chosen = Configuration(2048, 64, "int8", "mapped", 0, drafters_in("auto"), 7, "kept")
    footprint = Footprint({"kv_cache": 50_000_000, "weights": 50_000_000, "loading": 0}, {"weights": 200_000_000})
    return MemoryPlan(
        configuration=chosen,
        layout="native",
        overflow="stop",
        prefix_cache=0,
        budget_bytes=budget,
        counted="resident",
        footprint=footprint,
        speed=Speed(12.34, 1000.0, False),
        minimum_bytes=200_000_000,
        given_up=("drafts of 7 tokens at most instead of 15",),
        alternatives=(Alternative("float32 KV cache", chosen, 700_000_000, False, Speed(15.6, 900.0, False)),),
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
    return calls


def test_plan(planned: list[tuple[Any, dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-m", "toy", "--memory", "600MB", "-c", "1024"]) == 0
    assert planned == [("toy", {"memory": 600_000_000, "context": 1024})]
    out = capsys.readouterr().out
    for line in (
        "Fits in 600 MB: needs 300.0 MB, about 12.3 tokens/s, context 2048.",
        "Given up to fit: drafts of 7 tokens",
        "weights   250.0 MB",
        "total     300.0 MB",
        "this plan         300.0 MB  ~12.3",
        "float32 KV cache  700.0 MB  ~15.6, does not fit",
        "Speeds are estimates until",
    ):
        assert line in out
    assert "working memory" not in out and "mapped from files" not in out
    assert main(["plan", "-m", "toy", "-v", "--curve"]) == 0
    verbose = capsys.readouterr().out
    assert "Drafting is faster than plain decoding from 250.0 MB on." in verbose
    assert "95% of the best speed needs 280.0 MB." in verbose
    bars = [line.count("#") for line in verbose.splitlines() if "#" in line]
    assert bars == [26, 32, 40]
    assert "weights   250.0 MB  partly mapped from files" in verbose
    check_recorded("cli-plan", out.splitlines() + verbose.splitlines())


def test_plan_options(planned: list[tuple[Any, dict[str, Any]]]) -> None:
    line = "plan --no-native --spec copy,model --draft-model small --spec-draft-n-max 5"
    assert main(line.split()) == 0
    drafting = {"speculation": "copy,model", "draft_model": "small", "draft_max": 5}
    assert planned == [(None, {"native": False} | drafting)]


def test_plan_that_does_not_fit(planned: list[tuple[Any, dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "100MB", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_plan_without_a_budget(planned: list[tuple[Any, dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    assert "\nbudget " not in capsys.readouterr().out
    line = (
        "plan --kv int8 --overflow window --weights streamed --counted anonymous --prefill-chunk 8 --prefix-cache 2MB"
    )
    assert main(line.split()) == 0
    options = {"kv": "int8", "overflow": "window", "weights": "streamed", "counted": "anonymous"}
    assert planned[-1] == (None, options | {"prefill_chunk": 8, "prefix_cache": 2_000_000})


def test_pull(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def update(name: str, *, revision: str | None, bits: int | None, **_: Any) -> Path:
        calls.append((name, revision, bits))
        return bundle

    monkeypatch.setattr(hub, "update", update)
    monkeypatch.setattr(hub, "local", lambda name: bundle)
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


def test_pull_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def update(name: str, **options: Any) -> Path:
        raise HubError("You are offline.", "Go online.")

    monkeypatch.setattr(hub, "update", update)
    assert main(["pull", "org/name"]) == 3
    assert capsys.readouterr().err == "error: You are offline. Go online.\n"


@dataclass(frozen=True)
class FakeExportConfig:
    """The options the command can set."""

    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    head_bits: int | None = None
    layout: str = "native"
    exporter: str = "native"
    name: str | None = None
    force: bool = False
    keep_small: bool = True
    method: str | None = None
    calibration: Path | None = None
    calibration_tokens: int = 0
    budget_bits: float | None = None
    target_size: int | None = None
    bits_for: tuple[tuple[str, int], ...] = ()
    static: object | None = None


class FakeExport(ModuleType):
    """Stands for edgeinfer.export, whose libraries need not be installed here."""

    ExportConfig = FakeExportConfig

    def __init__(self) -> None:
        super().__init__("edgeinfer.export")
        self.calls: list[tuple[Path, Path, FakeExportConfig]] = []
        self.fails: BaseException | None = None

    def export_checkpoint(self, source: Path, out: Path, config: FakeExportConfig, progress: Progress) -> Path:
        self.calls.append((source, out, config))
        if self.fails is not None:
            raise self.fails
        out.mkdir()
        (out / "weights.bin").write_bytes(b"w" * 1500)
        return out


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch) -> FakeExport:
    fake = FakeExport()
    monkeypatch.setitem(sys.modules, "edgeinfer.export", fake)
    return fake


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    return path


def test_export(export: FakeExport, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", str(checkpoint), str(out)]) == 0
    assert export.calls == [(checkpoint, out, FakeExportConfig())]
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert "1.5 KB" in stderr
    assert f"edgeinfer run -m {out}" in stderr


def test_export_options(
    export: FakeExport, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--bits 8 --group-size 64 --symmetric --head-bits 8 --portable --exporter optimum --name toy --force --json"
    assert main(["export", str(checkpoint), str(tmp_path / "out"), *line.split()]) == 0
    assert export.calls[0][2] == FakeExportConfig(8, 64, True, 8, "portable", "optimum", "toy", True)
    data = json.loads(capsys.readouterr().out)
    assert data["bytes"] == 1500
    assert data["bundle"] == str(tmp_path / "out")


@pytest.mark.parametrize("option", ["--no-kv-scales", "--kv-calibration a.txt"])
def test_export_says_that_caches_need_no_calibration(
    export: FakeExport, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main(["export", str(checkpoint), str(tmp_path / "out"), *option.split()]) == 0
    assert f"{option.split()[0]} has no effect" in capsys.readouterr().err
    assert export.calls == [(checkpoint, tmp_path / "out", FakeExportConfig())]


def test_export_options_of_bits(export: FakeExport, checkpoint: Path, tmp_path: Path) -> None:
    line = "--budget-bits 3.5 --bits-for layers.*.down=8 --bits-for head=4 --method gptq --calibration a.txt"
    assert main(["export", str(checkpoint), str(tmp_path / "out"), *line.split(), "--calibration-tokens", "512"]) == 0
    config = export.calls[0][2]
    assert (config.budget_bits, config.method, config.calibration_tokens) == (3.5, "gptq", 512)
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


@pytest.mark.parametrize("library", ["onnx", "safetensors", "ml_dtypes"])
def test_export_without_its_libraries(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library: str
) -> None:
    class Missing:
        """An import of edgeinfer.export that finds a library absent."""

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "edgeinfer.export":
                raise ModuleNotFoundError(f"No module named {library!r}", name=library)

    for name in [name for name in sys.modules if name.partition(".export")[:2] == ("edgeinfer", ".export")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    assert main(["export", str(checkpoint), "out"]) == 2
    assert "pip install 'edgeinfer[export]'" in capsys.readouterr().err


@each_row(
    ("options", "says"),
    [
        ("--bits 5", "--bits"),
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


def test_export_of_a_source_that_is_not_there(export: FakeExport, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "no-such-checkpoint", "out"]) == 3
    assert capsys.readouterr().err.startswith("error: No model at 'no-such-checkpoint'")
    assert export.calls == []
