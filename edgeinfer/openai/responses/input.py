"""The input of a response, a text or items, as messages; knows nothing of other fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.messages import Message, joined, read_message

__all__ = ["read_input"]

_ITEMS = "message, function_call, function_call_output and reasoning"


def read_input(value: Any, instructions: str | None) -> list[Message]:
    """The conversation that a response goes on with.

    Raises:
        RequestError: it is malformed, or holds an item that cannot be taken.
    """
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise RequestError("input is neither a text nor a non-empty list of items.", "Give one.", param="input")
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
    raise RequestError(message, f"Items of type {_ITEMS} are taken.", param=where, code="unsupported_content")


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
