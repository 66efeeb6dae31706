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
beside certain ones. It does not hold where a guess's presence or place depends on what was drawn: siblings sorted by
probability, guesses dropped because an unlikely token came out or because of what followed it, or a repetition that
moves to an elder place. A drafter or policy that wants that must leave the distribution out; certain guesses are
always safe.

k-SEQ (SpecTr, Sun et al. 2023) accepts one of k independent chains that branch at the root; equal tokens in several of
them stay apart. Each step is decided among the chains that agree with what was accepted so far: their next tokens are
independent draws x of one distribution q. They are accepted in turn with probability min(1, p(x) / (rho q(x))), where
p is the target's distribution and rho is in [1, k]; else a token is drawn from what that leaves of p. Where the
distributions at a step differ, each has its turn with its own draws, on what the one before left of p; a guess without
a distribution is a distribution of its own that is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from edgeinfer.runtime.sampling.distributions import draw_from
from edgeinfer.runtime.speculation.drafters.contract import Draft, Guess, Probabilities, TargetView, Verdict

Uniform = Callable[[int], float]  # the uniform draw of a place by its number
# Any rho that is too large is still lossless and accepts less often by no more than this.
_PRECISION = 1e-4


def verify_rejection(draft: Draft, target: TargetView) -> Verdict:
    """Goes down from the root while a child is accepted; else draws a token from what is left.

    Of each depth's numbers, 0 draws the token and the n-th tests the n-th child. The target's keyed choice has no part
    in it: certain guesses may foretell that one, and then the draft would be no stranger to it.
    """
    accepted: list[int] = []
    node = -1
    while True:
        depth, children = len(accepted), draft.children(node)
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


def verify_kseq(draft: Draft, target: TargetView) -> Verdict:
    """Goes down from the root with the chains that agree; then draws a token from what is left.

    Of each depth's numbers, 0 draws the token and the n-th tests the n-th chain's. The path ends at a node with a
    child wherever one was rejected, also where chains of equal tokens are of different lengths.
    """
    agreeing, depth = [-1], 0
    while True:
        candidates = [node for node, parent in enumerate(draft.parents) if parent in agreeing]
        end = draft.parents[candidates[0]] if candidates else agreeing[0]
        chosen, left = _choose_chain(draft, candidates, target.probabilities(end), partial(target.uniform, depth))
        if chosen is None:
            return Verdict(draft.branch(end), draw_from(left, target.uniform(depth, 0)), bonus=not candidates)
        token = draft.guesses[chosen].token
        agreeing = [node for node in candidates if draft.guesses[node].token == token]
        depth += 1


def solve_rho(probabilities: Probabilities, proposal: Probabilities, k: int) -> float:
    """The least factor rho in [1, k] at which k draws of a proposal leave nothing negative of a distribution.

    With beta the probability that one draw is accepted, the first accepted of k draws is x with probability
    min(q, p / rho)(x) (1 - (1 - beta)^k) / beta; that is at most p(x) while the factor is at most rho.

    Args:
        probabilities: p. (V,)
        proposal: q. (V,)
    """
    if k == 1:
        return 1.0  # below the first tokens, chains seldom agree
    both = np.flatnonzero((probabilities > 0) & (proposal > 0))
    p, q = probabilities[both], proposal[both]
    low, high = 1.0, float(k)
    while high - low > _PRECISION:
        middle = (low + high) / 2
        # Tests grow with rho, so where they are fewer than it they are an upper bound themselves, else a lower one.
        tries = _tries(float(np.minimum(q, p / middle).sum()), k)
        low, high = (low, tries) if tries <= middle else (tries, high)
    return high


def _tries(beta: float, k: int) -> float:
    """How many of k draws are tested on average: (1 - (1 - beta)^k) / beta, without the cancellation at small beta."""
    return sum((1 - beta) ** tried for tried in range(k))


def _choose_chain(
    draft: Draft, candidates: list[int], probabilities: Probabilities, uniform: Uniform
) -> tuple[int | None, Probabilities]:
    """Which candidate is accepted, or None; and what the rejected ones left of the target's distribution."""
    draw = 0
    for proposal, nodes in _turns(draft, candidates):
        rho = 1.0 if proposal is None else solve_rho(probabilities, proposal, len(nodes))
        for node in nodes:
            draw += 1
            if uniform(draw) < ratio(probabilities, proposal, draft.guesses[node].token) / rho:
                return node, probabilities
        if proposal is None:
            probabilities = without(probabilities, [draft.guesses[node].token for node in nodes])
        else:
            one = np.minimum(proposal, probabilities / rho)
            probabilities = residual(probabilities, one * _tries(float(one.sum()), len(nodes)))
    return None, probabilities


def _turns(draft: Draft, candidates: list[int]) -> list[tuple[Probabilities | None, list[int]]]:
    """Candidates by the distribution they were drawn from; alone where they have none, or it rules them out."""
    turns: list[tuple[Probabilities | None, list[int]]] = []
    for node in candidates:
        proposal = _proposal(draft.guesses[node])
        for other, nodes in turns:
            if proposal is not None and other is not None and (other is proposal or np.array_equal(other, proposal)):
                nodes.append(node)
                break
        else:
            turns.append((proposal, [node]))
    return turns


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

    Where rounding leaves nothing the two were the same up to rounding, and the distribution itself is the answer.
    """
    return _renormalised(np.maximum(probabilities - served, 0), probabilities)


def _renormalised(weights: Probabilities, otherwise: Probabilities) -> Probabilities:
    total = weights.sum()
    return weights / total if total > 0 else otherwise
