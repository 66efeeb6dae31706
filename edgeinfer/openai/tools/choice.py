"""Whether functions are called and which; knows nothing of how models call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.tools.functions import Function

__all__ = ["ToolChoice", "read_choice"]

_HINT = 'Give none, auto, required or {"type": "function", "function": {"name": ...}}.'


@dataclass(frozen=True)
class ToolChoice:
    """What the reply may call.

    Attributes:
        mode: calls are impossible, possible or certain.
        functions: of those offered, that may be called.
        several: whether more than one call may be made.
    """

    mode: Literal["none", "auto", "required"]
    functions: tuple[Function, ...]
    several: bool


def read_choice(value: Any, functions: Sequence[Function], several: bool) -> ToolChoice:
    """The choice of a request, with a function's name inside `function` or, as in /v1/responses, beside `type`.

    Raises:
        RequestError: it is malformed, or names what is not offered.
    """
    offered = tuple(functions)
    mode = value if isinstance(value, str) else None
    if value is None or mode in ("none", "auto"):
        return ToolChoice("auto" if offered and mode != "none" else "none", offered, several)
    if not offered:
        raise RequestError("tool_choice asks for a call, but there are no tools.", "Give tools.", param="tool_choice")
    if mode == "required":
        return ToolChoice("required", offered, several)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "function":
        return ToolChoice("required", (_named(value, offered),), several=False)
    if kind == "allowed_tools":
        return _allowed(value.get("allowed_tools", value), offered, several)
    raise RequestError(f"tool_choice={value!r} is not supported.", _HINT, param="tool_choice")


def _allowed(value: Any, offered: tuple[Function, ...], several: bool) -> ToolChoice:
    tools = value.get("tools") if isinstance(value, Mapping) else None
    mode = value.get("mode", "auto") if isinstance(value, Mapping) else None
    if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
        raise RequestError("tool_choice.allowed_tools is malformed.", "Give mode and tools.", param="tool_choice")
    return ToolChoice(mode, tuple(_named(tool, offered) for tool in tools), several)


def _named(value: Any, offered: tuple[Function, ...]) -> Function:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    found = next((function for function in offered if function.name == name), None)
    if found is None:
        message = f"tool_choice names {name!r}, which is not among the tools."
        raise RequestError(message, "Name one of them.", param="tool_choice")
    return found
