"""RAPID: what is retrieved of a long text, and what the draft model says behind it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.runtime.research import rapid
from edgeinfer.runtime.research.rapid import RapidDrafter, bm25, retrieved
from tests.runtime.models import feed
from tests.runtime.speculation.drafters.models import committed, context, export, make_backend, pair
from tests.runtime.speculation.drafters.rounds import guesses_of
from tests.speculation import load_eager, random_bundle, same

TEXT = np.random.default_rng(4).integers(0, 320, 60).tolist()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passages of four tokens, of which two are retrieved by the last six."""
    for name, value in {"_PASSAGE": 4, "_MOST": 2, "_END": 6}.items():
        monkeypatch.setattr(rapid, name, value)


texts = st.lists(st.integers(0, 6), min_size=1, max_size=12)


@given(texts, st.lists(texts, min_size=1, max_size=6))
def test_scores_are_those_of_the_formula(query: list[int], passages: list[list[int]]) -> None:
    mean = sum(map(len, passages)) / len(passages)
    for passage, score in zip(passages, bm25(query, passages), strict=True):
        expected = 0.0
        for term in sorted(set(query)):
            n, f = sum(term in other for other in passages), passage.count(term)
            rarity = math.log(1 + (len(passages) - n + 0.5) / (n + 0.5))
            expected += rarity * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * len(passage) / mean))
        assert score == pytest.approx(expected)


@pytest.mark.usefixtures("small")
def test_what_has_to_do_with_the_end_is_retrieved() -> None:
    assert retrieved(TEXT[:18]) == TEXT[:18]
    end = [900, 901, 902, 903, 904, 905]
    text = [*TEXT[:8], 900, 901, 1, 2, *TEXT[12:20], 902, 3, 4, 5, *TEXT[24:32], *end]
    assert retrieved(text) == [*TEXT[:4], 900, 901, 1, 2, 902, 3, 4, 5, *end]


@pytest.mark.usefixtures("small")
def test_it_says_what_the_draft_model_says_behind_the_short_text() -> None:
    bundle = export("portable", num_hidden_layers=2)
    drafter, oracle = RapidDrafter(*pair(make_backend("portable", bundle)), 8), make_backend("portable", bundle)

    def said(text: list[int]) -> int:
        oracle.cache.trim(0)
        return int(feed(oracle, text)[-1].argmax())

    now, short = context(TEXT), retrieved(TEXT)
    assert len(short) == 18
    drafter.begin(TEXT)
    drafted: list[int] = []
    for _ in range(3):
        (guess,) = guesses_of(drafter, now, drafted, 1)
        assert guess.token == said([*short, *drafted])
        drafted.append(guess.token)
    # A round later it has the text's new tokens, and of another text it retrieves again.
    now.tokens.extend([drafted[0], 7])
    drafter.observe(committed(drafted, 1, 7))
    (guess,) = guesses_of(drafter, now, [], 1)
    assert guess.token == said([*short, drafted[0], 7])
    other = TEXT[::-1]
    drafter.begin(other)
    (guess,) = guesses_of(drafter, context(other), [], 1)
    assert guess.token == said(retrieved(other))


def test_of_a_text_that_stays_whole_only_what_is_new_is_unread() -> None:
    drafter = RapidDrafter(*pair(make_backend("portable", export("portable", num_hidden_layers=2))), 8)
    for length, unread in ((40, 39), (60, 19)):
        drafter.begin(TEXT[:length])
        assert drafter.unread(context(TEXT[:length])) == unread
        assert guesses_of(drafter, context(TEXT[:length]), [], 1)
        assert drafter.unread(context(TEXT[:length])) == 0


@pytest.mark.usefixtures("small")
@pytest.mark.slow
def test_texts_are_those_without_drafts(tmp_path: Path) -> None:
    target = random_bundle(tmp_path / "target", num_hidden_layers=2)
    draft, prompt = random_bundle(tmp_path / "draft", seed=3, num_hidden_layers=1), [5 + i % 90 for i in range(80)]
    options: dict[str, Any] = {"threads": 1, "context": 128, "remember": False, "speculation": "rapid"}
    ways: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9, "seed": 3})
    with load_eager(target, draft_model=draft, **options) as model:
        for way in ways:
            found = same(model, "rapid", prompt=prompt, max_tokens=40, ignore_eos=True, **way)
            assert found.per_drafter["rapid"].drafted > 0
