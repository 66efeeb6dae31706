"""Numbers keyed by seed and absolute position, and the token of a law at one; knows nothing of what they decide."""

from __future__ import annotations

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

__all__ = ["draw_from", "uniform"]

_UNIT = 2.0**-53  # spacing of the doubles in [1/2, 1): 53 random bits fill a mantissa


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """The number in [0, 1) that belongs to this seed, position and stream.

    A counter-based generator: nothing is remembered, so the number is the same on every platform and whatever
    was drawn before. That is why sampled text does not depend on speculation.

    Args:
        seed: in [0, 2**64).
        position: absolute position of the token being drawn, in [0, 2**64).
        stream: separates independent draws at one position, in [0, 2**64).
    """
    bits: int = Philox(counter=position, key=seed | stream << 64).random_raw()
    return (bits >> 11) * _UNIT


def draw_from(law: NDArray[np.float64], chance: float) -> int:
    """The token at `chance`, in [0, 1), of the cumulative distribution in order of token id; never an impossible one.

    Args:
        law: a distribution, or weights of positive sum. (V,)
    """
    cumulative = np.cumsum(law)
    # The largest double below 1 takes more than half a rounding off any sum: some token always lies beyond the product.
    return int(cumulative.searchsorted(chance * cumulative[-1], side="right"))
