"""How estimates of acceptance follow what is observed, and survive storage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.core.errors import StorageError
from edgeinfer.runtime.speculation.controller import Acceptance


@pytest.fixture
def acceptance() -> Acceptance:
    acceptance = Acceptance()
    acceptance.add("copy", (0.1, 0.6))
    return acceptance


def test_begins_with_the_priors_and_follows_the_evidence_of_each_sign_apart(acceptance: Acceptance) -> None:
    assert acceptance.estimate("copy", 0) == pytest.approx(0.1)
    assert acceptance.estimate("copy", 1) == pytest.approx(0.6)
    for _ in range(100):
        acceptance.observe("copy", 0, True)
    assert acceptance.estimate("copy", 1) == pytest.approx(0.6)
    for _ in range(100):
        acceptance.observe("copy", 1, False)
    assert acceptance.estimate("copy", 0) > 0.9
    assert acceptance.estimate("copy", 1) < 0.1


def test_forgets_what_is_long_ago(acceptance: Acceptance) -> None:
    for came in (True, False):
        for _ in range(1500):
            acceptance.observe("copy", 1, came)
    assert acceptance.estimate("copy", 1) < 0.05


def test_siblings_take_nothing_from_first_guesses(acceptance: Acceptance) -> None:
    for _ in range(100):
        acceptance.observe("copy", 0, True)
        for rank in range(1, 6):
            acceptance.observe("copy", 0, False, rank)
    assert acceptance.mean("copy") > 0.95 > 0.05 > acceptance.mean("copy", 5)
    assert acceptance.estimate("copy", 0) > 0.9 > 0.05 > acceptance.estimate("copy", 0, 5)


@settings(deadline=None)
@given(outcomes=st.lists(st.tuples(st.integers(0, 1), st.booleans())))
def test_estimates_are_probabilities_and_survive_storage(outcomes: list[tuple[int, bool]]) -> None:
    first, second = Acceptance(), Acceptance()
    for each in (first, second):
        each.add("copy", (0.1, 0.6))
    for sign, came in outcomes:
        first.observe("copy", sign, came)
    second.restore("copy", first.state())
    for sign in range(2):
        estimate = first.estimate("copy", sign)
        assert 0 < estimate < 1
        assert second.estimate("copy", sign) == pytest.approx(estimate)


def test_counts_of_other_signs_are_left_alone(acceptance: Acceptance) -> None:
    acceptance.restore("copy", {"copy": np.ones((2, 5, 4))})
    acceptance.restore("copy", {})
    assert acceptance.estimate("copy", 0) == pytest.approx(0.1)


def test_damaged_counts_are_refused(acceptance: Acceptance) -> None:
    for accepted in (-1.0, 3.0, np.nan, np.inf):
        with pytest.raises(StorageError, match="damaged"):
            acceptance.restore("copy", {"copy": np.array([np.full((2, 4), accepted), np.full((2, 4), 2.0)])})
            pytest.fail(f"{accepted} of two was taken")
