"""The fields of a request to /v1/responses, with its input as messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.config import GenerationConfig
from edgeinfer.openai.contract import ChatModel
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import IGNORED, MOST_ALTERNATIVES, Fields, form, limit, sampling
from edgeinfer.openai.messages import Message, joined, read_message
from edgeinfer.openai.prompt import ChatPrompt
from edgeinfer.openai.tool_formats import dialect_of
from edgeinfer.openai.tools import ToolUse, read_choice, read_functions
from edgeinfer.records import dataclass

__all__ = ["ResponseRequest", "read_input", "read_request"]

_ITEMS = "message, function_call, function_call_output and reasoning"


def read_input(value: Any, instructions: str | None) -> list[Message]:
    """The conversation that a response goes on with.

    Raises:
        RequestError: it is malformed, or holds an item that cannot be taken.
    """
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise RequestError(
            "input is neither a string nor a non-empty list of items.", "Send one of them.", param="input"
        )
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        messages += _messages(item, f"input[{index}]")
    return _by_turn(messages)


def _messages(item: Any, where: str) -> list[Message]:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    match kind:
        case "message":
            return [read_message({"role": item.get("role"), "content": item.get("content")}, where)]
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return [read_message({"role": "assistant", "content": None, "tool_calls": [call]}, where)]
        case "function_call_output":
            content = joined(item.get("output"), f"{where}.output")
            answer = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            return [read_message(answer, where)]
        case "reasoning":  # what a model thought is not told to it again
            return []
    message = f"{where} is {f'of type {kind!r}' if isinstance(kind, str) else 'no item'}."
    raise RequestError(message, f"Items of type {_ITEMS} are supported.", param=where, code="unsupported_content")


def _by_turn(messages: list[Message]) -> list[Message]:
    """A turn of the assistant's is one message: what it says, and the calls behind."""
    turns: list[Message] = []
    for message in messages:
        before = turns[-1] if turns else None
        if before is not None and message.get("tool_calls") and before["role"] == "assistant":
            turns[-1] = {**before, "tool_calls": [*before.get("tool_calls", ()), *message["tool_calls"]]}
        else:
            turns.append(message)
    return turns


_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class ResponseRequest:
    """A request.

    Attributes:
        logprobs: whether log-probabilities are told.
        told: what the answer says of the request.
        ignored: fields of it that change nothing.
    """

    stream: bool
    prompt: ChatPrompt
    logprobs: bool
    told: Mapping[str, Any]
    ignored: tuple[str, ...]


def read_request(body: Mapping[str, Any], model: ChatModel[Any]) -> ResponseRequest:
    """The request, checked.

    Raises:
        RequestError: a field is unknown, malformed or asks for what cannot be.
    """
    fields = Fields(body)
    stream = fields.flag("stream")
    instructions = fields.text("instructions")
    messages = read_input(fields.any("input"), instructions)
    tools, wanted = fields.items("tools"), fields.any("tool_choice")
    several = fields.take("parallel_tool_calls", bool, "true or false") is not False
    functions = read_functions(tools, flat=True)
    choice = read_choice(wanted, functions, several)
    alternatives = fields.whole("top_logprobs", 0, MOST_ALTERNATIVES)
    logprobs = _LOGPROBS in fields.items("include") or bool(alternatives)
    options = limit(fields, "max_output_tokens")
    options |= sampling(fields) | _text(fields)
    if logprobs:
        options["logprobs"] = alternatives or 0
    effort = _effort(fields)
    metadata = fields.take("metadata", dict, "an object") or {}
    _refuse(fields)
    fields.ignore_others()
    fields.end()
    used = GenerationConfig.for_chat(model.sampling, options)
    told = {
        "instructions": instructions,
        "max_output_tokens": options.get("max_tokens"),
        "metadata": metadata,
        "parallel_tool_calls": several,
        "reasoning": {"effort": effort, "summary": None},
        "temperature": used.temperature,
        "text": {"format": _told_format(options)},
        "tool_choice": wanted or "auto",
        "tools": [_told_tool(tool) for tool in tools],
        "top_logprobs": alternatives or 0,
        "top_p": used.top_p,
    }
    variables = None if effort is None else {"reasoning_effort": effort}
    use = ToolUse(dialect_of(model.chat_template_text), choice)
    prompt = ChatPrompt(messages, use, options, variables, fields=("input", "text.format"))
    return ResponseRequest(stream, prompt, logprobs, told, tuple(fields.ignored))


def _text(fields: Fields) -> dict[str, Any]:
    """Options of the field `text`."""
    inner = fields.inner("text")
    if inner is None:
        return {}
    options = form(inner, "format")
    inner.ignore("verbosity")
    inner.end()
    return options


def _effort(fields: Fields) -> str | None:
    inner = fields.inner("reasoning")
    return None if inner is None else inner.text("effort")


def _refuse(fields: Fields) -> None:
    """What is ignored, and what cannot be."""
    fields.ignore(*IGNORED, "stream_options", "max_tool_calls")
    fields.only("background", (False,), "Wait for the answer, or have it streamed.")
    fields.refuse("previous_response_id", "conversation", hint="Nothing is stored here: send the whole conversation.")
    fields.refuse("prompt", hint="Nothing is stored here: send the text as input.")
    fields.only("truncation", ("disabled",), "No part of a conversation is dropped silently: shorten it.")
    fields.refuse("context_management", hint="No part of a conversation is dropped silently: shorten it.")
    fields.refuse("moderation", hint="Replies are not moderated here.")
    fields.refuse("image", hint="This model writes text only.")


def _told_format(options: Mapping[str, Any]) -> dict[str, Any]:
    if "json_schema" in options:
        return {"type": "json_schema", "name": "schema", "schema": options["json_schema"], "strict": True}
    return {"type": "json_object" if "json_object" in options else "text"}


def _told_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": True, "description": None, **tool}
