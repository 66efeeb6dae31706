"""Acceptance by place over all replies, kept between sessions and never trusted when damaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.runtime.profile.drafting import PositionAcceptance, acceptance_by_position


def test_shares_of_rounds_by_place() -> None:
    reach = PositionAcceptance()
    reach.add(40, (20, 10))
    assert acceptance_by_position(reach.state()) == ()  # too few rounds to tell
    again = PositionAcceptance(reach.state())
    again.add(60, (30, 20, 5))
    shares = acceptance_by_position(again.state())
    assert shares == pytest.approx((0.5, 0.3, 0.05), rel=0.02)
    for _ in range(20):
        again.add(1000, ())
    assert max(acceptance_by_position(again.state())) < 0.01


def test_damage_counts_as_nothing() -> None:
    damaged: list[dict[str, NDArray[Any]]] = [
        {},
        {"counts": np.zeros(3)},
        {"counts": np.full(64, np.nan)},
        {"counts": np.full(64, -1.0)},
        {"counts": np.ones(64, np.int64)},
        {"counts": np.ones(64), "more": np.ones(1)},
    ]
    for kept in damaged:
        assert acceptance_by_position(kept) == () == acceptance_by_position(None)
        assert not PositionAcceptance(kept).state()["counts"].any()
