"""Weights in GGUF's types: errors, statistics, and what is read back."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.kinds import pack_blocks, read_blocks, unpack_blocks
from edgeinfer.quant.block_types import FORMS, codes, starter
from edgeinfer.quant.blocks import Grid, dequantized, restored
from edgeinfer.quant.gptq import GptqOptions, damped, solver
from edgeinfer.quant.methods import approximate, quantize
from edgeinfer.quant.policy import QuantScheme, make_scheme
from edgeinfer.quant.statistics import InputStatistics, output_error
from tests.quant.samples import Floats, correlated_inputs, random_matrix, statistics_of

# Those without a choice of a few levels too few for the properties of errors.
TYPES = ("Q4_K", "Q5_K", "Q5_0", "Q6_K")
each_kind = pytest.mark.parametrize("kind", sorted(FORMS))


def scheme_of(kind: str) -> QuantScheme:
    return QuantScheme(FORMS[kind].bits, 32, FORMS[kind].zero == "middle", kind=kind)


@st.composite
def matrices(draw: st.DrawFn, constant: bool = True) -> Floats:
    """Rows of 256 or 512 values of any size and skew, some rows zero or, if wanted, constant."""
    n, k = draw(st.integers(1, 6)), draw(st.sampled_from([256, 512]))
    weight = random_matrix(n, k, draw(st.integers(0, 2**32 - 1))) + np.float32(draw(st.sampled_from([0, 0, 0.5, -2])))
    if draw(st.booleans()):
        weight = weight**3
    weight *= np.float32(draw(st.sampled_from([1e-3, 0.02, 1, 300])))
    weight[draw(st.integers(0, n - 1))] *= np.float32(draw(st.sampled_from([0, 1])))
    if constant and draw(st.booleans()):
        weight[0] = weight[0, 0]
    return weight


@settings(max_examples=60, deadline=None)
@given(weight=matrices(), kind=st.sampled_from(sorted(FORMS)), paired=st.booleans())
def test_blocks_are_read_back_as_they_are(weight: Floats, kind: str, paired: bool) -> None:
    scheme, k = scheme_of(kind), weight.shape[1]
    blocks = quantize(weight, scheme).data
    values = read_blocks(kind, blocks, k)
    np.testing.assert_array_equal(values, approximate(weight, Grid.of(scheme)))
    np.testing.assert_array_equal(values, dequantized(quantize(weight, scheme), scheme, k))
    np.testing.assert_allclose(values, dequantize(blocks, GGMLQuantizationType[kind]), rtol=1e-6, atol=1e-6)
    whole = np.resize(blocks, (64, blocks.shape[1]))
    tiles = pack_blocks(kind, whole, k, paired=paired, name="w")
    np.testing.assert_array_equal(unpack_blocks(kind, tiles, 64, k, paired=paired), whole)


@settings(max_examples=60, deadline=None)
@given(weight=matrices(constant=False))
def test_more_bits_are_never_worse(weight: Floats) -> None:
    errors = {kind: np.square(quantized(weight, kind) - weight).sum(dtype=np.float64) for kind in TYPES}
    # Values of 1e-3 and less have scales of few bits in float16.
    least = 4e-5 * np.square(weight).sum(dtype=np.float64)
    assert errors["Q6_K"] <= errors["Q5_K"] + least
    assert errors["Q5_K"] <= errors["Q4_K"] + least
    four = np.square(approximate(weight, Grid(4, 32, False)) - weight).sum(dtype=np.float64)
    assert max(errors["Q5_K"], errors["Q6_K"]) <= four + least


def quantized(weight: Floats, kind: str) -> Floats:
    return approximate(weight, Grid.of(scheme_of(kind)))


def test_minima_beat_zero_points_of_as_many_bits() -> None:
    weight = random_matrix(64, 512)
    errors = {kind: np.square(quantized(weight, kind) - weight).sum() for kind in TYPES}
    plain = {bits: np.square(approximate(weight, Grid(bits, 32, False)) - weight).sum() for bits in (4, 8)}
    assert errors["Q4_K"] < 0.94 * plain[4]
    assert errors["Q5_K"] < 0.3 * errors["Q4_K"]
    assert errors["Q5_0"] < 0.35 * errors["Q4_K"]
    assert plain[8] < errors["Q6_K"] < 0.3 * errors["Q5_K"]


@each_kind
def test_inputs_weigh_errors(kind: str) -> None:
    # The same channels with other tokens.
    weight, x = random_matrix(48, 512), correlated_inputs(3000, 512)
    statistics, unseen, grid = statistics_of(x[:2000]), statistics_of(x[2000:]), Grid.of(scheme_of(kind))
    plain = output_error(weight, approximate(weight, grid), unseen)
    weighted, fed = (output_error(weight, approximate(weight, grid, statistics, m), unseen) for m in ("rtn", "gptq"))
    assert weighted < 0.95 * plain
    assert fed < 0.5 * weighted


@settings(max_examples=40, deadline=None)
@given(
    weight=matrices(),
    kind=st.sampled_from(sorted(FORMS)),
    tokens=st.integers(1, 400),
    seed=st.integers(0, 999),
    sweeps=st.integers(0, 3),
)
def test_feeding_errors_forward_is_never_worse(weight: Floats, kind: str, tokens: int, seed: int, sweeps: int) -> None:
    k, grid, options = weight.shape[1], Grid.of(scheme_of(kind)), GptqOptions(sweeps=sweeps)
    statistics = statistics_of(correlated_inputs(tokens, k, seed))
    assert statistics.hessian is not None
    more = damped(statistics.hessian, options.share(statistics), 1)
    measured = InputStatistics(tokens, statistics.mean_square, statistics.mean, more)
    fed = restored(solver(grid, k, statistics, options), weight, grid)
    plain = approximate(weight, grid, statistics)
    for row in range(len(weight)):
        one = slice(row, row + 1)
        limit = output_error(weight[one], plain[one], measured)
        assert output_error(weight[one], fed[one], measured) <= limit * (1 + 1e-3)


@settings(max_examples=40, deadline=None)
@given(weight=matrices(), kind=st.sampled_from(sorted(FORMS)))
def test_bytes_hold_the_values_that_were_computed(weight: Floats, kind: str) -> None:
    state = starter(kind, weight.shape[1], None)(weight)
    values = read_blocks(kind, codes(kind, state).values, weight.shape[1])
    np.testing.assert_allclose(state.values().T, values, rtol=1e-5, atol=1e-6 * np.abs(weight).max() + 1e-30)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    weight = random_matrix(700, 512)
    for kind in FORMS:
        whole, alone = (quantize(part, scheme_of(kind)).data for part in (weight, weight[650:651]))
        np.testing.assert_array_equal(whole[650], alone[0])


def test_types_are_chosen_by_the_columns() -> None:
    def chosen(bits: int, k: int, *, symmetric: bool = False, minima: bool = False) -> tuple[int, str]:
        scheme = make_scheme((8, k), bits, 128, symmetric=symmetric, minima=minima)
        assert scheme is not None
        return scheme.bits, scheme.kind

    assert [chosen(bits, 512) for bits in (4, 5, 6, 8)] == [(4, ""), (5, "Q5_K"), (6, "Q6_K"), (8, "")]
    assert [chosen(bits, 96) for bits in (5, 6)] == [(5, "Q5_0"), (8, "")]
    assert [chosen(bits, 100) for bits in (5, 6)] == [(8, ""), (8, "")]
    assert [chosen(4, k, minima=True) for k in (512, 96)] == [(4, "Q4_K"), (4, "")]
    assert [chosen(bits, 512, symmetric=True) for bits in (4, 5, 6)] == [(4, ""), (5, "Q5_0"), (6, "Q6_K")]
