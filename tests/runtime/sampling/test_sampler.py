"""Samplers: draws, penalties, and the generator behind them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from edgeinfer.core.errors import BackendError, UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.sampling.distributions import GumbelNoise, token_logprobs, uniform
from edgeinfer.runtime.sampling.penalties import Penalties, TokenCounts
from edgeinfer.runtime.sampling.sampler import LogitsProcessor

SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.05, 5),
        "top_k": st.integers(0, 60),
        "top_p": st.floats(0.01, 1),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 1)),
    }
)
SEVERAL = st.fixed_dictionaries(
    {"temperature": st.floats(0.05, 5), "top_k": st.integers(0, 60), "top_p": st.just(1.0)},
    optional={
        "min_p": st.floats(0, 1),
        "top_n_sigma": st.floats(0.01, 3),
        "xtc_probability": st.floats(0, 1),
        "xtc_threshold": st.floats(0, 0.6),
        "dynatemp_range": st.floats(0, 5),
        "dynatemp_exponent": st.floats(0, 3),
    },
)
# Coarse values, so that ties abound.
ROWS = st.lists(st.integers(-12, 12).map(lambda x: x / 4) | st.just(-math.inf), min_size=2, max_size=50).filter(
    lambda row: max(row) > -math.inf
)


def oracle(row: list[float], config: ReplyOptions) -> list[float]:
    """Straight from the definitions: sort all, cut thrice, renormalising each time."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if config.top_n_sigma > 0:
        floor = row[order[0]] - config.top_n_sigma * statistics.pstdev(x for x in row if x > -math.inf)
        order = [i for i in order if row[i] >= floor - 1e-9]
    if config.top_k:
        order = order[: config.top_k]
    temperature = heat(row, order, config)
    weights = [math.exp((row[i] - row[order[0]]) / temperature) for i in order]
    if config.top_p < 1:
        total, reached, kept = sum(weights), 0.0, 0
        for weight in weights:
            if reached >= config.top_p * total:
                break
            reached += weight
            kept += 1
        order, weights = order[:kept], weights[:kept]
    kept = sum(weight >= config.min_p * weights[0] for weight in weights)
    out = [0.0] * len(row)
    plain = [math.exp(row[i] - row[order[0]]) for i in order[:kept]]
    edge = config.xtc_threshold * sum(plain)
    top = sum(p >= edge and p > 0 for p in plain)
    # Of the likeliest, the first of the last ones that are equal stays.
    spared = plain.index(plain[top - 1]) if top else 0
    left = [j for j in range(kept) if j >= top or j == spared]
    for chance, some in ((config.xtc_probability, left), (1 - config.xtc_probability, range(kept))):
        total = sum(weights[j] for j in some)
        for j in some:
            out[order[j]] += chance * weights[j] / total
    return out


def heat(row: list[float], order: list[int], config: ReplyOptions) -> float:
    """The temperature behind the first cuts."""
    some = [row[i] for i in order if row[i] > -math.inf]
    if config.dynatemp_range == 0 or len(some) == 1:
        return config.temperature
    total = sum(math.exp(x - some[0]) for x in some)
    each = [math.exp(x - some[0]) / total for x in some]
    share = max(-sum(p * math.log(p) for p in each) / math.log(len(each)), 0.0)
    low, high = max(0.0, config.temperature - config.dynatemp_range), config.temperature + config.dynatemp_range
    return max(low + (high - low) * math.pow(min(share, 1.0), config.dynatemp_exponent), 1e-6)


