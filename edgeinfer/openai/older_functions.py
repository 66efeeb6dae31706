"""Calls that are not of function tools, as OpenAI's functions of before: read as such calls, and written back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.openai.fields import Fields

_HINT = 'Give none, auto or {"name": ...}, or tools and tool_choice instead.'


def older_tools(fields: Fields) -> tuple[list[Any], Any]:
    """The tools that `functions` are, and the choice that `function_call` is; none where they are left out."""
    functions, choice = fields.items("functions"), fields.any("function_call")
    if not isinstance(choice, str | Mapping | None):
        raise fields.wrong("function_call", choice, _HINT)
    if isinstance(choice, Mapping):
        choice = {"type": "function", "function": dict(choice)}
    elif choice not in (None, "", "none", "auto"):
        raise fields.wrong("function_call", choice, _HINT)
    return [{"type": "function", "function": function} for function in functions], choice if functions else None


def with_tool_calls(messages: Any) -> Any:
    """Messages with calls and answers of functions as those of tools."""
    if not isinstance(messages, list | tuple):
        return messages
    made: list[Any] = []
    last = ""
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            made.append(message)
        elif message.get("role") == "function":
            given = {name: value for name, value in message.items() if name != "name"}
            answer = {"role": "tool", "content": message.get("content") or "", "tool_call_id": last or f"call_{place}"}
            made.append({**given, **answer})
        elif message.get("function_call") is not None:
            last = f"call_{place}"
            given = {name: value for name, value in message.items() if name != "function_call"}
            call = {"id": last, "type": "function", "function": message["function_call"]}
            made.append({**given, "content": message.get("content"), "tool_calls": [call]})
        elif isinstance(message.get("tool_calls"), list | tuple):
            made.append({**message, "tool_calls": list(map(_function_call, message["tool_calls"]))})
        else:
            made.append({name: value for name, value in message.items() if name != "function_call"})
    return made


def _function_call(call: Any) -> Any:
    """A call of a tool that takes a text as one of a function of that text."""
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping):
        return call
    arguments = {"input": custom.get("input")}
    return {"id": call.get("id"), "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}


def in_older_words(told: dict[str, Any]) -> dict[str, Any]:
    """A message or a part of one, in the answer to such a request: it has one call at most."""
    calls = told.pop("tool_calls", None)
    return told | {"function_call": calls[0]["function"]} if calls else told
