"""Trains whatever gives a loss, saves its state on disk, and resumes after an interruption. A step depends on its
number and the seed alone: batches and everything else that is drawn come from them. So an interrupted training gives
the losses and weights, to the last bit, of one that was not, on one machine and with one number of threads."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from edgeinfer.bundle.writing import storage_errors, sync_tree
from edgeinfer.core.errors import DeviceError, StorageError, UsageError
from edgeinfer.core.options import require
from edgeinfer.core.results import Progress

DEVICES = ("auto", "cpu", "cuda")
_STATE = "training.safetensors"
_ANOTHER = "Give another working folder, or remove this one to start again."
# The options that the result depends on; a training resumes only with the same ones.
_DECISIVE = ("steps", "learning_rate", "weight_decay", "warmup", "clip", "seed")
_BETAS = (0.9, 0.95)
_EPSILON = 1e-8
# The optimizer's tensors of a parameter; "step" counts its own, as not every step reaches every parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class TrainOptions:
    steps: int  # of the optimizer; the learning rate rises over `warmup` of them and falls along half a cosine
    learning_rate: float = 2e-3  # at its highest
    weight_decay: float = 0.1  # of matrices; vectors have none
    warmup: int = 50
    clip: float = 1.0  # largest norm of all gradients together
    seed: int = 0
    save_seconds: float = 60.0  # between two checkpoints; it does not change the result
    device: str = "auto"  # one of DEVICES; "auto" is CUDA where there is a CUDA device
    # Of the linear algebra; None takes torch's own number. The same number gives the same result.
    threads: int | None = None

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", self.steps, "1 or more")
        require(0 < self.learning_rate < 1, "learning_rate", self.learning_rate, "between 0 and 1")
        require(0 <= self.weight_decay < 1, "weight_decay", self.weight_decay, "from 0 to less than 1")
        require(self.warmup >= 0, "warmup", self.warmup, "0 or more")
        require(self.clip > 0, "clip", self.clip, "positive")
        require(0 <= self.seed < 2**31, "seed", self.seed, "from 0 to 2147483647")
        require(self.save_seconds >= 0, "save_seconds", self.save_seconds, "0 or more")
        require(self.device in DEVICES, "device", self.device, f"one of {', '.join(DEVICES)}")
        require(self.threads is None or self.threads >= 1, "threads", self.threads, "1 or more")

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rising = min(1.0, (step + 1) / max(1, self.warmup))
        return self.learning_rate * rising * 0.5 * (1 + math.cos(math.pi * step / self.steps))


class Task(Protocol):
    """A loss over parameters to train."""

    name: str  # of the stage, as progress shows it

    @property
    def configuration(self) -> Mapping[str, Any]:
        """What the result depends on besides TrainOptions, as JSON: sizes, digests of the target and of the data."""

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters to train, by name, on their device."""

    def loss(self, step: int) -> torch.Tensor:
        """The loss of a step, whose batch depends on the seed and the step alone. Torch's own generators are seeded
        with both before each call."""


@dataclass(frozen=True)
class Trained:
    losses: tuple[float, ...]  # of every step
    resumed_at: int  # step at which it was resumed; 0 where it was not interrupted
    seconds: float  # since it was last started

    @property
    def final_loss(self) -> float:
        """Mean loss of the last twentieth."""
        tail = self.losses[-max(1, len(self.losses) // 20) :]
        return sum(tail) / len(tail)


def find_device(name: str) -> torch.device:
    """The device that a name of DEVICES stands for on this machine."""
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("There is no CUDA device, or PyTorch was built without CUDA.", "Use --device cpu, or auto.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


class Trainer:
    """Trains one task with AdamW; keeps its state in `folder`, if any, when `clock` says that a checkpoint is due."""

    def __init__(
        self, task: Task, options: TrainOptions, folder: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._task, self._options, self._folder, self._clock = task, options, folder, clock
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
        self._configuration = {"task": task.name} | dict(task.configuration)
        self._configuration |= {name: getattr(options, name) for name in _DECISIVE}
        if folder is not None and (folder / _STATE).exists():
            self._load(folder / _STATE)
        self._resumed_at = len(self._losses)

    @property
    def step(self) -> int:
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
                self._losses.append(self._train_step(self.step))
                if progress is not None:
                    recent = self._losses[-50:]
                    progress(f"{task.name}, loss {sum(recent) / len(recent):.3f}", self.step, options.steps)
                if self._clock() - saved >= options.save_seconds:
                    self.save()
                    saved = self._clock()
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()
        return Trained(tuple(self._losses), self._resumed_at, self._clock() - started)

    def _train_step(self, step: int) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.rate(step)
        # The caller's random numbers stay as they were.
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

    def save(self) -> None:
        """Saves the state in place of an older one, which stays until this one is complete."""
        if self._folder is None:
            return
        tensors = {f"weight.{name}": p.detach().cpu().contiguous() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state.get(parameter, {})
            tensors |= {f"{part}.{name}": moments[part].cpu().contiguous() for part in _MOMENTS if moments}
        table = {"configuration": json.dumps(self._configuration), "losses": json.dumps(self._losses)}
        scratch = self._folder / f".{_STATE}"
        with storage_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                save_file(tensors, scratch, table)
                sync_tree(self._folder)
                scratch.replace(self._folder / _STATE)
            except SafetensorError as error:  # the library's name for a full disk
                raise StorageError(f"Cannot write {self._folder / _STATE}: {error}.", "Free some space.") from error
            finally:
                scratch.unlink(missing_ok=True)

    def _load(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                table = file.metadata()
                saved, losses = json.loads(table["configuration"]), list(map(float, json.loads(table["losses"])))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise StorageError(f"Cannot read the training saved in {path}: {error}.", _ANOTHER) from error
        self._require_same(path.parent, saved)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[f"weight.{name}"])
                if f"step.{name}" in tensors:
                    moments = {part: tensors[f"{part}.{name}"].to(parameter.device) for part in _MOMENTS[:2]}
                    # The count stays on the CPU, where the optimizer keeps it.
                    self._optimizer.state[parameter] = moments | {"step": tensors[f"step.{name}"]}
        self._losses = losses

    def _require_same(self, folder: Path, saved: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(self._configuration))
        names = sorted(name for name in {*saved, *now} if saved.get(name) != now.get(name))
        if names:
            changes = ", ".join(f"{n} was {_short(saved.get(n))}, is {_short(now.get(n))}" for n in names[:3])
            raise UsageError(f"{folder} contains a training with another configuration: {changes}.", _ANOTHER)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}..."
