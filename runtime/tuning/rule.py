"""When one way to run a model is taken to be faster than another, by pairs of timings; knows no model and no clock.

Nothing is assumed of how timings scatter. Two ways are timed in turns, so that what slows the machine for a while slows
both; of each pair only the ratio counts. From some sorted ratios follow bounds of their median, whatever their
distribution: it lies above the k-th largest only if k of them or more fell on one side by chance, as of a coin (the
sign test, turned round). A way is kept if it is surely faster in what it is for, and surely not slower in anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["GAIN", "Verdict", "judge", "median_below"]

# A gain that is worth a setting of one's own, and a loss that nobody notices.
GAIN, _LOSS = 0.03, 0.03
# Chance of taking a way for faster that is not, and for no slower that is, at each look at the timings.
_WRONGLY_FASTER, _WRONGLY_EQUAL = 0.01, 0.05


@dataclass(frozen=True)
class Verdict:
    """What some pairs of timings tell.

    Attributes:
        better: the second way is to be kept.
        settled: more pairs would not change that.
        ratios: of the second way's time to the first's, by what was timed: medians.
        slower: what the second way is surely slower in.
    """

    better: bool
    settled: bool
    ratios: Mapping[str, float]
    slower: tuple[str, ...] = ()


def median_below(ratios: Sequence[float], chance: float) -> float:
    """A bound that the true median lies above with no more than this chance; infinite where they are too few."""
    count, below, rank = len(ratios), 0.0, 0
    while rank <= count and below + math.comb(count, rank) / 2**count <= chance:
        below += math.comb(count, rank) / 2**count
        rank += 1
    return sorted(ratios, reverse=True)[rank - 1] if rank else math.inf


def judge(ratios: Mapping[str, Sequence[float]], aims: Sequence[str]) -> Verdict:
    """Whether a way is better.

    Args:
        ratios: of each pair, by what was timed: the second way's time in units of the first's.
        aims: of these the second way must be faster in one.
    """
    medians = {part: median(values) for part, values in ratios.items()}
    gained = [part for part in aims if medians[part] <= 1 - GAIN and median_below(ratios[part], _WRONGLY_FASTER) < 1]
    if gained and all(median_below(values, _WRONGLY_EQUAL) <= 1 + _LOSS for values in ratios.values()):
        return Verdict(True, True, medians)
    # Turned round, the same bound says what is surely slower, and what surely gains too little.
    slower = tuple(part for part in ratios if _median_above(ratios[part], _WRONGLY_FASTER) > 1 + _LOSS)
    hopeless = all(_median_above(ratios[part], _WRONGLY_FASTER) > 1 - GAIN for part in aims)
    return Verdict(False, bool(slower) or hopeless, medians, slower)


def _median_above(ratios: Sequence[float], chance: float) -> float:
    return -median_below([-ratio for ratio in ratios], chance)
