"""Drafts of earlier replies, kept between sessions and never trusted when damaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.core.results import DrafterUse
from edgeinfer.runtime.profile.costs import Prior, prospects_by
from edgeinfer.runtime.profile.drafting import DraftHistory, drafter_records

NAMES = ("copy", "ngram", "model")


def test_shares_of_rounds_and_rates_of_tokens() -> None:
    history = DraftHistory()
    assert drafter_records(history.state(), NAMES) == {}
    history.add(40, 20, {"copy": DrafterUse(20, 80, 60)})
    few = drafter_records(history.state(), NAMES)["copy"]
    # Drafts of four tokens at a rate of 0.8: 0.8 + 0.64 + 0.512 + 0.4096 are accepted of each.
    again = DraftHistory(history.state())
    for _ in range(20):
        again.add(100, 50, {"copy": DrafterUse(30, 120, 71), "ngram": DrafterUse(20, 80, 47)})
    found = drafter_records(again.state(), NAMES)
    assert set(found) == set(NAMES)
    assert found["copy"].share == pytest.approx(0.3, abs=0.01) and found["ngram"].share == pytest.approx(0.2, abs=0.01)
    assert found["copy"].accepted == pytest.approx(0.8, abs=0.01) == found["ngram"].accepted
    assert (found["model"].share, found["model"].accepted_trust) == (0.0, 0.0)
    assert few.trust < 0.1 and found["copy"].trust > 0.7
    for _ in range(200):
        again.add(100, 100, {})
    assert max(record.share for record in drafter_records(again.state(), NAMES).values()) < 0.01


def test_one_text_is_one_text() -> None:
    """What few texts say is drawn towards what is expected of a drafter, and a long one is no more than a few."""
    priors = {"copy": Prior(0.25, 0.75, tables=True)}

    def expected(*rounds: int) -> tuple[float, float]:
        history = DraftHistory()
        for count in rounds:
            history.add(count, 0, {"copy": DrafterUse(count, 4 * count, 4 * count)})
        (found,) = prospects_by(priors, 10.0, {"copy": 0.01}, drafter_records(history.state(), NAMES))
        return found.covers, found.accepted

    assert expected() == (0.25, 0.75)
    assert expected(10_000) == pytest.approx(expected(100))
    several = [expected(*[100] * count) for count in (0, 1, 2, 10, 100)]
    assert several == sorted(several) and several[1][0] < 0.5 and several[-1][0] > 0.8


def test_damage_counts_as_nothing() -> None:
    sound = {"rounds": np.array([100.0, 50.0]), "tokens.copy": np.ones(2)}
    assert drafter_records(sound, NAMES)
    damaged: list[dict[str, NDArray[Any]]] = [
        {},
        {"tokens.copy": np.ones(2)},
        sound | {"rounds": np.zeros(3)},
        sound | {"rounds": np.array([50.0, 100.0])},
        sound | {"tokens.copy": np.full(2, np.nan)},
        sound | {"tokens.copy": np.full(2, -1.0)},
        sound | {"rounds": np.ones(2, np.int64)},
        sound | {"more": np.ones(1)},
    ]
    for kept in damaged:
        assert drafter_records(kept, NAMES) == {} == drafter_records(None, NAMES)
        assert set(DraftHistory(kept).state()) == {"rounds"}
