"""Verification by typical acceptance (Medusa, Cai et al. 2024, arXiv 2401.10774), which is lossy."""

from __future__ import annotations

import math

import numpy as np

from edgeinfer.runtime.speculation.drafters.contract import Deciding, Draft, Probabilities, TargetView, Verdict
from edgeinfer.runtime.speculation.verification.rule import VerificationRule

# Medusa's constants: a probability that always suffices, and its square root for the share of exp(-entropy), which is
# what a token of a flat distribution with that entropy has.
_EPSILON = 0.09
_ALPHA = 0.3


def verify_typical(draft: Draft, target: TargetView) -> Deciding:
    """Take the longest path of which the target finds every token typical, of equals the likeliest; then its choice.

    This is Medusa's typical acceptance (Cai et al. 2024), and it is lossy.

    Output is NOT distributed as the target's: unlikely tokens are never accepted, likely ones more often than they are
    likely. As temperature falls to 0 it becomes greedy decoding.
    """
    reached: dict[int, tuple[int, float]] = {-1: (0, 0.0)}  # nodes of accepted paths: length and log-probability
    known: dict[int, tuple[Probabilities, float]] = {}
    for node, parent in enumerate(draft.parents):
        if parent not in reached:
            continue
        if parent not in known:
            yield parent
            probabilities = target.probabilities(parent)
            known[parent] = probabilities, threshold(probabilities)
        probabilities, least = known[parent]
        likely = float(probabilities[draft.guesses[node].token])
        if likely > least:
            length, score = reached[parent]
            reached[node] = length + 1, score + math.log(likely)
    best = end = max(reached, key=lambda node: reached[node])
    path: list[int] = []
    while end >= 0:
        path.append(end)
        end = draft.parents[end]
    yield best
    return Verdict(tuple(path[::-1]), target.token(best), bonus=best not in draft.parents)


def threshold(probabilities: Probabilities) -> float:
    """The probability a token must exceed to be typical of a distribution (V,): less where the distribution is flat."""
    some = probabilities[probabilities > 0]
    entropy = -float(some @ np.log(some))
    return min(_EPSILON, _ALPHA * math.exp(-entropy))


METHOD = VerificationRule(
    name="typical", help="accepts what the model finds typical (Medusa); lossy", verify=verify_typical, lossless=False
)
