"""Codes of vectors: less error than 2 bits each, on the inputs seen and on others, and the same values in 4 bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.layouts import NATIVE, PORTABLE
from edgeinfer.bundle.packing import (
    MAGNITUDES,
    QuantizedShape,
    dense_rows,
    join_codes,
    plain_shape,
    read_vectors,
    split_codes,
    widen,
)
from edgeinfer.core.errors import UsageError
from edgeinfer.quant.blocks import Grid, dequantized
from edgeinfer.quant.budget import candidate_schemes
from edgeinfer.quant.gptq import GptqOptions, damped
from edgeinfer.quant.methods import approximate, quantize
from edgeinfer.quant.policy import QuantScheme, make_scheme
from edgeinfer.quant.statistics import InputStatistics, output_error
from tests.quant.samples import correlated_inputs, random_matrix, statistics_of
from tests.tables import each_row


def vectors(size: int) -> QuantScheme:
    return QuantScheme(2, size, symmetric=True, vectors=True)


def test_a_code_chooses_magnitudes_and_signs() -> None:
    codes = np.arange(256, dtype=np.uint8)[None]  # four blocks of 64 codes, side by side
    fields = split_codes(codes)
    np.testing.assert_array_equal(join_codes(fields), codes)
    values = read_vectors(fields).reshape(4, 256).astype(int) - 8
    for code in range(256):
        signs = [-1 if code >> (4 + place) & 1 else 1 for place in range(4)]
        np.testing.assert_array_equal(values[:, code], signs * MAGNITUDES[code % 16])


@each_row(("method", "most"), [("rtn", 0.8), ("gptq", 0.75)])
def test_less_error_than_two_bits_each(method: str, most: float) -> None:
    """On text that was seen and on other text, with block sizes whose scales take as much."""
    weight, x = random_matrix(60, 256), correlated_inputs(6000, 256)
    statistics, unseen = statistics_of(x[:4000]), statistics_of(x[4000:])
    ours, plain = (
        approximate(weight, Grid.of(s), statistics, method) for s in (vectors(128), QuantScheme(2, 128, True))
    )
    for text in (statistics, unseen):
        assert output_error(weight, ours, text) < most * output_error(weight, plain, text)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 999), blocks=st.integers(1, 4), size=st.sampled_from([32, 64, 128]), tokens=st.integers(1, 300)
)
def test_feeding_errors_forward_is_never_worse(seed: int, blocks: int, size: int, tokens: int) -> None:
    k = blocks * size
    weight, statistics = random_matrix(6, k, seed), statistics_of(correlated_inputs(tokens, k, seed))
    assert statistics.hessian is not None
    more = damped(statistics.hessian, GptqOptions().share(statistics), 1)
    measured = InputStatistics(tokens, statistics.mean_square, statistics.mean, more)
    grid = Grid.of(vectors(size))
    for row in range(len(weight)):
        one = weight[row : row + 1]
        plain, fed = (output_error(one, approximate(one, grid, statistics, m), measured) for m in ("rtn", "gptq"))
        assert fed <= plain * (1 + 1e-3)


@each_row("method", ["rtn", "gptq"])
def test_four_bits_hold_the_same_values(method: str) -> None:
    weight, statistics, scheme = random_matrix(20, 192), statistics_of(correlated_inputs(300, 192)), vectors(64)
    weight[3] = 0
    matrix = quantize(weight, scheme, statistics, method)
    dense = dequantized(matrix, scheme, 192)
    np.testing.assert_array_equal(dense, approximate(weight, Grid.of(scheme), statistics, method))
    assert np.abs(dense[3]).max() < 1e-9
    shape = QuantizedShape(20, 192, 2, 64, zero_points=False, vectors=True)
    plain = plain_shape(shape)
    assert plain == replace(shape, bits=4, vectors=False)
    np.testing.assert_array_equal(dense_rows(widen(matrix, shape, plain), plain), dense)
    with_zeros = replace(plain, bits=8, block_size=32, zero_points=True)
    np.testing.assert_array_equal(dense_rows(widen(matrix, shape, with_zeros), with_zeros), dense)


def test_two_bits_are_vectors_where_a_layout_holds_them_and_blocks_are_whole() -> None:
    assert make_scheme((8, 192), 2, 128, symmetric=False, vectors=True) == vectors(64)
    assert make_scheme((8, 200), 2, 128, symmetric=False, vectors=True) == QuantScheme(2, 32)
    assert make_scheme((8, 192), 2, 128, symmetric=False) == QuantScheme(2, 64)
    found = {layout: candidate_schemes({"layers.0.mlp.down": (8, 192)}, layout=layout) for layout in (NATIVE, PORTABLE)}
    marks = {layout: {s.vectors for s in f["layers.0.mlp.down"] if s and s.bits == 2} for layout, f in found.items()}
    assert marks == {NATIVE: {True}, PORTABLE: {False}}


@each_row(("bits", "symmetric"), [(4, True), (2, False)])
def test_other_schemes_are_refused(bits: int, symmetric: bool) -> None:
    with pytest.raises(UsageError, match="2 bits and no zero points"):
        QuantScheme(bits, 32, symmetric, vectors=True)
