"""Half-quadratic quantization: what its norm with a power below one does, without any data."""

from __future__ import annotations

import numpy as np

from edgeinfer.quant import Grid, approximate
from tests.quant.samples import Floats, correlated_inputs, random_matrix, statistics_of
from tests.quant.test_awq import plain_ranges
from tests.tables import each_row


def norm(error: Floats) -> float:
    return float((np.abs(error) ** 0.7).sum())


@each_row("bits", [2, 3, 4])
def test_zero_points_lower_the_norm_of_plain_ranges(bits: int) -> None:
    weight = np.random.default_rng(0).laplace(size=(100, 128)).astype(np.float32)
    kept = approximate(weight, Grid(bits, 32, False), None, "hqq")
    assert norm(kept - weight) < 0.99 * norm(plain_ranges(weight, bits, 32) - weight)


@each_row("bits", [2, 4])
def test_fitted_scales_lower_the_norm_of_symmetric_ranges(bits: int) -> None:
    weight = np.random.default_rng(0).laplace(size=(100, 128)).astype(np.float32)
    blocks = weight.reshape(100, -1, 32)
    high, low = blocks.max(axis=2, keepdims=True), blocks.min(axis=2, keepdims=True)
    step = np.where(high > -low, -high, -low) / 2 ** (bits - 1)
    plain = np.clip(np.rint(blocks / step), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step
    kept = approximate(weight, Grid(bits, 32, True), None, "hqq")
    assert norm(kept - weight) < 0.99 * norm(plain.reshape(weight.shape) - weight)


def test_statistics_change_nothing() -> None:
    weight, grid = random_matrix(10, 64), Grid(4, 32, False)
    statistics = statistics_of(correlated_inputs(100, 64))
    np.testing.assert_array_equal(approximate(weight, grid, statistics, "hqq"), approximate(weight, grid, None, "hqq"))


def test_errors_are_in_proportion_to_weights() -> None:
    weight, grid = random_matrix(10, 64), Grid(4, 32, False)
    # A power of two: every rounding is the same.
    small = approximate(weight * np.float32(2.0**-20), grid, None, "hqq")
    np.testing.assert_array_equal(small * np.float32(2.0**20), approximate(weight, grid, None, "hqq"))
