"""Memory of plans and chats: what is drawn, what counts as kept, enforced limits, and the commands on a tiny model."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.bench import memory, memory_plans, memory_timed
from edgeinfer.apps.bench.enforced import Enclosure, enclosure
from edgeinfer.apps.bench.memory_jobs import chat_loop, fill_context
from edgeinfer.apps.bench.memory_plans import PlanCase, PlannedModel, PlanRun, PlansResults, draw_cases, find_subjects
from edgeinfer.apps.bench.memory_sections import chat_section, plans_section
from edgeinfer.apps.bench.memory_timed import ChatResults
from edgeinfer.apps.bench.render import print_section, section_markdown
from edgeinfer.apps.bench.watch import Growth, watch
from edgeinfer.apps.cli.main import main
from edgeinfer.errors import UsageError
from edgeinfer.hub import resolve
from tests.apps.bench.here import exports_here, watch_here
from tests.recorded import check_recorded
from tests.tables import each_row

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
BUILTIN = PlannedModel("built-in", str(resolve(None)), 5_000_000, 1024, "built-in", (str(resolve(None)),))


def plan_run(measured: int, *, planned: int = 90, counted: str = "resident", **more: Any) -> PlanRun:
    case = PlanCase(0, BUILTIN, 1.0, 0, 1, False, {"counted": counted})
    details = {"choice": {"kv": "float32", "weights": "mapped"}, "anonymous": {"kv": 5}, "file": {}, "used": {"kv": 4}}
    sizes = {"peak_rss": measured} if counted == "resident" else {"peak_anonymous": measured, "peak_rss": 1000}
    return PlanRun(
        case, "none", **{"ended": "ran", "planned": planned, "budget": 100, "details": details, **sizes, **more}
    )


@each_row("counted", ["resident", "anonymous"])
def test_a_plan_is_kept_if_no_more_of_what_counts_was_taken(counted: str) -> None:
    assert plan_run(90, counted=counted).outcome == "kept"
    assert plan_run(91, counted=counted).outcome == "exceeded"
    assert plan_run(80, counted=counted).gap == pytest.approx(0.1)
    assert plan_run(0, ended="killed").outcome == "killed"


def test_results_name_every_plan_that_was_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    refused = dataclasses.replace(plan_run(0), ended="refused", reason="too small")
    results = PlansResults(1, (plan_run(80), plan_run(95), refused))
    print_section(plans_section(results.to_dict()))
    shown = capsys.readouterr().out
    assert "3 plans: 1 kept, 1 exceeded, 1 refused, 0 failed, 0 killed" in shown
    assert "too small" in shown and "exceeded: built-in" in shown
    check_recorded("bench-plans", section_markdown(plans_section(results.to_dict())).splitlines())
    data = json.loads(json.dumps(results.to_dict()))
    assert data["outcomes"]["kept"] == 1
    assert data["gap"]["median"] == pytest.approx(0.025)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What plans were asked for; those with the smallest context cannot be had."""
    asked: list[dict[str, Any]] = []

    def plan(model: str, **options: Any) -> None:
        asked.append(options)
        if options["context"] == 64:
            raise UsageError("No.")

    monkeypatch.setattr(edgeinfer, "plan", plan)
    return asked


def test_draws_repeat_and_leave_out_what_cannot_be_had(planned: list[dict[str, Any]]) -> None:
    first, again = (list(draw_cases([BUILTIN], 30, 5)) for _ in range(2))
    assert first == again
    assert list(draw_cases([BUILTIN], 1, 6)) != first[:1]
    assert [case.number for case in first] == list(range(30))
    assert all(1.0 <= case.slack <= 1.6 for case in first)
    for option, values in {"speculation": 4, "context": 3, "counted": 2, "threads": 2}.items():
        assert len({case.options[option] for case in first}) >= values
    assert any(options["context"] == 64 for options in planned)
    assert not any(case.options["context"] == 64 for case in first)


