"""`bench compute`: figures of every policy, its floors, and the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.bench import compute
from edgeinfer.apps.bench.compute import ComputeBench, Point, compute_chart, measure_compute
from edgeinfer.apps.bench.texts import Material
from edgeinfer.apps.cli.main import main
from tests.compute import even_costs
from tests.speculation import random_bundle
from tests.tables import each_row

STORIES = tuple("Once upon a time there was a little dog. " * count + "She said: no." for count in (3, 4, 5))


def test_the_chart_has_points_that_diverge() -> None:
    whole = {"policy": "full", "level": "", "divergence": 0.0, "speedup": 1.0}
    early = {"policy": "exit", "level": "p 0.90", "divergence": 0.5, "speedup": 2.0}
    chart = compute_chart({"model": "m", "points": [whole, early]})
    assert [(line.name, line.points, line.marks) for line in chart.lines] == [("exit", ((2.0, 0.5),), ("p 0.90",))]


@pytest.fixture(scope="module", autouse=True)
def costs() -> Iterator[None]:
    with even_costs():
        yield


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    large = random_bundle(tmp_path_factory.mktemp("large"), num_hidden_layers=4, max_position_embeddings=256)
    return large, random_bundle(tmp_path_factory.mktemp("small"), seed=3, num_hidden_layers=2)


def test_every_policy_is_measured(bundles: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {"entropy": (0.0, 0.5), "calibrated": (1.3,), "exit": (0.02,)}
    few = {name: (compute.LEVELS[name][0], values, compute.LEVELS[name][2]) for name, values in levels.items()}
    monkeypatch.setattr(compute, "LEVELS", few)
    monkeypatch.setattr(compute, "_FLOORS", (1e-3, 90.0))
    large, small = bundles
    material = Material(STORIES[1:], STORIES[:1], (), "stories")
    with edgeinfer.load(large, draft_model=small, threads=1, remember=False) as model:
        found = measure_compute(ComputeBench(model, material, lambda stage: None), drafter="small")
    points = [Point(**each) for each in found["points"]]
    assert [each.policy for each in points] == ["full", "entropy", "entropy", "calibrated", "exit"]
    whole = points[0]
    assert whole.speedup == 1.0 and whole.divergence == 0 and whole.per_token_ms is not None
    for each in points[1:]:
        assert each.tokens == whole.tokens and each.reduced > 0 and each.divergence > 0
        assert each.speedup is not None and each.questions == 0
    assert {each["floor"] for each in found["floors"]} == {1e-3, 90.0}
    assert all(each["divergence"] <= each["floor"] and each["above"] == 0 for each in found["floors"])
    assert {each["policy"] for each in found["floors"]} == set(levels)


def test_the_command_writes_what_the_report_shows(
    bundles: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, chart, page = tmp_path / "compute.json", tmp_path / "chart.svg", tmp_path / "page.html"
    options = ["-m", str(bundles[0]), "-t", "1", "--quick", "--stories", "6", "--questions", "1"]
    assert main(["bench", "compute", *options, "--json", str(data), "--svg", str(chart)]) == 0
    found: dict[str, Any] = json.loads(data.read_text())
    assert found["benchmark"] == "compute" and found["drafter"] is None and "entropy" in found["skipped"]
    printed = capsys.readouterr().out
    assert "calibrated" in printed and "above the floor" in printed and chart.read_text().startswith("<svg")
    assert main(["bench", "report", str(data), "--out", str(page)]) == 0
    assert "What less compute costs" in page.read_text()


@each_row(("options", "message"), [(["--stories", "0"], "to read"), (["--json", "/nowhere/at/all.json"], "folder")])
def test_bad_input(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compute", *options]) != 0
    assert message in capsys.readouterr().err
