"""How often guesses come true, learnt for each drafter, sign and rank among siblings as text is made.

A guess's estimate is its cell's share of successes, drawn towards the drafter's prior while there is little evidence,
times a factor for its place in the draft: behind guesses that are themselves uncertain the shares of single cells
multiply to a little too much or too little. Of several guesses for one place the one of highest estimate is taken, and
the highest of several estimates is too high on average (the winner's curse), so what became of guesses that were taken
is learnt once more, by how high they were estimated.

Of siblings at most one comes true, so those of each rank are counted apart: a second guess takes nothing from what is
known of first ones, which decide how deep a draft goes and who is asked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import StorageError
from edgeinfer.runtime.speculation.mixing import MixingWeights

# A prior counts as this many observations: few enough that twenty rounds outweigh it, enough that two do not.
_PRIOR_WEIGHT = 4.0
# Observations a cell remembers: the text may turn from copied to new within a paragraph.
_MEMORY = 200.0
# Guesses that a drafter's mean runs over.
_LATEST = 20.0
# Buckets of estimates whose reliability is learnt, the observations a bucket remembers, and those that 1 counts for.
_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
_TAKEN_MEMORY, _TAKEN_WEIGHT = 100.0, 6.0
# Ranks among the guesses of one drafter for one place that are told apart; those behind share the last one's counts.
_RANKS = 4
# No guess is certain; a chain of certain ones would be worth any length.
SUREST = 0.999
# Places in a draft that are told apart; those behind share the last one's factor.
_DEPTHS = 8
_DEPTH_WEIGHT = 20.0


class _Record:
    """What is known of one drafter's guesses."""

    def __init__(self, priors: Sequence[float]) -> None:
        shape = len(priors), _RANKS
        self.priors = np.broadcast_to(np.array(priors, np.float64)[:, None], shape)
        self.accepted = np.zeros_like(self.priors)
        self.seen = np.zeros_like(self.priors)
        self.estimates: list[list[float]] = self.priors.tolist()
        # Successes and what the cells expected of them, by place and rank.
        self.came = np.zeros((_DEPTHS, _RANKS)).tolist()
        self.expected = np.zeros((_DEPTHS, _RANKS)).tolist()
        self.taken = [[0.0, 0.0] for _ in range(len(_EDGES) + 1)]  # successes, and what was expected of them
        mean = float(np.mean(priors))
        self.means = [mean * (1 - mean) ** rank for rank in range(_RANKS)]

    def refresh(self, sign: int, rank: int) -> None:
        cell = sign, rank
        accepted, seen, prior = float(self.accepted[cell]), float(self.seen[cell]), float(self.priors[cell])
        self.estimates[sign][rank] = (accepted + _PRIOR_WEIGHT * prior) / (seen + _PRIOR_WEIGHT)


class Acceptance:
    """Running acceptance of guesses.

    Attributes:
        mixing: what several drafters' guesses for one place say together.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self.mixing = MixingWeights()

    def add(self, drafter: str, priors: Sequence[float]) -> None:
        """Begins to learn about a drafter, with its acceptance by sign before any observation."""
        self._records[drafter] = _Record(priors)

    def estimate(self, drafter: str, sign: int, depth: int, rank: int = 0) -> float:
        """Probability that the target chooses this guess, if all before it in the draft are accepted."""
        record, place, rank = self._records[drafter], min(depth, _DEPTHS - 1), min(rank, _RANKS - 1)
        factor = (record.came[place][rank] + _DEPTH_WEIGHT) / (record.expected[place][rank] + _DEPTH_WEIGHT)
        return min(record.estimates[sign][rank] * factor, SUREST)

    def reliable(self, drafter: str, estimate: float) -> float:
        """Probability of a guess that is taken because its estimate is the highest."""
        came, expected = self._records[drafter].taken[bisect_right(_EDGES, estimate)]
        return min(estimate * (came + _TAKEN_WEIGHT) / (expected + _TAKEN_WEIGHT), SUREST)

    def observe_taken(self, drafter: str, estimate: float, came: bool) -> None:
        """Learns what became of the guess of highest estimate at a place that was reached."""
        cell, kept = self._records[drafter].taken[bisect_right(_EDGES, estimate)], 1 - 1 / _TAKEN_MEMORY
        cell[0], cell[1] = cell[0] * kept + came, cell[1] * kept + estimate

    def mean(self, drafter: str, rank: int = 0) -> float:
        """Share of the drafter's latest guesses of a rank that came true, whatever their signs."""
        return self._records[drafter].means[min(rank, _RANKS - 1)]

    def observe(self, drafter: str, sign: int, depth: int, came: bool, rank: int = 0) -> None:
        """Learns what became of a guess whose predecessors were accepted; the arguments are as of `estimate`."""
        record, place, rank = self._records[drafter], min(depth, _DEPTHS - 1), min(rank, _RANKS - 1)
        cell, kept = (sign, rank), 1 - 1 / _MEMORY
        expected = record.estimates[sign][rank]
        record.came[place][rank] = record.came[place][rank] * kept + came
        record.expected[place][rank] = record.expected[place][rank] * kept + expected
        record.accepted[cell] = record.accepted[cell] * kept + came
        record.seen[cell] = record.seen[cell] * kept + 1
        record.means[rank] += (came - record.means[rank]) / _LATEST
        record.refresh(sign, rank)

    def state(self) -> dict[str, NDArray[Any]]:
        """Successes and observations of every cell, and how guesses are mixed, for the next session."""
        arrays = self.mixing.state()
        for name, record in self._records.items():
            arrays |= {f"{name}_accepted": record.accepted.copy(), f"{name}_seen": record.seen.copy()}
            arrays[f"{name}_places"] = np.array([record.came, record.expected])
            arrays[f"{name}_taken"] = np.array(record.taken)
        return arrays

    def restore(self, drafter: str, state: Mapping[str, NDArray[Any]]) -> None:
        """Takes back what `state` gave for one drafter; nothing where it is not in it, or has other signs."""
        record = self._records[drafter]
        self.mixing.restore(drafter, state)
        accepted, seen = (state.get(f"{drafter}_{what}") for what in ("accepted", "seen"))
        if accepted is None or seen is None or not accepted.shape == seen.shape == record.priors.shape:
            return
        accepted, seen = accepted.astype(np.float64), seen.astype(np.float64)
        # NaN compares false with everything.
        if not bool(np.all((accepted >= 0) & (accepted <= seen + 1e-6) & (seen <= _MEMORY + 1))):
            raise StorageError(f"The kept acceptance of {drafter} is damaged.", "Delete it; it is learned again.")
        record.accepted, record.seen = accepted, seen
        record.estimates = ((accepted + _PRIOR_WEIGHT * record.priors) / (seen + _PRIOR_WEIGHT)).tolist()
        places, taken = state.get(f"{drafter}_places"), state.get(f"{drafter}_taken")
        if places is not None and places.shape == (2, _DEPTHS, _RANKS) and _are_counts(places):
            record.came, record.expected = places.tolist()
        if taken is not None and taken.shape == (len(record.taken), 2) and _are_counts(taken):
            record.taken = taken.tolist()
        for rank, (came, tried) in enumerate(zip(accepted.sum(0), seen.sum(0), strict=True)):
            if tried > 0:
                record.means[rank] = float(came / tried)


def _are_counts(array: NDArray[Any]) -> bool:
    # NaN compares false with everything.
    return bool(np.all((array >= 0) & (array <= _MEMORY + 1)))
