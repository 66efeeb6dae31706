"""What is measured of two models that write together: every way, and a budget that is never overdrawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from tests.speculation import random_bundle
from tests.tools.research.two_models import METHODS, measure


@pytest.mark.slow
def test_every_way_is_measured(tmp_path: Path) -> None:
    large = random_bundle(tmp_path / "large", num_hidden_layers=2)
    small = random_bundle(tmp_path / "small", seed=3, num_hidden_layers=1)
    options: dict[str, Any] = {"context": 96, "threads": 1, "remember": False}
    with edgeinfer.load(large, draft_model=small, **options) as model, edgeinfer.load(small, **options) as draft:
        gains = list(measure(model, draft, ["One day"], tokens=6, seeds=1))
    assert [gain.method for gain in gains] == list(METHODS)
    for gain in gains:
        assert gain.tokens == 6
        budget = METHODS[gain.method].get("anchor_budget", 0.15)
        assert gain.divergence is None or gain.divergence <= budget + 1e-9
