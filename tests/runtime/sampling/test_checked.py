"""Draws under a caller's check against enumeration: tokens, their frequencies, and the estimate of their share."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import UsageError
from edgeinfer.runtime.sampling.constraint import TextCheck, first_accepted, weighed_draw
from edgeinfer.runtime.sampling.distributions import GumbelNoise
from edgeinfer.runtime.sampling.processor import LogitsProcessor
from edgeinfer.runtime.sampling.sampler import Sampler
from tests.runtime.search.fakes import END, LETTERS, PROMPT, Letters, V, letters_logits

STOPS = frozenset({END})


def allowed_after(text: str, check: Any) -> list[int]:
    return [t for t in range(V) if check(text + ("" if t == END else LETTERS[t]), t == END)]


def no_double(text: str, ended: bool) -> bool:
    """No letter twice in a row, and at least two before the end."""
    return all(a != b for a, b in pairwise(text)) and (len(text) > 1 or not ended)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.7, "frequency_penalty": 0.5}])
def test_tokens_are_those_that_drawing_among_all_accepted_ones_gives(options: dict[str, Any]) -> None:
    """Bit for bit, for the same seed; also behind drafts."""
    for seed in range(60):
        config = GenerationConfig(**options)
        checked = Sampler(LogitsProcessor(config, V, seed), PROMPT, check=TextCheck(no_double, Letters(), STOPS))
        masked = LogitsProcessor(config, V, seed)
        plain = Sampler(masked, PROMPT)
        text: list[int] = []
        while END not in text and len(text) < 8:
            logits = letters_logits([*PROMPT, seed % 5, *text])
            spelled = Letters().decode(text)
            ids = np.array(allowed_after(spelled, no_double))
            expected = masked.sample(logits, len(text), plain._counts, ids)
            assert checked.sample(logits, len(text)) == expected
            after = checked.sample(logits, 40, [expected]) if expected != END else END
            assert after in allowed_after(Letters().decode([*text, expected]), no_double)
            text.append(expected)
            for sampler in (checked, plain):
                sampler.accept(expected, logits)


def test_few_tokens_are_asked_about() -> None:
    asked: list[int] = []

    def accepts(index: int) -> bool:
        asked.append(index)
        return index % 2 == 0

    chance = np.random.default_rng(1)
    for _ in range(200):
        scores = chance.normal(size=5000)
        found = first_accepted(scores, accepts)
        assert found == 2 * int(scores[::2].argmax())
    assert len(asked) < 200 * 3


@pytest.mark.slow
def test_frequencies_and_the_estimate_are_those_of_enumeration() -> None:
    """Chi-square of the tokens; the mean estimate within four of its own errors of the accepted probability."""
    chance = np.random.default_rng(5)
    for accepted in ({0, 3}, {7}, set(range(8)), {1, 2, 4, 5, 6}):
        logits = chance.normal(0, 1.5, 8)
        logprobs = logits - math.log(np.exp(logits).sum())
        share = sum(math.exp(logprobs[i]) for i in accepted)
        noise, draws, seen, weights = GumbelNoise(3, 8), 6000, np.zeros(8), []
        for position in range(draws):
            drawn = weighed_draw(logprobs, logprobs + noise.of(np.arange(8), position), accepted.__contains__)
            assert drawn.index in accepted
            seen[drawn.index] += 1
            weights.append(math.exp(drawn.log_weight))
        expected = np.array([draws * math.exp(logprobs[i]) / share if i in accepted else 0 for i in range(8)])
        chi = sum((seen[i] - expected[i]) ** 2 / expected[i] for i in accepted)
        assert chi < 24.3  # 7 degrees of freedom at most, p = 0.001
        assert abs(np.mean(weights) - share) < 4 * np.std(weights) / math.sqrt(draws) + 1e-9
    refused = weighed_draw(logprobs, logprobs, lambda index: False)
    assert (refused.index, refused.log_weight) == (None, -math.inf)


def test_a_check_that_refuses_all_or_fails_says_so() -> None:
    def fails(text: str, ended: bool) -> bool:
        raise ValueError("no such text")

    for check, message in (
        (lambda text, ended: False, "refuses each of the 10 tokens"),
        (fails, "ValueError: no such"),
    ):
        sampler = Sampler(LogitsProcessor(GenerationConfig(), V, 1), PROMPT, check=TextCheck(check, Letters(), STOPS))
        with pytest.raises(UsageError, match=message):
            sampler.sample(letters_logits([1]), 0)
    with pytest.raises(UsageError, match="checker"):
        GenerationConfig(checker="isdigit")  # type: ignore[arg-type]
