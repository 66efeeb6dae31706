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

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import StorageError
from edgeinfer.runtime.speculation.drafters.contract import Drafter, Guess

# How fast weights follow what comes, and the terms of a reply.
_RATE, _REPLY_RATE = 0.04, 0.1
# Counts of drafters that say the same are distinguished up to this one. Several that agree begin with weights whose
# sum is a little more than one's.
_AGREEING, _MORE = 4, 0.1
# Log-odds and weights go no farther.
_FARTHEST, _HEAVIEST = 7.0, 16.0
# Differences that a reply remembers, and those that a state does; at a reply's beginning the state counts as so many.
_REPLY_MEMORY, _STATE_MEMORY, _KNOWN = 20.0, 200.0, 8.0
# Of the logarithm of the odds of being right in a difference, what is added to one side and taken from the other, and
# what the surest table loses where it is decided whether to ask a drafter with logits as well.
_SHARE, _HUMILITY = 0.25, 0.5
# Places that the share of copies that came true runs over, what it begins with, and the upper edges of its states.
_COPIES, _FIRST_SHARE, _COPY_EDGES = 8.0, 0.5, (0.3, 0.7)
_DIFFERENCES = "differences"


class Answer(NamedTuple):
    """A drafter's guess for a place."""

    drafter: str
    rank: int  # its guesses for the same place before it
    guess: Guess
    estimate: float  # the probability of the guess, whatever others say


class Mixture(NamedTuple):
    """All answers for a place, and the probability of every token among them."""

    answers: Sequence[Answer]
    probabilities: Mapping[int, float]


_NOTHING = Mixture((), {})


class MixingWeights:
    """What mixing has learnt from reply to reply."""

    def __init__(self) -> None:
        # Each drafter's biases and weights of its log-odds, by whether it guessed others before, and by how many
        # drafters agree.
        self.of: defaultdict[str, list[list[list[float]]]] = defaultdict(_first_weights)
        # By state, how often drafters with logits were right, and tables.
        self.differences = [[0.0, 0.0] for _ in range(len(_COPY_EDGES) + 1)]

    def state(self) -> dict[str, NDArray[Any]]:
        """Arrays for the next session; none before anything was mixed."""
        # A list, as other replies may add drafters.
        arrays = {f"{name}_weights": np.array(weights) for name, weights in list(self.of.items())}
        return arrays | {_DIFFERENCES: np.array(self.differences)} if arrays else {}

    def restore(self, drafter: str, state: Mapping[str, NDArray[Any]]) -> None:
        """Take back a drafter's part of what `state` gave, and who was right; what is not in it stays as it is."""
        weights, differences = state.get(f"{drafter}_weights"), state.get(_DIFFERENCES)
        # NaN compares false with everything.
        if weights is not None and weights.shape == (2, _AGREEING, 2):
            _require(bool(np.all(np.abs(weights) <= _HEAVIEST)), f"The kept weights of {drafter} are")
            self.of[drafter] = weights.tolist()
        if differences is not None and differences.shape == (len(self.differences), 2):
            counts = (differences >= 0) & (differences <= _STATE_MEMORY + 1)
            _require(bool(np.all(counts)), f"What is kept of {drafter} and others is")
            self.differences = differences.tolist()


def _require(whole: bool, what: str) -> None:
    if not whole:
        raise StorageError(f"{what} damaged.", "Delete the profile's acceptance; it is learned again.")


