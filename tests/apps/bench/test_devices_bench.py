"""`bench devices`: what counts as passed, what becomes of a device that fails, and the table of where it was run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.bench import devices, jobs
from edgeinfer.apps.bench.devices import devices_table, find_targets, judged
from edgeinfer.apps.bench.processes import Finished
from edgeinfer.apps.cli.main import main
from edgeinfer.core.errors import UsageError
from tests.apps.bench.here import watch_here
from tests.devices import install, lacking
from tests.speculation import needs_builtin
from tests.tables import each_row

FOUND = {"divergence": 0.001, "agreement": 0.99, "replied": 72, "replied_same": 60}
FOUND |= {"prompt_per_second": 100.0, "reply_per_second": 50.0}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One story of few tokens."""
    for name, value in (("_CONTEXT", 48), ("_STORIES", 1), ("_COMPARED_TOKENS", 6)):
        monkeypatch.setattr(jobs, name, value)
    for name in ("_TIMED_PROMPT", "_TIMED_REPLY"):
        monkeypatch.setattr(jobs, name, 4)


@needs_builtin
@each_row("traits", [None, {"dynamic_shapes": False}])
def test_a_device_says_what_the_reference_says(
    traits: dict[str, bool] | None, short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, lacking(**(traits or {})), automatic=False)
    monkeypatch.setattr(devices, "watch", watch_here(lambda found: 50_000_000))
    file = tmp_path / "here.json"
    assert main(["bench", "devices", "--devices", "standin", "-r", "1", "--json", str(file)]) == 0
    (run,) = json.loads(file.read_text("utf-8"))["runs"]
    assert run["files"] == ("static" if traits else "bundle") and run["found"]["device"] == "standin"
    assert run["same_predictions"] and run["passed"] and run["within_budget"] is None
    assert run["found"]["divergence"] < 1e-3 and run["found"]["read"] > 20
    assert run["found"]["replied_same"] == run["found"]["replied"] == 6
    assert run["memory"]["tokens"] > 40
    table = devices_table(tmp_path)
    assert "standin" in table and "same, " in table and "6 of 6 tokens" in table


def test_the_processor_is_run_on_every_path_of_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.tools.devices._kernels", lambda: ("neon", "portable"))
    targets = {target.name: target for target in find_targets()}
    assert targets["cpu:neon"].environment == {"EDGEINFER_NATIVE_ISA": "neon"}
    assert targets["cpu:onnxruntime"].environment == {"EDGEINFER_NATIVE": "0"}
    assert [target.name for target in find_targets(["cpu:portable"])] == ["cpu:portable"]
    with pytest.raises(UsageError, match=r"no device 'npu' here.*cpu:neon"):
        find_targets(["npu"])


@each_row(
    ("found", "memory", "passed"),
    [
        ({}, {"budget": 100, "peak_rss_bytes": 100}, True),
        ({}, {"budget": None, "peak_rss_bytes": 100}, True),
        ({}, {"budget": 99, "peak_rss_bytes": 100}, False),
        ({"divergence": 0.1}, {"budget": None, "peak_rss_bytes": 1}, False),
        ({"divergence": float("nan")}, {"budget": None, "peak_rss_bytes": 1}, False),
        ({"agreement": 0.5}, {"budget": None, "peak_rss_bytes": 1}, False),
    ],
)
def test_what_passes(found: dict[str, Any], memory: dict[str, Any], passed: bool) -> None:
    assert judged({"error": "", "found": FOUND | found, "memory": memory})["passed"] is passed


@needs_builtin
def test_a_driver_that_ends_the_process_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgeinfer.tools.devices._kernels", tuple)
    install(monkeypatch, lacking(), automatic=False)
    asked: list[Any] = []

    def watch(command: list[str], environment: dict[str, str], seconds: float) -> Finished:
        asked.append(json.loads(command[-1])["device"])
        return Finished(-11, "Segmentation fault")

    monkeypatch.setattr(devices, "watch", watch)
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert main(["bench", "devices", "--json", str(tmp_path / "here.json")]) == 1
    assert asked == ["standin", "cpu"]
    assert capsys.readouterr().out.count("failed: Segmentation fault") == 2
    assert devices_table(tmp_path).count("failed: Segmentation fault") == 2


def test_a_driver_that_fails_later_has_told_its_predictions(tmp_path: Path) -> None:
    run = judged({"name": "CUDA0", "files": "gguf", "error": "segmentation fault", "found": FOUND, "memory": {}})
    assert not run["passed"]
    machine = {"processor": "Processor", "system": "Linux 6"}
    data = {"environment": machine, "accelerators": ["NVIDIA H200"], "runs": [run]}
    (tmp_path / "here.json").write_text(json.dumps(data), "utf-8")
    row = [cell.strip() for cell in devices_table(tmp_path).splitlines()[-1].split("|")]
    assert row[2] == "Processor, NVIDIA H200, Linux"
    assert row[4:7] == ["same, 99.0%", "60 of 72 tokens", "failed: segmentation fault"]
