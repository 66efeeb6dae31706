"""The sampler's distribution against a naive oracle, and its draws against its distribution."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import BackendError
from edgeinfer.runtime.sampling import Sampler, TokenCounts, uniform

SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.05, 5),
        "top_k": st.integers(0, 60),
        "top_p": st.floats(0.01, 1),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 1)),
    }
)
# Coarse values, so that ties abound.
ROWS = st.lists(st.integers(-12, 12).map(lambda x: x / 4) | st.just(-math.inf), min_size=2, max_size=50).filter(
    lambda row: max(row) > -math.inf
)


def oracle(row: list[float], config: GenerationConfig) -> list[float]:
    """Straight from the definitions: sort all, cut thrice, renormalising each time."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if config.top_k:
        order = order[: config.top_k]
    weights = [math.exp((row[i] - row[order[0]]) / config.temperature) for i in order]
    if config.top_p < 1:
        total, reached, kept = sum(weights), 0.0, 0
        for weight in weights:
            if reached >= config.top_p * total:
                break
            reached += weight
            kept += 1
        order, weights = order[:kept], weights[:kept]
    kept = sum(weight >= config.min_p * weights[0] for weight in weights)
    total = sum(weights[:kept])
    out = [0.0] * len(row)
    for i, weight in zip(order[:kept], weights[:kept], strict=True):
        out[i] = weight / total
    return out


@settings(max_examples=300, deadline=None)
@given(ROWS, SETTINGS)
def test_distribution_equals_the_oracle(row: list[float], options: dict[str, Any]) -> None:
    config = GenerationConfig(**options)
    got = Sampler(config, len(row), 0).probabilities(np.array(row, np.float32))
    expected = [float(i == row.index(max(row))) for i in range(len(row))] if config.greedy else oracle(row, config)
    if config.top_p < 1:
        # A mass that lands on the edge to the last bit may fall on either side of it.
        exact = dataclasses.replace(config, top_p=min(config.top_p * (1 + 1e-9), 1.0))
        below = dataclasses.replace(config, top_p=config.top_p * (1 - 1e-9))
        if oracle(row, exact) != oracle(row, below):
            return
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 0.9999999])
def test_nucleus_of_a_large_flat_vocabulary(top_p: float) -> None:
    row = np.random.default_rng(0).normal(0, 0.5, 30_000).astype(np.float32)
    config = GenerationConfig(temperature=1.0, top_p=top_p)
    got = Sampler(config, len(row), 0).probabilities(row)
    np.testing.assert_allclose(got, oracle(row.tolist(), config), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 6},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 9, "top_p": 0.95, "min_p": 0.02, "presence_penalty": 0.5},
    ],
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    row = np.random.default_rng(3).normal(0, 1.5, 12).astype(np.float32)
    sampler = Sampler(GenerationConfig(**options), 12, seed=11)
    counts = TokenCounts([1])
    counts.push(2)
    target = sampler.probabilities(row, counts)
    n = 8000
    seen = np.bincount([sampler.token(row, position, counts) for position in range(n)], minlength=12)
    allowed = target > 0
    assert not seen[~allowed].any()
    chi = ((seen - n * target)[allowed] ** 2 / (n * target[allowed])).sum()
    freedom = allowed.sum() - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom) + 8


@settings(deadline=None)
@given(ROWS, SETTINGS, st.integers(0, 2**64 - 1), st.integers(0, 2**32))
def test_a_draw_is_the_inverse_cdf_of_its_position(
    row: list[float], options: dict[str, Any], seed: int, position: int
) -> None:
    sampler = Sampler(GenerationConfig(**options), len(row), seed)
    logits = np.array(row, np.float32)
    token = sampler.token(logits, position)
    probabilities = sampler.probabilities(logits)
    cumulative = np.cumsum(probabilities)
    u = uniform(seed, position)
    assert probabilities[token] > 0
    assert sampler.config.greedy or cumulative[token] - probabilities[token] - 1e-9 <= u <= cumulative[token] + 1e-9


