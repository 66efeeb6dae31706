"""When one way to run a model is taken to be faster than another, by pairs of timings.

Nothing is assumed of how timings scatter. Two ways are timed in turns, so that what slows the machine for a while slows
both; of each pair only the ratio counts. From some sorted ratios follow bounds of their median, whatever their
distribution: it lies above the k-th largest only if k of them or more fell on one side at random, as of a coin (the
sign test, turned round). A way is kept if it is surely faster in what it is for, and surely not slower in anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from edgeinfer.records import dataclass
from edgeinfer.runtime.profile.settings import TunedSettings
from edgeinfer.runtime.tuning.work import Times

# A gain that is worth a setting of one's own, and a loss that is not noticed.
GAIN, _LOSS = 0.03, 0.03
# Probability of taking a way for faster that is not, and for no slower that is, at each look at the timings.
_WRONGLY_FASTER, _WRONGLY_EQUAL = 0.01, 0.05


@dataclass(frozen=True)
class TimingVerdict:
    """What some pairs of timings tell.

    Attributes:
        better: the second way is to be kept.
        decided: more pairs would not change that.
        ratios: of the second way's time to the first's, by what was timed: medians.
        slower: what the second way is surely slower in.
    """

    better: bool
    decided: bool
    ratios: Mapping[str, float]
    slower: tuple[str, ...] = ()


def median_below(ratios: Sequence[float], error_rate: float) -> float:
    """A bound that the true median lies above with no more than this probability; infinite where they are too few."""
    count, below, rank = len(ratios), 0.0, 0
    while rank <= count and below + math.comb(count, rank) / 2**count <= error_rate:
        below += math.comb(count, rank) / 2**count
        rank += 1
    return sorted(ratios, reverse=True)[rank - 1] if rank else math.inf


def judge(ratios: Mapping[str, Sequence[float]], aims: Sequence[str]) -> TimingVerdict:
    """Whether a way is better.

    Args:
        aims: of these the second way must be faster in one.
    """
    medians = {part: median(values) for part, values in ratios.items()}
    gained = [part for part in aims if medians[part] <= 1 - GAIN and median_below(ratios[part], _WRONGLY_FASTER) < 1]
    if gained and all(median_below(values, _WRONGLY_EQUAL) <= 1 + _LOSS for values in ratios.values()):
        return TimingVerdict(True, True, medians)
    # Turned round, the same bound says what is surely slower, and what surely gains too little.
    slower = tuple(part for part in ratios if _median_above(ratios[part]) > 1 + _LOSS)
    hopeless = all(_median_above(ratios[part]) > 1 - GAIN for part in aims)
    return TimingVerdict(False, bool(slower) or hopeless, medians, slower)


def _median_above(ratios: Sequence[float]) -> float:
    return -median_below([-ratio for ratio in ratios], _WRONGLY_FASTER)


@dataclass(frozen=True)
class Effort:
    """How long a comparison measures.

    Attributes:
        looks: numbers of pairs after which it is asked whether they tell enough.
        seconds: of a comparison, after which what there is has to do.
    """

    looks: tuple[int, ...]
    seconds: float

    @property
    def visit_ms(self) -> float:
        """Milliseconds of one visit, so that the second look comes in time."""
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

    verdict: TimingVerdict
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
            if late or verdict.decided:
                break
    return Trial(verdict, _medians(mine), _medians(theirs), len(mine))


def _ratios(first: Sequence[Times], second: Sequence[Times]) -> Mapping[str, Sequence[float]]:
    return {part: [b[part] / a[part] for a, b in zip(first, second, strict=True)] for part in first[0]}


def _medians(visits: Sequence[Times]) -> Times:
    return {part: median(times[part] for times in visits) for part in visits[0]}
