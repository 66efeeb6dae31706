"""Rounding to bfloat16 against the nearest of all of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16

ALL = bfloat16.from_bits(np.arange(0x7F80, dtype=np.uint16))  # every bfloat16 from 0 up, in order


def array(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


@given(st.floats(0, float(ALL[-1]), width=32))
def test_rounds_to_the_nearest_and_ties_to_even(value: float) -> None:
    rounded = bfloat16.round_nearest(array(value))
    assert bfloat16.is_representable(rounded)
    distances = np.abs(ALL.astype(np.float64) - value)
    nearest = np.flatnonzero(distances == distances.min())
    assert int(bfloat16.to_bits(rounded)[0]) == (nearest[0] if len(nearest) == 1 else nearest[nearest % 2 == 0][0])
    np.testing.assert_array_equal(bfloat16.round_nearest(array(-value)), -rounded)


def test_representable_values_stay() -> None:
    np.testing.assert_array_equal(bfloat16.round_nearest(ALL), ALL)
    np.testing.assert_array_equal(bfloat16.from_bits(bfloat16.to_bits(-ALL)), -ALL)
    assert bfloat16.is_representable(ALL)
    assert not bfloat16.is_representable(array(1.0, 1.001))


@given(st.integers(6, len(ALL) - 7), st.integers(-6, 6))
def test_steps_move_away_from_zero(index: int, count: int) -> None:
    for sign in (1, -1):
        stepped = bfloat16.step(sign * ALL[index : index + 1], count)
        np.testing.assert_array_equal(stepped, sign * ALL[index + count : index + count + 1])
