"""Tokens and times: llama-server's names, sums over replies, and no division by nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

import edgeinfer
from edgeinfer.openai.replies import responses_usage, timings, usage
from edgeinfer.results import Result, SpeculationUse, Timings, Usage

NAMES = [
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
    "draft_n",
    "draft_n_accepted",
]


@pytest.fixture
def result(model: edgeinfer.Model) -> Result:
    """A reply of known figures."""
    times = Timings(
        load_ms=1.0,
        prompt_ms=20.0,
        ttft_ms=500.0,
        per_token_ms=5.0,
        per_token_p50_ms=5.0,
        per_token_p95_ms=5.0,
        tokens_per_second=200.0,
        cached_prompt_tokens=6,
    )
    speculation = SpeculationUse("auto", drafted=9, accepted=4)
    return replace(model.generate([5], max_tokens=1), usage=Usage(10, 5), timings=times, speculation=speculation)


def test_timings(result: Result) -> None:
    one = timings([result])
    assert list(one) == NAMES
    assert (one["cache_n"], one["prompt_n"], one["predicted_n"]) == (6, 4, 5)
    assert (one["prompt_ms"], one["prompt_per_token_ms"], one["prompt_per_second"]) == (20.0, 5.0, 200.0)
    assert (one["predicted_ms"], one["predicted_per_token_ms"], one["predicted_per_second"]) == (20.0, 4.0, 250.0)
    assert (one["draft_n"], one["draft_n_accepted"]) == (9, 4)
    two = timings([result, result])
    for name in NAMES:
        assert two[name] == (one[name] if "_per_" in name else 2 * one[name])


def test_nothing_was_done(result: Result) -> None:
    idle = replace(result.timings, prompt_ms=0.0, per_token_ms=0.0, cached_prompt_tokens=10)
    found = timings([replace(result, timings=idle, usage=Usage(10, 0))])
    assert [found[name] for name in NAMES] == [10, 0, 0, 0, 0, 0, 0, 0, 0, 9, 4]


def test_a_prompt_counts_once(result: Result) -> None:
    counted = usage([result] * 6, per_prompt=3)
    assert counted == {
        "prompt_tokens": 20,
        "completion_tokens": 30,
        "total_tokens": 50,
        "prompt_tokens_details": {"cached_tokens": 12},
    }
    assert responses_usage([result])["total_tokens"] == 15
