"""Token counts, times and log-probabilities of replies, in OpenAI's and llama-server's words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edgeinfer.results import Result, TokenLogprob


def usage(results: Sequence[Result], per_prompt: int = 1) -> dict[str, Any]:
    """OpenAI's count of tokens."""
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


def entries(logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Those of chat completions and responses."""
    return [
        {**_entry(logprob), "top_logprobs": [_entry(other) for other in logprob.alternatives]} for logprob in logprobs
    ]


def token_table(logprobs: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
    """Those of legacy completions, and where the text behind them begins."""
    texts = [token_text(logprob) for logprob in logprobs]
    offsets = []
    for logprob in logprobs:
        offsets.append(offset)
        offset += len(logprob.bytes.decode("utf-8", "ignore"))
    table = {
        "tokens": texts,
        "token_logprobs": [logprob.logprob for logprob in logprobs],
        "top_logprobs": [_top(logprob) for logprob in logprobs],
        "text_offset": offsets,
    }
    return table, offset


def token_text(logprob: TokenLogprob) -> str:
    """A token's text; of one that is only a part of a character its bytes, as OpenAI spells them."""
    try:
        return logprob.bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in logprob.bytes)


def _top(logprob: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the token itself; of those with one text the likelier one's figure."""
    found: dict[str, float] = {}
    for other in (*logprob.alternatives, logprob):
        found.setdefault(token_text(other), other.logprob)
    return found


def _entry(logprob: TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(logprob), "logprob": logprob.logprob, "bytes": list(logprob.bytes)}