class Mixer:
    """Mixes the answers for the places of one reply, and learns from what comes."""

    def __init__(self, learnt: MixingWeights, drafters: Sequence[Drafter]) -> None:
        self._learnt = learnt
        self._with_logits = frozenset(drafter.name for drafter in drafters if drafter.draws)
        self._copying = frozenset(drafter.name for drafter in drafters if drafter.copies)
        self._terms: defaultdict[str, float] = defaultdict(float)
        self._right = [0.0, 0.0]
        self._copied = _FIRST_SHARE
        self._advantage = 0.0  # of a reply of which nothing was seen

    @property
    def _state(self) -> int:
        return sum(self._copied > edge for edge in _COPY_EDGES)

    def _advantage_now(self) -> float:
        """Logarithm of the odds that a drafter with logits is right where it and the surest table differ. Of a reply of
        which nothing was seen it is 0: a wrong first draft costs dozens of plain steps."""
        ours, theirs = self._learnt.differences[self._state]
        share = (ours + 1) / (ours + theirs + 2)
        ours, theirs = self._right[0] + _KNOWN * share, self._right[1] + _KNOWN * (1 - share)
        return math.log((ours + 0.5) / (theirs + 0.5))

    def mix(self, answers: Sequence[Answer]) -> Mixture:
        """Probabilities of the tokens that were guessed for a place."""
        if not answers:
            return _NOTHING
        agreeing = _agreeing(answers)
        advantage = self._advantage if len({answer.drafter in self._with_logits for answer in answers}) == 2 else 0.0
        scores = dict.fromkeys(agreeing, 0.0)
        for answer in answers:
            token = answer.guess.token
            bias, weight = self._weights(answer, agreeing[token])
            scores[token] += bias + weight * _log_odds(answer.estimate) + self._terms[answer.drafter]
        if advantage:
            for token in scores:
                kinds = {answer.drafter in self._with_logits for answer in answers if answer.guess.token == token}
                if len(kinds) == 1:
                    scores[token] += _SHARE * advantage if kinds == {True} else -_SHARE * advantage
        # Of any other token the score is 0.
        highest = max((0.0, *scores.values()))
        total = math.exp(-highest) + sum(math.exp(score - highest) for score in scores.values())
        return Mixture(answers, {token: math.exp(score - highest) / total for token, score in scores.items()})

    def against_tables(self, mixture: Mixture, probability: float) -> float:
        """What a token of tables is worth where it is decided whether to ask a drafter with logits, too: less than its
        probability where such drafters win the differences."""
        if self._advantage <= 0 or any(answer.drafter in self._with_logits for answer in mixture.answers):
            return probability
        odds = probability / (1 - probability)
        return odds / (odds + math.exp(_HUMILITY * self._advantage))

    def observe(self, mixture: Mixture, token: int) -> None:
        """Learn which token came at a place."""
        agreeing = _agreeing(mixture.answers)
        for answer in mixture.answers:
            guessed = answer.guess.token
            error = (guessed == token) - mixture.probabilities[guessed]
            weights = self._weights(answer, agreeing[guessed])
            for index, value in enumerate((1.0, _log_odds(answer.estimate))):
                weights[index] = max(-_HEAVIEST, min(_HEAVIEST, weights[index] + _RATE * error * value))
            self._terms[answer.drafter] += _REPLY_RATE * error
        self._compare([answer for answer in mixture.answers if answer.rank == 0], token)
        self._advantage = self._advantage_now()

    def _weights(self, answer: Answer, agreeing: int) -> list[float]:
        return self._learnt.of[answer.drafter][min(answer.rank, 1)][min(agreeing, _AGREEING) - 1]

    def _compare(self, firsts: Sequence[Answer], token: int) -> None:
        """Count who was right where the surest of both kinds differ."""
        ours = [answer for answer in firsts if answer.drafter in self._with_logits]
        theirs = [answer for answer in firsts if answer.drafter not in self._with_logits]
        if ours and theirs:
            mine, other = (max(kind, key=attrgetter("estimate")).guess.token for kind in (ours, theirs))
            if mine != other and token in (mine, other):
                learnt = self._learnt.differences[self._state]
                for counts, memory in ((self._right, _REPLY_MEMORY), (learnt, _STATE_MEMORY)):
                    counts[:] = [count * (1 - 1 / memory) for count in counts]
                    counts[int(token == other)] += 1
        copied = any(answer.drafter in self._copying and answer.guess.token == token for answer in firsts)
        self._copied += (copied - self._copied) / _COPIES


def _first_weights() -> list[list[list[float]]]:
    weights = [(1 + _MORE * more) / (1 + more) for more in range(_AGREEING)]
    return [[[0.0, weight] for weight in weights] for _ in range(2)]


def _agreeing(answers: Sequence[Answer]) -> dict[int, int]:
    """How many guessed each token."""
    counts: dict[int, int] = {}
    for answer in answers:
        counts[answer.guess.token] = counts.get(answer.guess.token, 0) + 1
    return counts


def _log_odds(probability: float) -> float:
    odds = math.log(max(probability, 1e-9) / (1 - probability))
    return odds if -_FARTHEST < odds < _FARTHEST else math.copysign(_FARTHEST, odds)


# A prior counts as this many observations: few enough that twenty rounds outweigh it, enough that two do not.
_PRIOR_WEIGHT = 4.0
# Observations a cell remembers: the text may turn from copied to new within a paragraph.
_MEMORY = 200.0
# Guesses that a drafter's mean runs over.
_LATEST = 20.0
# Buckets of estimates whose reliability is learnt, the observations a bucket remembers, and those that 1 counts for.
_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
_TAKEN_MEMORY, _TAKEN_WEIGHT = 100.0, 6.0
# Ranks among the guesses of one drafter for one place that are distinguished; those behind share the last one's counts.
_RANKS = 4
# No guess is certain; a chain of certain ones would be worth any length.
SUREST = 0.999
# Places in a draft that are distinguished; those behind share the last one's factor.
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
    """Running acceptance of guesses."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self.mixing = MixingWeights()  # what several drafters' guesses for one place say together

    def add(self, drafter: str, priors: Sequence[float]) -> None:
        """Begin to learn about a drafter, with its acceptance by sign before any observation."""
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
        """Learn what became of the guess of highest estimate at a place that was reached."""
        cell, kept = self._records[drafter].taken[bisect_right(_EDGES, estimate)], 1 - 1 / _TAKEN_MEMORY
        cell[0], cell[1] = cell[0] * kept + came, cell[1] * kept + estimate

    def mean(self, drafter: str, rank: int = 0) -> float:
        """Share of the drafter's latest guesses of a rank that came true, whatever their signs."""
        return self._records[drafter].means[min(rank, _RANKS - 1)]

    def observe(self, drafter: str, sign: int, depth: int, came: bool, rank: int = 0) -> None:
        """Learn what became of a guess whose predecessors were accepted; the arguments are as of `estimate`."""
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
        """Take back what `state` gave for one drafter; nothing where it is not in it, or has other signs."""
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
