"""Activation-aware clipping and channel scales."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.errors import CheckpointError, UsageError
from edgeinfer.quant.awq import scale_search, solver
from edgeinfer.quant.blocks import Grid
from edgeinfer.quant.methods import approximate
from edgeinfer.quant.policy import QuantScheme
from edgeinfer.quant.statistics import output_error
from tests.quant.samples import Floats, correlated_inputs, random_matrix, statistics_of
from tests.tables import each_row


def plain_ranges(weight: Floats, bits: int, size: int) -> Floats:
    """Rounds between each block's extremes, symmetric about the middle."""
    blocks = weight.reshape(len(weight), -1, size)
    low, high = np.minimum(blocks.min(axis=2), 0)[..., None], np.maximum(blocks.max(axis=2), 0)[..., None]
    step = (high - low) / (2**bits - 1)
    zero = np.rint(-low / step)
    return np.asarray((np.clip(np.rint(blocks / step) + zero, 0, 2**bits - 1) - zero) * step).reshape(weight.shape)


@pytest.mark.parametrize("hessian", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_cut_ranges_beat_whole_ones(bits: int, hessian: bool) -> None:
    weight, statistics = random_matrix(60, 256), statistics_of(correlated_inputs(2000, 256), hessian)
    kept = approximate(weight, Grid(bits, 32, False), statistics, "awq")
    assert output_error(weight, kept, statistics) < 0.9 * output_error(
        weight, plain_ranges(weight, bits, 32), statistics
    )


def test_correlations_within_a_block_count() -> None:
    weight, statistics = random_matrix(60, 128), statistics_of(correlated_inputs(2000, 128))
    alone = statistics_of(correlated_inputs(2000, 128), hessian=False)
    kept, other = (approximate(weight, Grid(2, 128, False), s, "awq") for s in (statistics, alone))
    assert output_error(weight, kept, statistics) < output_error(weight, other, statistics)


def test_statistics_are_needed() -> None:
    with pytest.raises(UsageError, match="needs statistics"):
        solver(Grid(4, 32, False), 32)


def scaled_error(weight: Floats, scheme: QuantScheme, x: Floats, scale: Floats) -> float:
    kept = approximate(weight * scale, Grid.of(scheme), statistics_of(x / scale)) / scale
    return output_error(weight, kept, statistics_of(x))


@settings(max_examples=10, deadline=None)
@given(bits=st.sampled_from([2, 4]), seed=st.integers(0, 99), spread=st.sampled_from([0.0, 0.5, 2.0]))
def test_channel_scales_never_cost_and_have_a_mean_of_one(bits: int, seed: int, spread: float) -> None:
    weight, x, scheme = random_matrix(100, 96, seed), correlated_inputs(500, 96, seed, spread), QuantScheme(bits, 32)
    scale = scale_search([weight[:60], weight[60:]], statistics_of(x), scheme)
    assert scale.shape == (96,) and (scale > 0).all()
    assert np.exp(np.log(scale).mean()) == pytest.approx(1, rel=1e-4)
    assert scaled_error(weight, scheme, x, scale) <= 1.001 * scaled_error(weight, scheme, x, np.ones_like(scale))


def test_channel_scales_protect_large_inputs() -> None:
    x, weight, scheme = correlated_inputs(1000, 128, spread=0.1), random_matrix(64, 128), QuantScheme(2, 64)
    x[:, [3, 90]] *= 20
    scale = scale_search([weight], statistics_of(x), scheme)
    assert scale[[3, 90]].min() > 1.5 * np.median(scale)
    assert scaled_error(weight, scheme, x, scale) < 0.8 * scaled_error(weight, scheme, x, np.ones_like(scale))


@each_row("seed", [0, 1])
def test_channel_scales_are_those_of_the_least_error(seed: int) -> None:
    weight, x, scheme = random_matrix(60, 96, seed), correlated_inputs(500, 96, seed, 2.0), QuantScheme(2, 32)
    statistics = statistics_of(x, hessian=False)
    size = np.sqrt(statistics.mean_square)

    def error(scale: Floats) -> float:
        entering = statistics_of(x / scale, hessian=False)
        return output_error(weight, approximate(weight * scale, Grid.of(scheme), entering) / scale, statistics)

    powers = [size ** np.float32(power) for power in np.linspace(0, 1, 21)]
    least = min(error(power / np.exp(np.log(power).mean())) for power in powers)
    assert error(scale_search([weight], statistics, scheme)) == pytest.approx(least, rel=1e-3)


def test_inputs_never_seen_leave_scales_at_one() -> None:
    statistics = statistics_of(np.zeros((5, 40), np.float32))
    np.testing.assert_array_equal(scale_search([random_matrix(4, 40)], statistics, QuantScheme(4, 32)), 1)


def test_what_cannot_be_searched_is_refused() -> None:
    statistics = statistics_of(correlated_inputs(5, 40))
    with pytest.raises(UsageError, match="no matrices"):
        scale_search([], statistics, QuantScheme(4, 32))
    with pytest.raises(UsageError, match="do not fit"):
        scale_search([random_matrix(4, 32)], statistics, QuantScheme(4, 32))
    with pytest.raises(CheckpointError):
        scale_search([np.full((4, 40), np.nan, np.float32)], statistics, QuantScheme(4, 32))
