"""k-SEQ: accepts one of several independent chains (SpecTr, Sun et al. 2023); knows nothing of how they are drawn.

A draft is k chains that branch at the root, each drawn by itself from the drafter's law; equal tokens in several of
them stay apart. Each step is decided among the chains that agree with what was accepted so far: their next tokens are
independent draws x of one law q. They are accepted in turn with probability min(1, p(x) / (rho q(x))), where p is the
target's law and rho is in [1, k]; else a token is drawn from what that leaves of p.

Output is distributed as the target's where, given all that was drafted before it, every token is a draw from its law;
presence and order of tokens must not depend on what was drawn. Where the laws at a step differ, each has its turn with
its own draws, on what the one before left of p; a guess without a law is a law of its own that is certain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from edgeinfer.runtime.speculation.contracts import Draft, Law, TargetView, Verdict
from edgeinfer.runtime.speculation.verification.laws import draw_from, drawn_from, ratio, residual, without

__all__ = ["solve_rho", "verify_kseq"]

# Any rho that is too large is still lossless and accepts less often by no more than this.
_PRECISION = 1e-4


def verify_kseq(draft: Draft, target: TargetView) -> Verdict:
    """Goes down from the root with the chains that agree; then takes a token from what is left of the target's law.

    Of each depth's numbers, 0 draws the token and the n-th tests the n-th chain's. The path ends at a node with a
    child wherever one was rejected, also where chains of equal tokens are of different lengths.
    """
    agreeing, depth = [-1], 0
    while True:
        candidates = [node for node, parent in enumerate(draft.parents) if parent in agreeing]
        end = draft.parents[candidates[0]] if candidates else agreeing[0]
        chosen, left = _choose(draft, candidates, target.law(end), partial(target.chance, depth))
        if chosen is None:
            return Verdict(_path(draft, end), draw_from(left, target.chance(depth, 0)), bonus=not candidates)
        token = draft.guesses[chosen].token
        agreeing = [node for node in candidates if draft.guesses[node].token == token]
        depth += 1


def solve_rho(law: Law, proposal: Law, k: int) -> float:
    """The least factor rho in [1, k] at which k draws of a proposal leave nothing negative of a law.

    With beta the chance that one draw is accepted, the first accepted of k draws is x with probability
    min(q, p / rho)(x) (1 - (1 - beta)^k) / beta; that is at most p(x) while the factor is at most rho.

    Args:
        law: p. (V,)
        proposal: q. (V,)
    """
    if k == 1:
        return 1.0  # below the first tokens, chains seldom agree
    both = np.flatnonzero((law > 0) & (proposal > 0))
    p, q = law[both], proposal[both]
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


def _choose(draft: Draft, candidates: list[int], law: Law, chance: Callable[[int], float]) -> tuple[int | None, Law]:
    """Which candidate is accepted, or None; and what the rejected ones left of the target's law."""
    draw = 0
    for proposal, nodes in _turns(draft, candidates):
        rho = 1.0 if proposal is None else solve_rho(law, proposal, len(nodes))
        for node in nodes:
            draw += 1
            if chance(draw) < ratio(law, proposal, draft.guesses[node].token) / rho:
                return node, law
        if proposal is None:
            law = without(law, [draft.guesses[node].token for node in nodes])
        else:
            one = np.minimum(proposal, law / rho)
            law = residual(law, one * _tries(float(one.sum()), len(nodes)))
    return None, law


def _turns(draft: Draft, candidates: list[int]) -> list[tuple[Law | None, list[int]]]:
    """Candidates by the law they were drawn from; each that has none, or whose law rules it out, alone."""
    turns: list[tuple[Law | None, list[int]]] = []
    for node in candidates:
        proposal = drawn_from(draft.guesses[node])
        for other, nodes in turns:
            if proposal is not None and other is not None and (other is proposal or np.array_equal(other, proposal)):
                nodes.append(node)
                break
        else:
            turns.append((proposal, [node]))
    return turns


def _path(draft: Draft, node: int) -> tuple[int, ...]:
    """Nodes from the root's child to this one."""
    nodes: list[int] = []
    while node >= 0:
        nodes.append(node)
        node = draft.parents[node]
    return tuple(nodes[::-1])
