"""Whole trainings on a random target: what they report, and that interrupted ones end as others do."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from edgeinfer.errors import UsageError
from edgeinfer.export.training import drafter
from edgeinfer.export.training.drafter import DrafterOptions, StudentSize, train_drafter
from edgeinfer.export.training.exits import ExitsOptions, tune_exits
from edgeinfer.export.training.models import Target, load_target
from edgeinfer.export.training.samples import SampleOptions
from edgeinfer.export.training.text import TextSource
from edgeinfer.results import Progress
from tests.factories import make_checkpoint
from tests.recorded import check_recorded

OPTIONS = DrafterOptions(
    size=StudentSize.of(64, 2),
    steps=12,
    samples=700,
    rows=2,
    length=16,
    device="cpu",
    threads=1,
    sampling=SampleOptions(tokens=1, length=12, rows=8),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target") / "checkpoint"
    make_checkpoint(folder, "llama")
    return load_target(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, target: Target) -> TextSource:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [json.dumps({"text": f"the cat number {i} ran to the dog and sat on it {i * i} times"}) for i in range(60)]
    file.write_text("\n".join(lines), "utf-8")
    return TextSource((file,), target)


def stop_at(stage: str, step: int) -> Progress:
    def progress(name: str, done: int, total: int) -> None:
        if name.startswith(stage) and done == step:
            raise KeyboardInterrupt

    return progress


def test_an_interrupted_drafter_is_that_of_an_uninterrupted_run(
    tmp_path: Path, target: Target, text: TextSource
) -> None:
    whole = train_drafter(target, text, OPTIONS, tmp_path / "whole")
    for stage, step in (("sampling", 400), ("reading,", 3), ("distilling,", 5)):
        with pytest.raises(KeyboardInterrupt):
            train_drafter(
                target, text, OPTIONS, tmp_path / "work", progress=stop_at(stage, step) if step != 400 else first
            )
    found = train_drafter(target, text, OPTIONS, tmp_path / "work")
    assert (found.reading.resumed_at, found.distilling.resumed_at) == (4, 5)
    assert found.reading.losses == whole.reading.losses
    assert found.distilling.losses == whole.distilling.losses
    ours, theirs = (load_file(each.checkpoint / "model.safetensors") for each in (found, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert found.distilled == whole.distilled
    assert whole.distilled.divergence < whole.untrained.divergence
    facts = json.loads(json.dumps(found.facts()))
    assert facts["steps"] == {"reading": 4, "distilling": 8}
    assert list(facts["acceptance"]) == ["untrained", "after_reading", "after_distilling"]
    losses = {"reading": whole.reading.losses, "distilling": whole.distilling.losses}
    check_recorded("distilled", losses | {name: facts[name] for name in facts if "seconds" not in name}, rel=5e-3)


def first(name: str, done: int, total: int) -> None:
    """Interrupts the first stage that says anything."""
    raise KeyboardInterrupt


def test_another_size_or_text_does_not_go_on(tmp_path: Path, target: Target, text: TextSource) -> None:
    train_drafter(target, text, OPTIONS, tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "reading").rglob("*.json")}
    with pytest.raises(UsageError, match="another configuration"):
        train_drafter(target, text, replace(OPTIONS, size=StudentSize.of(64, 1)), tmp_path)
    with pytest.raises(UsageError, match="another configuration"):
        train_drafter(target, text, replace(OPTIONS, samples=900), tmp_path)
    assert {path: path.read_bytes() for path in (tmp_path / "reading").rglob("*.json")} == before


def test_minutes_become_steps_that_a_resumed_run_keeps(
    tmp_path: Path, target: Target, text: TextSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    # Whatever is timed takes a fiftieth of a second.
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 50, monotonic=lambda: 0.0)
    monkeypatch.setattr(drafter, "time", clock)
    found = {}
    for minutes in (0.005, 0.01):
        options = replace(OPTIONS, steps=None, minutes=minutes, samples=None)
        with pytest.raises(KeyboardInterrupt):
            train_drafter(target, text, options, tmp_path / str(minutes), progress=first)
        found[minutes] = json.loads((tmp_path / str(minutes) / "schedule.json").read_text())
    few, many = found.values()
    assert 1 <= few["reading"] < few["distilling"]
    assert many["reading"] == pytest.approx(2 * few["reading"], abs=1)
    assert many["distilling"] == pytest.approx(2 * few["distilling"], abs=1)

    def asked_again() -> float:
        raise AssertionError("what steps take is known")

    clock.perf_counter = asked_again
    options = replace(OPTIONS, steps=None, minutes=0.005, samples=None)
    trained = train_drafter(target, text, options, tmp_path / "0.005")
    assert len(trained.reading.losses) == few["reading"] and len(trained.distilling.losses) == few["distilling"]
    with pytest.raises(UsageError, match="another time limit"):
        train_drafter(target, text, replace(options, minutes=0.02), tmp_path / "0.005")


def test_depths_learn_together(tmp_path: Path, target: Target, text: TextSource) -> None:
    nested = train_drafter(target, text, replace(OPTIONS, nested=True), tmp_path / "nested")
    assert list(nested.depths) == [1]
    assert "after_1_layers" in nested.facts()["acceptance"]
    plain = train_drafter(target, text, OPTIONS, tmp_path / "plain")
    assert plain.depths == {}
    assert nested.depths[1].divergence < nested.untrained.divergence
    with pytest.raises(UsageError, match="cannot stop earlier"):
        replace(OPTIONS, nested=True, size=StudentSize.of(64, 1))


def test_too_little_text_is_refused_with_what_is_needed(tmp_path: Path, target: Target) -> None:
    (tmp_path / "short.txt").write_text("a cat", "utf-8")
    with pytest.raises(UsageError, match="and 64 are needed"):
        train_drafter(target, TextSource((tmp_path / "short.txt",), target), OPTIONS, tmp_path / "work")


def test_exits_learn_what_the_whole_says_and_resume(tmp_path: Path, target: Target, text: TextSource) -> None:
    options = ExitsOptions(steps=40, rows=4, length=16, learning_rate=3e-3, device="cpu", threads=1)
    results = []
    for name in ("whole", "work"):
        fresh = load_target(target.folder)
        if name == "work":
            with pytest.raises(KeyboardInterrupt):
                tune_exits(
                    load_target(target.folder), text, options, tmp_path / name, tmp_path / "w", stop_at("tuning", 9)
                )
        results.append(tune_exits(fresh, text, options, tmp_path / name, tmp_path / ("w" if name == "work" else "v")))
    whole, found = results
    assert found.trained.resumed_at == 9 and found.trained.losses == whole.trained.losses
    assert found.after == whole.after and list(found.before) == [1, 2]
    assert sum(found.after.values()) > sum(found.before.values())
    assert found.perplexity_after == pytest.approx(found.perplexity_before, rel=0.5)
    again = load_target(tmp_path / "work")
    assert not torch.equal(again.model.lm_head.weight, target.model.lm_head.weight)
    facts = json.loads(json.dumps(found.facts()))
    assert facts["steps"] == 40
    losses = {"losses": whole.trained.losses}
    check_recorded("exits", losses | {n: facts[n] for n in facts if n not in ("seconds", "checkpoint")}, rel=5e-3)


def test_a_model_of_one_layer_has_no_exits(tmp_path: Path, text: TextSource) -> None:
    make_checkpoint(tmp_path / "one", "llama", num_hidden_layers=1)
    single = load_target(tmp_path / "one")
    options = ExitsOptions(steps=2, rows=1, length=16, device="cpu")
    with pytest.raises(UsageError, match="one layer"):
        tune_exits(single, TextSource(text.files, single), options, tmp_path / "out", tmp_path / "work")
