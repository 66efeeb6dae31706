"""Trains whatever gives a loss, keeps its state on disk, and resumes where it was interrupted.

A step depends on its number and the seed alone: batches and whatever else is drawn come from them. So a training that
was interrupted gives the losses and weights, to the last bit, of one that was not, on one machine and with one number
of threads.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from edgeinfer.bundle.writing import storage_errors, write_file
from edgeinfer.errors import DeviceError, StorageError, UsageError
from edgeinfer.export.training.options import TrainOptions
from edgeinfer.results import Progress

_FORMAT = "edgeinfer-training"
_TENSORS, _TABLE = "state.safetensors", "state.json"
_SCHEDULE = "schedule.json"
_NAME = re.compile(r"step-(\d+)")
_ANOTHER = "Give another working folder, or remove this one to start again."
# Steps that tell what one costs.
_TRIED = 4
_BETAS = (0.9, 0.95)
_EPSILON = 1e-8
# What the optimizer keeps of a parameter; "step" counts its own, as not every step need reach every parameter.
_STATES = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class TrainingState:
    """A training after some steps.

    Attributes:
        losses: of every step so far.
        tensors: by name, on the CPU.
    """

    step: int
    losses: list[float]
    tensors: dict[str, torch.Tensor]


def configuration_digest(configuration: Mapping[str, Any]) -> str:
    """A digest of a configuration; the order of its names does not matter."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()


def save_state(folder: Path, kept: TrainingState, configuration: Mapping[str, Any]) -> None:
    """Saves a state in the place of an older one, which stays until this one is whole."""
    target = folder / f"step-{kept.step}"
    if target.exists():
        return
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".step-"))
        try:
            _write(scratch, kept, configuration)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    for step, path in _found(folder):
        if step != kept.step:
            shutil.rmtree(path, ignore_errors=True)


def load_state(folder: Path, configuration: Mapping[str, Any]) -> TrainingState | None:
    """The newest state in a folder; None where there is none."""
    found = _found(folder)
    if not found:
        return None
    step, path = max(found)
    try:
        table = json.loads((path / _TABLE).read_text("utf-8"))
        if table["format"] != _FORMAT or table["step"] != step:
            raise ValueError("it was written by another program")
        _compare(folder, table["configuration"], configuration)
        return TrainingState(step, list(map(float, table["losses"])), load_file(path / _TENSORS))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StorageError(f"Cannot read the training saved in {path}: {error}.", _ANOTHER) from error


