"""GPTQ and its refinement: less output error than rounding, on the inputs it saw and on others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.core.errors import UsageError
from edgeinfer.quant.blocks import Grid, restored
from edgeinfer.quant.gptq import GptqOptions, damped, solver
from edgeinfer.quant.methods import approximate
from edgeinfer.quant.statistics import InputStatistics, output_error
from tests.quant.samples import Floats, correlated_inputs, grids, random_matrix, statistics_of
from tests.tables import each_row


def quantized(weight: Floats, grid: Grid, statistics: InputStatistics, options: GptqOptions) -> Floats:
    return restored(solver(grid, weight.shape[1], statistics, options), weight, grid)


@settings(max_examples=30, deadline=None)
@given(
    grid=grids, seed=st.integers(0, 999), k=st.integers(1, 150), tokens=st.integers(1, 400), sweeps=st.integers(0, 3)
)
def test_never_worse_than_rounding_under_the_damped_hessian(
    grid: Grid, seed: int, k: int, tokens: int, sweeps: int
) -> None:
    weight, statistics = random_matrix(6, k, seed), statistics_of(correlated_inputs(tokens, k, seed))
    options = GptqOptions(sweeps=sweeps)
    assert statistics.hessian is not None
    more = damped(statistics.hessian, options.share(statistics), 1)
    measured = InputStatistics(tokens, statistics.mean_square, statistics.mean, more)
    for row in range(len(weight)):
        one = weight[row : row + 1]
        plain = output_error(one, approximate(one, grid, statistics), measured)
        assert output_error(one, quantized(one, grid, statistics, options), measured) <= plain * (1 + 1e-3)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "size"), [(2, 32), (4, 32), (3, 64)])
def test_each_part_lowers_the_error(bits: int, size: int, symmetric: bool) -> None:
    weight, grid = random_matrix(100, 256), Grid(bits, size, symmetric)
    # The same channels with other tokens.
    x = correlated_inputs(6000, 256)
    statistics, unseen = statistics_of(x[:4000]), statistics_of(x[4000:])
    rounded = approximate(weight, grid, statistics)
    plain, refined = (quantized(weight, grid, statistics, GptqOptions(sweeps=n)) for n in (0, 2))
    for text in (statistics, unseen):
        errors = [output_error(weight, matrix, text) for matrix in (rounded, plain, refined)]
        assert errors[1] < 0.6 * errors[0]
        assert errors[2] < 0.98 * errors[1]


def test_uncorrelated_inputs_leave_codes_to_rounding() -> None:
    """Without correlations there is nothing to make good: only scales are searched further."""
    k = 64
    ones = np.ones(k, np.float32)
    statistics = InputStatistics(100, ones, np.zeros_like(ones), np.eye(k, dtype=np.float32))
    weight, grid = random_matrix(20, k), Grid(4, 32, False)
    plain = approximate(weight, grid, statistics)
    np.testing.assert_array_equal(quantized(weight, grid, statistics, GptqOptions(sweeps=0)), plain)
    assert output_error(weight, quantized(weight, grid, statistics, GptqOptions())) <= output_error(weight, plain)


def test_inputs_of_the_quantized_model_are_made_good() -> None:
    """The outputs come near those that the float model's inputs gave."""
    k = 128
    x_float = correlated_inputs(4000, k, spread=0.3)
    x = x_float + 0.3 * x_float[:, ::-1]
    weight, grid, options = random_matrix(50, k), Grid(4, 32, False), GptqOptions()

    def error(statistics: InputStatistics) -> float:
        made = x @ quantized(weight, grid, statistics, options).T
        return float(np.square(x_float @ weight.T - made).sum(axis=1).mean())

    assert error(statistics_of(x, x_float=x_float)) < 0.5 * error(statistics_of(x))


def test_equal_inputs_of_both_models_change_nothing() -> None:
    x, weight, grid = correlated_inputs(500, 96), random_matrix(10, 96), Grid(4, 32, True)
    plain = quantized(weight, grid, statistics_of(x), GptqOptions())
    np.testing.assert_array_equal(quantized(weight, grid, statistics_of(x, x_float=x), GptqOptions()), plain)


def test_rows_do_not_depend_on_portions() -> None:
    weight, statistics, grid = random_matrix(1100, 64), statistics_of(correlated_inputs(500, 64)), Grid(4, 32, False)
    whole = quantized(weight, grid, statistics, GptqOptions())
    error = output_error(weight[1000:], whole[1000:], statistics)
    alone = output_error(weight[1000:], quantized(weight[1000:], grid, statistics, GptqOptions()), statistics)
    # Sums in another order may round another way.
    assert alone == pytest.approx(error, rel=1e-2)


def test_a_huge_input_does_not_move_weights_without_bounds() -> None:
    x = correlated_inputs(100, 100)
    x[:, 5] *= 1e6
    weight = random_matrix(20, 100)
    kept = quantized(weight, Grid(4, 32, False), statistics_of(x), GptqOptions())
    assert np.abs(kept).max() < 1000
    assert output_error(weight, kept, statistics_of(x)) < 0.01 * output_error(weight, 0 * weight, statistics_of(x))


def test_a_hessian_is_needed_and_must_be_one() -> None:
    statistics, grid = statistics_of(correlated_inputs(100, 32), hessian=False), Grid(4, 32, False)
    with pytest.raises(UsageError, match="needs the Hessian"):
        solver(grid, 32, statistics)
    ones = np.ones(32, np.float32)
    indefinite = (
        np.eye(32, dtype=np.float32) + 2 * np.eye(32, k=1, dtype=np.float32) + 2 * np.eye(32, k=-1, dtype=np.float32)
    )
    with pytest.raises(UsageError, match="larger damping"):
        solver(grid, 32, InputStatistics(9, ones, ones, indefinite))


@each_row("options", [{"damping": 0.0}, {"sweeps": -1}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="out of range"):
        GptqOptions(**options)  # type: ignore[arg-type]
