"""Momentum, look-ahead, contrast and cautious tokens, each against its definition written out over whole texts."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.research.cautious import trials_for
from edgeinfer.runtime.research.contrast import contrasted
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.search.momentum import Runs
from tests.runtime.search.fakes import END, LETTERS, PROMPT, Letters, LettersBackend, Trial, V, alone, letters_logits
from tests.tables import each_row

NO_STOPS: frozenset[int] = frozenset()
Probabilities = NDArray[np.float64]


def probabilities_of(text: list[int]) -> Probabilities:  # (V,)
    logits = letters_logits(text).astype(np.float64)
    weights = np.exp(logits - logits.max())
    probabilities: Probabilities = weights / weights.sum()
    return probabilities


def uncertainty(probabilities: Probabilities) -> float:
    return -math.fsum(p * math.log(p) for p in probabilities.tolist() if p > 0)


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


def test_lookahead_takes_the_token_that_is_followed_best() -> None:
    for count, ahead, above in ((3, 5, 1.0), (2, 1, 0.0), (4, 3, 1.5), (3, 5, 9.0)):
        for stop_ids in (NO_STOPS, frozenset({END, 2})):
            options: dict[str, Any] = {"candidates": count, "look_ahead": ahead, "uncertainty": above, "max_tokens": 12}
            trial = Trial(LettersBackend(), search="lookahead", stop_ids=stop_ids, **options)
            text, looked = list(PROMPT), 0
            for place in range(12):
                probabilities = probabilities_of(text)
                token = int(probabilities.argmax())
                left = min(ahead, 12 - place - 1)
                if uncertainty(probabilities) > above and left:
                    looked += 1
                    scores = {}
                    for candidate in sorted(range(V), key=lambda t: -probabilities[t])[:count]:
                        longer, found = [*text, candidate], [math.log(probabilities[candidate])]
                        while len(found) <= left and longer[-1] not in stop_ids:
                            behind = probabilities_of(longer)
                            longer.append(int(behind.argmax()))
                            found.append(math.log(behind.max()))
                        scores[candidate] = sum(found) / len(found)
                    token = max(scores, key=lambda t: scores[t])
                text.append(token)
                if token in stop_ids:
                    break
            assert trial.tokens() == text[len(PROMPT) :]
            assert trial.strategy.search.trials == looked
            if above == 9:
                assert looked == 0 and trial.strategy.search.branches == 0


def test_lookahead_looks_no_further_than_the_context_reaches() -> None:
    trial = Trial(LettersBackend(12), search="lookahead", uncertainty=0.0, max_tokens=None, stop_ids=NO_STOPS)
    assert len(trial.tokens()) == 10


def test_contrast_moves_away_from_the_worse_prompt() -> None:
    for above, temperature in product([0.0, 1.4, None], [0.0, 1.3]):
        lame = "gabcaf.a,bd" * 2
        options: dict[str, Any] = {"temperature": temperature, "uncertainty": above, "max_tokens": 15}
        trial = Trial(LettersBackend(), search="contrast", lame_prompt=lame, contrast_strength=0.8, **options)
        config = ReplyOptions(temperature=temperature)
        sampler, said, changed = Sampler(LogitsProcessor(config, V, 5), PROMPT), list[int](), 0
        worse = [LETTERS.index(letter) for letter in lame]
        while len(said) < 15 and END not in said:
            own, place = letters_logits([*PROMPT, *said]), len(PROMPT) + len(said)
            probabilities, other = probabilities_of([*PROMPT, *said]), probabilities_of([*worse, *said])
            plain = token = sampler.sample(own, place)
            # The authors' measure, of the probabilities of as many tokens as theirs: all further ones have none.
            deviation = np.std(np.concatenate([probabilities, np.zeros(32_016 - V)]), ddof=1)
            if deviation <= 0.005 if above is None else uncertainty(probabilities) > above:
                moved = np.full(V, -np.inf, np.float32)
                for index, (p, q) in enumerate(zip(probabilities, other, strict=True)):
                    if p >= probabilities.mean() * 2 / 3 and p > 0.8 * q:
                        moved[index] = math.log(p - 0.8 * q)
                token = sampler.sample(moved, place)
            changed += token != plain
            said.append(token)
        assert trial.tokens() == said
        assert trial.strategy.search.trials == changed
        assert changed > 0 or above == 1.4
        assert trial.strategy.search.rows == len(worse) + 2 * (len(said) - 1)


def test_contrast_leaves_what_is_implausible() -> None:
    own, lame = np.log([0.6, 0.3, 0.05, 0.05]), np.log([0.8, 0.1, 0.05, 0.05])
    moved = contrasted(own, lame, 0.5, own)
    assert moved == pytest.approx([math.log(0.2), math.log(0.25), -math.inf, -math.inf])
    masked = np.where(np.arange(4) < 2, own, -np.inf)
    assert contrasted(own, lame, 3.0, masked).tolist() == own.tolist(), "nothing is left"


def test_contrast_goes_on_plainly_where_the_context_ends() -> None:
    options: dict[str, Any] = {"search": "contrast", "lame_prompt": "gab", "stop_ids": NO_STOPS, "uncertainty": 0.0}
    roomy = Trial(LettersBackend(200), max_tokens=40, **options).tokens()
    for capacity in (20, 21):
        trial = Trial(LettersBackend(capacity), max_tokens=None, **options)
        text = trial.tokens()
        assert len(text) == capacity - len(PROMPT) + 1
        # Each pass adds a row to both texts, as long as there is room for two.
        pairs = (capacity - len(PROMPT) - 3) // 2
        assert text[: pairs + 1] == roomy[: pairs + 1]
        for length in range(pairs + 1, len(text)):
            assert text[length] == int(letters_logits([*PROMPT, *text[:length]]).argmax())
        # The worse prompt, the pairs, the reply over again, and a row for each token of plain decoding.
        assert trial.strategy.search.rows == 3 + 2 * pairs + pairs + len(text) - pairs - 1
    for lame, capacity, most in (("", 50, 4), ("gab", 5, None), ("gab", 20, 15)):
        with pytest.raises(UsageError, match=r"no room|needs the method option"):
            Trial(LettersBackend(capacity), search="contrast", lame_prompt=lame, max_tokens=most).tokens()


def test_trials_by_entropy() -> None:
    assert [trials_for(h) for h in (0.0, 0.01, 0.17, 0.18, 1.49, 1.5, 9.0)] == [1, 1, 1, 2, 9, 10, 10]


def pieces(config: ReplyOptions, most: int) -> tuple[list[int], int]:
    """Cautious next tokens written out, every trial by itself, and how many tokens were tried once."""
    sampler, said, single = Sampler(LogitsProcessor(config, V, 5), PROMPT), list[int](), 0
    while len(said) < most and END not in said:
        probabilities = sampler.probabilities(letters_logits([*PROMPT, *said]))
        trials = []
        count = trials_for(uncertainty(probabilities))
        single += count == 1
        for stream in range(count):
            longer, surprise = list[int](), 0.0
            while True:
                text = [*PROMPT, *said, *longer]
                behind = sampler.probabilities(letters_logits(text), longer)
                longer.append(sampler.sample_from(behind, len(text), stream))
                surprise -= math.log(behind[longer[-1]])
                letter = Letters().decode(longer[-1:])
                ended = longer[-1] == END or letter in (".", ",") or len(said) + len(longer) == most
                if count == 1 or ended:
                    break
            trials.append((surprise / len(longer), stream, longer))
        chosen = min(trials)[2]
        for token in chosen:
            sampler.accept(token, letters_logits([]))
        said += chosen
    return said, single


@each_row(
    "options, singles",
    [
        ({"temperature": 0.8, "top_p": 0.95}, False),
        ({"temperature": 1.3, "repetition_penalty": 1.2}, False),
        ({"temperature": 0.3}, True),
    ],
)
def test_cautious_takes_the_least_perplexing_piece(options: dict[str, Any], singles: bool) -> None:
    trial = Trial(LettersBackend(900), search="cautious", max_tokens=30, **options)
    tokens, single = pieces(ReplyOptions(**options), 30)
    assert trial.tokens() == tokens
    use = trial.strategy.search
    assert use.trials - use.branches == single and use.branches > 1 and not use.lossless
    assert (single > 0) == singles


def test_a_sure_model_is_tried_once() -> None:
    trial = Trial(LettersBackend(), search="cautious", temperature=0.01, max_tokens=12)
    assert trial.tokens() == alone(5, max_tokens=12)
    assert trial.backend.passes.count(1) >= 4
