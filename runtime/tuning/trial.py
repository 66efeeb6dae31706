"""Times two ways to run a model in turns until one is surely better, or time is up; knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from edgeinfer.runtime.profile.settings import TunedSettings
from edgeinfer.runtime.tuning.rule import Verdict, judge
from edgeinfer.runtime.tuning.work import Times

__all__ = ["FULL", "QUICK", "Effort", "Trial", "compare"]


@dataclass(frozen=True)
class Effort:
    """How long is measured.

    Attributes:
        looks: numbers of pairs after which it is asked whether they tell enough.
        seconds: of a comparison, after which what there is has to do.
    """

    looks: tuple[int, ...]
    seconds: float

    @property
    def visit_ms(self) -> float:
        """Of one visit, so that the second look comes in time."""
        return self.seconds * 1e3 / (2 * self.looks[1])


FULL = Effort((7, 13, 25, 37), 45.0)
QUICK = Effort((7, 13), 8.0)


@dataclass(frozen=True)
class Trial:
    """What a comparison told.

    Attributes:
        first, second: median milliseconds by part.
        pairs: visits to each.
    """

    verdict: Verdict
    first: Times
    second: Times
    pairs: int


def compare(
    timed: Callable[[TunedSettings], Times],
    first: TunedSettings,
    second: TunedSettings,
    aims: Sequence[str],
    effort: Effort,
    clock: Callable[[], float],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Trial:
    """Whether the second way is better than the first.

    Args:
        timed: visits a way once.
        aims: parts of which the second must be faster in one.
        clock: in seconds.
        report: called with pairs done and at most to do.
    """
    deadline = clock() + effort.seconds
    # What only a first pass does is no measure.
    timed(first), timed(second)
    mine: list[Times] = []
    theirs: list[Times] = []
    for count in range(1, effort.looks[-1] + 1):
        # Each begins every other pair: whatever the visit before leaves behind is shared.
        for way in (first, second) if count % 2 else (second, first):
            (mine if way == first else theirs).append(timed(way))
        report(count, effort.looks[-1])
        late = clock() > deadline
        if late or count in effort.looks:
            verdict = judge(_ratios(mine, theirs), aims)
            if late or verdict.settled:
                break
    return Trial(verdict, _medians(mine), _medians(theirs), len(mine))


def _ratios(first: Sequence[Times], second: Sequence[Times]) -> Mapping[str, Sequence[float]]:
    return {part: [b[part] / a[part] for a, b in zip(first, second, strict=True)] for part in first[0]}


def _medians(visits: Sequence[Times]) -> Times:
    return {part: median(times[part] for times in visits) for part in visits[0]}