def test_draws_of_which_none_can_be_had_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(model: str, **options: Any) -> None:
        raise UsageError("No.")

    monkeypatch.setattr(edgeinfer, "plan", plan)
    with pytest.raises(UsageError, match=r"No\."):
        list(draw_cases([BUILTIN], 1, 0))


@pytest.mark.slow
def test_what_is_drawn_can_be_planned() -> None:
    for case in draw_cases([BUILTIN], 6, 5):
        plan = edgeinfer.plan(case.subject.model, **case.options)
        assert plan.minimum_bytes > 0


@pytest.mark.usefixtures("planned")
def test_larger_models_are_drawn_less_often() -> None:
    large = dataclasses.replace(BUILTIN, name="large", parameters=1_500_000_000, mates=())
    drawn = list(draw_cases([BUILTIN, large], 90, 0))
    larger = [case for case in drawn if case.subject is large]
    assert 0 < len(larger) < len(drawn) / 4
    assert not any("draft_model" in case.options for case in larger)


def test_the_context_is_filled_to_its_end() -> None:
    with edgeinfer.load(context=64, threads=1, speculation="copy", remember=False) as model:
        filled = fill_context(model, seed=3)
        assert filled.tokens == 65
        assert filled.peak_rss_bytes > 0 and filled.used["kv"] > 0
    with edgeinfer.load(context=64, threads=1, overflow="window", speculation="off", remember=False) as model:
        assert fill_context(model, seed=3, beyond=True).tokens > 75


def test_chats_begin_again_before_the_context_is_full() -> None:
    with edgeinfer.load(context=256, threads=1, speculation="off", prefix_cache="1MB", remember=False) as model:
        peaks = chat_loop(model, 14, reply_tokens=8)
    assert len(peaks) == 14 and min(peaks) > 10e6


def test_growth_is_counted_from_the_warm_turns_on() -> None:
    assert ChatResults((50, *[100] * 10, 100), 200, 64).flat
    assert not ChatResults((*[100] * 10, 102), 200, 64).flat


@linux_only
def test_growth_is_what_the_process_took_and_gave_back() -> None:
    growth = Growth()
    np.ones(4_000_000)  # touched, and freed at once
    assert 31e6 <= growth.bytes() < 40e6
    assert growth.peak_before > 0


def test_peaks_of_a_chat_stand_beside_their_turns(capsys: pytest.CaptureFixture[str]) -> None:
    print_section(chat_section(ChatResults(tuple(1000 * turn for turn in range(1, 21)), 200, 64).to_dict()))
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for turn in (1, 5, 10, 15, 20):
        assert [str(turn), f"{turn}.0", "KB"] in printed


