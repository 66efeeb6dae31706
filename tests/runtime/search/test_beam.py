"""Beam search against every reply there is, and groups of beams against their definition written out."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest

from edgeinfer.runtime.sampling.constraint import ChoiceConstraint, ChoiceTrie, ConstraintPlaces, TextPlaces
from edgeinfer.runtime.search.strategy import log_probabilities
from tests.runtime.search.fakes import END, PROMPT, LettersBackend, Trial, V, alone, letters_logits

NO_STOPS: frozenset[int] = frozenset()


def total(reply: tuple[int, ...]) -> float:
    return sum(float(log_probabilities(letters_logits([*PROMPT, *reply[:i]]))[token]) for i, token in enumerate(reply))


def every_reply(most: int) -> list[tuple[int, ...]]:
    """Texts that end, and texts of `most` tokens."""
    going = [t for t in range(V) if t != END]
    found = [(*start, END) for length in range(most) for start in product(going, repeat=length)]
    return found + list(product(going, repeat=most))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("prompt", [PROMPT, [4], [0, 6, 6, 1]])
def test_enough_beams_find_the_best_of_all_replies(penalty: float, prompt: list[int]) -> None:
    """In replies of two tokens nine beginnings are all that do not end."""
    trial = Trial(LettersBackend(), search="beam", beams=10, max_tokens=2, length_penalty=penalty, prompt=prompt)

    def score(reply: tuple[int, ...]) -> float:
        logs = [log_probabilities(letters_logits([*prompt, *reply[:i]]))[t] for i, t in enumerate(reply)]
        return float(sum(logs)) / math.pow(len(reply), penalty)

    assert tuple(trial.tokens()) == max(every_reply(2), key=score)


def test_one_beam_is_greedy() -> None:
    assert Trial(LettersBackend(), search="beam", beams=1, stop_ids=NO_STOPS).tokens() == alone(0, stop_ids=NO_STOPS)


def grouped(beams: int, groups: int, diversity: float, most: int) -> set[tuple[int, ...]]:
    """Diverse beam search without an end, written out."""
    kept: list[list[tuple[int, ...]]] = [[()] for _ in range(groups)]
    for _ in range(most):
        chosen: Counter[int] = Counter()
        for group in range(groups):
            longer = [(*start, token) for start in kept[group] for token in range(V)]
            judged = sorted(longer, key=lambda reply: diversity * chosen[reply[-1]] - total(reply))
            kept[group] = judged[: beams // groups]
            chosen.update(reply[-1] for reply in kept[group])
    return {reply for group in kept for reply in group}


def test_groups_avoid_each_other() -> None:
    for beams, groups, diversity in ((4, 1, 0.5), (6, 3, 0.6), (4, 4, 2.0), (4, 2, 0.0)):
        options: dict[str, Any] = {"beams": beams, "beam_groups": groups, "diversity": diversity, "max_tokens": 5}
        trial = Trial(LettersBackend(), search="beam", stop_ids=NO_STOPS, **options)
        found = tuple(trial.tokens())
        expected = grouped(beams, groups, diversity, 5)
        assert {text.token_ids for text in trial.strategy.search.texts} == expected
        assert found == max(expected, key=total)


def test_beams_share_rows() -> None:
    """One token of each beam is fed at a time, whatever they have in common; here each has a pass."""
    trial = Trial(LettersBackend(500), search="beam", beams=4, max_tokens=20, stop_ids=NO_STOPS)
    trial.tokens()
    use = trial.strategy.search
    assert (use.passes, use.rows) == (19 * 4 + 2, 19 * 4 + 19)


class AnyConstraint(ChoiceConstraint):
    """A list of choices that is followed as grammars are."""

    def places(self) -> ConstraintPlaces:
        return TextPlaces(self)


def test_beams_find_the_best_of_a_list_and_nothing_else() -> None:
    """Some choices begin others, and the likeliest first token leads to a poor one."""
    chance = np.random.default_rng(3)
    for kind, token in product((ChoiceConstraint, AnyConstraint), range(6)):
        choices = {tuple(chance.integers(0, 6, chance.integers(1, 6)).tolist()) for _ in range(40)}
        prompt = [*PROMPT, token]
        options: dict[str, Any] = {"search": "beam", "length_penalty": 0.0, "prompt": prompt}

        def logprob(choice: tuple[int, ...], prompt: list[int] = prompt) -> float:
            text = (*choice, END)
            return sum(float(log_probabilities(letters_logits([*prompt, *text[:i]]))[t]) for i, t in enumerate(text))

        for beams, groups in ((16, 1), (3, 1), (4, 2)):
            constraint = kind(ChoiceTrie(sorted(choices), [END]))
            trial = Trial(LettersBackend(900), constraint=constraint, beams=beams, beam_groups=groups, **options)
            found, texts = tuple(trial.tokens()), trial.strategy.search.texts
            assert {text.token_ids for text in texts} <= {(*choice, END) for choice in choices}
            if beams == 16:
                assert found == (*max(choices, key=logprob), END)


def test_a_choice_that_ends_wins_over_one_that_is_cut_off() -> None:
    choices = [[0, 1, 2, 3, 4, 5], [6], [5, 4, 3, 2, 1, 0]]
    trial = Trial(
        LettersBackend(), search="beam", max_tokens=3, constraint=ChoiceConstraint(ChoiceTrie(choices, [END]))
    )
    assert trial.tokens() == [6, END]
