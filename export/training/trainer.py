"""Trains whatever gives a loss, and goes on where it was interrupted; knows nothing of what is trained.

A step depends on its number and the seed alone: batches and whatever else is drawn come from them. So a training that
was interrupted gives the losses and weights, to the last bit, of one that was not, on one machine and with one number
of threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from edgeinfer.errors import DeviceError, UsageError
from edgeinfer.export.training.kept import Kept, load_kept, save_kept
from edgeinfer.export.training.options import Progress, TrainOptions

__all__ = ["Task", "Trained", "Trainer", "find_device"]

_BETAS = (0.9, 0.95)
_EPSILON = 1e-8
# What the optimizer keeps of a parameter; "step" counts its own, as not every step need reach every parameter.
_STATES = ("exp_avg", "exp_avg_sq", "step")


class Task(Protocol):
    """What is trained.

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
    """A training that came to its end.

    Attributes:
        losses: of every step.
        resumed_at: step that it went on from; 0 where it was not interrupted.
        seconds: that it took, since it was last begun.
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
    """The device that a name of options.DEVICES means here.

    Raises:
        DeviceError: CUDA is asked for and not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("There is no CUDA device, or this torch is without CUDA.", "Use --device cpu, or auto.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


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
        kept = None if folder is None else load_kept(folder, self._configuration)
        if kept is not None:
            self._restore(kept)
        self._resumed_at = len(self._losses)

    @property
    def step(self) -> int:
        """Steps that are done."""
        return len(self._losses)

    def run(self, progress: Progress | None = None, until: int | None = None) -> Trained:
        """Trains to the end, or until a step.

        Raises:
            StorageError: the state cannot be kept; the older one is still there.
            KeyboardInterrupt: after what is done was kept.
        """
        options, task = self._options, self._task
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        begun = saved = self._clock()
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
        return Trained(tuple(self._losses), self._resumed_at, self._clock() - begun)

    def save(self) -> None:
        """Keeps the state; errors as `save_kept`."""
        if self._folder is None:
            return
        tensors = {f"weight.{name}": p.detach().cpu().contiguous() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            state = self._optimizer.state.get(parameter, {})
            tensors |= {f"{part}.{name}": state[part].cpu().contiguous() for part in _STATES if state}
        save_kept(self._folder, Kept(self.step, self._losses, tensors), self._configuration)

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

    def _restore(self, kept: Kept) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(kept.tensors[f"weight.{name}"])
                if f"step.{name}" not in kept.tensors:
                    continue
                state = {part: kept.tensors[f"{part}.{name}"].to(parameter.device) for part in _STATES[:2]}
                # The count stays on the CPU, where the optimizer keeps it.
                self._optimizer.state[parameter] = state | {"step": kept.tensors[f"step.{name}"]}
        self._losses = list(kept.losses)
