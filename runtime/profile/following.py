"""Moves c(m) towards what passes of a session took, each held against the passes around it.

A machine that other programs use slows down for seconds at a time, so passes of two sizes are compared where they ran
close together. The median of these comparisons tells by how much the belief about one size is off beside that about the
other; what all of them say together is a least-squares problem of a few unknowns. Sizes that were never measured are
known by the least of what passes of them took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.profile.costs import PassCosts

# Rows of a pass, and its milliseconds.
TimedPass = tuple[int, float]
# Passes that tell anything at all.
_FEWEST = 3
# Passes apart that ran close together: a tenth of a second of a 0.5B.
_NEAR = 5
# What was believed counts as so many comparisons: one disturbed pass moves it little, twenty decide.
_BELIEVED = 2.0
# Passes of one size of which the least counts, as other work only adds to it; and sizes that tell what others take.
_KEPT, _SIZES = 8, 3
_LARGEST = 4096  # rows, as `PassCosts` takes them


class RanPasses:
    """What passes take by their rows, as far as those that ran in earnest tell."""

    def __init__(self) -> None:
        self._ms: dict[int, deque[float]] = {}
        self._least: dict[int, float] = {}
        self._costs: PassCosts | None = None
        self._measured: PassCosts | None = None  # what these go on from

    def observe(self, rows: int, ms: float) -> None:
        """A pass over so many rows took so long."""
        if not 0 < rows <= _LARGEST or ms <= 0:
            return
        kept = self._ms.setdefault(rows, deque(maxlen=_KEPT))
        kept.append(ms)
        if self._least.get(rows) != (least := min(kept)):
            self._least[rows] = least
            self._costs = None

    def beyond(self, measured: PassCosts | None) -> PassCosts | None:
        """Costs as they were measured, and those of larger passes that ran; None where too little is known."""
        if measured is None and len(self._least) < _SIZES:
            return None
        if self._costs is None or self._measured is not measured:
            self._measured = measured
            points, step = ((), 1) if measured is None else (measured.points, measured.step)
            largest = points[-1][0] if points else 0
            further = sorted((rows, ms) for rows, ms in self._least.items() if rows > largest)
            self._costs = PassCosts((*points, *further), step)
        return self._costs


def following(costs: PassCosts, observed: Sequence[TimedPass]) -> PassCosts:
    """Costs moved towards those of passes that ran in earnest.

    Sizes that did not run move as the nearest ones that did: beliefs that one busy moment spoiled are mostly spoiled
    alike, and where nothing but small passes seemed to pay, larger ones have no other way to look better.
    """
    ran = _within(costs, observed)
    if len(ran) < _FEWEST:
        return costs
    off = np.log([ms / costs.ms(rows) for rows, ms in ran])  # (N,)
    padded = [-(-rows // costs.step) * costs.step if rows > 1 else rows for rows, _ in ran]
    sizes, places = np.unique(padded, return_inverse=True)
    beside = _differences(off, places, len(sizes))
    common = float(np.median(off - beside[places])) * len(ran) / (len(ran) + _BELIEVED)
    points = np.log([rows for rows, _ in costs.points])
    factors = np.exp(np.interp(points, np.log(sizes), beside) + common).tolist()
    return PassCosts(tuple((rows, ms * factors[i]) for i, (rows, ms) in enumerate(costs.points)), costs.step)


def pace(costs: PassCosts, observed: Sequence[TimedPass]) -> float | None:
    """Milliseconds of a pass over one row where passes take what was observed; None where too few ran."""
    ran = _within(costs, observed)
    if len(ran) < _FEWEST:
        return None
    return costs.ms(1) * median(ms / costs.ms(rows) for rows, ms in ran)


def _within(costs: PassCosts, observed: Sequence[TimedPass]) -> list[TimedPass]:
    return [(rows, ms) for rows, ms in observed if rows <= costs.largest]


def _differences(off: Floats, sizes: Ints, count: int) -> Floats:  # (N,), (N,) -> (M,)
    """By how much sizes are off beside each other, as far as passes of different ones ran close together."""
    near = range(1, min(_NEAR, len(off) - 1) + 1)
    first = np.concatenate([sizes[:-apart] for apart in near])
    second = np.concatenate([sizes[apart:] for apart in near])
    further = np.concatenate([off[apart:] - off[:-apart] for apart in near])
    further = np.where(first < second, further, -further)
    pairs = np.minimum(first, second) * count + np.maximum(first, second)
    # Least squares of all medians, weighted by the passes behind them, and of the beliefs.
    matrix, right = np.eye(count) * _BELIEVED, np.zeros(count)
    for pair in np.unique(pairs[first != second]):
        low, high = divmod(int(pair), count)
        differences = further[pairs == pair]
        weight = len(differences) / _NEAR
        matrix[[low, high], [low, high]] += weight
        matrix[[low, high], [high, low]] -= weight
        right[[low, high]] += np.array([-weight, weight]) * np.median(differences)
    solved: Floats = np.linalg.solve(matrix, right)
    return solved
