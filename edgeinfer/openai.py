"""OpenAI's chat-completion wire format over a model, as plain dicts; knows nothing of HTTP.

Fields and values follow the OpenAI API reference, "Chat Completions"; `timings` adds edgeinfer's own figures.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import UsageError
from edgeinfer.results import Result

if TYPE_CHECKING:
    from edgeinfer.api import Model
    from edgeinfer.generation import TokenStream

__all__ = ["chat_completion"]

_SAME = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop")
# Beyond OpenAI's, as llama.cpp's and vLLM's servers accept them.
_OWN = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "speculation", "regex", "grammar")
# Accepted where they ask for what happens anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
}
_IGNORED = ("model", "user", "stream_options")


def chat_completion(
    model: Model, messages: Sequence[Mapping[str, Any]], /, *, stream: bool, **request: Any
) -> dict[str, Any] | Iterator[dict[str, Any]]:
    """Answers one request; see `Model.create_chat_completion`."""
    stream_options = request.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise UsageError(f"stream_options={stream_options!r} is not an object.", "Leave it out, or give include_usage.")
    usage_wanted = bool(stream_options.get("include_usage"))
    tokens = model.stream_chat(messages, **_options(request))
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model.info.name}
    if stream:
        return _chunks(tokens, head, usage_wanted)
    result = tokens.complete()
    message = {"role": "assistant", "content": result.text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(result)}
    return head | {"object": "chat.completion", "choices": [choice]} | _figures(result)


def _options(request: Mapping[str, Any]) -> dict[str, Any]:
    """GenerationConfig fields of a request.

    Raises:
        UsageError: a field that is unknown or not supported.
    """
    options: dict[str, Any] = {}
    for name, value in request.items():
        if name in _IGNORED:
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise UsageError(f"{name}={value!r} is not supported.", f"Leave {name} out.")
        elif name in _SAME or name in _OWN:
            if value is not None:
                options[name] = value
        elif name in ("max_tokens", "max_completion_tokens"):
            options["max_tokens"] = value
        elif name == "logit_bias":
            options["logit_bias"] = _by_id(value or {})
        elif name == "response_format":
            options |= _form(value)
        else:
            raise UsageError(f"Unknown request field {name!r}.", "See the OpenAI chat completion reference.")
    return options


def _form(value: Any) -> dict[str, Any]:
    """GenerationConfig fields of a `response_format`."""
    kind = "text" if value is None else value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        # llama.cpp's server takes a schema here too.
        schema = value.get("schema")
        return {"json_object": True} if schema is None else {"json_schema": schema}
    if kind != "json_schema":
        message = f"response_format={value!r} is not supported."
        raise UsageError(message, "Give an object whose type is text, json_object or json_schema.")
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        message = "response_format of type json_schema has no schema."
        raise UsageError(message, 'Give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.')
    # `strict` or not, nothing but what the schema allows is written.
    return {"json_schema": inner["schema"]}


def _by_id(bias: Any) -> Any:
    """JSON's keys are strings; GenerationConfig judges what is no number."""
    if not isinstance(bias, dict):
        return bias
    return {int(token) if isinstance(token, str) and token.isdecimal() else token: b for token, b in bias.items()}


def _chunks(tokens: TokenStream, head: Mapping[str, Any], usage_wanted: bool) -> Iterator[dict[str, Any]]:
    head = {**head, "object": "chat.completion.chunk"}

    def chunk(delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}

    yield chunk({"role": "assistant", "content": ""}, None)
    with tokens:
        for piece in tokens:
            if piece.text:
                yield chunk({"content": piece.text}, None)
    yield chunk({}, _reason(tokens.result))
    if usage_wanted:
        yield {**head, "choices": []} | _figures(tokens.result)


def _reason(result: Result) -> str:
    # OpenAI has no word for cancelled; a reply that was cut short is one that ran out of length.
    return "stop" if result.finish_reason == "stop" else "length"


def _figures(result: Result) -> dict[str, Any]:
    usage = dataclasses.asdict(result.usage) | {"total_tokens": result.usage.total_tokens}
    return {"usage": usage, "timings": dataclasses.asdict(result.timings)}
