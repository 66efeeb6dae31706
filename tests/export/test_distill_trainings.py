"""Trainings: what they report, that interrupted ones end as others do, and that nothing is overwritten by mistake."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgeinfer.core.errors import DeviceError, StorageError, UsageError
from edgeinfer.core.results import Progress
from edgeinfer.export.training import drafter
from edgeinfer.export.training import trainer as trainer_module
from edgeinfer.export.training.drafter import DrafterOptions, StudentSize, train_drafter
from edgeinfer.export.training.exits import ExitsOptions, tune_exits
from edgeinfer.export.training.models import Target, load_target
from edgeinfer.export.training.samples import SampleOptions
from edgeinfer.export.training.text import TextSource
from edgeinfer.export.training.trainer import Trained, Trainer, TrainOptions, find_device
from tests.factories import make_checkpoint
from tests.recorded import check_recorded
from tests.tables import each_row

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


class Line:
    """Fits a line and a rarely used offset; draws from its batch and from torch."""

    name = "line"

    def __init__(self, data: str = "a", fails_at: int = -1) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(3, 2, generator=generator))
        self.offset = torch.nn.Parameter(torch.zeros(2))
        self._data, self._fails_at = data, fails_at

    @property
    def configuration(self) -> Mapping[str, Any]:
        return {"data": self._data}

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return {"weight": self.weight, "offset": self.offset}

    def loss(self, step: int) -> torch.Tensor:
        if step == self._fails_at:
            raise KeyboardInterrupt
        x = torch.from_numpy(np.random.default_rng((1, step)).standard_normal((4, 3)).astype(np.float32))
        guess = x @ self.weight + (self.offset if step % 3 == 0 else 0)
        return (guess - x.sum(-1, keepdim=True) + 0.1 * torch.randn(4, 2)).square().mean()


LINE_OPTIONS = TrainOptions(20, learning_rate=0.05, warmup=3, device="cpu")


def train(folder: Path | None, task: Line, options: TrainOptions = LINE_OPTIONS) -> Trained:
    return Trainer(task, options, folder).run()


def test_an_interrupted_training_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = Line()
    expected = train(None, whole)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "work", Line(fails_at=8))
    again = Line()
    found = train(tmp_path / "work", again)
    assert (found.resumed_at, expected.resumed_at) == (8, 0)
    assert found.losses == expected.losses
    assert torch.equal(again.weight, whole.weight) and torch.equal(again.offset, whole.offset)
    # What fits is a weight of one everywhere.
    assert (whole.weight - 1).abs().mean() < (Line().weight - 1).abs().mean() - 0.3


def test_a_finished_training_is_not_repeated(tmp_path: Path) -> None:
    first, second = Line(), Line(fails_at=0)
    train(tmp_path, first)
    assert train(tmp_path, second).resumed_at == LINE_OPTIONS.steps
    assert torch.equal(first.weight, second.weight)


def test_what_surrounds_a_training_draws_as_before() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    train(None, Line())
    assert torch.equal(torch.rand(4), expected)


@each_row(
    ("task", "options", "named"),
    [
        (Line("b"), LINE_OPTIONS, "data"),
        (Line(), TrainOptions(30, learning_rate=0.05, warmup=3), "steps"),
        (Line(), TrainOptions(20, learning_rate=0.05, warmup=3, seed=1), "seed"),
    ],
)
def test_another_configuration_is_refused_and_overwrites_nothing(
    tmp_path: Path, task: Line, options: TrainOptions, named: str
) -> None:
    train(tmp_path, Line())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=named):
        Trainer(task, options, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_times_of_saving_are_no_configuration(tmp_path: Path) -> None:
    train(tmp_path, Line())
    options = TrainOptions(20, learning_rate=0.05, warmup=3, device="cpu", save_seconds=1)
    assert Trainer(Line(), options, tmp_path).step == 20


def test_a_full_disk_leaves_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Line(fails_at=5))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer_module, "save_file", full)
    with pytest.raises(StorageError, match="full"):
        train(tmp_path, Line())
    assert [path.name for path in tmp_path.iterdir()] == ["training.safetensors"]
    monkeypatch.undo()
    assert train(tmp_path, Line()).resumed_at == 5


def test_checkpoints_come_by_time_and_only_the_newest_stays(tmp_path: Path) -> None:
    ticks = iter(range(1000, 2000))
    options = TrainOptions(20, learning_rate=0.05, warmup=3, device="cpu", save_seconds=4)
    seen: set[int] = set()

    def look(stage: str, done: int, total: int) -> None:
        if tmp_path.exists() and list(tmp_path.iterdir()):
            seen.add(Trainer(Line(), options, tmp_path).step)

    trained = Trainer(Line(), options, tmp_path, clock=lambda: float(next(ticks))).run(look)
    assert len(seen) > 2
    assert [path.name for path in tmp_path.iterdir()] == ["training.safetensors"]
    assert Trainer(Line(), options, tmp_path).step == 20
    # The clock was read once at the beginning and once at the end, and in between at most twice a step.
    assert 20 < trained.seconds == next(ticks) - 1001 <= 42


@each_row("damage", ["short", "no table"])
def test_a_damaged_state_is_an_error_of_one_line(tmp_path: Path, damage: str) -> None:
    train(tmp_path, Line())
    state = tmp_path / "training.safetensors"
    if damage == "short":
        state.write_bytes(state.read_bytes()[:-7])
    else:
        save_file({"weight.weight": torch.zeros(3, 2)}, state)
    with pytest.raises(StorageError, match="Cannot read"):
        Trainer(Line(), LINE_OPTIONS, tmp_path)


def test_a_loss_that_is_no_number_ends_the_training() -> None:
    task = Line()
    with torch.no_grad():
        task.weight.fill_(float("nan"))
    with pytest.raises(UsageError, match="nan"):
        train(None, task)


def test_cuda_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="CUDA"):
        find_device("cuda")
    assert find_device("auto").type == "cpu"


def test_the_rate_rises_and_falls() -> None:
    rates = [LINE_OPTIONS.rate(step) for step in range(LINE_OPTIONS.steps)]
    assert rates.index(max(rates)) == LINE_OPTIONS.warmup - 1
    assert rates[0] < max(rates) <= LINE_OPTIONS.learning_rate
    assert rates[-1] < 0.01 * LINE_OPTIONS.learning_rate + 1e-3
