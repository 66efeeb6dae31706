"""Accepts drawn tokens by the ratio of target's law to drafter's; knows nothing of how drafts or laws are made.

On a chain this is speculative sampling (Leviathan et al. 2023, Chen et al. 2023), on a tree recursive rejection
without replacement (Jeon et al. 2024, Chen et al. 2024): a sibling is tested against what its rejected elder siblings
left of the target's law, with their tokens taken out of its own. A guess without a law is certain: it is accepted with
the target's probability of its token.

Output is distributed as the target's where, for every guess with a law, given all that was drafted before it and that
it repeats no elder sibling,

    its token is distributed as its law with the tokens of its elder siblings taken out and the rest renormalised.

That holds for siblings drawn from a law one after the other, with replacement (repetitions kept or dropped) or without
(Gumbel top-k, in order of the perturbed values), for siblings of several drafters, and for drawn siblings beside
certain ones. It does not hold where a guess's presence or place depends on what was drawn: siblings sorted by
probability, guesses dropped because an unlikely token came out or because of what followed it, or a repetition that
moves to an elder place. A drafter or policy that wants that must leave the law out; certain guesses are always safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from edgeinfer.runtime.speculation.contracts import Draft, Guess, Law, TargetView, Verdict
from edgeinfer.runtime.speculation.verification.laws import draw_from, drawn_from, ratio, residual, without

__all__ = ["verify_rejection"]


def verify_rejection(draft: Draft, target: TargetView) -> Verdict:
    """Goes down from the root while a child is accepted; then takes a token from what is left of the target's law.

    Of each depth's numbers, 0 draws the token and the n-th tests the n-th child. The target's keyed choice has no part
    in it: certain guesses may foretell that one, and then the draft would be no stranger to it.
    """
    accepted: list[int] = []
    node = -1
    while True:
        depth, children = len(accepted), draft.children(node)
        siblings = [draft.guesses[child] for child in children]
        chosen, left = _choose(siblings, target.law(node), partial(target.chance, depth))
        if chosen is None:
            return Verdict(tuple(accepted), draw_from(left, target.chance(depth, 0)), bonus=not children)
        node = children[chosen]
        accepted.append(node)


def _choose(siblings: Sequence[Guess], law: Law, chance: Callable[[int], float]) -> tuple[int | None, Law]:
    """Which sibling is accepted, or None; and what the rejected ones left of the target's law."""
    gone: list[int] = []
    for place, guess in enumerate(siblings):
        token = guess.token
        if token in gone:
            continue  # its elder sibling was its test
        proposal = drawn_from(guess)
        if proposal is not None and gone:
            proposal = without(proposal, gone)
        if chance(place + 1) < ratio(law, proposal, token):
            return place, law
        law = without(law, [token]) if proposal is None else residual(law, proposal)
        gone.append(token)
    return None, law
