"""Aligned sampling against the exact distribution of the replies of a list, given that the reply is one of them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from edgeinfer.core.errors import UsageError
from edgeinfer.runtime.sampling.constraint import ChoiceConstraint, ChoiceTrie
from edgeinfer.runtime.search.aligned import Aligned, Beginning
from edgeinfer.runtime.search.strategy import log_probabilities
from tests.runtime.search.fakes import END, PROMPT, LettersBackend, Trial, letters_logits

Reply = tuple[int, ...]
# Two thirds begin with a token behind which little that the model writes is in the list.
CHOICES: list[Reply] = [(0, 1, 2), (0, 1), (0, 2, 2, 1), (3,), (3, 4), (3, 4, 5), (5, 5), (1, 0, 4, 4), (1, 2)]


def probabilities_behind(text: Reply) -> np.typing.NDArray[np.float64]:
    found: np.typing.NDArray[np.float64] = np.exp(log_probabilities(letters_logits([*PROMPT, *text])))
    return found


def exact() -> dict[Reply, float]:
    """The model's own probabilities of the choices and their ends, normalised."""
    found = {}
    for choice in CHOICES:
        text = (*choice, END)
        found[text] = math.prod(float(probabilities_behind(text[:i])[t]) for i, t in enumerate(text))
    whole = sum(found.values())
    return {text: probability / whole for text, probability in found.items()}


def drawn_by(root: Beginning) -> dict[Reply, float]:
    """What a draw by the estimates of a tree gives each reply."""
    constraint = ChoiceConstraint(ChoiceTrie(CHOICES, [END]))
    found = {}
    for text in exact():
        chance, here = 1.0, root
        for depth, token in enumerate(text):
            ids = constraint.allowed()
            weights = Beginning(behind=here.behind).weights(probabilities_behind(text[:depth]), ids)
            chance *= float(weights[ids.tolist().index(token)] / weights.sum())
            here = here.behind[token][1] if token in here.behind else Beginning()
            constraint.push(token)
        constraint.pop(len(text))
        found[text] = chance
    return found


def divergence(found: dict[Reply, float]) -> float:
    return sum(p * math.log(p / found[text]) for text, p in exact().items())


def trial_of(rounds: int, samples: int, seed: int = 5) -> Trial:
    constraint = ChoiceConstraint(ChoiceTrie(CHOICES, [END]))
    options: dict[str, Any] = {
        "search": "aligned",
        "rounds": rounds,
        "samples": samples,
        "temperature": 1.0,
        "seed": seed,
    }
    return Trial(LettersBackend(400), constraint=constraint, **options)


@pytest.mark.slow
def test_draws_become_those_of_the_exact_distribution() -> None:
    """The divergence of what would be drawn next falls from masking's to nothing."""
    found = [divergence(drawn_by(Beginning()))]
    for rounds in (2, 16, 128):
        trial = trial_of(rounds, 4)
        assert tuple(trial.tokens()) in exact()
        assert isinstance(trial.strategy, Aligned)
        found.append(divergence(drawn_by(trial.strategy._tree)))
    assert found[0] > 0.1 and found[0] > found[2] > found[3] - 1e-12
    assert found[3] < 1e-3


@pytest.mark.slow
def test_answers_are_drawn_so() -> None:
    """Chi-square of the replies of a few seeds."""
    seeds = 60
    seen = Counter(tuple(trial_of(12, 4, seed).tokens()) for seed in range(seeds))
    chi = sum((seen[text] - seeds * p) ** 2 / (seeds * p) for text, p in exact().items())
    assert chi < 26.1  # 8 degrees of freedom, p = 0.001


def test_it_needs_a_form() -> None:
    with pytest.raises(UsageError, match="aligned"):
        Trial(LettersBackend(), search="aligned", temperature=1.0)


def test_what_has_no_probability_leads_nowhere() -> None:
    constraint = ChoiceConstraint(ChoiceTrie([[int(letters_logits(PROMPT).argmin())]], [END]))
    with pytest.raises(UsageError, match="led nowhere"):
        Trial(LettersBackend(), search="aligned", constraint=constraint, temperature=1.0, top_p=0.1).tokens()
