"""The generator's promise: a number depends on its key alone."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, Philox

from edgeinfer.runtime.sampling import uniform

KEYS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**16))


@settings(deadline=None)
@given(KEYS)
def test_is_in_the_half_open_unit_interval_and_repeats(key: tuple[int, int, int]) -> None:
    number = uniform(*key)
    assert 0 <= number < 1
    assert uniform(*key) == number


@settings(deadline=None)
@given(KEYS)
def test_is_philox_as_others_compute_it(key: tuple[int, int, int]) -> None:
    seed, position, stream = key
    philox = Philox(key=np.array([seed, stream], np.uint64), counter=np.array([position, 0, 0, 0], np.uint64))
    assert uniform(*key) == Generator(philox).random()


def test_known_values_hold_on_every_platform() -> None:
    assert uniform(1, 5) == 0.9719207784869555
    assert uniform(0, 0) == 0.011546754286331562


def test_order_of_calls_does_not_matter() -> None:
    keys = [(seed, position, stream) for seed in range(3) for position in range(50) for stream in range(3)]
    first = {key: uniform(*key) for key in keys}
    random.Random(0).shuffle(keys)
    assert {key: uniform(*key) for key in keys} == first
    assert len(set(first.values())) == len(keys)


def test_positions_are_uniform_and_uncorrelated() -> None:
    numbers = np.array([uniform(7, position) for position in range(20_000)])
    counts = np.bincount((numbers * 20).astype(int), minlength=20)
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.025