@st.composite
def rows_and_masks(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    row = draw(ROWS)
    usable = [i for i, value in enumerate(row) if value > -math.inf]
    return row, sorted(draw(st.sets(st.sampled_from(range(len(row))))) | {draw(st.sampled_from(usable))})


def masked(row: list[float], allowed: list[int]) -> list[float]:
    return [value if i in allowed else -math.inf for i, value in enumerate(row)]


@settings(max_examples=300, deadline=None)
@given(rows_and_masks(), st.booleans(), SETTINGS)
def test_distribution_of_what_a_mask_allows_equals_the_oracle(
    case: tuple[list[float], list[int]], everything: bool, options: dict[str, Any]
) -> None:
    row, allowed = case
    hidden, mask = (row, None) if everything else (masked(row, allowed), np.array(allowed))
    config = ReplyOptions(**options)
    got = LogitsProcessor(config, len(row), 0).probabilities(np.array(row, np.float32), None, mask)
    best = hidden.index(max(hidden))
    expected = [float(i == best) for i in range(len(row))] if config.greedy else oracle(hidden, config)
    if config.top_p < 1:
        # A mass that lands on the edge to the last bit may fall on either side of it.
        exact = dataclasses.replace(config, top_p=min(config.top_p * (1 + 1e-9), 1.0))
        below = dataclasses.replace(config, top_p=config.top_p * (1 - 1e-9))
        if oracle(hidden, exact) != oracle(hidden, below):
            return
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=300, deadline=None)
@given(rows_and_masks(), SEVERAL, st.integers(0, 2**64 - 1), st.integers(0, 2**32))
def test_llama_cpp_s_samplers_equal_the_oracle_and_so_does_what_is_drawn(
    case: tuple[list[float], list[int]], options: dict[str, Any], seed: int, position: int
) -> None:
    row, allowed = case
    config, logits, mask = ReplyOptions(**options), np.array(row, np.float32), np.array(allowed)
    processor = LogitsProcessor(config, len(row), seed)
    found, token = processor.probabilities(logits, None, mask), processor.sample(logits, position, None, mask)
    likely = np.flatnonzero(found)
    if config.greedy:
        assert likely.tolist() == [token]
        return
    np.testing.assert_allclose(found, oracle(masked(row, allowed), config), rtol=1e-6, atol=1e-9)
    scores = np.log(found[likely]) + GumbelNoise(seed, len(row)).of(likely, position)
    assert scores[likely == token][0] >= scores.max() - 1e-9


def test_nucleus_of_a_large_flat_vocabulary() -> None:
    row = np.random.default_rng(0).normal(0, 0.5, 30_000).astype(np.float32)
    for top_p in (0.3, 0.9, 0.999, 0.9999999):
        config = ReplyOptions(temperature=1.0, top_p=top_p)
        got = LogitsProcessor(config, len(row), 0).probabilities(row)
        np.testing.assert_allclose(got, oracle(row.tolist(), config), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("n", [1500, pytest.param(8000, marks=pytest.mark.slow)])
def test_draws_follow_the_distribution(n: int) -> None:
    """By chi-square; of right samplers, fewer than one in ten thousand fail."""
    row = np.random.default_rng(3).normal(0, 1.5, 12).astype(np.float32)
    counts = TokenCounts([1])
    counts.push(2)
    several: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 6},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 9, "top_p": 0.95, "min_p": 0.02, "presence_penalty": 0.5},
        {"temperature": 0.9, "top_n_sigma": 1.2, "xtc_probability": 0.5, "dynatemp_range": 0.5},
    ]
    for options in several:
        processor = LogitsProcessor(ReplyOptions(**options), 12, seed=11)
        target = processor.probabilities(row, counts)
        seen = np.bincount([processor.sample(row, position, counts) for position in range(n)], minlength=12)
        allowed = target > 0
        assert not seen[~allowed].any(), options
        # Rare tokens together, so that every cell has some.
        common = n * target >= 5
        found = np.append(seen[common], seen[~common].sum())
        wanted = n * np.append(target[common], target[~common].sum())
        chi = ((found - wanted) ** 2 / np.maximum(wanted, 1)).sum()
        freedom = common.sum()
        assert chi < freedom + 4 * math.sqrt(2 * freedom) + 8, options


