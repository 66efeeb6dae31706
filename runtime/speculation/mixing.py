"""What the guesses of all drafters for one place say together: a probability for each token that was guessed.

What speaks for a token is added up: the log-odds of every drafter that guessed it, weighted, and its tokens share their
probability with all others by softmax, as PAQ mixes its models (Mahoney 2005, TR CS-2005-16). The weights are learnt by
gradient, apart for how many drafters said the same: tables that know the same text do not count several times.

Replies differ in who is right. So each drafter has a term that is learnt faster and ends with the reply. And where a
drafter with logits and the surest table differ, it is counted who was right: in the reply, and from reply to reply for
each of three states, by whether what was copied from the conversation came true lately. So little of a reply has to be
seen: in stories that are new a draft model is right in nine of ten differences, in such as the prompt holds in one of
twenty (docs/log/2026-11-26.md, third).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import StorageError
from edgeinfer.runtime.speculation.drafters.contract import Drafter, Guess

# How fast weights follow what comes, and the terms of a reply.
_RATE, _REPLY_RATE = 0.04, 0.1
# Counts of drafters that say the same are told apart up to this one. Several that agree begin with weights whose sum is
# a little more than one's.
_AGREEING, _MORE = 4, 0.1
# Log-odds and weights go no farther.
_FARTHEST, _HEAVIEST = 7.0, 16.0
# Differences that a reply remembers, and those that a state does; at a reply's beginning the state counts as so many.
_REPLY_MEMORY, _STATE_MEMORY, _KNOWN = 20.0, 200.0, 8.0
# Of the logarithm of the odds of being right in a difference, what is added to one side and taken from the other, and
# what the surest table loses where it is decided whether to ask a drafter with logits beside it.
_SHARE, _HUMILITY = 0.25, 0.5
# Places that the share of copies that came true runs over, what it begins with, and the upper edges of its states.
_COPIES, _FIRST_SHARE, _EDGES = 8.0, 0.5, (0.3, 0.7)
_DIFFERENCES = "differences"


class Answer(NamedTuple):
    """A drafter's guess for a place.

    Attributes:
        rank: its guesses for the same place before it.
        estimate: the probability of the guess, whatever others say.
    """

    drafter: str
    rank: int
    guess: Guess
    estimate: float


class Mixture(NamedTuple):
    """All answers for a place, and the probability of every token among them."""

    answers: Sequence[Answer]
    probabilities: Mapping[int, float]


_NOTHING = Mixture((), {})


class MixingWeights:
    """What mixing has learnt from reply to reply.

    Attributes:
        of: each drafter's biases and weights of its log-odds, by whether it guessed others before, and by how many
            drafters agree.
        differences: by state, how often drafters with logits were right, and tables.
    """

    def __init__(self) -> None:
        self.of: defaultdict[str, list[list[list[float]]]] = defaultdict(_first_weights)
        self.differences = [[0.0, 0.0] for _ in range(len(_EDGES) + 1)]

    def state(self) -> dict[str, NDArray[Any]]:
        """Arrays for the next session; none before anything was mixed."""
        # A list, as replies beside this one may add drafters.
        arrays = {f"{name}_weights": np.array(weights) for name, weights in list(self.of.items())}
        return arrays | {_DIFFERENCES: np.array(self.differences)} if arrays else {}

    def restore(self, drafter: str, state: Mapping[str, NDArray[Any]]) -> None:
        """Takes back a drafter's part of what `state` gave, and who was right; what is not in it stays as it is."""
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
    """Mixes the answers for the places of one reply, and learns from what comes.

    Args:
        learnt: from other replies; learns on.
        drafters: those that draw have logits, the others are tables.
    """

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
        return sum(self._copied > edge for edge in _EDGES)

    def _advantage_now(self) -> float:
        """Logarithm of the odds that a drafter with logits is right where it and the surest table differ.

        Of a reply of which nothing was seen it is 0: a wrong first draft costs dozens of plain steps.
        """
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

    def beside_tables(self, mixture: Mixture, probability: float) -> float:
        """What a token of tables is worth where it is decided whether to ask a drafter with logits, too: less than its
        probability where such drafters win the differences."""
        if self._advantage <= 0 or any(answer.drafter in self._with_logits for answer in mixture.answers):
            return probability
        odds = probability / (1 - probability)
        return odds / (odds + math.exp(_HUMILITY * self._advantage))

    def observe(self, mixture: Mixture, token: int) -> None:
        """Learns which token came at a place."""
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
        """Counts who was right where the surest of both kinds differ."""
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
