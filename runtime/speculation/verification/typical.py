"""Accepts whatever the target finds typical (Medusa, Cai et al. 2024), so is lossy; knows nothing of drafters' laws."""

from __future__ import annotations

import math

import numpy as np

from edgeinfer.runtime.speculation.contracts import Draft, Law, TargetView, Verdict

__all__ = ["threshold", "verify_typical"]

# Medusa's constants: a probability that always suffices, and its square root for the share of exp(-entropy), which is
# what a token of a flat law with that entropy has.
_EPSILON = 0.09
_ALPHA = 0.3


def verify_typical(draft: Draft, target: TargetView) -> Verdict:
    """The longest path of which the target finds every token typical, of equals the likeliest; then its own choice.

    Output is NOT distributed as the target's: unlikely tokens are never accepted, likely ones more often than they are
    likely. As temperature falls to 0 it becomes greedy decoding.
    """
    reached: dict[int, tuple[int, float]] = {-1: (0, 0.0)}  # nodes of accepted paths: length and log-probability
    known: dict[int, tuple[Law, float]] = {}
    for node, parent in enumerate(draft.parents):
        if parent not in reached:
            continue
        if parent not in known:
            law = target.law(parent)
            known[parent] = law, threshold(law)
        law, least = known[parent]
        likely = float(law[draft.guesses[node].token])
        if likely > least:
            length, score = reached[parent]
            reached[node] = length + 1, score + math.log(likely)
    best = end = max(reached, key=lambda node: reached[node])
    path: list[int] = []
    while end >= 0:
        path.append(end)
        end = draft.parents[end]
    return Verdict(tuple(path[::-1]), target.token(best), bonus=best not in draft.parents)


def threshold(law: Law) -> float:
    """The probability a token must exceed to be typical of a law (V,): less where the law is flat."""
    some = law[law > 0]
    entropy = -float(some @ np.log(some))
    return min(_EPSILON, _ALPHA * math.exp(-entropy))