@linux_only
@pytest.mark.parametrize("kind", ["cgroup", "rlimit"])
def test_limits_are_enforced(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "grow.py"
    script.write_text(
        "import json, sys\nfrom edgeinfer.apps.bench.enforced import set_limit\n"
        "set_limit(json.loads(sys.argv[1]), 60_000_000)\nblock = bytearray(int(sys.argv[2]))\n"
    )
    with enclosure() as place:
        if kind == "cgroup" and place.kind != kind:
            pytest.skip("no control group can be made here")
        place = place if kind == "cgroup" else Enclosure("rlimit")
        codes = []
        for size in (1_000_000, 200_000_000):
            command = [sys.executable, str(script), json.dumps(place.limit), str(size)]
            codes.append(watch(place.command(command), dict(os.environ)).returncode)
        assert codes[0] == 0 and codes[1] != 0
        if kind == "cgroup":
            assert place.killed() and place.times_full() > 0
            group = place.group
    assert kind != "cgroup" or (group is not None and not group.exists())


def _plans(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and results of two plans."""
    out = tmp_path / "plans.json"
    arguments = ["bench", "memory", "plans", "--runs", "2", "--shapes", "tiny", "--work", str(tmp_path)]
    code = main([*arguments, "--json", str(out), "--seed", "1", *options])
    return code, json.loads(out.read_text())


def test_plans_are_run_and_compared_with_what_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="needs the export extra")
    exports_here(monkeypatch, "model_files")
    shares = iter([0.9, 1.1])
    monkeypatch.setattr(memory_plans, "watch", watch_here(lambda found: round(next(shares) * found["planned"])))
    # Draws short contexts, which are soon filled.
    code, data = _plans(tmp_path, "--no-limits", "--seed", "51")
    assert code == 1
    assert [run["outcome"] for run in data["runs"]] == ["kept", "exceeded"]
    for run, share in zip(data["runs"], (0.9, 1.1), strict=True):
        assert run["budget"] >= run["planned"] > 0
        # Of anonymous memory there was half as much.
        counted = share if run["counted"] == "resident" else share / 2
        assert run["enforced"] == "none" and run["measured"] == pytest.approx(counted * run["planned"], abs=1)


@each_row(("measured", "code"), [((80, 90), 0), ((80, 95), 1)])
def test_the_code_says_whether_all_plans_were_kept(
    measured: tuple[int, int], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plans, "run_cases", lambda cases, enforce: map(plan_run, measured))
    monkeypatch.setattr(memory, "find_subjects", lambda *_: [BUILTIN])
    found, data = _plans(tmp_path)
    assert (found, len(data["runs"])) == (code, 2)


@pytest.mark.usefixtures("planned")
def test_plans_go_on_at_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[PlanCase] = []

    def run_cases(cases: Iterable[PlanCase], enforce: bool) -> list[PlanRun]:
        ran.extend(cases)
        return [plan_run(80)]

    monkeypatch.setattr(memory_plans, "run_cases", run_cases)
    monkeypatch.setattr(memory, "find_subjects", lambda *_: [BUILTIN])
    _plans(tmp_path, "--from", "3")
    assert ran == list(draw_cases([BUILTIN], 5, 1))[3:]
    assert main(["bench", "memory", "plans", "--from", "-1"]) == 2


def test_subjects_are_the_built_in_model_and_the_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="needs the export extra")
    exports_here(monkeypatch, "model_files")
    names = {subject.name for subject in find_subjects(resolve(None), tmp_path, ("tiny",))}
    assert names == {"built-in", "tiny native", "tiny portable"}


@linux_only
@pytest.mark.slow
def test_plans_in_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnx", reason="needs the export extra")
    code, data = _plans(tmp_path)
    assert sum(data["outcomes"].values()) == 2
    assert data["outcomes"]["failed"] == data["outcomes"]["killed"] == 0
    assert code == (0 if data["outcomes"]["kept"] == 2 else 1)
    for run in data["runs"]:
        assert run["peak_rss"] > run["peak_anonymous"] > 10e6
        assert run["budget"] >= run["planned"] > 0
    assert "by bundle" in capsys.readouterr().out


@each_row(("last", "code", "says"), [(100, 0, "flat"), (200, 1, "not flat")])
def test_the_code_says_whether_memory_grew(
    last: int, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        assert (name, arguments["turns"], arguments["context"]) == ("chat", 12, 256)
        return {"peaks": [100] * 11 + [last], "planned": 300, "context": 256}

    monkeypatch.setattr(memory_timed, "run_job", job)
    out = tmp_path / "chat.json"
    arguments = ["bench", "memory", "chat", "--turns", "12", "-n", "4", "-c", "256", "--json", str(out)]
    assert main(arguments) == code
    assert json.loads(out.read_text())["flat"] == (says == "flat")
    assert "The peak grew by" in capsys.readouterr().out


@linux_only
@pytest.mark.slow
def test_a_chat_in_a_process(tmp_path: Path) -> None:
    out = tmp_path / "chat.json"
    code = main(["bench", "memory", "chat", "--turns", "12", "-n", "4", "-c", "256", "--json", str(out)])
    data = json.loads(out.read_text())
    assert len(data["peaks"]) == 12 and min(data["peaks"]) > 10e6
    assert code == (0 if data["flat"] else 1)


def test_too_few_turns_tell_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", "chat", "--turns", "10"]) == 2
    assert "10 turns tell nothing" in capsys.readouterr().err
