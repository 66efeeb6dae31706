"""Particles against enumeration of all replies: the estimate of their sum, what each is drawn by, and resampling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from edgeinfer.core.errors import UsageError
from edgeinfer.runtime.research.particles import Particles, systematic
from edgeinfer.runtime.research.scoring import asked_score
from edgeinfer.runtime.sampling.constraint import ChoiceConstraint, ChoiceTrie, TextCheck
from edgeinfer.runtime.search.strategy import log_probabilities
from tests.runtime.search.fakes import END, Letters, LettersBackend, Trial, V, letters_logits

Reply = tuple[int, ...]
# Behind it the likeliest token leads to what is less likely as a whole.
PROMPT = [2, 3, 2]
MOST = 3
STOPS = frozenset({END})
CHOICES: list[Reply] = [(0, 1), (0, 2), (3,), (5, 5), (1, 0), (1, 2), (8, 9)]


def spelled(text: Reply) -> str:
    return Letters().decode(text)


def scores(text: str, ended: bool) -> float:
    """Likes the letters b to d, and dislikes texts that do not end."""
    return 1.5 * sum(letter in "bcd" for letter in text) - (0.0 if ended else 1.0)


def no_double(text: str, ended: bool) -> bool:
    return all(a != b for a, b in pairwise(text)) and (len(text) > 1 or not ended)


def replies(text: Reply = ()) -> Iterator[Reply]:
    """All replies of at most so many tokens."""
    for token in range(V):
        if token == END or len(text) + 1 == MOST:
            yield (*text, token)
        else:
            yield from replies((*text, token))


def target(case: str, power: float) -> dict[Reply, float]:
    """p**power times what scorer, checker and form make of it, for every reply."""
    found = {}
    for reply in replies():
        logs = [float(log_probabilities(letters_logits([*PROMPT, *reply[:i]]))[t]) for i, t in enumerate(reply)]
        weight = math.exp(power * sum(logs))
        text, ended = spelled(reply), reply[-1] == END
        if case == "scorer":
            weight *= math.exp(scores(text, ended))
        if case == "checker" and not all(no_double(spelled(reply[:i]), reply[i - 1] == END) for i in range(1, 4)):
            weight = 0
        if case == "choices" and reply[: len(reply) - ended] not in CHOICES:
            weight = 0
        if weight:
            found[reply] = weight
    return found


def trial_of(case: str, **options: Any) -> Trial:
    given: dict[str, Any] = {
        "search": "particles",
        "samples": 4,
        "resample_every": 1,
        "temperature": 1.0,
        "max_tokens": MOST,
    } | options
    if case == "scorer":
        given["scorer"] = scores
    form = ChoiceConstraint(ChoiceTrie(CHOICES, [END])) if case == "choices" else None
    trial = Trial(LettersBackend(400), prompt=PROMPT, constraint=form, **given)
    if case == "checker":
        trial.sampler._check = TextCheck(no_double, Letters(), STOPS)
    return trial


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "power"),
    [("plain", 2.0), ("plain", 0.5), ("scorer", 1.0), ("scorer", 2.0), ("checker", 1.5), ("choices", 1.0)],
)
def test_estimates_are_unbiased(case: str, power: float) -> None:
    """Estimates of the sum of the target over all replies, and of the part of it that begins with each token.

    The mean over seeds lies within four of its own standard errors of what enumeration gives.
    """
    exact, seeds = target(case, power), 500
    sums, parts = np.zeros(seeds), np.zeros((seeds, V))
    for seed in range(seeds):
        trial = trial_of(case, power=power, seed=seed)
        tokens = tuple(trial.tokens())
        assert tokens in exact
        assert isinstance(trial.strategy, Particles)
        sums[seed] = math.exp(trial.strategy.log_evidence)
        parts[seed, tokens[0]] = sums[seed]
        texts = trial.strategy.search.texts
        assert sum(text.weight or 0 for text in texts) == pytest.approx(1)
    assert abs(sums.mean() - sum(exact.values())) < 4 * sums.std() / math.sqrt(seeds)
    for token in range(V):
        part = sum(weight for reply, weight in exact.items() if reply[0] == token)
        if part > 0.05 * sum(exact.values()):  # others are too rare for an error to be estimated
            assert abs(parts[:, token].mean() - part) < 4 * parts[:, token].std() / math.sqrt(seeds), token


def test_without_power_and_scorer_all_weigh_the_same() -> None:
    trial = trial_of("plain", power=1.0, max_tokens=12)
    found = trial.tokens()
    texts = trial.strategy.search.texts
    assert [text.weight for text in texts] == pytest.approx([0.25] * 4)
    assert list(texts[trial.strategy.search.chosen].token_ids) == found


def test_particles_of_no_weight_are_replaced() -> None:
    """Particles whose text leads nowhere go on as others did, whose rows they share."""
    trial = trial_of("plain", scorer=lambda text, ended: 0.0 if text.startswith(".") else -math.inf, samples=16)
    assert trial.tokens()[0] == 8
    assert all(text.token_ids[0] == 8 for text in trial.strategy.search.texts)
    assert len(trial.strategy.search.texts) == 16


def test_resampling_is_systematic() -> None:
    weights = np.array([0.5, 0.0, 0.3, 0.2])
    counts = np.zeros(4)
    starts = (np.arange(1000) + 0.5) / 1000
    for start in starts:
        chosen = systematic(weights, start)
        assert chosen.count(0) == 2 and chosen.count(1) == 0 and chosen.count(2) in (1, 2)
        counts += np.bincount(chosen, minlength=4)
    assert counts / 1000 == pytest.approx(4 * weights, abs=0.01)
    assert systematic(np.ones(16) / 16, 1 - 2**-53)[-1] == 15


def test_a_scorer_that_fails_or_refuses_all_says_so() -> None:
    def fails(text: str, ended: bool) -> float:
        raise ValueError("no such text")

    rows: list[tuple[Any, str]] = [
        (fails, "ValueError: no such"),
        (lambda text, ended: "much", "could not convert"),
        (lambda text, ended: math.nan, "gave nan"),
        (lambda text, ended: math.inf, "gave inf"),
        (lambda text, ended: -math.inf, "None of 4 particles"),
    ]
    for scorer, message in rows:
        with pytest.raises(UsageError, match=message):
            trial_of("plain", scorer=scorer).tokens()
    assert asked_score(lambda text, ended: len(text), "abc", False) == 3.0
