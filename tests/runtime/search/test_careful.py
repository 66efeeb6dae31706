"""Momentum decoding against its definition written out over whole texts."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.runtime.search.momentum import Runs
from tests.runtime.search.fakes import PROMPT, LettersBackend, Trial, V, letters_logits

NO_STOPS: frozenset[int] = frozenset()
Probabilities = NDArray[np.float64]


def probabilities_of(text: list[int]) -> Probabilities:  # (V,)
    logits = letters_logits(text).astype(np.float64)
    weights = np.exp(logits - logits.max())
    probabilities: Probabilities = weights / weights.sum()
    return probabilities


def closed(text: list[int], token: int, most: int) -> int:
    """Length of the longest run, `token` the last of it, that the text holds already."""
    longer = [*text, token]
    for length in range(most, 0, -1):
        run = longer[len(longer) - length :]
        if length <= len(longer) and any(text[i : i + length] == run for i in range(len(text) - length + 1)):
            return length
    return 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 2), st.integers(1, 6))
def test_runs_that_a_token_closes(text: list[int], token: int, most: int) -> None:
    assert Runs(text, most).closed(token) == closed(text, token, most)


def test_momentum_takes_the_least_resisted() -> None:
    for resistance in ((0.0, 0.0, 0.0, 5.0), (1.0, 2.0, 3.0, 4.0, 5.0), (0.1,)):
        trial = Trial(LettersBackend(), search="momentum", max_tokens=60, stop_ids=NO_STOPS, resistance=resistance)
        text, changed = list(PROMPT), 0
        for _ in range(60):
            probabilities = probabilities_of(text)
            best, score = -1, -math.inf
            for token in sorted(range(V), key=lambda t: -probabilities[t])[:5]:
                run = closed(text, token, len(resistance) + 1)
                cost = (0.0, *resistance, math.inf)[run]
                if best < 0 or probabilities[token] - 0.2 * cost > score:
                    best, score = token, probabilities[token] - 0.2 * cost
            changed += best != int(probabilities.argmax())
            text.append(best)
        assert trial.tokens() == text[len(PROMPT) :]
        assert trial.strategy.search.trials == changed
        assert changed > 0 or resistance[0] == 0
