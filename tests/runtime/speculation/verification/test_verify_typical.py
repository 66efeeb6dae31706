"""Typical acceptance: its threshold, its choice among paths, its limit at temperature 0, its label."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgeinfer.runtime.research.typical import threshold, verify_typical
from edgeinfer.runtime.speculation.drafters.contract import Probabilities
from edgeinfer.runtime.speculation.verification.rule import find_verification
from tests.runtime.speculation.verification.enumeration import TableTarget, lossless_error, make_draft, settle


def two_part(first: float, size: int) -> Probabilities:
    """One token of this probability, the rest alike."""
    return np.array([first] + [(1 - first) / (size - 1)] * (size - 1))


def test_the_threshold_is_the_lesser_of_its_two() -> None:
    assert threshold(np.array([0.0, 1, 0])) == pytest.approx(0.09)
    assert threshold(np.full(100, 0.01)) == pytest.approx(0.3 / 100)
    probabilities = two_part(0.5, 9)
    entropy = 0.5 * math.log(2) + 0.5 * math.log(16)
    assert threshold(probabilities) == pytest.approx(min(0.09, 0.3 * math.exp(-entropy)))
    assert threshold(probabilities) < 0.09


def test_an_unlikely_token_is_typical_only_of_a_flat_distribution() -> None:
    for probabilities, accepted in ((two_part(0.95, 2), ()), (two_part(0.05, 20), (0,))):
        token = int(np.argmin(np.abs(probabilities - 0.05)))
        draft = make_draft((-1, token, None))
        view = TableTarget(draft, lambda path, p=probabilities: p, lambda depth, draw: 0.5)  # type: ignore[misc]
        verdict = settle(verify_typical(draft, view))
        assert verdict.accepted == accepted
        assert verdict.bonus == bool(accepted)


def test_the_longest_path_wins_then_the_likeliest() -> None:
    # Everything is typical of a flat distribution of 3; behind token 2 the distribution is skewed.
    def distributions(path: tuple[int, ...]) -> Probabilities:
        return np.array([0.2, 0.3, 0.5]) if path == (2,) else np.full(3, 1 / 3)

    def accepted(*nodes: tuple[int, int]) -> tuple[int, ...]:
        draft = make_draft(*((parent, token, None) for parent, token in nodes))
        return settle(verify_typical(draft, TableTarget(draft, distributions, lambda depth, draw: 0.5))).accepted

    assert accepted((-1, 0), (-1, 2), (0, 1)) == (0, 2)
    assert accepted((-1, 0), (-1, 2), (0, 1), (1, 1), (1, 2)) == (1, 4)
    assert accepted((-1, 0), (-1, 2), (0, 1), (1, 1)) == (0, 2)


def test_a_node_behind_a_rejected_one_is_not_reached() -> None:
    def distributions(path: tuple[int, ...]) -> Probabilities:
        return np.array([1.0, 0, 0]) if not path else np.full(3, 1 / 3)

    draft = make_draft((-1, 1, None), (0, 1, None), (1, 1, None), (-1, 0, None))
    verdict = settle(verify_typical(draft, TableTarget(draft, distributions, lambda depth, draw: 0.9)))
    assert (verdict.accepted, verdict.token, verdict.bonus) == ((3,), 2, True)


def test_it_is_lossy_and_says_so() -> None:
    rule = find_verification("typical")
    assert not rule.lossless
    assert (
        lossless_error(rule.verify, iter([(1.0, make_draft((-1, 0, None)))]), lambda path: np.full(3, 1 / 3), 1) > 0.1
    )
