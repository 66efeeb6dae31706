"""Penalties and bias against their formulas, and counts against plain lists."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import UsageError
from edgeinfer.runtime.sampling.processor import Penalties, TokenCounts

V = 40
TOKENS = st.lists(st.integers(0, V - 1), max_size=30)


def naive(row: NDArray[np.float32], config: GenerationConfig, prompt: list[int], reply: list[int]) -> list[float]:
    out = [float(x) for x in row]
    for token, bias in config.logit_bias.items():
        out[token] += bias
    for token in range(V):
        if token in prompt or token in reply:
            out[token] = (
                out[token] / config.repetition_penalty if out[token] > 0 else out[token] * (config.repetition_penalty)
            )
        count = reply.count(token)
        out[token] -= count * config.frequency_penalty + (count > 0) * config.presence_penalty
    return out


@settings(deadline=None)
@given(
    TOKENS,
    TOKENS,
    st.floats(0.5, 2.0),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100), max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_equal_the_formulas(
    prompt: list[int],
    reply: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    bias: dict[int, float],
    seed: int,
) -> None:
    config = GenerationConfig(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, logit_bias=bias
    )
    row = np.random.default_rng(seed).normal(0, 5, V).astype(np.float32)
    counts = TokenCounts(prompt)
    for token in reply:
        counts.push(token)
    expected = naive(row, config, prompt, reply)
    Penalties.from_config(config, V).apply(row, counts)
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-4)


@settings(deadline=None)
@given(TOKENS, st.lists(st.one_of(st.integers(0, V - 1), st.none()), max_size=200))
def test_counts_follow_pushes_and_pops(prompt: list[int], moves: list[int | None]) -> None:
    counts, reply = TokenCounts(prompt), list[int]()
    for token in moves:
        if token is not None:
            counts.push(token)
            reply.append(token)
        elif reply:
            counts.pop()
            reply.pop()
    assert len(counts) == len(reply)
    assert sorted(counts.ids.tolist()) == sorted(set(prompt) | set(reply))
    seen = dict(zip(counts.ids.tolist(), counts.reply_counts.tolist(), strict=True))
    assert seen == {token: reply.count(token) for token in seen}


def test_undoing_a_draft_restores_the_result() -> None:
    config = GenerationConfig(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1)
    penalties = Penalties.from_config(config, 500)
    counts = TokenCounts(range(100))
    for token in range(50, 200):
        counts.push(token)
    before, after = np.ones(500, np.float32), np.ones(500, np.float32)
    penalties.apply(before, counts)
    for token in range(150, 450):
        counts.push(token)
    counts.pop(300)
    penalties.apply(after, counts)
    np.testing.assert_array_equal(before, after)


def test_popping_stops_at_the_prompt() -> None:
    counts = TokenCounts([1, 2])
    with pytest.raises(AssertionError):
        counts.pop()


def test_bias_outside_the_vocabulary_is_refused() -> None:
    for token in (-1, V):
        with pytest.raises(UsageError, match="logit_bias"):
            Penalties.from_config(GenerationConfig(logit_bias={token: 1.0}), V)
            pytest.fail(f"bias of token {token}")


def test_infinite_bias_bans_and_forces_without_nan() -> None:
    row = np.zeros(V, np.float32)
    Penalties.from_config(GenerationConfig(logit_bias={3: -math.inf, 5: math.inf}), V).apply(row, None)
    assert row[3] == -math.inf
    assert np.isfinite(row[5]) and row.argmax() == 5