def test_draws_do_not_depend_on_earlier_draws() -> None:
    rows = np.random.default_rng(0).normal(0, 1, (30, 50)).astype(np.float32)
    sampler = Sampler(GenerationConfig(temperature=1.0, top_p=0.9), 50, seed=5)
    forwards = [sampler.token(rows[i], i) for i in range(30)]
    backwards = [sampler.token(rows[i], i) for i in reversed(range(30))]
    assert backwards[::-1] == forwards
    fresh = [Sampler(GenerationConfig(temperature=1.0, top_p=0.9), 50, seed=5).token(rows[i], i) for i in range(30)]
    assert fresh == forwards


def test_greedy_takes_the_lowest_of_equals_after_bias_and_penalties() -> None:
    row = np.array([0, 3, 3, 1], np.float32)
    assert Sampler(GenerationConfig(), 4, 0).token(row, 0) == 1
    assert Sampler(GenerationConfig(temperature=0.9, top_k=1), 4, 0).token(row, 0) == 1
    assert Sampler(GenerationConfig(logit_bias={1: -1.0}), 4, 0).token(row, 0) == 2
    counts = TokenCounts([1, 2])
    assert Sampler(GenerationConfig(repetition_penalty=10.0), 4, 0).token(row, 0, counts) == 3
    np.testing.assert_array_equal(row, [0, 3, 3, 1])


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 2, "top_p": 0.9}])
@pytest.mark.parametrize("row", [[-math.inf] * 3, [math.nan] * 3, [1.0, math.nan, 2.0], [0.0, math.inf, 1.0]], ids=str)
def test_unusable_logits_are_the_backends_fault(row: list[float], options: dict[str, Any]) -> None:
    sampler = Sampler(GenerationConfig(**options), 3, 0)
    for call in (lambda x: sampler.token(x, 0), sampler.probabilities, lambda x: sampler.logprobs(x, 0, 1)):
        with pytest.raises(BackendError, match="No token can be chosen"):
            call(np.array(row, np.float32))


def test_masked_tokens_are_never_drawn() -> None:
    row = np.full(100, -math.inf, np.float32)
    row[[7, 50]] = [1.0, 1.5]
    for options in ({}, {"top_k": 10}, {"top_p": 0.99999}, {"min_p": 0.001}):
        sampler = Sampler(GenerationConfig(temperature=1.0, **options), 100, 1)
        assert {sampler.token(row, position) for position in range(200)} == {7, 50}


@pytest.mark.parametrize("temperature", [1e-308, 1e-30, 1e-5, 1e5, 1e30, 1e300])
@pytest.mark.parametrize("min_p", [0.0, 0.5, 1e-300])
def test_extreme_temperatures_stay_finite(temperature: float, min_p: float) -> None:
    row = np.array([1.0, -500.0, 80.0, 80.0], np.float32)
    p = Sampler(GenerationConfig(temperature=temperature, min_p=min_p), 4, 0).probabilities(row)
    np.testing.assert_allclose(p, [0, 0, 0.5, 0.5] if temperature < 1 else [0.25] * 4, atol=1e-2)


@settings(deadline=None)
@given(ROWS, st.integers(0, 60))
def test_logprobs_are_the_models_own(row: list[float], top: int) -> None:
    logits = np.array(row, np.float32)
    sampler = Sampler(GenerationConfig(temperature=0.3, top_k=1, logit_bias={0: 5.0}), len(row), 0)
    chosen = row.index(max(row))
    found = sampler.logprobs(logits, chosen, top)
    normaliser = math.log(sum(math.exp(x) for x in row))
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top]
    assert [token for token, _ in found.top] == order
    np.testing.assert_allclose([value for _, value in found.top], [row[i] - normaliser for i in order], atol=1e-9)
    assert found.logprob == pytest.approx(row[chosen] - normaliser)


def test_half_precision_logits_work() -> None:
    row: NDArray[np.float16] = np.array([1, 2, 3, 4], np.float16)
    p = Sampler(GenerationConfig(temperature=1.0, top_k=3), 4, 0).probabilities(row)
    np.testing.assert_allclose(p, oracle([1, 2, 3, 4], GenerationConfig(temperature=1.0, top_k=3)))


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (1 - 2.0**-53, 3)])
def test_edges_of_the_interval_never_reach_impossible_tokens(
    u: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeinfer.runtime.sampling.sampler.uniform", lambda seed, position: u)
    row = np.array([-math.inf, 0.0, 1.0, 0.5, -math.inf], np.float32)
    assert Sampler(GenerationConfig(temperature=1.0), 5, 0).token(row, 0) == token
