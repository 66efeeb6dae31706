"""The messages of a request as a chat template takes them. Only text is taken: no file or address that a request names
is ever opened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields

Message = dict[str, Any]

# OpenAI's newer word for the system's messages; templates know the older one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Names of a message's thought; templates know the first.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def read_messages(value: Any) -> list[Message]:
    """Read the conversation: contents become text, arguments of calls objects where they are; other keys are kept."""
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or not value:
        hint = 'Give a list such as [{"role": "user", "content": "Hello"}].'
        raise RequestError("messages is not a non-empty list.", hint, param="messages")
    return [read_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def read_message(message: Any, where: str) -> Message:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in _ROLES:
        hint = f"Give each message a role, one of {', '.join(_ROLES)}, and content."
        raise RequestError(f"{where} has no known role.", hint, param=f"{where}.role")
    read = {key: value for key, value in message.items() if value is not None}
    calls = read.pop("tool_calls", [])
    read["role"] = _ROLES[role]
    thought = next((read.pop(name) for name in _THOUGHTS if name in read), None)
    if role == "assistant" and isinstance(thought, str) and thought:
        read["reasoning_content"] = thought
    content = read.get("content", read.pop("refusal", None) if role == "assistant" else None)
    if content is None and role != "assistant":
        raise RequestError(f"{where}.content is missing.", "Set it to a string.", param=f"{where}.content")
    nothing = None if calls else ""  # templates recognize a reply of only calls by it
    read["content"] = nothing if content is None else joined(content, f"{where}.content")
    if role == "tool" and not isinstance(read.get("tool_call_id"), str):
        param = f"{where}.tool_call_id"
        raise RequestError(f"{param} is missing.", "Name the call that it answers.", param=param)
    if calls:
        read["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return read


def split_prefill(messages: list[Message]) -> tuple[list[Message], str]:
    """The messages before a prefill at their end, and its text; all messages and "" where there is none."""
    *before, last = messages
    if not before or last["role"] != "assistant" or "tool_calls" in last:
        return messages, ""
    return before, last["content"]


def joined(content: Any, where: str) -> str:
    """The text of a content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where} is not a string.", "Use a string, or a list of text parts.", param=where)
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _TEXTS:
        message = f"{where} is {f'of type {kind!r}' if isinstance(kind, str) else 'no content part'}, not text."
        hint = "This model reads text only; files and addresses are not opened."
        raise RequestError(message, hint, param=where, code="unsupported_content")
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where} has no text.", 'Parts look like {"type": "text", "text": "..."}.', param=where)
    return text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where} is not a list.", "Repeat the calls as they were in the reply.", param=where)
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        hint = 'Calls look like {"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}.'
        raise RequestError(f"{where} is not a function call.", hint, param=where)
    id_ = call.get("id")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    function = {"name": function["name"], "arguments": arguments}
    return {"id": id_ if isinstance(id_, str) else "", "type": "function", "function": function}


def _arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    """Arguments as an object, or as text where they are not one: replies are cut off, and models err."""
    if arguments is None or arguments == "":
        return {}
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = None
    if isinstance(read, Mapping):
        return dict(read)
    if not isinstance(arguments, str):
        raise RequestError(f"{where} is neither text nor an object.", "Send it as it was in the reply.", param=where)
    return arguments


_HINT = 'Give none, auto or {"name": ...}, or tools and tool_choice instead.'


def older_tools(fields: Fields) -> tuple[list[Any], Any]:
    """The deprecated fields `functions` and `function_call` as tools and a tool choice; empty where left out."""
    functions, choice = fields.items("functions"), fields.any("function_call")
    if not isinstance(choice, str | Mapping | None):
        raise fields.wrong("function_call", choice, _HINT)
    if isinstance(choice, Mapping):
        choice = {"type": "function", "function": dict(choice)}
    elif choice not in (None, "", "none", "auto"):
        raise fields.wrong("function_call", choice, _HINT)
    return [{"type": "function", "function": function} for function in functions], choice if functions else None


def with_tool_calls(messages: Any) -> Any:
    """Messages with deprecated function calls and their answers as those of tools."""
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
    """A call of a custom tool, which takes a text, as a call of a function of that text."""
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping):
        return call
    arguments = {"input": custom.get("input")}
    return {"id": call.get("id"), "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}


def with_function_call(message: dict[str, Any]) -> dict[str, Any]:
    """A message or delta of an answer with its call in `function_call`; it has one call at most."""
    calls = message.pop("tool_calls", None)
    return message | {"function_call": calls[0]["function"]} if calls else message
