"""Products of calibration in plain numpy: of a matrix, and of the first half of an MLP, piece by piece."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.activations import gate_up, inner_values
from edgeinfer.bundle.spec import Activation

Floats = NDArray[np.float32]

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
    activation: Activation = "silu",
    xielu: Floats | None = None,  # (2,)
) -> Floats:  # (N, F)
    """The inner values of an MLP."""
    inner = np.empty((len(x), len(weight) // (2 if gated else 1)), np.float32)
    for start in range(0, len(x), _CHUNK_TOKENS):
        rows = slice(start, start + _CHUNK_TOKENS)
        product = multiply(x[rows], weight, bias)
        if gated:
            gate, up = np.split(product, 2, axis=1)
            inner[rows] = gate_up(activation, gate, up, xielu)
        else:
            inner[rows] = inner_values(activation, product, xielu)
    return inner
