"""Matrices and inputs that tests of quantizers share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.quant.blocks import Grid
from edgeinfer.quant.policy import QuantScheme
from edgeinfer.quant.statistics import InputStatistics, StatisticsAccumulator

Floats = NDArray[np.float32]

schemes = st.builds(
    QuantScheme, bits=st.sampled_from([2, 3, 4, 8]), block_size=st.sampled_from([32, 64, 128]), symmetric=st.booleans()
)
grids = st.builds(Grid, bits=st.sampled_from([2, 3, 4, 8]), size=st.sampled_from([32, 64]), symmetric=st.booleans())


def random_matrix(n: int, k: int, seed: int = 0) -> Floats:
    """Standard normal values."""
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def correlated_inputs(tokens: int, k: int, seed: int = 0, spread: float = 1.0) -> Floats:  # (T, K)
    """Inputs that vary together, with energies that differ by channel."""
    chance = np.random.default_rng(seed)
    causes, mix = chance.standard_normal((tokens, max(1, k // 4))), chance.standard_normal((max(1, k // 4), k))
    x = causes @ mix / np.sqrt(len(mix)) + 0.3 * chance.standard_normal((tokens, k)) + 0.2
    return np.asarray(x * np.exp(spread * chance.standard_normal(k)), np.float32)


def statistics_of(x: Floats, hessian: bool = True, x_float: Floats | None = None) -> InputStatistics:
    """Moments of some inputs."""
    accumulator = StatisticsAccumulator(x.shape[1], hessian, cross=x_float is not None)
    accumulator.add(x, x_float)
    return accumulator.result()


def form(scheme: QuantScheme | None) -> str:
    """A scheme as records have it."""
    return "float32" if scheme is None else f"{scheme.bits} {scheme.block_size}{' symmetric' * scheme.symmetric}"
