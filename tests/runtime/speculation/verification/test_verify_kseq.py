"""k-SEQ: exact output distributions on small vocabularies, its factor rho and how often it accepts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from edgeinfer.runtime.speculation.drafters.contract import Draft, Probabilities
from edgeinfer.runtime.speculation.rejection import solve_rho, verify_kseq, verify_rejection
from tests.runtime.speculation.verification.enumeration import (
    Laws,
    check_lossless,
    drafts,
    lossless_error,
    make_draft,
    random_laws,
    verdicts,
)
from tests.tables import each_row

Path = tuple[int, ...]


def chains(k: int, depth: int, probabilities: Laws) -> Iterator[tuple[float, Draft]]:
    """Every k chains that may be drawn, each by itself."""
    return drafts(lambda path: [probabilities(path)] * (1 if path else k), depth, replacement=True)


@pytest.mark.parametrize(
    ("k", "depth", "size", "zeros"),
    [(1, 3, 3, 0), (2, 1, 5, 1), (2, 2, 3, 0), (3, 1, 4, 0), (3, 2, 2, 0), (4, 1, 3, 1)],
)
def test_chains_are_lossless(k: int, depth: int, size: int, zeros: int) -> None:
    target, drafter = random_laws(21, size, zeros=zeros), random_laws(22, size)
    check_lossless(verify_kseq, chains(k, depth, drafter), target, depth)


@pytest.mark.slow
@pytest.mark.parametrize("shorter", [0, 1])
def test_chains_of_different_lengths_are_lossless(shorter: int) -> None:
    target, drafter = random_laws(23, 3), random_laws(24, 3)

    def cut(draft: Draft) -> Draft:
        nodes = [
            (parent, guess.token, guess.probabilities)
            for parent, guess in zip(draft.parents, draft.guesses, strict=True)
        ]
        return make_draft(*(node for node in nodes if node[0] != shorter))

    made = [(weight, cut(draft)) for weight, draft in chains(2, 2, drafter)]
    check_lossless(verify_kseq, iter(made), target, 2)


def test_chains_that_agree_go_on_together() -> None:
    # Both begin alike; the second goes on with what the first was rejected for.
    probabilities = np.array([0.5, 0.5])
    target = {(): probabilities, (0,): np.array([0.0, 1.0]), (0, 1): probabilities}
    draft = make_draft((-1, 0, probabilities), (0, 0, probabilities), (-1, 0, probabilities), (2, 1, probabilities))
    accepted = [verdict.accepted for verdict in verdicts(verify_kseq, draft, lambda path: target[path])]
    assert (2, 3) in accepted
    # Where one has ended and the other's next token was rejected, the path is the one that had a next token.
    draft = make_draft((-1, 0, probabilities), (-1, 0, probabilities), (1, 0, probabilities))
    for verdict in verdicts(verify_kseq, draft, lambda path: target[path]):
        assert (verdict.accepted, verdict.bonus) in [((1,), False), ((), False)]


def test_a_chain_that_stops_at_a_token_is_lossless() -> None:
    target, drafter = random_laws(25, 3), random_laws(26, 3)

    def siblings(path: Path) -> list[Probabilities | int]:
        return [drafter(path)] * 2 if not path else [] if path[-1] == 0 else [drafter(path)]

    check_lossless(verify_kseq, drafts(siblings, 2, replacement=True), target, 2)


@each_row("order", ["ddc", "cdd", "dced", "cc", "dcd"])
def test_several_laws_and_certain_guesses_have_their_turns(order: str) -> None:
    target, one, other = random_laws(27, 3), random_laws(28, 3), random_laws(29, 3)
    kinds: dict[str, Probabilities | int] = {"c": 1, "d": one(()), "e": other(())}
    check_lossless(verify_kseq, drafts(lambda path: [kinds[kind] for kind in order], 1, replacement=True), target, 1)


def test_equal_laws_in_different_arrays_are_one() -> None:
    target, probabilities = random_laws(30, 4), random_laws(31, 4)(())
    unlikely = int((target(()) / probabilities).argmin())
    first, second = (-1, unlikely, probabilities), (-1, (unlikely + 1) % 4, probabilities)
    same = verdicts(verify_kseq, make_draft(first, second), target)
    assert same == verdicts(verify_kseq, make_draft(first, (*second[:2], probabilities.copy())), target)
    assert same != verdicts(verify_kseq, make_draft(first, (*second[:2], random_laws(32, 4)(()))), target)


def test_siblings_that_must_differ_are_no_independent_chains() -> None:
    target, drafter = random_laws(33, 3), random_laws(34, 3)
    assert lossless_error(verify_kseq, drafts(lambda path: [drafter(path)] * 2, 1), target, 1) > 1e-3


def test_one_chain_is_verified_as_by_ratio() -> None:
    target, drafter = random_laws(35, 4), random_laws(36, 4)
    for _, draft in drafts(lambda path: [drafter(path)], 2):
        assert verdicts(verify_kseq, draft, target) == verdicts(verify_rejection, draft, target)


@each_row("k", [2, 3, 5])
def test_acceptance_is_that_of_the_paper(k: int) -> None:
    target, drafter = random_laws(37, 4)(()), random_laws(38, 4)(())

    def beta(rho: float) -> float:
        return float(np.minimum(drafter, target / rho).sum())

    rho = brentq(lambda rho: 1 - (1 - beta(rho)) ** k - rho * beta(rho), 1, k)
    assert solve_rho(target, drafter, k) == pytest.approx(rho, abs=2e-4)
    if k < 5:
        accepted = sum(
            weight * uniform
            for weight, draft in chains(k, 1, lambda path: drafter)
            for verdict, uniform in verdicts(verify_kseq, draft, lambda path: target).items()
            if verdict.accepted
        )
        assert accepted == pytest.approx(1 - (1 - beta(rho)) ** k, abs=1e-4)


rows = st.lists(st.floats(0, 1) | st.just(0.0), min_size=6, max_size=6).filter(lambda x: sum(x) > 0)


@settings(deadline=None, max_examples=100)
@given(rows, rows, st.integers(1, 8))
def test_rho_leaves_nothing_negative_and_accepts_enough(p: list[float], q: list[float], k: int) -> None:
    probabilities, proposal = np.array(p) / sum(p), np.array(q) / sum(q)
    rho = solve_rho(probabilities, proposal, k)
    assert 1 <= rho <= k
    one = np.minimum(proposal, probabilities / rho)
    beta = one.sum()
    served = one * sum((1 - beta) ** tried for tried in range(k))
    assert (served <= probabilities + 1e-12).all()
    # SpecTr's bound: at least 1 - (1 - 1/k)^k > 1 - 1/e of what any rule could accept.
    assert served.sum() >= (1 - (1 - 1 / k) ** k) * np.minimum(probabilities, k * proposal).sum() - 1e-4


def test_laws_apart_and_laws_alike() -> None:
    low, high = np.array([0.5, 0.5, 0, 0]), np.array([0.0, 0, 0.25, 0.75])
    draft = make_draft((-1, 0, low), (-1, 0, low), (-1, 1, low))
    found = verdicts(verify_kseq, draft, lambda path: high)
    assert {verdict.token: weight for verdict, weight in found.items()} == pytest.approx({2: 0.25, 3: 0.75}, abs=1e-6)
    assert not any(verdict.accepted or verdict.bonus for verdict in found)
    found = verdicts(verify_kseq, draft, lambda path: low)
    assert sum(weight for verdict, weight in found.items() if verdict.accepted == (0,)) > 1 - 2e-4