def _found(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return [(int(match[1]), path) for match, path in matches if match is not None]


def _write(folder: Path, kept: TrainingState, configuration: Mapping[str, Any]) -> None:
    try:
        save_file(kept.tensors, folder / _TENSORS)
    except SafetensorError as error:  # the library's own word for a full disk
        raise StorageError(f"Cannot write {folder / _TENSORS}: {error}.", "Free some space.") from error
    table = {
        "format": _FORMAT,
        "step": kept.step,
        "digest": configuration_digest(configuration),
        "configuration": dict(configuration),
        "losses": kept.losses,
    }
    (folder / _TABLE).write_text(json.dumps(table), "utf-8")
    for name in (_TENSORS, _TABLE):
        handle = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _compare(folder: Path, kept: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuses to resume a training that was started with other settings."""
    if configuration_digest(kept) == configuration_digest(asked):
        return
    names = sorted(name for name in {*kept, *asked} if kept.get(name) != asked.get(name))
    shown = ", ".join(f"{name} was {_short(kept.get(name))}, is {_short(asked.get(name))}" for name in names[:3])
    raise UsageError(f"{folder} contains a training with another configuration: {shown}.", _ANOTHER)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}..."


class Task(Protocol):
    """A loss over parameters to train.

    Attributes:
        name: of the stage, as progress shows it.
    """

    name: str

    @property
    def configuration(self) -> Mapping[str, Any]:
        """What the result depends on besides TrainOptions, as JSON: sizes, digests of the target and of the data."""

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """What is to be trained, by name; on the device already."""

    def loss(self, step: int) -> torch.Tensor:
        """The loss of a step, whose batch is drawn from the seed and the step alone.

        Torch's own generators are seeded with both before each call.
        """


@dataclass(frozen=True)
class Trained:
    """A finished training.

    Attributes:
        losses: of every step.
        resumed_at: step that it went on from; 0 where it was not interrupted.
        seconds: that it took, since it was last started.
    """

    losses: tuple[float, ...]
    resumed_at: int
    seconds: float

    @property
    def final_loss(self) -> float:
        """Mean loss of the last twentieth."""
        tail = self.losses[-max(1, len(self.losses) // 20) :]
        return sum(tail) / len(tail)


def find_device(name: str) -> torch.device:
    """The device that a name of options.DEVICES means here."""
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("There is no CUDA device, or PyTorch was built without CUDA.", "Use --device cpu, or auto.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def kept_schedule(work: Path, minutes: float | None, measure: Callable[[], Mapping[str, int]]) -> dict[str, int]:
    """The numbers of steps and tokens that fit a time limit, measured once, so that a resumed run has the same."""
    file = work / _SCHEDULE
    if not file.exists():
        write_file(file, json.dumps(dict(measure()) | {"minutes": minutes}).encode())
    kept: dict[str, int] = json.loads(file.read_text("utf-8"))
    if kept.pop("minutes") != minutes:
        hint = "Use another working folder, or remove this one to start over."
        raise UsageError(f"{work} contains a training with another time limit.", hint)
    return kept


def step_seconds(task: Task, clock: Callable[[], float]) -> float:
    """Seconds of a training step, without the first."""
    torch.autograd.backward(task.loss(0))
    started = clock()
    for step in range(_TRIED):
        torch.autograd.backward(task.loss(step))
    return (clock() - started) / _TRIED


class Trainer:
    """Trains one task with AdamW.

    Args:
        folder: where the state is kept; None keeps none.
        clock: tells when a checkpoint is due.

    Raises:
        UsageError: the folder holds a training of another configuration.
        StorageError: the folder cannot be read.
    """

    def __init__(
        self,
        task: Task,
        options: TrainOptions,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task = task
        self._options = options
        self._folder = folder
        self._clock = clock
        self._parameters = dict(task.parameters())
        if not self._parameters:
            raise UsageError(f"{task.name} has nothing to train.", "Choose other layers.")
        matrices = [p for p in self._parameters.values() if p.ndim >= 2]
        vectors = [p for p in self._parameters.values() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # One kernel per tensor: the fused ones differ between versions and processors.
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=options.learning_rate, betas=_BETAS, eps=_EPSILON
        )
        self._losses: list[float] = []
        self._configuration = {"task": task.name} | dict(task.configuration) | options.decisive
        kept = None if folder is None else load_state(folder, self._configuration)
        if kept is not None:
            self._restore(kept)
        self._resumed_at = len(self._losses)

    @property
    def step(self) -> int:
        """Steps that are done."""
        return len(self._losses)

    def run(self, progress: Progress | None = None, until: int | None = None) -> Trained:
        """Trains to the end, or until a step."""
        options, task = self._options, self._task
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        started = saved = self._clock()
        last = options.steps if until is None else min(until, options.steps)
        try:
            while self.step < last:
                self._losses.append(self._one(self.step))
                if progress is not None:
                    progress(f"{task.name}, loss {self._recent():.3f}", self.step, options.steps)
                if self._clock() - saved >= options.save_seconds:
                    self.save()
                    saved = self._clock()
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()
        return Trained(tuple(self._losses), self._resumed_at, self._clock() - started)

    def save(self) -> None:
        """Keeps the state; errors as `save_state`."""
        if self._folder is None:
            return
        tensors = {f"weight.{name}": p.detach().cpu().contiguous() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            state = self._optimizer.state.get(parameter, {})
            tensors |= {f"{part}.{name}": state[part].cpu().contiguous() for part in _STATES if state}
        save_state(self._folder, TrainingState(self.step, self._losses, tensors), self._configuration)

    def _one(self, step: int) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.rate(step)
        # What a program around this draws stays as it was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._options.seed * 1_000_003 + step)
            loss = self._task.loss(step)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise UsageError(f"The loss of step {step} is {value}.", "Choose a lower learning rate.")
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), self._options.clip)
        self._optimizer.step()
        return value

    def _recent(self) -> float:
        tail = self._losses[-50:]
        return sum(tail) / len(tail)

    def _restore(self, kept: TrainingState) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(kept.tensors[f"weight.{name}"])
                if f"step.{name}" not in kept.tensors:
                    continue
                state = {part: kept.tensors[f"{part}.{name}"].to(parameter.device) for part in _STATES[:2]}
                # The count stays on the CPU, where the optimizer keeps it.
                self._optimizer.state[parameter] = state | {"step": kept.tensors[f"step.{name}"]}
        self._losses = list(kept.losses)
