"""Products of matrices with the states of many tokens, for calibration; knows nothing of layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.arithmetic import silu

__all__ = ["Signal", "activate", "multiply"]

Floats = NDArray[np.float32]
# The same tokens in every stream, (N, width) each.
Signal = tuple[Floats, ...]

# Tokens that go through gate and up at a time, whose product is the widest: it stays at some tens of MB.
_CHUNK_TOKENS = 1024


def multiply(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:  # (N, C), (R, C) -> (N, R)
    """The product with a matrix, and a bias (R,) added."""
    product: Floats = x @ weight.T
    if bias is not None:
        product += bias
    return product


def activate(
    x: Floats,  # (N, D)
    weight: Floats,  # (2 F, D), or (F, D) where not gated
    bias: Floats | None = None,  # (2 F,)
    *,
    gated: bool = True,
) -> Floats:  # (N, F)
    """The inner values of an MLP."""
    inner = np.empty((len(x), len(weight) // (2 if gated else 1)), np.float32)
    for start in range(0, len(x), _CHUNK_TOKENS):
        rows = slice(start, start + _CHUNK_TOKENS)
        product = multiply(x[rows], weight, bias)
        if gated:
            gate, up = np.split(product, 2, axis=1)
            np.multiply(silu(gate), up, out=inner[rows])
        else:
            inner[rows] = silu(product)
    return inner
