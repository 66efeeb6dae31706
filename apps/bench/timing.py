"""Fair timing of several engines: the order of visits and the statistics of their samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np

T = TypeVar("T")
# What is timed in one visit: a pass over so many tokens, plain decoding, or taking in a whole prompt.
Task = int | Literal["decode", "prefill"]
DECODE: Literal["decode"] = "decode"
PREFILL: Literal["prefill"] = "prefill"


@dataclass(frozen=True)
class Spread:
    """The quartiles of some numbers."""

    median: float
    p25: float
    p75: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The quartiles of `values`, which must not be empty."""
        p25, median, p75 = np.percentile(np.asarray(values, np.float64), (25, 50, 75))
        return cls(float(median), float(p25), float(p75))


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The value that `percent` of them do not exceed; None of none."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else None


@dataclass
class VisitTimes:
    """Milliseconds of each repeat's visit to each (engine, task)."""

    bursts: dict[tuple[str, Task], list[list[float]]] = field(default_factory=dict)

    def add(self, engine: str, task: Task, times: Sequence[float]) -> None:
        """Record the times of one visit; visits come in the order of the repeats."""
        self.bursts.setdefault((engine, task), []).append(list(times))

    def spread(self, engine: str, task: Task) -> Spread:
        """The quartiles of all times together."""
        return Spread.of([time for burst in self.bursts[engine, task] for time in burst])


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items, starting at another one."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def visits(engines: Sequence[str], tasks: Sequence[Task], repeats: int) -> Iterator[tuple[str, Task]]:
    """Every engine and task once per repeat: tasks outside, engines inside, both starting elsewhere each time."""
    for repeat in range(repeats):
        for turn, task in enumerate(rotated(tasks, repeat)):
            for engine in rotated(engines, repeat + turn):
                yield engine, task
