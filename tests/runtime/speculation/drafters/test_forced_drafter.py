"""Forced tokens are proposed as the context tells them."""

from __future__ import annotations

from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Guess
from edgeinfer.runtime.speculation.drafters.copy import ForcedDrafter
from tests.runtime.speculation.drafters.rounds import ask, settled


def test_proposes_the_first_forced_token() -> None:
    drafter = ForcedDrafter()
    drafter.begin([1, 2])
    assert ask(drafter, [5], 3, forced=[7, 8]) == [Guess(7, 0)]
    drafter.observe(settled([7]))
    assert ask(drafter) == []
    assert drafter.priors[0] > 0.9


def test_asks_behind_the_drafted_tokens() -> None:
    forced = {(): [4], (4,): [5], (4, 5): []}
    context = DraftContext([1], lambda logits, path: (0, None), lambda path: forced[tuple(path)])
    drafter = ForcedDrafter()
    assert [drafter.guesses(context, path, 1) for path in ([], [4], [4, 5])] == [(Guess(4, 0),), (Guess(5, 0),), ()]


def test_holds_and_keeps_nothing() -> None:
    drafter = ForcedDrafter()
    assert (drafter.nbytes(), drafter.state()) == (0, {})
    drafter.restore({})
    drafter.close()
