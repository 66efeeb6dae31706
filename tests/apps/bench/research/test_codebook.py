"""Codebooks of groups of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.apps.bench.research.simulation import quantize_codebook
from edgeinfer.bundle import bfloat16
from edgeinfer.errors import CheckpointError, UsageError
from edgeinfer.quant import output_error
from tests.quant.samples import correlated_inputs, random_matrix, statistics_of
from tests.tables import each_row


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4]),
    n=st.integers(1, 40),
    k=st.integers(1, 50),
    group=st.integers(1, 20),
    scale=st.sampled_from([1e-30, 1e-8, 1.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_each_weight_gets_the_nearest_value(bits: int, n: int, k: int, group: int, scale: float, seed: int) -> None:
    weight = random_matrix(n, k, seed) * np.float32(scale)
    matrix = quantize_codebook(weight, bits, group)
    assert sorted(matrix.order) == list(range(n))
    assert matrix.codes.max() < 2**bits
    assert bfloat16.is_representable(matrix.scales) and bfloat16.is_representable(matrix.codebooks)
    kept = matrix.dequantize()
    for place, row in enumerate(matrix.order):
        values = matrix.codebooks[place // group] * matrix.scales[place]
        nearest = np.abs(weight[row, :, None] - values).min(axis=1)
        np.testing.assert_allclose(np.abs(weight[row] - kept[row]), nearest, atol=1e-5 * scale)


@each_row(("bits", "least"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_normal_weights_get_the_best_codebook(bits: int, least: float) -> None:
    """The least squared errors of a normal variable with 4, 8 and 16 values are known (Max, 1960)."""
    weight = random_matrix(16, 20000)
    error = np.square(quantize_codebook(weight, bits).dequantize() - weight).mean()
    assert least * 0.97 < error < least * 1.03


def test_important_inputs_get_better_values() -> None:
    chance = np.random.default_rng(0)
    weight = np.concatenate([chance.normal(size=(64, 64)), chance.normal(3, 0.2, size=(64, 64))], axis=1)
    weight = weight.astype(np.float32)
    x = correlated_inputs(1000, 128, spread=0)
    x[:, 64:] *= 10
    statistics = statistics_of(x, hessian=False)
    kept, plain = (quantize_codebook(weight, 2, 16, s).dequantize() for s in (statistics, None))
    assert output_error(weight, kept, statistics) < 0.7 * output_error(weight, plain, statistics)


def test_rows_of_a_like_shape_share_a_codebook() -> None:
    chance = np.random.default_rng(0)
    flat, peaked = chance.uniform(-1, 1, (32, 500)), chance.laplace(size=(32, 500))
    weight = np.stack([flat, peaked], axis=1).reshape(64, 500).astype(np.float32)
    matrix = quantize_codebook(weight, 3, 32)
    assert set(matrix.order[:32] % 2) == {0}


def test_bytes_are_those_of_all_parts() -> None:
    matrix = quantize_codebook(random_matrix(33, 21), 3, 16)
    # 33 rows of 63 bits, 3 codebooks of 8 values, 33 scales and 33 places of two bytes each.
    assert matrix.nbytes == 33 * 8 + 2 * (3 * 8 + 33 + 33)


def test_zeros_and_few_values_are_kept() -> None:
    np.testing.assert_array_equal(quantize_codebook(np.zeros((5, 9), np.float32), 2).dequantize(), 0)
    silent = statistics_of(np.zeros((4, 9), np.float32))
    assert np.isfinite(quantize_codebook(random_matrix(5, 9), 2, 4, silent).dequantize()).all()
    assert quantize_codebook(np.ones((3, 4), np.float32), 4).dequantize() == pytest.approx(1)


def test_what_cannot_be_done_is_refused() -> None:
    weight = random_matrix(4, 8)
    with pytest.raises(UsageError, match="not supported"):
        quantize_codebook(weight, 8)
    with pytest.raises(UsageError, match="not supported"):
        quantize_codebook(weight, 4, 0)
    with pytest.raises(CheckpointError, match="NaN"):
        quantize_codebook(weight * np.float32(np.nan), 4)
