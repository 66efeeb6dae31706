"""A*-style search on letters: the same beginnings as a search without a cache, and a reply that a scorer leads to."""

from __future__ import annotations

from typing import Any

import pytest

from edgeinfer.runtime.research import astar
from edgeinfer.runtime.search.strategy import logprob
from tests.runtime.search.fakes import END, PROMPT, Letters, LettersBackend, Trial, letters_logits

WARM: dict[str, Any] = {"temperature": 1.0, "search": "astar"}
Reply = tuple[int, ...]


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No letter ends a line, so that steps have so many tokens."""
    monkeypatch.setattr(astar, "_LONGEST", 2)


def value(text: str, ended: bool) -> float:
    """Likes few letters, and a text that ends, and breaks ties by length."""
    return sum(letter in "abh" for letter in text) + 0.5 * ended - 0.01 * len(text)


def grown(trial: Trial, text: Reply, stream: int, most: int) -> Reply:
    """The text with one more step."""
    for _ in range(2):
        if text and (text[-1] == END or len(text) >= most):
            break
        probabilities = trial.sampler.probabilities(letters_logits([*PROMPT, *text]), text)
        text = (*text, trial.sampler.sample_from(probabilities, len(PROMPT) + len(text), stream))
    return text


def mean(text: Reply) -> float:
    return sum(logprob(letters_logits([*PROMPT, *text[:i]]), token) for i, token in enumerate(text)) / len(text)


@pytest.mark.parametrize("scored", [True, False])
def test_the_best_beginning_is_expanded_next(scored: bool) -> None:
    for seed in range(12):
        most, samples, rounds = 8, 3, 5
        given = {**WARM, "samples": samples, "rounds": rounds, "max_tokens": most, "seed": seed}
        trial = Trial(LettersBackend(400), **given, scorer=value if scored else None)
        frontier: dict[Reply, float] = {(): 0.0}
        for turn in range(rounds):
            best = max(frontier, key=lambda text: frontier[text])
            if best and (best[-1] == END or len(best) >= most):
                break
            del frontier[best]
            for index in range(samples):
                text = grown(trial, best, turn * samples + index, most)
                ended = text[-1] == END
                frontier[text] = value(Letters().decode(text), ended) if scored else mean(text)
        wanted = max(frontier, key=lambda text: frontier[text])
        found = tuple(trial.tokens())
        use = trial.strategy.search
        assert {text.token_ids for text in use.texts} == frontier.keys()
        assert found[: len(wanted)] == wanted == use.texts[use.chosen].token_ids
        # Behind a beginning that is not over, the reply goes on alone.
        assert len(found) == len(wanted) or not (wanted[-1] == END or len(wanted) >= most)


def test_an_exact_value_leads_to_the_best_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the scorer knows how many letters of a text are right, the search finds it, of a million such texts."""
    monkeypatch.setattr(astar, "_LONGEST", 1)
    right = "bcdbcd"

    def steps_right(text: str, ended: bool) -> float:
        same = next(
            (i for i, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), min(len(text), len(right))
        )
        return same - 0.5 * (len(text) - same)

    options = {"temperature": 3.0, "max_tokens": 6, "stop_ids": frozenset[int](), "seed": 4}
    given: dict[str, Any] = WARM | options | {"samples": 16, "rounds": 200, "scorer": steps_right}
    found = Letters().decode(Trial(LettersBackend(20_000), **given).tokens())
    assert found == right


def test_little_room_ends_the_search() -> None:
    trial = Trial(LettersBackend(40), **WARM, samples=4, rounds=50, max_tokens=9)
    assert 1 <= len(trial.tokens()) <= 9
