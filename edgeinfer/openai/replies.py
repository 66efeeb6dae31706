"""Replies as they are made, text and calls, and their figures in the form of answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any

from edgeinfer.core.records import dataclass
from edgeinfer.core.results import Chunk, Result, TokenLogprob
from edgeinfer.openai.calls import ArgumentsPiece, CallPiece, Piece, PlainReader, ReasoningPiece, ReplyReader, TextPiece


@dataclass
class Call:
    """A call of a function, its arguments as far as they are written."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Reply:
    """A reply that is being made."""

    reader: ReplyReader = field(default_factory=PlainReader)
    text: str = ""  # so far, without thoughts and calls
    reasoning: str = ""  # thoughts so far
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # those of all tokens so far
    unsent: list[TokenLogprob] = field(default_factory=list)  # those that were not sent yet
    result: Result | None = None  # once finished

    def push(self, chunk: Chunk) -> list[Piece]:
        """Add a chunk and return the pieces that became certain with it."""
        self.logprobs += chunk.logprobs
        self.unsent += chunk.logprobs
        return self._gathered(self._split(chunk))

    def finish(self, result: Result) -> list[Piece]:
        """Add the result and return the pieces that were held back."""
        self.result = result
        return self._gathered(self.reader.finish())

    def _split(self, chunk: Chunk) -> list[Piece]:
        """Thoughts and the rest; what reads like a call in a thought is none."""
        thought: list[Piece] = [ReasoningPiece(chunk.reasoning)] if chunk.reasoning else []
        return thought if chunk.thinking and not chunk.text else [*thought, *self.reader.push(chunk)]

    def take_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities to send now."""
        unsent, self.unsent = self.unsent, []
        return unsent

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens, if requested; minus infinity for an empty reply."""
        found = [token.logprob for token in self.logprobs]
        return sum(found) / len(found) if found else -math.inf

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how it ended; cancelled replies count as "length". Calls whose arguments are complete can
        be answered, even where the reply was cut off after the last of them."""
        assert self.result is not None, "the reply is not finished"
        if self.calls and not self.reader.in_call:
            return "tool_calls"
        return "stop" if self.result.finish_reason == "stop" else "length"

    def _gathered(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    self.text += text
                case ReasoningPiece(text):
                    self.reasoning += text
                case CallPiece(_, id_, name):
                    self.calls.append(Call(id_, name))
                case ArgumentsPiece(place, text):
                    self.calls[place].arguments += text
        return pieces


def usage(results: Sequence[Result], per_prompt: int = 1) -> dict[str, Any]:
    prompts = results[::per_prompt]
    prompt = sum(result.usage.prompt_tokens for result in prompts)
    completion = sum(result.usage.completion_tokens for result in results)
    thought = sum(result.usage.reasoning_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(r.timings.cached_prompt_tokens for r in prompts)},
    } | ({"completion_tokens_details": {"reasoning_tokens": thought}} if thought else {})


def responses_usage(results: Sequence[Result]) -> dict[str, Any]:
    """Token counts in the fields of /v1/responses."""
    counted = usage(results)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counted["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": sum(result.usage.reasoning_tokens for result in results)},
        "total_tokens": counted["total_tokens"],
    }


def timings(results: Sequence[Result]) -> dict[str, Any]:
    """llama-server's timings, summed over the replies: of prompt evaluation and of generation."""
    cached = sum(result.timings.cached_prompt_tokens for result in results)
    prompt_n = sum(result.usage.prompt_tokens for result in results) - cached
    prompt_ms = sum(result.timings.prompt_ms for result in results)
    predicted_n = sum(result.usage.completion_tokens for result in results)
    # As in llama-server, from a reply's first token on.
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
    """Log-probabilities in the form of chat completions and responses."""
    return [
        {**_entry(logprob), "top_logprobs": [_entry(other) for other in logprob.alternatives]} for logprob in logprobs
    ]


def token_table(logprobs: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
    """Log-probabilities in the form of legacy completions, and the offset of the text after them."""
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
    """A token's text; its bytes as OpenAI spells them where it is only a part of a character."""
    try:
        return logprob.bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in logprob.bytes)


def _top(logprob: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the token itself; of tokens with equal text, the likeliest."""
    found: dict[str, float] = {}
    for other in (*logprob.alternatives, logprob):
        found.setdefault(token_text(other), other.logprob)
    return found


def _entry(logprob: TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(logprob), "logprob": logprob.logprob, "bytes": list(logprob.bytes)}
