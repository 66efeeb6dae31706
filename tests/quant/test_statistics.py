"""Moments of inputs and the errors that follow from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.errors import UsageError
from edgeinfer.quant.statistics import InputStatistics, StatisticsAccumulator, output_error
from tests.quant.samples import correlated_inputs, random_matrix, statistics_of
from tests.tables import each_row


@settings(max_examples=30, deadline=None)
@given(portions=st.lists(st.integers(0, 1500), min_size=1, max_size=4), k=st.integers(1, 40))
def test_moments_do_not_depend_on_portions(portions: list[int], k: int) -> None:
    x, other = correlated_inputs(sum(portions), k), correlated_inputs(sum(portions), k, 1)
    accumulator, start = StatisticsAccumulator(k, hessian=True, cross=True), 0
    for count in portions:
        accumulator.add(x[start : start + count], other[start : start + count])
        start += count
    result, count = accumulator.result(), max(len(x), 1)
    assert result.count == len(x)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(result.mean, exact.sum(axis=0) / count, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.mean_square, np.square(exact).sum(axis=0) / count, rtol=1e-4)
    assert result.hessian is not None and result.cross is not None
    np.testing.assert_allclose(result.hessian, exact.T @ exact / count, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(result.cross, other.T.astype(np.float64) @ exact / count, rtol=1e-3, atol=1e-3)


def test_small_inputs_count_beside_many_large_ones() -> None:
    accumulator = StatisticsAccumulator(1, hessian=True)
    accumulator.add(np.full((1, 1), 1e4, np.float32))
    for _ in range(1000):
        accumulator.add(np.ones((1, 1), np.float32))
    # A float32 sum would stay at 1e8, where its steps are 8.
    assert accumulator.result().mean_square[0] * 1001 == pytest.approx(1e8 + 1000, abs=20)


@each_row("bad", [np.nan, np.inf])
def test_activations_that_are_not_finite_are_refused(bad: float) -> None:
    accumulator, x = StatisticsAccumulator(3, hessian=False), np.ones((4, 3), np.float32)
    x[2, 1] = bad
    with pytest.raises(UsageError, match="not finite"):
        accumulator.add(x)
    with pytest.raises(UsageError, match="not finite"):
        accumulator.add(np.ones_like(x), x)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 20), k=st.integers(1, 30), seed=st.integers(0, 99))
def test_output_error_is_the_mean_over_tokens(n: int, k: int, seed: int) -> None:
    x, weight = correlated_inputs(200, k, seed), random_matrix(n, k, seed)
    other = weight + 0.1 * random_matrix(n, k, seed + 1)
    direct = np.square(x.astype(np.float64) @ (weight - other).T.astype(np.float64)).sum(axis=1).mean()
    assert output_error(weight, other, statistics_of(x)) == pytest.approx(direct, rel=1e-2)
    assert output_error(weight, weight, statistics_of(x)) == 0


def test_output_error_without_a_hessian_takes_inputs_as_uncorrelated() -> None:
    weight, other, x = random_matrix(5, 8), random_matrix(5, 8, 1), correlated_inputs(100, 8)
    difference = np.square(weight - other)
    assert output_error(weight, other) == pytest.approx(float(difference.sum()), rel=1e-5)
    diagonal = statistics_of(x, hessian=False)
    assert output_error(weight, other, diagonal) == pytest.approx(
        float((difference * diagonal.mean_square).sum()), rel=1e-5
    )


@each_row(
    ("change", "message"),
    [
        ({"mean_square": np.full(8, np.nan, np.float32)}, "not finite"),
        ({"mean_square": np.full(8, -1, np.float32)}, "not finite"),
        ({"hessian": np.full((8, 8), np.inf, np.float32)}, "not finite"),
        ({"cross": np.full((8, 8), np.nan, np.float32)}, "not finite"),
        ({"mean": np.zeros(7, np.float32)}, "do not fit"),
        ({"hessian": np.eye(9, dtype=np.float32)}, "do not fit"),
    ],
)
def test_wrong_statistics_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    moments = {"mean_square": np.ones(8, np.float32), "mean": np.zeros(8, np.float32)}
    with pytest.raises(UsageError, match=message):
        InputStatistics(**{"count": 3, **moments, **change}).check(8)  # type: ignore[arg-type]
