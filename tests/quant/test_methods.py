"""What every quantizer keeps: the layout, the grid of values, errors no worse than they must be, degenerate inputs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.bundle import bfloat16
from edgeinfer.bundle.packing import blocks_per_row, packed_bytes, unpack
from edgeinfer.core.errors import CheckpointError, UsageError
from edgeinfer.quant import statistics as moments
from edgeinfer.quant.blocks import Grid, dequantized
from edgeinfer.quant.methods import METHODS, approximate, method_for, quantize
from edgeinfer.quant.policy import QuantScheme
from edgeinfer.quant.statistics import InputStatistics, output_error, runs_of
from tests.quant.samples import correlated_inputs, random_matrix, schemes, statistics_of

each_method = pytest.mark.parametrize("method", METHODS)


@each_method
@settings(max_examples=25, deadline=None)
@given(
    scheme=schemes,
    n=st.integers(1, 9),
    k=st.integers(1, 200),
    scale=st.sampled_from([1e-8, 0.02, 1.0, 1e6]),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_layout_for_any_shape(method: str, scheme: QuantScheme, n: int, k: int, scale: float, spread: float) -> None:
    weight = random_matrix(n, k) * np.float32(scale)
    statistics = statistics_of(correlated_inputs(50, k, spread=spread))
    matrix = quantize(weight, scheme, statistics, method)
    blocks = blocks_per_row(k, scheme.block_size)
    assert matrix.data.shape == (n, blocks, packed_bytes(scheme.block_size, scheme.bits))
    assert matrix.scales.shape == (n, blocks)
    assert bfloat16.is_representable(matrix.scales)
    assert np.isfinite(matrix.scales).all() and (matrix.scales != 0).all()
    values = unpack(matrix.data, scheme.bits, scheme.block_size).reshape(n, -1)
    if scheme.symmetric:
        assert matrix.zero_points is None
        zeros = np.full((n, blocks), 2 ** (scheme.bits - 1))
    else:
        assert matrix.zero_points is not None
        assert matrix.zero_points.shape == (n, packed_bytes(blocks, scheme.bits))
        zeros = unpack(matrix.zero_points, scheme.bits, blocks)
    # The end of the last block is exactly zero, or activations that kernels pad with anything would count.
    padding = blocks * scheme.block_size - k
    np.testing.assert_array_equal(values[:, k:], np.repeat(zeros[:, -1:], padding, axis=1))
    kept = dequantized(matrix, scheme, k)
    assert np.isfinite(kept).all()
    if method == "gptq":  # the others know of no errors that add up
        assert output_error(weight, kept, statistics) < 1.1 * output_error(weight, 0 * weight, statistics)


@each_method
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_errors_are_within_those_of_even_steps(method: str, bits: int, symmetric: bool) -> None:
    weight, statistics = random_matrix(64, 256), statistics_of(correlated_inputs(2000, 256))
    kept = approximate(weight, Grid(bits, 32, symmetric), statistics, method)
    # GPTQ moves weights on purpose; outputs are what it keeps.
    measured = statistics if method == "gptq" else None
    share = {2: 0.16, 3: 0.045, 4: 0.013, 8: 8e-5}[bits]
    assert output_error(weight, kept, measured) < share * output_error(weight, np.zeros_like(weight), measured)


@each_method
def test_any_width_gives_what_the_packed_matrix_stands_for(method: str) -> None:
    weight, statistics = random_matrix(7, 90), statistics_of(correlated_inputs(300, 90))
    scheme = QuantScheme(4, 32)
    packed = dequantized(quantize(weight, scheme, statistics, method), scheme, 90)
    np.testing.assert_array_equal(approximate(weight, Grid.of(scheme), statistics, method), packed)


def degenerate(kind: str, k: int) -> InputStatistics:
    """Statistics that tell little."""
    x = correlated_inputs(100, k)
    if kind == "constant":
        x[:] = x[0]
    elif kind == "silent":
        x[:] = 0
    elif kind == "some silent":
        x[:, ::3] = 0
    elif kind == "one block silent":
        x[:, 32:64] = 0
    elif kind == "one token":
        x = x[:1]
    elif kind == "huge":
        x[:, 5] *= 1e3
    elif kind == "tiny":
        x *= 1e-12
    return statistics_of(x)


@each_method
@pytest.mark.parametrize("kind", ["constant", "silent", "some silent", "one block silent", "one token", "huge", "tiny"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_calibration_that_tells_little_keeps_all_weights(method: str, kind: str, bits: int) -> None:
    weight, scheme = random_matrix(20, 100), QuantScheme(bits, 32)
    kept = dequantized(quantize(weight, scheme, degenerate(kind, 100), method), scheme, 100)
    assert np.isfinite(kept).all()
    if kind == "huge" and method == "gptq":
        return  # shifts of small inputs make good what the huge one's error does
    # Also where inputs were never seen: another text may use them.
    share = {2: 1.0, 3: 0.6, 4: 0.3, 8: 0.02}[bits]
    assert np.square(kept - weight).mean() < share
    assert np.square(kept - weight)[:, 32:64].mean() < share


@each_method
@pytest.mark.parametrize("symmetric", [False, True])
def test_matrices_and_rows_of_zeros_stay_zero(method: str, symmetric: bool) -> None:
    weight, statistics = random_matrix(4, 70), statistics_of(correlated_inputs(100, 70))
    weight[1] = 0
    scheme = QuantScheme(4, 32, symmetric)
    np.testing.assert_array_equal(dequantized(quantize(weight, scheme, statistics, method), scheme, 70)[1], 0)
    weight[:] = 0
    matrix = quantize(weight, scheme, statistics, method)
    np.testing.assert_array_equal(dequantized(matrix, scheme, 70), 0)
    assert np.abs(matrix.scales).max() < 1e-15


@each_method
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(method: str, bad: float) -> None:
    weight, statistics = random_matrix(4, 64), statistics_of(correlated_inputs(100, 64))
    weight[3, 5] = bad
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        quantize(weight, QuantScheme(4, 32), statistics, method)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        approximate(weight, Grid(3, 32, False), statistics, method)


@each_method
def test_statistics_that_are_not_finite_or_of_another_matrix_are_refused(method: str) -> None:
    statistics = statistics_of(correlated_inputs(100, 64))
    broken = dataclasses.replace(statistics, mean_square=statistics.mean_square * np.float32(np.nan))
    with pytest.raises(UsageError, match="not finite"):
        quantize(random_matrix(4, 64), QuantScheme(4, 32), broken, method)
    with pytest.raises(UsageError, match="do not fit"):
        quantize(random_matrix(4, 32), QuantScheme(4, 32), statistics, method)


def test_without_what_a_method_needs_rounding_takes_its_place() -> None:
    known = statistics_of(correlated_inputs(10, 8))
    diagonal = statistics_of(correlated_inputs(10, 8), hessian=False)
    never = statistics_of(correlated_inputs(0, 8))
    names = {
        name: [method_for(name, statistics).name for statistics in (known, diagonal, never, None)] for name in METHODS
    }
    assert names == {
        "rtn": ["rtn", "rtn", "rtn", "rtn"],
        "gptq": ["gptq", "rtn", "rtn", "rtn"],
    }
    weight, scheme = random_matrix(4, 8), QuantScheme(4, 32)
    np.testing.assert_array_equal(
        quantize(weight, scheme, never, "gptq").data, quantize(weight, scheme, None, "rtn").data
    )


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(UsageError, match="Choose one of rtn, gptq"):
        quantize(random_matrix(4, 32), QuantScheme(4, 32), None, "magic")


@pytest.mark.parametrize("grid", [Grid(4, 32, False), Grid(2, 32, True, vectors=True), Grid(5, 32, False, kind="Q5_1")])
def test_runs_of_wide_inputs_are_rounded_for_themselves(monkeypatch: pytest.MonkeyPatch, grid: Grid) -> None:
    weight, x = random_matrix(6, 160), correlated_inputs(300, 160)
    monkeypatch.setattr(moments, "_RELATED", 70)
    monkeypatch.setattr(moments, "_WHOLE_BLOCKS", 32)
    runs = runs_of(160)
    assert [(run.start, run.stop) for run in runs] == [(0, 64), (64, 96), (96, 160)]
    known = statistics_of(x)
    alone = [approximate(weight[:, run], grid, statistics_of(x[:, run]), "gptq") for run in runs]
    np.testing.assert_array_equal(approximate(weight, grid, known, "gptq"), np.concatenate(alone, axis=1))
    assert known.hessian is not None and np.abs(known.hessian[64:96, 96:]).max() == 0


GRIDS = (Grid(2, 32, False), Grid(3, 128, False), Grid(4, 32, True), Grid(8, 64, False))
# Shares of the output's energy, by quantizer and what it knows of the inputs, for each grid. BLAS kernels for Haswell
# and for CPUs without AVX give the same five digits. A quantizer that was changed on purpose gets new figures here, and
# the old ones into docs/log.
RECORDED = {
    ("rtn", "nothing"): (0.10777, 0.033115, 0.0058700, 2.2774e-05),
    ("rtn", "hessian"): (0.068522, 0.024662, 0.0042421, 1.8648e-05),
    ("gptq", "hessian"): (0.019058, 0.0054943, 0.00086949, 3.7497e-06),
}


def test_quantizers_lose_what_they_lost() -> None:
    # 168 columns end in the middle of a block of every size.
    weight, x = random_matrix(30, 168, 7), correlated_inputs(600, 168, 7)
    known = {"nothing": None, "diagonal": statistics_of(x, hessian=False), "hessian": statistics_of(x)}
    full = statistics_of(x)
    energy = output_error(weight, np.zeros_like(weight), full)
    for (method, needs), recorded in RECORDED.items():
        kept = [approximate(weight, grid, known[needs], method) for grid in GRIDS]
        lost = [output_error(weight, matrix, full) / energy for matrix in kept]
        assert lost == pytest.approx(recorded, rel=1e-3), (method, needs)