@settings(deadline=None)
@given(ROWS, SETTINGS, st.integers(0, 2**64 - 1), st.integers(0, 2**32))
def test_a_draw_has_the_largest_sum_of_log_probability_and_noise(
    row: list[float], options: dict[str, Any], seed: int, position: int
) -> None:
    processor = LogitsProcessor(ReplyOptions(**options), len(row), seed)
    logits = np.array(row, np.float32)
    token = processor.sample(logits, position)
    likely = np.flatnonzero(probabilities := processor.probabilities(logits))
    scores = np.log(probabilities[likely]) + GumbelNoise(seed, len(row)).of(likely, position)
    assert token in likely
    assert processor.config.greedy or scores[likely == token][0] >= scores.max() - 1e-9


def test_greedy_takes_the_lowest_of_equals_after_bias_and_penalties() -> None:
    row = np.array([0, 3, 3, 1], np.float32)
    assert LogitsProcessor(ReplyOptions(), 4, 0).sample(row, 0) == 1
    assert LogitsProcessor(ReplyOptions(temperature=0.9, top_k=1), 4, 0).sample(row, 0) == 1
    assert LogitsProcessor(ReplyOptions(logit_bias={1: -1.0}), 4, 0).sample(row, 0) == 2
    counts = TokenCounts([1, 2])
    assert LogitsProcessor(ReplyOptions(repetition_penalty=10.0), 4, 0).sample(row, 0, counts) == 3
    np.testing.assert_array_equal(row, [0, 3, 3, 1])


def test_unusable_logits_are_the_backends_fault() -> None:
    rows = ([-math.inf] * 3, [math.nan] * 3, [1.0, math.nan, 2.0], [0.0, math.inf, 1.0])
    several: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 2, "top_p": 0.9}]
    for row, options in product(rows, several):
        processor, logits = LogitsProcessor(ReplyOptions(**options), 3, 0), np.array(row, np.float32)
        for call in (processor.sample, token_logprobs):
            with pytest.raises(BackendError, match="No token can be chosen"):
                call(logits, 0)
                pytest.fail(f"{row} with {options}")
        with pytest.raises(BackendError, match="No token can be chosen"):
            processor.probabilities(logits)
            pytest.fail(f"{row} with {options}")


def test_extreme_temperatures_stay_finite() -> None:
    row = np.array([1.0, -500.0, 80.0, 80.0], np.float32)
    for temperature, min_p in product((1e-308, 1e-30, 1e-5, 100.0), (0.0, 0.5, 1e-300)):
        p = LogitsProcessor(ReplyOptions(temperature=temperature, min_p=min_p), 4, 0).probabilities(row)
        weights = np.array([0, 0, 1, 1]) if temperature < 1 else np.exp((row - 80) / 100)
        np.testing.assert_allclose(
            p, np.where(weights < min_p, 0, weights) / weights[weights >= min_p].sum(), atol=1e-6
        )


@settings(deadline=None)
@given(ROWS, st.integers(0, 60))
def test_logprobs_are_the_models_own(row: list[float], top: int) -> None:
    logits = np.array(row, np.float32)
    chosen = row.index(max(row))
    found = token_logprobs(logits, chosen, top)
    normaliser = math.log(sum(math.exp(x) for x in row))
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top]
    assert [token for token, _ in found.top] == order
    np.testing.assert_allclose([value for _, value in found.top], [row[i] - normaliser for i in order], atol=1e-9)
    assert found.logprob == pytest.approx(row[chosen] - normaliser)


def test_half_precision_logits_work() -> None:
    row: NDArray[np.float16] = np.array([1, 2, 3, 4], np.float16)
    p = LogitsProcessor(ReplyOptions(temperature=1.0, top_k=3), 4, 0).probabilities(row)
    np.testing.assert_allclose(p, oracle([1, 2, 3, 4], ReplyOptions(temperature=1.0, top_k=3)))


