"""How sure a model is, from a row of logits or a distribution; knows nothing of who asks."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.arrays import Floats, Ints

__all__ = ["entropy", "likeliest", "log_probabilities", "logprob"]


def log_probabilities(logits: Floats) -> NDArray[np.float64]:  # (V,) -> (V,)
    """Natural log-probabilities of all tokens."""
    shifted = logits.astype(np.float64) - float(logits.max())
    normalised: NDArray[np.float64] = shifted - math.log(float(np.exp(shifted).sum()))
    return normalised


def logprob(logits: Floats, token: int) -> float:  # (V,)
    """Natural log-probability of one token."""
    best = logits.max()
    return float(logits[token] - best) - math.log(float(np.exp(logits - best).sum(dtype=np.float64)))


def entropy(law: NDArray[np.float64]) -> float:  # (V,)
    """Entropy of a distribution, in nats."""
    likely = law[law > 0]
    return float(-(likely * np.log(likely)).sum())


def likeliest(row: NDArray[np.floating], count: int) -> Ints:  # (V,) -> (count,)
    """The tokens of the largest values, best first, lower ids first on ties."""
    edge = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= edge)
    order: Ints = ids[np.argsort(-row[ids], kind="stable")][:count]
    return order
