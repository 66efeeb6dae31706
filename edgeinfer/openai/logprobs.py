"""Log-probabilities as OpenAI's answers have them; knows nothing of where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edgeinfer.results import TokenLogprob

__all__ = ["entries", "token_table", "token_text"]


def entries(logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Those of chat completions and responses."""
    return [
        {**_entry(logprob), "top_logprobs": [_entry(other) for other in logprob.alternatives]} for logprob in logprobs
    ]


def token_table(logprobs: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
    """Those of legacy completions, and where the text behind them begins.

    Args:
        offset: characters before the first.
    """
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
