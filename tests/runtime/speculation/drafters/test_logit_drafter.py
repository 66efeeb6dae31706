"""What drafters make of logits: the sign tells how sure they are, and width asks for more without losing what was."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.logit_drafter import LogitDrafter
from tests.runtime.speculation.drafters.models import committed, context


class Given(LogitDrafter):
    """Has the same logits after every path."""

    name = "given"

    def __init__(self, logits: Sequence[float]) -> None:
        super().__init__(len(logits))
        self.logits = np.array(logits, np.float32)
        self.asked = 0

    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Floats | None:  # (V,)
        self.asked += 1
        return self.logits


def drafter(*chances: float) -> Given:
    """With these probabilities of its tokens."""
    return Given([np.log(uniform) + 3 if uniform else -np.inf for uniform in chances])


def test_the_sign_of_a_drawn_token_is_its_probability() -> None:
    """The confidence of the token drawn, which need not be the most likely one."""
    signs = {0.05: 0, 0.2: 1, 0.3: 2, 0.5: 3, 0.6: 4, 0.8: 5, 0.9: 6, 0.96: 7, 1.0: 7}
    for uniform, sign in signs.items():
        rest = (1 - uniform) / 2
        one = drafter(uniform, rest, rest)
        assert one.guesses(context([1], lambda logits, drafted: (0, None)), [], 1)[0].sign == sign


def test_signs_are_priors_that_rise_with_it() -> None:
    drawn, others = np.split(np.array(Given([0.0]).priors), 2)
    assert (np.diff(drawn) > 0).all()
    assert (np.diff(others) >= 0).all()
    assert (others <= drawn).all()
    assert others.min() > 0
    assert drawn.max() < 1


def test_others_follow_by_probability_and_keep_what_was_drawn() -> None:
    one = drafter(0.11, 0.13, 0.5, 0.0, 0.26)
    now = context([1], lambda logits, drafted: (1, None))
    for width, tokens, asked in ((1, [1], 1), (3, [1, 2, 4], 2), (2, [1, 2], 2), (9, [1, 2, 4, 0], 3)):
        guesses = one.guesses(now, [], width)
        assert [guess.token for guess in guesses] == tokens
        assert one.asked == asked
    assert [guess.sign for guess in one.guesses(now, [], 4)] == [1, 8 + 3, 8 + 2, 8 + 1]
    assert one.guesses(now, [], 0) == ()


def test_a_round_or_a_generation_forgets_the_last() -> None:
    one = drafter(0.7, 0.3)
    ends: list[Callable[[], None]] = [lambda: one.observe(committed([], 0, 1)), lambda: one.begin([1])]
    for forget in ends:
        assert one.guesses(context([1]), [], 1)[0].token == 0
        one.logits = one.logits[::-1].copy()
        assert one.guesses(context([1]), [], 1)[0].token == 0
        forget()
        assert one.guesses(context([1]), [], 1)[0].token == 1
        one.logits = one.logits[::-1].copy()
        one.observe(committed([], 0, 1))
