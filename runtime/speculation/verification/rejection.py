"""Rejection sampling: accepts drawn tokens by the ratio of the target's probability to the drafter's.

On a chain this is speculative sampling (Leviathan et al. 2023, Chen et al. 2023), on a tree recursive rejection
without replacement (Jeon et al. 2024, Chen et al. 2024): a sibling is tested against what its rejected elder siblings
left of the target's distribution, with their tokens taken out of its own. A guess without a distribution is certain:
it is accepted with the target's probability of its token.

Output is distributed as the target's where, for every guess with a distribution, given all that was drafted before it
and that it repeats no elder sibling,

    its token is drawn from its distribution with the tokens of its elder siblings taken out and the rest renormalised.

That holds for siblings drawn from a distribution one after the other, with replacement (repetitions kept or dropped) or
without (Gumbel top-k, in order of the perturbed values), for siblings of several drafters, and for drawn siblings
next to certain ones. It does not hold where a guess's presence or place depends on what was drawn: siblings sorted by
probability, guesses dropped because an unlikely token came out or because of what followed it, or a repetition that
moves to an elder place. A drafter or policy that wants that must leave the distribution out; certain guesses are
always safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from edgeinfer.runtime.sampling.distributions import draw_from
from edgeinfer.runtime.speculation.drafters.contract import Deciding, Draft, Guess, Probabilities, TargetView, Verdict
from edgeinfer.runtime.speculation.verification.rule import VerificationRule

Uniform = Callable[[int], float]  # the uniform draw of a place by its number


def verify_rejection(draft: Draft, target: TargetView) -> Deciding:
    """Go down from the root while a child is accepted; else draws a token from what is left. Of each depth's numbers, 0
    draws the token and the n-th tests the n-th child. The target's keyed choice has no part in it: certain guesses may
    foretell that one, and then the draft would be no stranger to it."""
    accepted: list[int] = []
    node = -1
    while True:
        depth, children = len(accepted), draft.children(node)
        yield node
        siblings = [draft.guesses[child] for child in children]
        chosen, left = _choose_sibling(siblings, target.probabilities(node), partial(target.uniform, depth))
        if chosen is None:
            return Verdict(tuple(accepted), draw_from(left, target.uniform(depth, 0)), bonus=not children)
        node = children[chosen]
        accepted.append(node)


def _choose_sibling(
    siblings: Sequence[Guess], probabilities: Probabilities, uniform: Uniform
) -> tuple[int | None, Probabilities]:
    """Which sibling is accepted, or None; and what the rejected ones left of the target's distribution."""
    gone: list[int] = []
    for place, guess in enumerate(siblings):
        token = guess.token
        if token in gone:
            continue  # its elder sibling was its test
        proposal = _proposal(guess)
        if proposal is not None and gone:
            proposal = without(proposal, gone)
        if uniform(place + 1) < ratio(probabilities, proposal, token):
            return place, probabilities
        probabilities = without(probabilities, [token]) if proposal is None else residual(probabilities, proposal)
        gone.append(token)
    return None, probabilities


def _proposal(guess: Guess) -> Probabilities | None:  # (V,)
    """What a guess was drawn from; None if it is certain, as one must be that its distribution rules out."""
    return guess.probabilities if guess.probabilities is not None and guess.probabilities[guess.token] > 0 else None


def ratio(probabilities: Probabilities, proposal: Probabilities | None, token: int) -> float:
    """How many times likelier a token is by a distribution than by what proposed it, which None says was certain to."""
    return float(probabilities[token]) / (1.0 if proposal is None else float(proposal[token]))


def without(probabilities: Probabilities, tokens: Sequence[int]) -> Probabilities:  # (V,)
    """The distribution without some tokens, renormalised; the distribution itself where that leaves nothing."""
    left = probabilities.copy()
    left[list(tokens)] = 0
    return _renormalised(left, probabilities)


def residual(probabilities: Probabilities, served: Probabilities) -> Probabilities:  # (V,), (V,) -> (V,)
    """What is left to draw from once `served` of a distribution's mass was tried: the positive part, renormalised.
    Where rounding leaves nothing the two were the same up to rounding, and the distribution itself is the answer."""
    return _renormalised(np.maximum(probabilities - served, 0), probabilities)


def _renormalised(weights: Probabilities, otherwise: Probabilities) -> Probabilities:
    total = weights.sum()
    return weights / total if total > 0 else otherwise


METHODS = (
    VerificationRule(
        name="rejection",
        help="gives the distribution of plain decoding",
        verify=verify_rejection,
        stochastic=True,
        order=10,
    ),
)
