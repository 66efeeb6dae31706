"""The smallest budget that keeps the speed: how it is found, compared with no budget and with peers, and shown."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.bench import memory_budgets, memory_timed
from edgeinfer.apps.bench.memory_budgets import BudgetPeer, SmallestResults, SpecMemoResults, measure_peer
from edgeinfer.apps.bench.memory_sections import smallest_section, spec_memory_section
from edgeinfer.apps.bench.memory_timed import LoadSetup, Timed, TimedRun
from edgeinfer.apps.bench.render import print_section
from edgeinfer.apps.bench.watch import Ended, Watched
from edgeinfer.apps.cli.main import main
from tests.apps.bench.here import watch_here

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")


def timed(budget: int | None, short: float, deep: float, reason: str = "", name: str = "") -> Timed:
    terms = {"weights_mapped": 100, "interpreter": 20, "libraries": 10, "tokenizer": 5, "kv": 40}
    found = {
        "tokens": [11, 11],
        "ms_per_token": [1e3 / short, 1e3 / deep] if not reason else [],
        "processor_ms_per_token": [10.0, 10.0],
        "planned": sum(terms.values()) + (budget or 0),
        "terms": terms,
        "generation": 27,
        "weights_resident": 90,
        "choice": {"weights": "mapped", "context": 512, "kv": "float32"},
        "plan_given_up": ["the prompt in one pass"],
        "given_up": [],
    }
    options = {} if budget is None else {"memory": budget}
    run = TimedRun(reason, peak_rss=150, peak_anonymous=50, found=found)
    return Timed(LoadSetup(name or str(budget), options), (run, run))


def test_the_smallest_budget_has_to_keep_both_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    points = (timed(400, 30, 20), timed(300, 29, 19.5), timed(200, 29, 15), timed(100, 1, 1, "refused"))
    results = SmallestResults("m", 2048, points)
    assert results.shares(points[1]) == pytest.approx((29 / 30, 19.5 / 20))
    print_section(smallest_section(results.to_dict()))
    assert "Smallest budget with 95% of the best speed: 300 B; at all: 200 B." in capsys.readouterr().out


def test_generation_memory_is_all_beyond_the_weights() -> None:
    (run, _) = timed(None, 10, 10).runs
    assert run.generation_bytes(planned=True, alone=False) == 75
    assert run.generation_bytes(planned=True, alone=True) == 40
    assert run.generation_bytes(planned=False, alone=False) == 60
    assert run.generation_bytes(planned=False, alone=True) == 27


def test_speeds_are_compared_with_runs_of_the_same_time() -> None:
    reference, now = timed(400, 30, 20), timed(300, 15, 10)
    assert now.share(reference, (0, 1)) == pytest.approx(0.5)
    slowed = dataclasses.replace(now, beside=timed(400, 15, 10).runs)
    assert slowed.share(reference, (0, 1)) == pytest.approx(1.0)


def test_budgets_are_halved_towards_the_smallest_that_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    def speed(setup: LoadSetup) -> Timed:
        return timed(setup.budget, 30, 30) if (setup.budget or 0) >= 240 else timed(setup.budget, 3, 3)

    def time_them(model: str, setups: list[LoadSetup], *rest: object, **more: object) -> list[Timed]:
        return [speed(setup) for setup in setups]

    monkeypatch.setattr(memory_timed, "time_setups", time_them)
    first = [timed(400, 30, 30), timed(100, 3, 3)]
    results = SmallestResults("m", 2048, tuple(first))
    replies = memory_timed.ReplyRequest(((1,), (2,)), 4)
    found = memory_timed.narrow("m", first, replies, 1, 3, results.keeps)
    assert [each.setup.budget for each in found] == [400, 250, 212, 175, 100]
    assert found[1].beside and [results.keeps(each) for each in found] == [True, True, False, False, False]


def test_the_smallest_budget_that_pays_is_held_against_no_limits(capsys: pytest.CaptureFixture[str]) -> None:
    free = (timed(None, 30, 30, name="unconstrained"), timed(None, 30, 30, name="default"))
    results = SpecMemoResults("m", 512, ("a", "b"), (*free, timed(4, 29.5, 29.5), timed(2, 29, 29), timed(1, 28, 28)))
    assert results.smallest is not None and results.smallest.setup.budget == 2
    assert results.cut(results.smallest, "default", planned=True, alone=False) == pytest.approx(1 - 77 / 75)
    assert results.to_dict()["smallest_budget"] == 2
    print_section(spec_memory_section(results.to_dict()))
    printed = " ".join(capsys.readouterr().out.split())
    assert ": 2 B, 512 tokens in float32, mapped: the prompt in one pass." in printed
    for name in ("unconstrained", "default"):
        reserved, measured, *alone = (
            f"{results.cut(results.smallest, name, planned=planned, alone=alone):.1%}"
            for alone, planned in ((False, True), (False, False), (True, True), (True, False))
        )
        sizes = f"{reserved} reserved, {measured} measured; of cache, passes and drafts alone {alone[0]}, {alone[1]}."
        assert f"Generation memory cut against {name}: {sizes}" in printed
        assert len({reserved, measured, *alone}) > 2


BUDGETS = ["--steps", "2", "--rounds", "1", "--halvings", "0", "--no-limits", "-t", "1"]


def check_smallest(out: Path, shown: str) -> None:
    points = json.loads(out.read_text())["points"]
    assert len(points) == 2 and points[0]["setup"]["options"]["memory"] > points[1]["setup"]["options"]["memory"]
    assert "Smallest budget with 95% of the best speed" in shown


@pytest.mark.slow
def test_budgets_and_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    watch, out = watch_here(lambda found: 70_000_000), tmp_path / "out.json"
    monkeypatch.setattr(memory_timed, "watch", watch)
    monkeypatch.setattr(memory_timed, "run_watched", lambda command, env: watch(command, env).watched)
    # Its chats are longer than tests have time for.
    for name, tokens in {"_REPLY": 4, "_SHORT_PROMPT": 8, "_MARGIN": 4}.items():
        monkeypatch.setattr(memory_budgets, name, tokens)
    shared = ["--speculation", "off", *BUDGETS, "--json", str(out)]
    assert main(["bench", "memory", "smallest", "-c", "64", *shared]) == 0
    check_smallest(out, capsys.readouterr().out)
    prompts = ["--categories", "tales/retell", "--per-category", "1", "-n", "8"]
    assert main(["bench", "memory", "spec", *prompts, *shared]) == 0
    setups = json.loads(out.read_text())["setups"]
    assert [setup["setup"]["name"] for setup in setups[:2]] == ["unconstrained", "default"]
    assert setups[0]["generation_bytes"]["planned"] > setups[0]["generation_bytes"]["planned_alone"] > 0
    assert setups[0]["runs"][0]["peak_rss"] == 70_000_000


@linux_only
@pytest.mark.slow
def test_budgets_in_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    shared = ["--speculation", "copy", *BUDGETS, "--json", str(out)]
    assert main(["bench", "memory", "smallest", "-c", "384", *shared]) == 0
    check_smallest(out, capsys.readouterr().out)


def test_a_peer_is_asked_for_both_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(command: Sequence[str], env: Any, stdin: str) -> Ended:
        load, short, deep = (json.loads(line) for line in stdin.splitlines())
        assert load["kind"] == "edgeinfer" and len(short["past"]) < len(deep["past"])
        answers = [{"version": "1"}, [10.0] * short["tokens"], [20.0] * deep["tokens"]]
        told = "".join(json.dumps({"answer": answer}) + "\n" for answer in answers)
        return Ended(0, "", Watched(told, 1.0, 600, 0, 0, 300))

    monkeypatch.setattr(memory_budgets, "watch", watch)
    figures = measure_peer(BudgetPeer("edgeinfer", tmp_path), 512, 1)
    assert (figures.reason, figures.peak_rss, figures.peak_anonymous) == ("", 600, 300)
    assert (figures.short_speed, figures.deep_speed) == (100.0, 50.0)


@pytest.mark.slow
def test_a_peer_that_cannot_load_says_why(tmp_path: Path) -> None:
    figures = measure_peer(BudgetPeer("edgeinfer", tmp_path / "absent"), 512, 1)
    assert "absent" in figures.reason
