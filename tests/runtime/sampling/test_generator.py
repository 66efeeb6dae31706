"""The generator's promise: a number depends on its key alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, Philox

from edgeinfer.config import GenerationConfig
from edgeinfer.runtime.sampling.distributions import uniform
from edgeinfer.runtime.sampling.processor import LogitsProcessor

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


def test_positions_are_uniform_and_uncorrelated() -> None:
    numbers = np.array([uniform(7, position) for position in range(20_000)])
    counts = np.bincount((numbers * 20).astype(int), minlength=20)
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.025


def test_laws_that_overlap_draw_the_same_token_as_often_as_gumbel_noise_promises() -> None:
    """Laws of 5.4 nats over 4,096 tokens that overlap by 0.73: noisy logits, and a quarter of the mass moved away."""
    some, shift = np.random.default_rng(2).normal(0, 1, (2, 4096))
    law, even = np.exp(2.6 * some), np.arange(4096) % 2 == 0
    moved = [law * mask * (0.37 * law.sum() / (law @ mask)) for mask in (even, ~even)]
    gumbel = []
    for laws in ((law, law * np.exp(0.68 * shift)), (law + moved[0], law + moved[1])):
        p, q = (weights / weights.sum() for weights in laws)
        overlap = np.minimum(p, q).sum()
        assert overlap == pytest.approx(0.73, abs=0.02)
        assert -(p @ np.log(p)) == pytest.approx(5.4, abs=0.3)
        wanted = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(4096))
        rows = [np.log(p).astype(np.float32), np.log(q).astype(np.float32)]
        draws = LogitsProcessor(GenerationConfig(temperature=1.0), 4096, seed=3)
        agreed = np.mean([draws.sample(rows[0], place) == draws.sample(rows[1], place) for place in range(6000)])
        assert agreed == pytest.approx(wanted, abs=0.02)
        gumbel.append(agreed / overlap)
    assert min(gumbel) >= 0.97 * 0.59 / 0.73
