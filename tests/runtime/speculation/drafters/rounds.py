"""Rounds, questions and answers for drafters that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import run_alone
from edgeinfer.runtime.speculation.drafters.contract import Draft, DraftContext, Drafter, Guess, Round, Verdict, guessed


def settled(committed: Sequence[int], fed: Sequence[int] = (0,), logits: Floats | None = None) -> Round:
    """A round that committed these tokens; by default nothing was drafted and the logits say nothing."""
    given = np.zeros((len(fed), 8), np.float32) if logits is None else logits
    verdict = Verdict((), committed[-1], bonus=True)
    return Round(Draft(), verdict, tuple(committed), np.array(fed, np.int64), given)


def guesses_of(drafter: Drafter, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
    """The drafter's guesses, with whatever passes they take."""
    return run_alone(guessed(drafter, context, drafted, width))


def ask(drafter: Drafter, drafted: Sequence[int] = (), width: int = 1, forced: Sequence[int] = ()) -> list[Guess]:
    """The drafter's guesses behind a path."""
    context = DraftContext([], lambda logits, path: (0, None), lambda path: forced)
    return list(guesses_of(drafter, context, list(drafted), width))


def chain(drafter: Drafter, length: int) -> list[int]:
    """The tokens of a draft of the drafter's first guesses, as far as it has any."""
    tokens: list[int] = []
    while len(tokens) < length and (found := ask(drafter, tokens)):
        tokens.append(found[0].token)
    return tokens


def searched(tokens: list[int], drafted: list[int]) -> tuple[int, int]:
    """The longest suffix of both that occurs in the text with a successor there, the latest occurrence."""
    whole, best = tokens + drafted, (-1, 0)
    for position in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < position and tokens[position - 1 - length] == whole[len(whole) - 1 - length]:
            length += 1
        if length >= 2 and length > best[1]:
            best = position, length
    return best
