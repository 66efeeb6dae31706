"""Arithmetic of distributions that rules of verification share; knows nothing of trees or of the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.runtime.sampling.generator import draw_from
from edgeinfer.runtime.speculation.contracts import Guess, Law

__all__ = ["draw_from", "drawn_from", "ratio", "residual", "without"]


def drawn_from(guess: Guess) -> Law | None:  # (V,)
    """What a guess was drawn from; None if it is certain, as one must be that its law rules out."""
    return guess.law if guess.law is not None and guess.law[guess.token] > 0 else None


def ratio(law: Law, proposal: Law | None, token: int) -> float:
    """How many times likelier a token is by a law than by what proposed it, which None says was certain to."""
    return float(law[token]) / (1.0 if proposal is None else float(proposal[token]))


def without(law: Law, tokens: Sequence[int]) -> Law:  # (V,)
    """The law with some tokens taken out and the rest renormalised; the law itself where that leaves nothing."""
    left = law.copy()
    left[list(tokens)] = 0
    return _renormalised(left, law)


def residual(law: Law, served: Law) -> Law:  # (V,), (V,) -> (V,)
    """What is left to draw from once `served` of a law's mass has had its chance: the positive part, renormalised.

    Where rounding leaves nothing the two were the same up to rounding, and the law itself is the answer.
    """
    return _renormalised(np.maximum(law - served, 0), law)


def _renormalised(weights: Law, otherwise: Law) -> Law:
    total = weights.sum()
    return weights / total if total > 0 else otherwise
