"""What a comparison found, as an object and as JSON; knows nothing of how it was measured or is printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from edgeinfer.apps.bench.contenders import CompareConfig
from edgeinfer.apps.bench.timing import Samples, Spread, Task
from edgeinfer.results import DeviceLimits, PassWork

__all__ = ["Comparison", "Contender", "Floor"]


@dataclass(frozen=True)
class Contender:
    """An engine that was timed, what it shares its kernels with, and the size of its model file or folder."""

    label: str
    family: str
    version: str
    model_bytes: int


@dataclass(frozen=True)
class Floor:
    """The least time a task can take on the machine, and how far from it the engine was.

    Attributes:
        read_ms: reading the weights, at the speed memory was read at beside the engine's visits.
        multiply_ms: the multiply-adds; None where their speed is not known.
        times: the measured time over the larger of the two, formed within each repeat.
    """

    read_ms: float
    multiply_ms: float | None
    times: Spread


@dataclass(frozen=True)
class Comparison:
    """Times of every contender.

    Attributes:
        skipped: engines that were not timed, with the reason.
        samples: by (label, task), in milliseconds.
        limits: of the machine, one measurement beside each repeat's visits for a task; empty where there are none.
        work: what each task has to do, by (label, task); of edgeinfer only.
    """

    config: CompareConfig
    contenders: tuple[Contender, ...]
    skipped: dict[str, str]
    samples: Samples
    limits: dict[Task, list[DeviceLimits]] = field(default_factory=dict)
    work: dict[tuple[str, Task], PassWork] = field(default_factory=dict)

    @property
    def baselines(self) -> tuple[Contender, ...]:
        """Whom speed-ups are relative to: the first of each family, without the very first if it has no sibling."""
        firsts = {entry.family: entry for entry in reversed(self.contenders)}
        own = self.contenders[0].family
        alone = sum(entry.family == own for entry in self.contenders) == 1
        return tuple(e for e in self.contenders if e is firsts[e.family] and not (e.family == own and alone))

    def time(self, label: str, task: Task) -> Spread:
        """Milliseconds per step, pass or prompt."""
        return self.samples.spread(label, task)

    def growth(self, label: str, size: int) -> Spread:
        """c(size) / c(1)."""
        return self.samples.ratio((label, size), (label, 1))

    def speedup(self, label: str, task: Task, baseline: str) -> Spread:
        """How many times faster than the contender labelled `baseline`."""
        return self.samples.ratio((baseline, task), (label, task))

    def floor(self, label: str, task: Task) -> Floor | None:
        """How close to the machine's limits; None where they or the work are not known."""
        work, limits = self.work.get((label, task)), self.limits.get(task)
        if work is None or not limits:
            return None
        floors = [each.floor_ms(work) for each in limits]
        bursts = self.samples.bursts[label, task]
        times = [np.median(b) / max(read, multiply or 0) for b, (read, multiply) in zip(bursts, floors, strict=True)]
        multiplying = [multiply for _, multiply in floors if multiply is not None]
        return Floor(
            read_ms=float(np.median([read for read, _ in floors])),
            multiply_ms=float(np.median(multiplying)) if multiplying else None,
            times=Spread.of(times),
        )

    def read_rate(self) -> Spread:
        """Bytes per second that memory was read at."""
        return Spread.of([each.read_bytes_per_s for many in self.limits.values() for each in many])

    def multiply_rate(self) -> Spread | None:
        """Multiply-adds per second; None where the kernel has no instruction for them."""
        rates = [each.multiply_adds_per_s for many in self.limits.values() for each in many]
        known = [rate for rate in rates if rate is not None]
        return Spread.of(known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, samples included."""
        config = self.config
        return {
            "shape": config.shape.name,
            "parameters": config.shape.parameters,
            "threads": config.threads,
            "past": config.past,
            "prefill": config.prefill,
            "prefill_chunk": config.prefill_chunk,
            "limits": self._limits_dict(),
            "engines": {entry.label: self._engine_dict(entry) for entry in self.contenders},
            "skipped": self.skipped,
        }

    def _engine_dict(self, entry: Contender) -> dict[str, Any]:
        label, tasks, sizes = entry.label, self.config.tasks, self.config.sizes
        data = {
            **asdict(entry),
            "ms": {str(task): asdict(self.time(label, task)) for task in tasks},
            "growth": {str(size): asdict(self.growth(label, size)) for size in sizes},
            "speedup_vs": {
                baseline.label: {str(task): asdict(self.speedup(label, task, baseline.label)) for task in tasks}
                for baseline in self.baselines
                if baseline != entry
            },
            "samples": {str(task): self.samples.bursts[label, task] for task in tasks},
        }
        floors = {task: floor for task in tasks if (floor := self.floor(label, task))}
        if floors:
            data["floors"] = {str(t): asdict(floor) | asdict(self.work[label, t]) for t, floor in floors.items()}
        return data

    def _limits_dict(self) -> dict[str, Any] | None:
        if not self.limits:
            return None
        multiply = self.multiply_rate()
        return {
            "kernel": next(iter(self.limits.values()))[0].kernel,
            "read_bytes_per_s": asdict(self.read_rate()),
            "multiply_adds_per_s": asdict(multiply) if multiply else None,
            "samples": {str(task): [asdict(each) for each in many] for task, many in self.limits.items()},
        }
