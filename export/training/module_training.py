"""Trains draft modules, which read a target's states: text, the target's replies, as many steps as fit.

What is specific to EAGLE heads and to DFlash drafters are their options and tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.export.training.models import Target
from edgeinfer.export.training.options import TrainOptions, require
from edgeinfer.export.training.samples import Replier, SampleOptions, TorchReplier, open_text, sample
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TextSource, TokenFile
from edgeinfer.export.training.trainer import Task, Trained, Trainer, kept_schedule, step_seconds
from edgeinfer.results import Progress

__all__ = [
    "MEASURED_WINDOWS",
    "ModuleOptions",
    "ModuleTask",
    "ModuleTraining",
    "sizes_like",
    "sizes_of",
    "train_module",
]

# Of text and replies, what is kept for measuring; windows that are read for it.
_VALIDATION, MEASURED_WINDOWS = 0.04, 24
# Share of the minutes in which the target writes replies, and how many of them tell what a token takes.
_SAMPLING, _FEW = 0.2, 6


@dataclass(frozen=True)
class ModuleOptions:
    """How any module is trained.

    Attributes:
        steps: of the optimizer; None goes by `minutes`.
        minutes: that all may take, where `steps` is None.
        samples: tokens that the target writes; None goes by `minutes`, or is none where there are steps.
        rows, length: windows of a step and their tokens.
        learning_rate: at its highest.
        device, threads: as TrainOptions.
    """

    steps: int | None = None
    minutes: float | None = 30.0
    samples: int | None = None
    rows: int = 8
    length: int = 256
    learning_rate: float = 2e-3
    seed: int = 0
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        require(self.steps is None or self.steps >= 1, "steps", self.steps, "1 or more")
        if self.steps is None:
            fits = self.minutes is not None and 0 < self.minutes <= 100_000
            require(fits, "minutes", self.minutes, "more than 0")
        require(self.samples is None or self.samples >= 0, "samples", self.samples, "0 or more")
        require(self.rows >= 1, "rows", self.rows, "1 or more")

    @property
    def batches(self) -> Batches:
        """The windows of the steps."""
        return Batches(self.seed, self.rows, self.length)

    def training(self, steps: int) -> TrainOptions:
        """The trainer's options."""
        warmup, rate = min(50, max(1, steps // 10)), self.learning_rate
        return TrainOptions(steps, rate, warmup=warmup, seed=self.seed, device=self.device, threads=self.threads)


class ModuleTask(Task, Protocol):
    """A module over a frozen target."""

    @property
    def sizes(self) -> dict[str, Any]:
        """Of the module, for a report."""

    def agreement(self, validation: TokenFile) -> tuple[float, ...]:
        """How often its likeliest token is the target's, by place of a draft that was right so far."""

    def save(self, folder: Path) -> None:
        """Writes the module in its published layout.

        Raises:
            StorageError: the folder cannot be written, or the disk is full.
        """


@dataclass(frozen=True)
class ModuleTraining:
    """A trained module.

    Attributes:
        checkpoint: its folder, in the published layout.
        before, after: as `ModuleTask.agreement`, on text that was kept for measuring.
        seconds: in all, since it was last started.
        prompts: that were not sampled from, for measuring on an engine. (n,) each
    """

    checkpoint: Path
    sizes: dict[str, Any]
    before: tuple[float, ...]
    after: tuple[float, ...]
    trained: Trained
    seconds: float
    prompts: Sequence[NDArray[Any]]

    def facts(self) -> dict[str, Any]:
        """The facts of a report."""
        return {
            "shape": self.sizes,
            "before": list(self.before),
            "after": list(self.after),
            "steps": len(self.trained.losses),
            "resumed_at": self.trained.resumed_at,
            "final_loss": self.trained.final_loss,
            "seconds": round(self.seconds, 1),
            "losses": list(self.trained.losses),
        }


def train_module(
    kind: str,
    make: Callable[[tuple[TokenFile, ...]], ModuleTask],
    target: Target,
    text: TextSource,
    options: ModuleOptions,
    work: Path,
    replier: Replier | None,
    progress: Progress | None,
) -> ModuleTraining:
    """Trains a module in a working folder, or resumes the training that was interrupted there.

    Args:
        kind: of the module, which names its folder.
        make: the task over some texts, which take turns.
        replier: draws the target's replies; None draws them in torch.

    Raises:
        UsageError: there is too little text, or the folder holds a training of another configuration.
        StorageError: the folder cannot be written, or the disk is full.
    """
    started = time.monotonic()
    material = open_text(text, work, options.length, options.threads)
    drawer: Replier = replier or TorchReplier(target)
    schedule = _schedule(options, work, lambda: make((material.tokens,)), drawer, material.asked)
    sources = [material.tokens]
    if schedule["samples"]:
        drawn = SampleOptions(max(schedule["samples"], 8 * options.length), seed=options.seed)
        sources.insert(0, sample(drawer, material.asked, drawn, work / "samples", target.digest, progress))
    halves = [each.split(_VALIDATION) for each in sources]
    validation = halves[0][1]
    validation.require(options.length, "What is kept for measuring")
    task = make(tuple(most for most, _ in halves))
    before = task.agreement(validation)
    trained = Trainer(task, options.training(schedule["steps"]), work / kind).run(progress)
    after = task.agreement(validation)
    checkpoint = work / "checkpoint"
    task.save(checkpoint)
    seconds = time.monotonic() - started
    return ModuleTraining(checkpoint, task.sizes, before, after, trained, seconds, material.kept)


def _schedule(
    options: ModuleOptions,
    work: Path,
    tried: Callable[[], Task],
    replier: Replier,
    prompts: Sequence[NDArray[np.int64]],
) -> dict[str, int]:
    """Steps, and tokens that are sampled: as the options say, or what fits the minutes by what a few take here."""
    if options.steps is not None:
        return {"steps": options.steps, "samples": options.samples or 0}
    assert options.minutes is not None, "there are steps otherwise"
    seconds, samples = 60 * options.minutes, options.samples

    def measured() -> dict[str, int]:
        drawn = int(_SAMPLING * seconds / _token_seconds(replier, prompts[:_FEW])) if samples is None else samples
        steps = max(1, int((1 - _SAMPLING) * seconds / step_seconds(tried(), time.perf_counter)))
        return {"steps": steps, "samples": drawn}

    return kept_schedule(work, options.minutes, measured)


def _token_seconds(replier: Replier, prompts: Sequence[NDArray[np.int64]]) -> float:
    """Seconds that a token of a reply takes."""
    started = time.perf_counter()
    replies = replier.replies(prompts, [0.0] * len(prompts), SampleOptions(1).length, 0)
    return (time.perf_counter() - started) / max(1, sum(map(len, replies)))


def sizes_of(shape: Any) -> dict[str, Any]:
    """The fields of a shape as JSON has them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(shape).items()}


def sizes_like(target: Target) -> dict[str, int]:
    """The sizes of a module whose layers resemble its target's, by the names that shapes have for them."""
    config = target.config.get_text_config()
    heads = config.num_attention_heads
    return {
        "width": config.hidden_size,
        "inner": config.intermediate_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocabulary": config.vocab_size,
    }
