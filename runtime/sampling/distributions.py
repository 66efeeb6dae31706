"""Pure functions of one row of logits: truncation, log-probabilities, and draws keyed by seed and position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import BackendError
from edgeinfer.records import dataclass

Logits = NDArray[np.floating[Any]]
Ids = NDArray[np.int64]

# Sorting a whole vocabulary costs more than all else here, and a nucleus is nearly always inside this many tokens.
_NUCLEUS_GUESS = 256
_UNIT = 2.0**-53  # spacing of the doubles in [1/2, 1): 53 random bits fill a mantissa
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities under the model itself, before bias, penalties, mask, temperature and truncation.

    Attributes:
        logprob: of the chosen token.
        top: the most likely (token id, log-probability) pairs, best first, lower id first on ties.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Logits, token: int, top: int = 0) -> TokenLogprobs:
    """Log-probabilities of a token and of the `top` most likely ones, from the untouched logits.

    Args:
        logits: that predicted the token. (V,)
    """
    best = float(logits[argmax(logits)])
    shifted = logits.astype(np.float64)
    shifted -= best
    normaliser = float(np.log(np.exp(shifted).sum()))
    ids = _largest(logits, top) if top < len(logits) else np.arange(len(logits))
    ids = ids[np.argsort(-shifted[ids], kind="stable")]
    pairs = tuple((int(i), float(shifted[i]) - normaliser) for i in ids)
    return TokenLogprobs(float(shifted[token]) - normaliser, pairs)


def truncated(
    row: Logits, best: int, config: GenerationConfig, ids: Ids, weights: NDArray[np.float64]
) -> tuple[Ids, NDArray[np.float64]]:  # (S,), (S,)
    """Indices of a row (A,) that survive truncation, and their weights; the one at `best` has weight 1.

    Args:
        ids: ascending, for every index of the row. (A,)
        weights: a buffer that may be written to. (A,)
    """
    if 0 < config.top_k < len(row):
        ids = _largest(row, config.top_k)
        weights = row[ids].astype(np.float64)
    elif config.top_p == 1 and config.min_p > 0:
        # Nearly all of the vocabulary goes out here, before the exponential; the slack leaves the edge to min-p.
        top = float(row[best])
        floor = top + config.temperature * math.log(config.min_p) - 1e-3 - 1e-6 * abs(top)
        ids = np.flatnonzero(row >= np.float32(max(floor, _LOWEST)))
        weights = row[ids].astype(np.float64)
    else:
        np.copyto(weights, row)
    # The best value leaves before dividing, so that no temperature, however small, overflows.
    weights -= float(row[best])
    with np.errstate(over="ignore"):  # an overflow to -inf is a weight of 0
        weights /= config.temperature
    np.exp(weights, out=weights)
    if config.top_p < 1:
        keep = _nucleus(weights, config.top_p)
        ids, weights = ids[keep], weights[keep]
    if config.min_p > 0:
        likely = weights >= config.min_p  # the best weight is 1
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """The number in [0, 1) that belongs to this seed, position and stream.

    A counter-based generator: nothing is remembered, so the number is the same on every platform and whatever
    was drawn before. That is why sampled text does not depend on speculation.

    Args:
        seed: in [0, 2**64).
        position: absolute position of the token being drawn, in [0, 2**64).
        stream: separates independent draws at one position, in [0, 2**64).
    """
    from numpy.random import Philox  # which replies without draws do not wait for

    bits: int = Philox(counter=position, key=seed | stream << 64).random_raw()
    return (bits >> 11) * _UNIT


def draw_from(probabilities: NDArray[np.float64], draw: float) -> int:
    """The token at a draw in [0, 1) of the cumulative distribution in order of token id; never an impossible one.

    Args:
        probabilities: a distribution, or weights of positive sum. (V,)
    """
    cumulative = np.cumsum(probabilities)
    # The largest double below 1 takes more than half a rounding off any sum: some token always lies beyond the product.
    return int(cumulative.searchsorted(draw * cumulative[-1], side="right"))


def argmax(row: Logits) -> int:
    """Index of the largest logit, the lowest on ties, having checked that the row is usable."""
    best = int(row.argmax())
    # argmax counts NaN as largest, so this one look finds NaN anywhere in the row.
    if not np.isfinite(row[best]):
        raise BackendError(
            f"No token can be chosen: the largest logit is {row[best]}.",
            "The model's weights or its export are broken: export it again.",
        )
    return best


def _largest(row: NDArray[Any], count: int) -> Ids:
    """Ascending indices of the `count` largest values, count < len(row); lower indices win ties at the edge."""
    if count == 0:
        return np.empty(0, np.int64)
    edge = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= edge)
    surplus = len(ids) - count
    if surplus:
        tied = np.flatnonzero(row[ids] == edge)
        ids = np.delete(ids, tied[len(tied) - surplus :])
    return ids


def _nucleus(weights: NDArray[np.float64], mass: float) -> Ids:
    """Ascending indices of the smallest set of largest weights whose share of the total reaches `mass`."""
    wanted = mass * weights.sum()
    size = _NUCLEUS_GUESS
    while True:
        some = _largest(weights, size) if size < len(weights) else np.arange(len(weights))
        order = some[np.argsort(-weights[some], kind="stable")]
        reached = np.cumsum(weights[order])
        if reached[-1] >= wanted or len(some) == len(weights):
            return np.sort(order[: int(reached.searchsorted(wanted)) + 1])
        size *= 8
