"""Verification by ratio: exact output distributions on small vocabularies, and what the rule asks of drawing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from edgeinfer.runtime.sampling.distributions import draw_from
from edgeinfer.runtime.speculation.drafters.contract import Deciding, Draft, Probabilities, Verdict
from edgeinfer.runtime.speculation.verification.rejection import residual, verify_rejection, without
from tests.runtime.speculation.verification.enumeration import (
    Laws,
    TableTarget,
    check_lossless,
    drafts,
    make_draft,
    random_laws,
    settle,
    verdicts,
)
from tests.tables import each_row

Path = tuple[int, ...]


def drawn(*counts: int, probabilities: Laws) -> Callable[[Path], list[Probabilities | int]]:
    """So many drawn siblings at each depth."""
    return lambda path: [probabilities(path)] * counts[len(path)]


@each_row(
    ("size", "counts", "drawing"),
    [
        (3, (1, 1, 1), {}),
        *((3, counts, {}) for counts in ((2, 2), (3, 1), (1, 2))),
        *((size, (size - 2 * (size == 5),), {}) for size in (4, 5)),
        (4, (3,), {"replacement": True}),
        (4, (3,), {"replacement": True, "repeats": False}),
        *((3, counts, {"replacement": True}) for counts in ((2, 1), (1, 2))),
    ],
)
def test_chains_and_trees_are_lossless(size: int, counts: tuple[int, ...], drawing: dict[str, bool]) -> None:
    for zeros in (0, 1):
        target, drafter = random_laws(5, size, zeros=zeros), random_laws(6, size)
        made = drafts(drawn(*counts, probabilities=drafter), len(counts), **drawing)
        check_lossless(verify_rejection, made, target, len(counts))


def test_a_chain_is_accepted_as_often_as_the_laws_overlap() -> None:
    target, drafter = random_laws(3, 5), random_laws(4, 5)
    found = sum(
        weight * uniform
        for weight, draft in drafts(drawn(1, probabilities=drafter), 1)
        for verdict, uniform in verdicts(verify_rejection, draft, target).items()
        if verdict.accepted
    )
    assert found == pytest.approx(np.minimum(target(()), drafter(())).sum(), abs=1e-5)


def test_siblings_raise_acceptance() -> None:
    target, drafter = random_laws(9, 5), random_laws(10, 5)
    recovered = []
    for count in (1, 2, 3, 5):
        found = 0.0
        for weight, draft in drafts(drawn(count, probabilities=drafter), 1):
            for verdict, uniform in verdicts(verify_rejection, draft, target).items():
                found += weight * uniform * (not verdict.accepted)
        recovered.append(found)
    assert recovered == sorted(recovered, reverse=True)
    assert recovered[0] > recovered[1] > recovered[2] > recovered[3]
    # All tokens of the vocabulary are proposed: nothing can be left.
    assert recovered[3] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("order", ["cdd", "dcd", "ddc", "dce", "ecd"])
@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("repeats", [False, True])
def test_certain_and_drawn_siblings_of_several_drafters_mix(order: str, replacement: bool, repeats: bool) -> None:
    target, one, other = random_laws(11, 4), random_laws(12, 4), random_laws(13, 4)

    kinds: dict[str, Probabilities | int] = {"c": 2, "d": one(()), "e": other(())}
    made = drafts(lambda path: [kinds[kind] for kind in order], 1, replacement=replacement, repeats=repeats)
    check_lossless(verify_rejection, made, target, 1)


def test_mixed_siblings_have_children_of_their_own() -> None:
    target, drafter = random_laws(11, 3), random_laws(12, 3)

    def siblings(path: Path) -> list[Probabilities | int]:
        return [drafter(()), 2] if not path else [1, drafter(path)] if path[0] == 2 else [drafter(path)]

    check_lossless(verify_rejection, drafts(siblings, 2, repeats=False), target, 2)


def test_certain_guesses_are_accepted_as_often_as_the_target_takes_them() -> None:
    target = random_laws(14, 4)
    draft = make_draft((-1, 2, None), (-1, 0, None), (0, 1, None))
    found = verdicts(verify_rejection, draft, target)
    p = target(())
    assert sum(w for v, w in found.items() if v.accepted[:1] == (0,)) == pytest.approx(p[2], abs=1e-5)
    assert sum(w for v, w in found.items() if v.accepted == (1,)) == pytest.approx(p[0], abs=1e-5)
    assert sum(w for v, w in found.items() if v.accepted == (0, 2)) == pytest.approx(p[2] * target((2,))[1], abs=1e-5)
    check_lossless(verify_rejection, iter([(1.0, draft)]), target, 2)


def test_guesses_that_foretell_the_keyed_choice_may_be_chosen_by_it() -> None:
    # The token that plain decoding would take is proposed, but only where it is token 0.
    target = random_laws(17, 3)
    seen = np.zeros(3)
    edges = np.concatenate([[0], np.cumsum(target(()))])
    for token, mass in enumerate(np.diff(edges)):
        draft = make_draft((-1, 0, None)) if token == 0 else make_draft()

        def verify(
            draft: Draft, view: TableTarget, verify: Callable[..., Deciding] = verify_rejection, token: int = token
        ) -> Deciding:
            view.token = lambda node: token  # type: ignore[method-assign]
            return verify(draft, view)

        for verdict, weight in verdicts(verify, draft, target).items():  # type: ignore[arg-type]
            seen[draft.tokens[0] if verdict.accepted else verdict.token] += mass * weight
    np.testing.assert_allclose(seen, target(()), atol=3e-5)


def test_equal_laws_always_accept_and_leave_no_gap() -> None:
    probabilities = random_laws(18, 5)
    for token, u in product(range(5), (0.0, 0.5, 1 - 2.0**-53)):
        draft = make_draft((-1, token, probabilities(()).copy()))
        verdict = settle(verify_rejection(draft, TableTarget(draft, probabilities, lambda depth, draw, u=u: u)))  # type: ignore[misc]
        assert verdict.accepted == (0,)
        assert verdict.bonus


def test_one_hot_targets_are_followed() -> None:
    hot = np.array([0.0, 0, 1, 0])
    for flat, u in product((None, np.full(4, 0.25)), (0.0, 0.3, 1 - 2.0**-53)):
        draft = make_draft((-1, 0, flat), (-1, 2, flat), (1, 1, flat), (1, 3, flat))
        verdict = settle(verify_rejection(draft, TableTarget(draft, lambda path: hot, lambda depth, draw, u=u: u)))  # type: ignore[misc]
        assert verdict == Verdict((1,), 2, bonus=False)


def test_one_hot_drafters_are_certain() -> None:
    target = random_laws(19, 4)
    hot = np.array([0.0, 1, 0, 0])
    certain, probabilities = make_draft((-1, 1, None), (-1, 3, None)), make_draft((-1, 1, hot), (-1, 3, None))
    assert verdicts(verify_rejection, certain, target) == verdicts(verify_rejection, probabilities, target)
    # A second draw from a distribution that had one token is none; it counts as certain rather than divide by nothing.
    check_lossless(verify_rejection, iter([(1.0, make_draft((-1, 1, hot), (-1, 3, hot)))]), target, 1)


def test_a_residual_lost_to_rounding_leaves_the_probabilities() -> None:
    probabilities = np.array([0.25, 0.75])
    np.testing.assert_array_equal(residual(probabilities, probabilities), probabilities)
    np.testing.assert_array_equal(without(np.array([0.0, 1.0]), [1]), [0, 1])
    # The target's mass is one rounding short of certain, and the test falls into the gap.
    nearly = np.array([0.0, np.nextafter(1, 0), 0])
    draft = make_draft((-1, 1, np.array([0.0, 1, 0])))
    verdict = settle(verify_rejection(draft, TableTarget(draft, lambda path: nearly, lambda depth, draw: 1 - 2.0**-53)))
    assert (verdict.accepted, verdict.token) == ((), 1)


def test_tiny_probabilities_neither_warn_nor_overflow() -> None:
    target = np.array([1.0, 5e-324, 0])
    drafter = np.array([5e-324, 5e-324, 1.0])
    for token in range(3):
        draft = make_draft((-1, token, drafter), (-1, (token + 1) % 3, drafter))
        for u in (0.0, 0.5, 1 - 2.0**-53):
            view = TableTarget(draft, lambda path: target, lambda depth, draw, u=u: u)  # type: ignore[misc]
            assert settle(verify_rejection(draft, view)).token in (0, 1)


def test_the_inverse_cdf_runs_in_order_of_token_and_never_gives_the_impossible() -> None:
    probabilities = np.array([0.0, 0.25, 0, 0.5, 0.25, 0])
    assert [draw_from(probabilities, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-53)] == [1, 1, 3, 3, 4, 4]
    assert draw_from(probabilities * 7, 0.25) == 3
    short = np.array([0.1] * 3 + [0.0])
    assert draw_from(short, 1 - 2.0**-53) == 2
