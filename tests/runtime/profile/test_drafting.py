"""Drafts of earlier replies, kept between sessions and never trusted when damaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.drafting import DRAFTERS
from edgeinfer.results import DrafterUse
from edgeinfer.runtime.profile.drafting import DraftHistory, drafter_records


def test_shares_of_rounds_and_rates_of_tokens() -> None:
    history = DraftHistory()
    history.add(40, 20, {"copy": DrafterUse(20, 80, 60)})
    assert drafter_records(history.state()) == {}  # too few rounds to tell
    again = DraftHistory(history.state())
    # Drafts of four tokens at a rate of 0.8: 0.8 + 0.64 + 0.512 + 0.4096 are accepted of each.
    again.add(100, 50, {"copy": DrafterUse(30, 120, 71), "ngram": DrafterUse(20, 80, 47)})
    again.add(2000, 1000, {"copy": DrafterUse(600, 2400, 1417), "ngram": DrafterUse(400, 1600, 945)})
    found = drafter_records(again.state())
    assert set(found) == set(DRAFTERS)
    assert found["copy"].share == pytest.approx(0.3, abs=0.01) and found["ngram"].share == pytest.approx(0.2, abs=0.01)
    assert found["copy"].accepted == pytest.approx(0.8, abs=0.01) == found["ngram"].accepted
    assert (found["model"].share, found["model"].accepted) == (0.0, None)
    again.add(20_000, 20_000, {})
    assert max(record.share for record in drafter_records(again.state()).values()) < 0.01


def test_damage_counts_as_nothing() -> None:
    sound = {"rounds": np.array([100.0, 50.0]), "tokens": np.ones((len(DRAFTERS), 2))}
    assert drafter_records(sound)
    damaged: list[dict[str, NDArray[Any]]] = [
        {},
        {"rounds": np.ones(2)},
        sound | {"rounds": np.zeros(3)},
        sound | {"rounds": np.array([50.0, 100.0])},
        sound | {"tokens": np.full((len(DRAFTERS), 2), np.nan)},
        sound | {"tokens": np.full((len(DRAFTERS), 2), -1.0)},
        sound | {"rounds": np.ones(2, np.int64)},
        sound | {"more": np.ones(1)},
    ]
    for kept in damaged:
        assert drafter_records(kept) == {} == drafter_records(None)
        assert not DraftHistory(kept).state()["tokens"].any()