def test_what_is_drawn_of_a_large_vocabulary_has_the_largest_sum_of_all() -> None:
    rows = np.random.default_rng(5).normal(0, 1, (60, 20_000)).astype(np.float32)
    rows *= np.array([0, 1, 4], np.float32).repeat(20)[:, None]
    rows[:, ::7] = -math.inf
    noise = GumbelNoise(9, rows.shape[1])
    for position, row in enumerate(rows):
        heat = 0.3 + position % 20 / 20
        sums = row.astype(np.float64) / heat + noise.of(np.arange(len(row)), position)
        for allowed in (None, np.arange(1, len(row), 3)):
            ids = np.arange(len(row)) if allowed is None else allowed
            drawn = LogitsProcessor(ReplyOptions(temperature=heat), len(row), 9).sample(row, position, None, allowed)
            assert drawn == ids[sums[ids].argmax()]


@settings(deadline=None)
@given(rows_and_masks(), st.integers(0, 2**64 - 1), st.integers(0, 2**32), st.integers(0, 60), st.floats(0, 1))
def test_a_draw_under_a_mask_is_that_from_masked_logits(
    case: tuple[list[float], list[int]], seed: int, position: int, top_k: int, min_p: float
) -> None:
    row, allowed = case
    logits, hidden = np.array(row, np.float32), np.array(masked(row, allowed), np.float32)
    for temperature in (0.0, 1.0):
        processor = LogitsProcessor(ReplyOptions(temperature=temperature, top_k=top_k, min_p=min_p), len(row), seed)
        token = processor.sample(logits, position, None, np.array(allowed))
        assert token == processor.sample(hidden, position) and token in allowed
        ids, weights = processor.support(logits, None, np.array(allowed))
        assert set(ids.tolist()) <= set(allowed) and len(ids) == len(weights) and (np.diff(ids) > 0).all()


def test_bias_and_penalties_come_before_the_mask() -> None:
    for size in (1, 40, 390):
        chance = np.random.default_rng(size)
        options = {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "logit_bias": {7: 4.0, 350: -2.0}}
        config = ReplyOptions(temperature=0.8, **options)  # type: ignore[arg-type]
        processor, penalties, counts = (
            LogitsProcessor(config, 400, 1),
            Penalties.from_config(config, 400),
            TokenCounts(range(30)),
        )
        for position in range(50):
            row = chance.normal(0, 2, 400).astype(np.float32)
            allowed = np.sort(chance.choice(400, size, replace=False))
            changed, before = row.copy(), row.copy()
            penalties.apply(changed, counts)
            expected = oracle(masked(changed.tolist(), allowed.tolist()), config)
            np.testing.assert_allclose(processor.probabilities(row, counts, allowed), expected, rtol=1e-9, atol=1e-12)
            np.testing.assert_array_equal(row, before)
            counts.push(processor.sample(row, position, counts, allowed))
            processor.sample(row, position, counts)  # leaves other values behind


def test_a_bias_that_bans_all_that_is_allowed_is_an_error() -> None:
    several: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.0, "min_p": 0.1}]
    for options in several:
        processor = LogitsProcessor(ReplyOptions(logit_bias={1: -math.inf, 2: -math.inf}, **options), 4, 0)
        row = np.zeros(4, np.float32)
        with pytest.raises(UsageError, match="bans every token that may follow"):
            processor.sample(row, 0, None, np.array([1, 2]))
            pytest.fail(f"drawn with {options}")
        assert processor.sample(row, 0, None, np.array([1, 3])) == 3


def test_what_a_mask_hides_does_not_pile_up() -> None:
    for config in (ReplyOptions(repetition_penalty=0.5), ReplyOptions(logit_bias={3: -1e6})):
        row, counts = np.ones(64, np.float32), TokenCounts([4])
        processor = LogitsProcessor(config, 64, 0)
        processor.sample(row, 0, counts)
        for position in range(300):  # without overflow, which would warn
            assert processor.sample(row, position, counts, np.array([9])) == 9


KEYS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**16))


