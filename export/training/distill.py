"""The training of a drafter over a frozen target: text, the target's replies, as many steps as fit the time. A kind of
drafter is one file with its options and its task: the model, the loss, how it is measured and written."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.bundle.writing import write_file
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import require
from edgeinfer.core.results import Progress
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.samples import Replier, SampleOptions, TorchReplier, open_text, sample
from edgeinfer.export.training.text import TextSource, TokenFile
from edgeinfer.export.training.trainer import Task, Trained, Trainer, TrainOptions

# Share of text and replies that is set aside for validation, and windows that are read for it.
VALIDATION_SHARE, _MEASURED_WINDOWS = 0.04, 24
# Share of the minutes in which the target writes replies, and number of replies that are timed.
_SAMPLING, _FEW = 0.2, 6
# Steps that are timed.
_TIMED = 4
_SCHEDULE = "schedule.json"


@dataclass(frozen=True)
class StepOptions:
    """Options of the steps of every training."""

    weight_decay: ClassVar[float] = 0.1
    most_warmup: ClassVar[int] = 50

    # `rows`, `length`: windows of a step and their tokens.
    rows: int = 8
    length: int = 256
    learning_rate: float = 2e-3  # at its highest
    seed: int = 0
    # `device`, `threads`: as TrainOptions.
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("length", 8)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"{least} or more")

    def training(self, steps: int, seed: int | None = None) -> TrainOptions:
        return TrainOptions(
            steps,
            self.learning_rate,
            self.weight_decay,
            warmup=min(self.most_warmup, max(1, steps // 10)),
            seed=self.seed if seed is None else seed,
            device=self.device,
            threads=self.threads,
        )

    def batch(self, tokens: TokenFile, step: int, device: torch.device, extra: int = 0) -> torch.Tensor:
        """The windows of a step, with `extra` more tokens each. (rows, length + extra)"""
        return torch.from_numpy(tokens.batch(self.seed, step, self.rows, self.length + extra)).to(device)


@dataclass(frozen=True)
class DistillOptions(StepOptions):
    """Options of all trainings of drafters."""

    least_steps: ClassVar[int] = 1
    least_samples: ClassVar[int] = 0

    steps: int | None = None  # of the optimizer; None goes by `minutes`
    minutes: float | None = 30.0  # time limit of everything, where `steps` is None
    samples: int | None = None  # tokens that the target writes; None goes by the steps or by `minutes`

    def __post_init__(self) -> None:
        for name, least in (("steps", self.least_steps), ("samples", self.least_samples)):
            value = getattr(self, name)
            require(value is None or value >= least, name, value, f"{least} or more")
        if self.steps is None:
            fits = self.minutes is not None and 0 < self.minutes <= 100_000
            require(fits, "minutes", self.minutes, "more than 0")
        super().__post_init__()


class DistillTask(ABC):
    """A model over a frozen target, which learns from the target's replies and other text in turns. Implements
    `trainer.Task`."""

    name: str
    module: torch.nn.Module

    def __init__(
        self, target: Target, sources: tuple[TokenFile, ...], options: DistillOptions, settings: Mapping[str, Any]
    ) -> None:
        for tokens in sources:
            tokens.require(options.length, "The text")
        self._target, self._sources, self._options, self._settings = target, sources, options, settings

    @property
    def configuration(self) -> Mapping[str, Any]:
        digests = {"target": self._target.digest, "sources": [tokens.digest for tokens in self._sources]}
        return digests | {"rows": self._options.rows, "length": self._options.length} | dict(self._settings)

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return dict(self.module.named_parameters())

    @abstractmethod
    def loss(self, step: int) -> torch.Tensor:
        """The loss of a step."""

    @abstractmethod
    def figures(self, validation: TokenFile) -> dict[str, float]:
        """Quality on validation text by the name of the figure."""

    def _batch(self, step: int) -> torch.Tensor:  # (B, S)
        return self._options.batch(self._sources[step % len(self._sources)], step, self._target.device)

    def _windows(self, validation: TokenFile) -> Iterator[torch.Tensor]:  # (1, S) each
        for window in validation.windows(self._options.length, _MEASURED_WINDOWS):
            yield torch.from_numpy(window)[None].to(self._target.device)


T = TypeVar("T", bound=DistillTask)


@dataclass(frozen=True)
class KindOptions(DistillOptions, ABC, Generic[T]):
    kind: ClassVar[str]

    @abstractmethod
    def task(self, target: Target, sources: tuple[TokenFile, ...]) -> T:
        """What is trained over a target."""


@dataclass(frozen=True)
class Distilled(Generic[T]):
    task: T
    # `before`, `after`: figures on validation text.
    before: dict[str, float]
    after: dict[str, float]
    trained: Trained
    seconds: float  # in all, since it was last started
    prompts: Sequence[NDArray[np.int64]]  # for measuring on an engine; no replies to them were learned from. (n,) each

    def facts(self) -> dict[str, Any]:
        return {
            "before": self.before,
            "after": self.after,
            "steps": len(self.trained.losses),
            "resumed_at": self.trained.resumed_at,
            "final_loss": self.trained.final_loss,
            "seconds": round(self.seconds, 1),
            "losses": list(self.trained.losses),
        }


def distill(
    target: Target,
    text: TextSource,
    options: KindOptions[T],
    work: Path,
    replier: Replier | None = None,
    progress: Progress | None = None,
) -> Distilled[T]:
    """Trains a drafter in a working folder, or resumes there; torch draws the target's replies where no `replier`
    does."""
    started = time.monotonic()
    material = open_text(text, work, options.length, options.threads)
    drawer: Replier = replier or TorchReplier(target)

    def timed() -> dict[str, int]:
        """Steps and sampled tokens that fit the minutes."""
        assert options.minutes is not None, "there are steps otherwise"
        seconds, samples = 60 * options.minutes, options.samples
        if samples is None:
            began, prompts = time.perf_counter(), material.asked[:_FEW]
            replies = drawer.replies(prompts, [0.0] * len(prompts), SampleOptions(1).length, 0)
            token_seconds = (time.perf_counter() - began) / max(1, sum(map(len, replies)))
            samples = int(_SAMPLING * seconds / token_seconds)
        step = step_seconds(options.task(target, (material.tokens,)), time.perf_counter)
        return {"steps": max(1, int((1 - _SAMPLING) * seconds / step)), "samples": samples}

    if options.steps is not None:
        schedule = {"steps": options.steps, "samples": options.samples or 0}
    else:
        schedule = saved_schedule(work, options.minutes, timed)
    sources = [material.tokens]
    if schedule["samples"]:
        # Enough for one validation window.
        drawn = SampleOptions(max(schedule["samples"], int(options.length / VALIDATION_SHARE)), seed=options.seed)
        sources.insert(0, sample(drawer, material.asked, drawn, work / "samples", target.digest, progress))
    halves = [each.split(VALIDATION_SHARE) for each in sources]
    validation = halves[0][1]
    validation.require(options.length, "The validation part of the text")
    task = options.task(target, tuple(most for most, _ in halves))
    before = task.figures(validation)
    trained = Trainer(task, options.training(schedule["steps"]), work / options.kind).run(progress)
    return Distilled(task, before, task.figures(validation), trained, time.monotonic() - started, material.kept)


def step_seconds(task: Task, clock: Callable[[], float]) -> float:
    """Seconds of a training step, without the first."""
    torch.autograd.backward(task.loss(0))
    started = clock()
    for step in range(_TIMED):
        torch.autograd.backward(task.loss(step))
    return (clock() - started) / _TIMED


def saved_schedule(work: Path, minutes: float | None, measure: Callable[[], Mapping[str, int]]) -> dict[str, int]:
    """The numbers of steps and tokens that fit a time limit, measured once, so that a resumed run has the same."""
    file = work / _SCHEDULE
    if not file.exists():
        write_file(file, json.dumps(dict(measure()) | {"minutes": minutes}).encode())
    saved: dict[str, int] = json.loads(file.read_text("utf-8"))
    if saved.pop("minutes") != minutes:
        hint = "Use another working folder, or remove this one to start over."
        raise UsageError(f"{work} contains a training with another time limit.", hint)
    return saved
