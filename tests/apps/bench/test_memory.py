"""Memory: random plans, budgets and quantized caches, and the work of their processes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.bench import memory, memory_plans
from edgeinfer.apps.bench.jobs import fill_context
from edgeinfer.apps.bench.memory import Point, Smallest, SmallestOptions, keeps, smallest_section
from edgeinfer.apps.bench.memory_plans import (
    PlanCase,
    PlannedModel,
    draw_cases,
    find_subjects,
    plans_json,
    plans_section,
)
from edgeinfer.apps.bench.render import print_section
from edgeinfer.apps.cli.main import main
from edgeinfer.core.errors import UsageError
from edgeinfer.hub import resolve
from tests.apps.bench.here import watch_here
from tests.factories import make_bigram_bundle

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
BUILTIN = PlannedModel("built-in", str(resolve(None)), 5_000_000, 1024, "x", (str(resolve(None)),))
STORIES = ["Once upon a time there was a little dog.", "She said: the cat is not here, is it?"]


def plan_run(measured: int, outcome: str = "kept", reason: str = "") -> dict[str, Any]:
    case = dataclasses.asdict(PlanCase(0, BUILTIN, 1.0, 0, 1, False, {"counted": "resident"}))
    case["subject"]["model"] = "BUNDLE"
    details = {"choice": {"kv": "float32", "weights": "mapped"}, "anonymous": {"kv": 5}, "file": {}, "used": {"kv": 4}}
    sizes = {"planned": 90, "budget": 100, "peak_rss": measured, "measured": measured, "times_full": 0}
    found = {"case": case, "enforced": "none", "counted": "resident", "details": details}
    return found | sizes | {"outcome": outcome, "reason": reason}


def test_every_plan_that_was_not_kept_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [plan_run(80), plan_run(95, "exceeded"), plan_run(0, "refused", "too small")]
    data = json.loads(json.dumps(plans_json(1, runs)))
    assert data["outcomes"] == {"kept": 1, "exceeded": 1, "refused": 1, "failed": 0, "killed": 0}
    assert data["gap"]["median"] == pytest.approx(0.025)
    print_section(plans_section(data))
    shown = capsys.readouterr().out
    assert "too small" in shown and "exceeded: built-in" in shown


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options that plans were made for; plans for the smallest context are refused."""
    asked: list[dict[str, Any]] = []

    def plan(model: str, **options: Any) -> None:
        asked.append(options)
        if options["context"] == 64:
            raise UsageError("No.")

    monkeypatch.setattr(edgeinfer, "plan", plan)
    return asked


def test_draws_repeat_and_leave_out_refused_options(planned: list[dict[str, Any]]) -> None:
    first, again = (list(draw_cases([BUILTIN], 30, 5)) for _ in range(2))
    assert first == again and list(draw_cases([BUILTIN], 1, 6)) != first[:1]
    assert [case.number for case in first] == list(range(30))
    assert all(1.0 <= case.slack <= 1.6 for case in first)
    for option, values in {"speculation": 4, "context": 3, "counted": 2, "threads": 2}.items():
        assert len({case.options[option] for case in first}) >= values
    assert any(options["context"] == 64 for options in planned)
    assert not any(case.options["context"] == 64 for case in first)
    large = dataclasses.replace(BUILTIN, name="large", parameters=1_500_000_000, mates=())
    larger = [case for case in draw_cases([BUILTIN, large], 90, 0) if case.subject is large]
    assert 0 < len(larger) < 90 / 4 and not any("draft_model" in case.options for case in larger)


def test_models_draft_for_models_with_their_tokenizer(tmp_path: Path) -> None:
    other = make_bigram_bundle(tmp_path / "bigrams")
    builtin, bigrams = find_subjects([resolve(None), other])
    assert builtin.mates == (str(resolve(None)),) and builtin.longest > 500
    assert bigrams.name == "bigrams" and str(other) in bigrams.mates


def _plans(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "plans.json"
    code = main(["bench", "memory", "plans", "--runs", "2", "--json", str(out), *options])
    return code, json.loads(out.read_text())


def test_plans_are_compared_with_measured_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.9, 1.1])
    monkeypatch.setattr(memory_plans, "watch", watch_here(lambda found: round(next(shares) * found["planned"])))
    # Draws short contexts, which are soon filled.
    code, data = _plans(tmp_path, "--no-limits", "--seed", "51")
    assert [run["budget"] >= run["planned"] > 0 for run in data["runs"]] == [True, True]
    for run, share in zip(data["runs"], (0.9, 1.1), strict=True):
        # Of anonymous memory there was half as much.
        counted = share if run["counted"] == "resident" else share / 2
        assert run["measured"] == pytest.approx(counted * run["planned"], abs=1)
        assert run["outcome"] == ("kept" if counted < 1 else "exceeded") and run["enforced"] == "none"
    assert code == (0 if data["outcomes"]["kept"] == 2 else 1)


def test_the_context_is_filled_to_its_end() -> None:
    with edgeinfer.load(context=64, threads=1, speculation="copy", remember=False) as model:
        filled = fill_context(model, seed=3)
        assert filled["tokens"] == 65 and filled["peak_rss_bytes"] > 0 and filled["used"]["kv"] > 0
    with edgeinfer.load(context=64, threads=1, overflow="window", speculation="off", remember=False) as model:
        assert fill_context(model, seed=3, beyond=True)["tokens"] > 75


def point(budget: int, short: float, deep: float, reason: str = "") -> Point:
    found = {"planned": budget, "plan_given_up": ["the prompt in one pass"], "given_up": []}
    run = {"reason": reason, "peak_rss": 150, "peak_anonymous": 50, "found": found}
    shares = {"short_share": short / 30, "deep_share": deep / 20}
    return {"budget": budget, "reason": reason, "runs": [run], "short_speed": short, "deep_speed": deep, **shares}


def test_the_smallest_budget_has_to_keep_both_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    points = [point(400, 30, 20), point(300, 29, 19.5), point(200, 29, 15), point(100, 0, 0, "refused")]
    assert [keeps(each) for each in points] == [True, True, False, False]
    print_section(smallest_section({"model": "m", "context": 2048, "points": points}))
    assert "Smallest budget with 95% of the best speed: 300 B; at all: 200 B." in capsys.readouterr().out


def test_budgets_are_halved_towards_the_smallest_that_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Smallest, budget: int) -> dict[str, Any]:
        ms = 1.0 if budget >= 240 else 10.0
        return {"reason": "", "found": {"ms_per_token": [ms, ms]}}

    monkeypatch.setattr(Smallest, "_run", run)
    monkeypatch.setattr(memory, "run_job", lambda *_: {"planned": 400 / 1.02, "minimum": 100})
    smallest = Smallest(str(resolve(None)), {"context": 384}, SmallestOptions(steps=2, rounds=1, halvings=3))
    points = smallest.measure(lambda done, total: None)
    assert [each["budget"] for each in points] == [400, 250, 212, 175, 100]
    assert [keeps(each) for each in points] == [True, True, False, False, False]


@linux_only
@pytest.mark.slow
def test_budgets_in_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    sizes = ["--steps", "2", "--rounds", "1", "--halvings", "0", "-t", "1", "-c", "384", "--speculation", "copy"]
    assert main(["bench", "memory", "smallest", *sizes, "--json", str(out)]) == 0
    first, last = json.loads(out.read_text())["points"]
    assert first["budget"] > last["budget"] and first["runs"][0]["peak_rss"] > 10e6
    assert "Smallest budget with 95% of the best speed" in capsys.readouterr().out
    assert main(["bench", "memory", "smallest", "-c", "128"]) == 2
