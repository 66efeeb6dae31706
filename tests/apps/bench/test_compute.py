"""`bench compute`: what is compared with what, which figures stand in its tables, and that it runs from end to end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.bench.compute import compute_chart, dominates, point_rows
from edgeinfer.apps.bench.compute_measure import ComputeMaterial, ComputeResults, Levels, Point, measure_compute
from edgeinfer.apps.bench.cost_expanded import TrainedCheckpoint, grown
from edgeinfer.apps.bench.model_files import expanded_bundle
from edgeinfer.apps.cli.main import main
from edgeinfer.errors import UsageError
from tests.apps.bench.here import exports_here
from tests.compute import even_costs
from tests.factories import make_checkpoint
from tests.recorded import check_recorded
from tests.speculation import random_bundle
from tests.tables import each_row

STORIES = tuple("Once upon a time there was a little dog. " * count + "She said: no." for count in (3, 4, 5))
LEVELS = Levels((0.0, 0.5), (1.3,), (0.02,), (1e-3, 90.0))
LLAMA: dict[str, Any] = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "silu"}


def point(policy: str, reduced: float, nats: float, **rest: Any) -> Point:
    return Point(policy, {}, reduced=reduced, divergence=nats, **rest)


def results(*points: Point) -> ComputeResults:
    return ComputeResults("m", "s", "text", points)


def test_entropy_is_compared_with_random_turns_at_its_share() -> None:
    found = results(
        point("full", 0.0, 0.0), point("entropy", 0.6, 0.2), point("entropy", 1.0, 0.8),
        point("random", 1.0, 0.8), point("random", 0.5, 0.3),
    )  # fmt: skip
    # Three fifths of what the small model alone diverges, whatever that one draw at half of the tokens gave.
    pairs = found.against_random()
    assert [pair["share"] for pair in pairs] == pytest.approx([0.4])
    assert pairs[0]["random"] == pytest.approx(0.48) and pairs[0]["entropy"] == 0.2
    assert dominates("entropy", pairs[0]) and not dominates("entropy", {"entropy": 0.5, "random": 0.48})


def test_calibrated_sets_are_compared_with_even_ones_level_by_level() -> None:
    even = [point("unified", 1.0, nats, predicted_speedup=faster) for nats, faster in ((0.5, 1.2), (0.9, 1.5))]
    found = [point("calibrated", 1.0, nats, predicted_speedup=faster) for nats, faster in ((0.3, 1.25), (1.0, 1.5))]
    pairs = results(*even, *found).against_even()
    assert [dominates("calibrated", pair) for pair in pairs] == [True, False]
    assert [pair["speedup"] for pair in pairs] == [1.2, 1.5]


def test_tables_and_chart() -> None:
    data = results(
        point("full", 0.0, 0.0, per_token_ms=2.0, speedup=1.0),
        Point("exit", {"compute": "exit", "exit_confidence": 0.9}, reduced=0.25, divergence=0.5, skipped=0.125,
              per_token_ms=1.0, speedup=2.0, right=3, questions=4),
    ).to_dict()  # fmt: skip
    rows = point_rows(data["points"])
    assert rows[1] == ("exit", "p 0.90", "0.5000", "0.000", "75%", "12%", "", "1.000", "2.00x", "3/4")
    assert rows[0][-1] == ""
    chart = compute_chart(data)
    assert [(line.name, line.points) for line in chart.lines] == [("exit", ((2.0, 0.5),))]
    check_recorded("bench-compute", {name: part for name, part in data.items() if name != "environment"})


@pytest.fixture(scope="module", autouse=True)
def costs() -> Iterator[None]:
    with even_costs():
        yield


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    large = random_bundle(tmp_path_factory.mktemp("large"), num_hidden_layers=4, max_position_embeddings=256)
    return large, random_bundle(tmp_path_factory.mktemp("small"), seed=3, num_hidden_layers=2)


def test_every_policy_is_measured(bundles: tuple[Path, Path]) -> None:
    large, small = bundles
    material = ComputeMaterial(STORIES[1:], STORIES[:1], (), "stories")
    with edgeinfer.load(large, draft_model=small, threads=1, remember=False) as model:
        found = measure_compute(model, material, LEVELS, drafter="small", evaluations=20, repeats=1)
    policies = [each.policy for each in found.points]
    assert policies == ["full", "entropy", "entropy", "random", "random", "unified", "calibrated", "importance", "exit"]
    assert list(found.skipped) == ["routers"]
    whole = found.points[0]
    assert whole.speedup == 1.0 and whole.divergence == 0 and whole.per_token_ms is not None
    for each in found.points[1:]:
        assert each.tokens == whole.tokens and each.reduced > 0 and each.divergence > 0
        assert each.speedup is not None and each.questions == 0
    # Without any of the large model's tokens, whose turn it is makes no difference.
    assert found.of("entropy")[0].divergence == pytest.approx(found.of("random")[0].divergence)
    even, calibrated = found.of("unified")[0], found.of("calibrated")[0]
    assert even.predicted_speedup is not None and calibrated.predicted_speedup is not None
    assert calibrated.predicted_speedup >= even.predicted_speedup * (1 - 1e-6)
    assert {each.floor for each in found.floored} == {1e-3, 90.0}
    assert all(each.divergence <= each.floor and each.above == 0 for each in found.floored)
    assert {each.policy for each in found.floored} == {"entropy", "unified", "calibrated", "importance", "exit"}


def check_command(bundle: Path, folder: Path) -> dict[str, Any]:
    """Runs the command and the report, and gives the figures."""
    data, chart, page = folder / "compute.json", folder / "chart.svg", folder / "page.html"
    options = ["-m", str(bundle), "-t", "1", "--quick", "--stories", "6", "--questions", "1"]
    assert main(["bench", "compute", *options, "--json", str(data), "--svg", str(chart)]) == 0
    found: dict[str, Any] = json.loads(data.read_text())
    assert found["benchmark"] == "compute" and found["expanded"] is None
    assert chart.read_text().startswith("<svg")
    assert main(["bench", "report", str(data), "--out", str(page)]) == 0
    assert "What less compute costs" in page.read_text()
    return found


def test_the_command_writes_what_the_report_shows(
    bundles: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exits = [point("exit", 0.5, nats, per_token_ms=1.0, speedup=2.0) for nats in (0.25, 0.5)]
    known = results(point("full", 0.0, 0.0, per_token_ms=2.0, speedup=1.0), *exits)

    def measure(model: edgeinfer.Model, material: ComputeMaterial, *_: Any, **__: Any) -> ComputeResults:
        assert material.stories and not {*material.stories} & {*material.calibration}
        assert material.questions
        return known

    monkeypatch.setattr("edgeinfer.apps.bench.compute.measure_compute", measure)
    found = check_command(bundles[0], tmp_path)
    assert [each["divergence"] for each in found["points"]] == [0.0, 0.25, 0.5]
    assert "exit" in capsys.readouterr().out


def test_the_command_measures(bundles: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command(bundles[0], tmp_path)["drafter"] is None
    printed = capsys.readouterr().out
    assert "calibrated" in printed and "above the floor" in printed and "entropy" not in printed


def test_expanded_models_compute_what_the_small_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exports_here(monkeypatch, "model_files")
    make_checkpoint(tmp_path / "small", "Llama", **LLAMA)
    bundle = expanded_bundle(tmp_path / "small", 2, tmp_path / "work")
    assert expanded_bundle(tmp_path / "small", 2, tmp_path / "work") == bundle
    shape = TrainedCheckpoint(tmp_path / "small").shape
    assert grown(shape, 2).layers == 2 * shape.layers and grown(shape, 2).hidden == 2 * shape.hidden
    with edgeinfer.load(bundle, threads=1, speculation="off", remember=False) as model:
        tokens = [5, 17, 80, 3, 44]
        assert model.info.parameters > 4 * shape.parameters
        logits = np.concatenate([rows.copy() for rows in model.logits(tokens)])
        assert logits.shape[1] == shape.vocab_size
    with pytest.raises(UsageError, match="by 1"):
        grown(shape, 1)


@each_row(
    ("options", "message"),
    [
        (["--expand", "4"], "--expand needs a checkpoint"),
        (["--checkpoint", "x", "--expand", "4", "-m", "y"], "cannot be expanded"),
        (["--stories", "0"], "something to read"),
        (["--json", "/nowhere/at/all.json"], "no such folder"),
    ],
)
def test_what_cannot_be_measured(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compute", *options]) != 0
    assert message in capsys.readouterr().err
