"""Keyed verification: the text of plain decoding, whatever is drafted."""

from __future__ import annotations

import numpy as np

from edgeinfer.runtime.speculation.drafters.contract import Draft, Verdict
from edgeinfer.runtime.speculation.verification.keyed import verify_keyed
from tests.runtime.speculation.verification.enumeration import (
    TableTarget,
    check_lossless,
    drafts,
    make_draft,
    random_laws,
    settle,
)
from tests.tables import each_row


def chosen(draft: Draft, choices: dict[tuple[int, ...], int]) -> TableTarget:
    """A target that is sure of a token behind each of these paths."""
    return TableTarget(draft, lambda path: np.eye(10)[choices[path]], lambda depth, draw: 0.5)


TREE = make_draft((-1, 5, None), (-1, 7, None), (0, 1, None), (1, 1, None), (1, 2, None), (4, 3, None))
CHAIN = make_draft((-1, 1, None), (0, 2, None), (1, 3, None))


@each_row(
    ("draft", "choices", "verdict"),
    [
        (TREE, {(): 4}, Verdict((), 4, bonus=False)),
        (TREE, {(): 5, (5,): 1, (5, 1): 9}, Verdict((0, 2), 9, bonus=True)),
        (TREE, {(): 7, (7,): 3}, Verdict((1,), 3, bonus=False)),
        (TREE, {(): 7, (7,): 1, (7, 1): 0}, Verdict((1, 3), 0, bonus=True)),
        (TREE, {(): 7, (7,): 2, (7, 2): 1}, Verdict((1, 4), 1, bonus=False)),
        (TREE, {(): 7, (7,): 2, (7, 2): 3, (7, 2, 3): 3}, Verdict((1, 4, 5), 3, bonus=True)),
        (CHAIN, {(): 1, (1,): 2, (1, 2): 0}, Verdict((0, 1), 0, bonus=False)),
        (CHAIN, {(): 1, (1,): 2, (1, 2): 3, (1, 2, 3): 4}, Verdict((0, 1, 2), 4, bonus=True)),
        (Draft(), {(): 8}, Verdict((), 8, bonus=True)),
        # Of equal siblings the first is taken.
        (make_draft((-1, 1, None), (-1, 1, None), (1, 2, None)), {(): 1, (1,): 2}, Verdict((0,), 2, bonus=True)),
    ],
)
def test_a_draft_is_followed_along_the_targets_choices(
    draft: Draft, choices: dict[tuple[int, ...], int], verdict: Verdict
) -> None:
    assert settle(verify_keyed(draft, chosen(draft, choices))) == verdict


def test_output_is_lossless_however_guesses_come_about() -> None:
    target, drafter = random_laws(1, 3), random_laws(2, 3)
    check_lossless(verify_keyed, drafts(lambda path: [drafter(path), 1], 2, repeats=False), target, 2)
