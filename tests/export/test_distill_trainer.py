"""The trainer: an interrupted training ends as one that was not, and nothing is overwritten by mistake."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from edgeinfer.errors import DeviceError, StorageError, UsageError
from edgeinfer.export.training import trainer as trainer_module
from edgeinfer.export.training.trainer import Trained, Trainer, TrainOptions, find_device
from tests.tables import each_row


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


OPTIONS = TrainOptions(20, learning_rate=0.05, warmup=3, device="cpu")


def train(folder: Path | None, task: Line, options: TrainOptions = OPTIONS) -> Trained:
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
    assert train(tmp_path, second).resumed_at == OPTIONS.steps
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
        (Line("b"), OPTIONS, "data"),
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
        Trainer(Line(), OPTIONS, tmp_path)


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
    rates = [OPTIONS.rate(step) for step in range(OPTIONS.steps)]
    assert rates.index(max(rates)) == OPTIONS.warmup - 1
    assert rates[0] < max(rates) <= OPTIONS.learning_rate
    assert rates[-1] < 0.01 * OPTIONS.learning_rate + 1e-3
