"""Drafts of earlier replies to new prompts, kept between sessions and never trusted when damaged."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.core.results import DrafterUse
from edgeinfer.runtime.profile.costs import Prior, prospects_by
from edgeinfer.runtime.profile.drafting import MOST_SEEN, DraftHistory, SeenTexts, drafter_records

_NUMBERS = itertools.count()
NAMES = ("copy", "ngram", "model")


def text(length: int = 60) -> list[int]:
    """Tokens of a text that never came before."""
    tokens: list[int] = np.random.default_rng(next(_NUMBERS)).integers(0, 50_000, length).tolist()
    return tokens


def add(history: DraftHistory, rounds: int, plain: int, drafters: dict[str, DrafterUse]) -> None:
    history.add(text(), text(), rounds, plain, drafters)


def test_shares_of_rounds_and_rates_of_tokens() -> None:
    history = DraftHistory()
    assert drafter_records(history.state(), NAMES) == {}
    add(history, 40, 20, {"copy": DrafterUse(20, 80, 60)})
    few = drafter_records(history.state(), NAMES)["copy"]
    # Drafts of four tokens at a rate of 0.8: 0.8 + 0.64 + 0.512 + 0.4096 are accepted of each.
    again = DraftHistory(history.state())
    for _ in range(20):
        add(again, 100, 50, {"copy": DrafterUse(30, 120, 71), "ngram": DrafterUse(20, 80, 47)})
    found = drafter_records(again.state(), NAMES)
    assert set(found) == set(NAMES)
    assert found["copy"].share == pytest.approx(0.3, abs=0.01) and found["ngram"].share == pytest.approx(0.2, abs=0.01)
    assert found["copy"].accepted == pytest.approx(0.8, abs=0.01) == found["ngram"].accepted
    assert (found["model"].share, found["model"].accepted_trust) == (0.0, 0.0)
    assert few.trust < 0.1 and found["copy"].trust > 0.7
    for _ in range(200):
        add(again, 100, 100, {})
    assert max(record.share for record in drafter_records(again.state(), NAMES).values()) < 0.01


def test_a_text_that_was_made_before_teaches_nothing() -> None:
    """Asked again, asked otherwise with the same reply, gone on with, going round in circles, or side by side."""
    history = DraftHistory()
    prompt, reply = text(40), text(200)
    history.add(prompt, reply, 100, 80, {"copy": DrafterUse(20, 20, 2)})
    state = history.state()
    right = {"copy": DrafterUse(20, 180, 180)}
    circle = text(20)
    for asked, said in (
        (prompt, reply),  # repeated, as by bench
        (prompt, text(200)),  # drawn again
        (text(40), reply),
        ([*text(9), *prompt], reply[30:]),
        (text(40), circle * 10),
        (prompt, reply[:5]),
        ([], reply),
    ):
        history.add(asked, said, 20, 0, right)
    again = DraftHistory(history.state())
    again.add(text(7), reply, 20, 0, right)
    again.add(text(40), text(200), 0, 0, right)  # in a batch
    for name in ("rounds", "tokens.copy"):
        assert np.array_equal(again.state()[name], state[name])
    # A new question, and the next turn of a conversation, are new.
    turn = [*prompt, *reply, *text(10)]
    for asked in (text(40), turn, prompt[:-1]):
        before = again.state()["rounds"][0]
        again.add(asked, text(120), 50, 0, right)
        assert again.state()["rounds"][0] > before + 40


def test_one_text_is_one_text() -> None:
    """What few texts say is drawn towards what is expected of a drafter, and a long one is no more than a few."""
    priors = {"copy": Prior(0.25, 0.75, tables=True)}

    def expected(*rounds: int) -> tuple[float, float]:
        history = DraftHistory()
        for count in rounds:
            add(history, count, 0, {"copy": DrafterUse(count, 4 * count, 4 * count)})
        (found,) = prospects_by(priors, 10.0, {"copy": 0.01}, drafter_records(history.state(), NAMES))
        return found.covers, found.accepted

    assert expected() == (0.25, 0.75)
    assert expected(10_000) == pytest.approx(expected(100))
    several = [expected(*[100] * count) for count in (0, 1, 2, 10, 100)]
    assert several == sorted(several) and several[1][0] < 0.5 and several[-1][0] > 0.8


def test_only_the_latest_texts_are_remembered() -> None:
    seen, first = SeenTexts(), (text(), text())
    assert seen.observe(*first) and not seen.observe(*first)
    while len(seen.fingerprints) < MOST_SEEN:
        seen.observe(text(), text(8000))
    assert len(seen.fingerprints) == MOST_SEEN and seen.observe(*first)
    assert not SeenTexts(seen.fingerprints).observe(*first)


def test_damage_counts_as_nothing() -> None:
    seen = np.zeros(1, np.uint64)
    sound = {"rounds": np.array([100.0, 50.0]), "tokens.copy": np.ones(2), "seen": seen}
    assert drafter_records(sound, NAMES)
    damaged: list[dict[str, NDArray[Any]]] = [
        {},
        {"rounds": np.ones(2)},
        {name: array for name, array in sound.items() if name != "seen"},
        sound | {"rounds": np.zeros(3)},
        sound | {"rounds": np.array([50.0, 100.0])},
        sound | {"tokens.copy": np.full(2, np.nan)},
        sound | {"tokens.copy": np.full(2, -1.0)},
        sound | {"rounds": np.ones(2, np.int64)},
        sound | {"seen": np.zeros(1)},
        sound | {"seen": np.zeros((1, 1), np.uint64)},
        sound | {"seen": np.zeros(MOST_SEEN + 1, np.uint64)},
        sound | {"more": np.ones(1)},
    ]
    for kept in damaged:
        assert drafter_records(kept, NAMES) == {} == drafter_records(None, NAMES)
        assert set(DraftHistory(kept).state()) == {"rounds", "seen"}
