"""The options of a training, validated on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from edgeinfer.options import require

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class TrainOptions:
    """How a task is trained.

    Attributes:
        steps: of the optimizer; the learning rate rises over `warmup` of them and falls along half a cosine.
        learning_rate: at its highest.
        weight_decay: of matrices; vectors have none.
        warmup: steps until the learning rate is reached.
        clip: most that the norm of all gradients together may be.
        seed: of everything that is drawn.
        save_seconds: between two checkpoints; it changes nothing of the result.
        device: one of DEVICES; "auto" is CUDA where it is there.
        threads: of the linear algebra; None takes torch's own number. The same number gives the same result.
    """

    steps: int
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup: int = 50
    clip: float = 1.0
    seed: int = 0
    save_seconds: float = 60.0
    device: str = "auto"
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

    @property
    def decisive(self) -> dict[str, Any]:
        """The options that the result depends on; a training is resumed with the same only."""
        names = ("steps", "learning_rate", "weight_decay", "warmup", "clip", "seed")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class DraftTrainOptions:
    """What the trainings of all drafters have in common.

    Attributes:
        steps: of the optimizer; None goes by `minutes`.
        minutes: that all may take, where `steps` is None.
        samples: tokens that the target writes; None goes by the steps or by `minutes`.
        rows, length: windows of a step and their tokens.
        learning_rate: at its highest.
        device, threads: as TrainOptions.
    """

    least_steps: ClassVar[int] = 1
    least_samples: ClassVar[int] = 0

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
        for name, least in (("steps", self.least_steps), ("samples", self.least_samples)):
            value = getattr(self, name)
            require(value is None or value >= least, name, value, f"{least} or more")
        if self.steps is None:
            fits = self.minutes is not None and 0 < self.minutes <= 100_000
            require(fits, "minutes", self.minutes, "more than 0")
        for name, least in (("rows", 1), ("length", 8)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"{least} or more")

    def training(self, steps: int, seed: int | None = None) -> TrainOptions:
        """The trainer's options for so many steps."""
        return TrainOptions(
            steps,
            self.learning_rate,
            warmup=min(50, max(1, steps // 10)),
            seed=self.seed if seed is None else seed,
            device=self.device,
            threads=self.threads,
        )
