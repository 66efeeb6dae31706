"""Tokens and times of a request's replies, in OpenAI's and llama-server's words; knows nothing of how they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeinfer.results import Result

__all__ = ["responses_usage", "timings", "usage"]


def usage(results: Sequence[Result], per_prompt: int = 1) -> dict[str, Any]:
    """OpenAI's count of tokens.

    Args:
        results: of all replies, those of one prompt side by side.
        per_prompt: replies to each prompt, which counts once.
    """
    prompts = results[::per_prompt]
    prompt = sum(result.usage.prompt_tokens for result in prompts)
    completion = sum(result.usage.completion_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(r.timings.cached_prompt_tokens for r in prompts)},
    }


def responses_usage(results: Sequence[Result]) -> dict[str, Any]:
    """The same in the words of /v1/responses."""
    counted = usage(results)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counted["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["total_tokens"],
    }


def timings(results: Sequence[Result]) -> dict[str, Any]:
    """llama-server's times, summed over the replies: what was evaluated of the prompts, and what was written."""
    cached = sum(result.timings.cached_prompt_tokens for result in results)
    prompt_n = sum(result.usage.prompt_tokens for result in results) - cached
    prompt_ms = sum(result.timings.prompt_ms for result in results)
    predicted_n = sum(result.usage.completion_tokens for result in results)
    # As there, from a reply's first token on.
    predicted_ms = sum(r.timings.per_token_ms * max(r.usage.completion_tokens - 1, 0) for r in results)
    return {
        "cache_n": cached,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": 1e3 * _ratio(prompt_n, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, predicted_n),
        "predicted_per_second": 1e3 * _ratio(predicted_n, predicted_ms),
        "draft_n": sum(result.speculation.drafted for result in results),
        "draft_n_accepted": sum(result.speculation.accepted for result in results),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
