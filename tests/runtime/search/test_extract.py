"""Spans of passages against the score of every span written out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from edgeinfer.core.errors import UsageError
from edgeinfer.runtime.search.strategy import log_probabilities
from tests.runtime.search.fakes import END, LETTERS, PROMPT, LettersBackend, Trial, letters_logits
from tests.tables import each_row


def score(span: str, prompt: list[int]) -> float:
    """Log-probability of a span and of the end behind it."""
    text = [*map(LETTERS.index, span), END]
    return sum(float(log_probabilities(letters_logits([*prompt, *text[:i]]))[t]) for i, t in enumerate(text))


def passage_of(chance: np.random.Generator, size: int) -> str:
    return "".join(LETTERS[i] for i in chance.integers(0, 6, size))


def extracted(passage: str, prompt: list[int], **options: Any) -> Trial:
    return Trial(LettersBackend(2000), search="extract", passage=passage, prompt=prompt, **options)


@pytest.mark.slow
def test_the_best_of_all_spans_is_found_in_200_passages() -> None:
    """Texts of a few letters, which stand in several places, and longer ones; with and without a bound of tokens."""
    chance = np.random.default_rng(7)
    passes = spans = 0
    for size in chance.integers(1, 25, 200).tolist():
        passage, most = passage_of(chance, size), int(chance.integers(2, 14))
        prompt = [*PROMPT, *chance.integers(0, 6, 2).tolist()]
        every = {passage[i:j] for i in range(size) for j in range(i + 1, min(size, i + most - 1) + 1)}
        trial = extracted(passage, prompt, max_tokens=most)
        found = "".join(LETTERS[t] for t in trial.tokens()[:-1])
        scores = {span: score(span, prompt) for span in every}
        assert found in every and scores[found] == pytest.approx(max(scores.values()), abs=1e-5)
        texts = trial.strategy.search.texts
        for text in texts:
            assert text.finish_reason == "stop" and text.text in every
            assert text.score * len(text.token_ids) == pytest.approx(scores[text.text], abs=1e-4)
        assert all(
            one.score * len(one.token_ids) >= two.score * len(two.token_ids) - 1e-6 for one, two in pairwise(texts)
        )
        passes, spans = passes + trial.strategy.search.passes, spans + len(every)
    assert passes < spans / 2


def test_where_there_is_room_for_one_beginning_at_a_time() -> None:
    chance = np.random.default_rng(1)
    for _ in range(10):
        passage = passage_of(chance, 12)
        roomy, narrow = (
            Trial(LettersBackend(size), search="extract", passage=passage, max_tokens=8) for size in (500, 13)
        )
        assert narrow.tokens() == roomy.tokens()


@each_row(
    "options",
    [
        {"passage": "", "max_tokens": 5},
        {"passage": "abc", "max_tokens": 1},
        {"passage": "abc", "stop_ids": frozenset()},
        {"passage": None},
        {"passage": "a" * 32_001},
        {"passage": 3},
        {"search": "off", "passage": "abc"},
    ],
)
def test_no_room_no_words_and_no_end_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="passage"):
        Trial(LettersBackend(), **{"search": "extract", **options}).tokens()