@settings(deadline=None)
@given(KEYS)
def test_is_philox_as_others_compute_it(key: tuple[int, int, int]) -> None:
    seed, position, stream = key
    philox = Philox(key=np.array([seed, stream], np.uint64), counter=np.array([position, 0, 0, 0], np.uint64))
    assert uniform(*key) == Generator(philox).random()


def test_known_values_hold_on_every_platform() -> None:
    assert uniform(1, 5) == 0.9719207784869555
    assert uniform(0, 0) == 0.011546754286331562


V = 40
TOKENS = st.lists(st.integers(0, V - 1), max_size=30)


def naive(row: NDArray[np.float32], config: ReplyOptions, prompt: list[int], reply: list[int]) -> list[float]:
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
    config = ReplyOptions(
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


def test_a_bias_bans_and_forces_without_nan_within_the_vocabulary() -> None:
    row = np.zeros(V, np.float32)
    Penalties.from_config(ReplyOptions(logit_bias={3: -math.inf, 5: math.inf}), V).apply(row, None)
    assert row[3] == -math.inf and np.isfinite(row[5]) and row.argmax() == 5
    for token in (-1, V):
        with pytest.raises(UsageError, match="logit_bias"):
            Penalties.from_config(ReplyOptions(logit_bias={token: 1.0}), V)


def repeats(text: list[int], config: ReplyOptions, pieces: list[str]) -> dict[int, int]:
    """The longest repeat that each token would go on with, straight from llama.cpp's rule."""
    text = text[max(len(text) - config.dry_penalty_last_n, 0) :] if config.dry_penalty_last_n >= 0 else text
    since = len(text)
    for breaker in config.dry_sequence_breakers:
        joined, ends = "".join(pieces[token] for token in text), []
        for n in range(1, len(text) + 1):
            before, upto = (len("".join(pieces[token] for token in text[:m])) for m in (n - 1, n))
            if any(joined[:end].endswith(breaker) for end in range(before + 1, upto + 1)):
                ends.append(n)
        since = min(since, len(text) - max(ends, default=0))
    longest: dict[int, int] = {}
    for place in range(1, len(text)):
        length = 0
        while length < min(place, since) and text[place - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= config.dry_allowed_length:
            longest[text[place]] = max(longest.get(text[place], 0), length)
    return longest if since >= config.dry_allowed_length else {}


PIECES = ["a", "b", ":", "b\n", "\n", "x:y", "é"]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 6), max_size=12),
    st.lists(st.integers(0, 6), max_size=12),
    st.integers(0, 4),
    st.integers(-1, 20),
    st.sampled_from([("\n", ":"), ("\n\n", "y:"), ("b\nb",), ("é",)]),
    st.floats(1, 3),
)
def test_repeats_lose_what_llama_cpp_takes(
    prompt: list[int], reply: list[int], allowed: int, last: int, breakers: tuple[str, ...], base: float
) -> None:
    config = ReplyOptions(
        dry_multiplier=0.8,
        dry_base=base,
        dry_allowed_length=allowed,
        dry_penalty_last_n=last,
        dry_sequence_breakers=breakers,
    )
    row, counts = np.arange(7, dtype=np.float32), TokenCounts(prompt)
    for token in (*reply, 0, 1):
        counts.push(token)
    counts.pop(2)
    expected = row.copy()
    for token, length in repeats([*prompt, *reply], config, PIECES).items():
        expected[token] -= 0.8 * base ** (length - allowed)
    Penalties.from_config(config, 7, lambda token: PIECES[token].encode()).apply(row, counts)
    np.testing.assert_allclose(row, expected, rtol=1e-5)


def test_a_long_repeat_is_penalised_without_overflow() -> None:
    row, counts = np.zeros(4, np.float32), TokenCounts([1, 2] * 3000)
    Penalties.from_config(ReplyOptions(dry_multiplier=100.0), 4).apply(row, counts)
    assert row[1] == np.float32(-1e30) and row.tolist()[::2] == [0, 0] and row[3] == 0
