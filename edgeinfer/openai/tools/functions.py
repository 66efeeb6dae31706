"""The functions that a request offers; knows nothing of how models call them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields

__all__ = ["Function", "read_functions"]

# OpenAI's names, and those of other makers: dots of modules, slashes and colons of servers.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MOST = 512


@dataclass(frozen=True)
class Function:
    """A function that may be called.

    Attributes:
        parameters: JSON Schema of its arguments, an object's.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The schema that arguments are held to: of an object that names its members, no others are taken."""
        closed = "additionalProperties" not in self.parameters and "properties" in self.parameters
        return {**self.parameters, "additionalProperties": False} if closed else self.parameters

    def as_tool(self) -> dict[str, Any]:
        """As OpenAI's requests and chat templates have it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def read_functions(tools: Sequence[Any], *, flat: bool = False) -> tuple[Function, ...]:
    """The functions of a request's tools.

    Args:
        flat: a function's fields are the tool's own, as in /v1/responses.

    Raises:
        RequestError: a tool is malformed or no function, or two have one name.
    """
    if len(tools) > _MOST:
        raise RequestError(f"There are {len(tools)} tools.", f"The limit is {_MOST}.", param="tools")
    functions = tuple(_function(tool, f"tools[{index}]", flat) for index, tool in enumerate(tools))
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"Two tools are named {name!r}.", "Give each its own.", param=f"tools[{index}]")
    return functions


def _function(tool: Any, where: str, flat: bool) -> Function:
    outer = Fields(tool, f"{where}.")
    kind = outer.text("type")
    if kind != "function":
        message = f"{where} is of type {kind!r}."
        raise RequestError(message, "Only functions can be called.", param=f"{where}.type", code="unsupported_tool")
    inner = outer if flat else outer.inner("function")
    if inner is None:
        raise outer.missing("function", "Give the function's name and parameters.")
    name = inner.text("name")
    if name is None or not _NAME.fullmatch(name):
        raise inner.wrong("name", name, "A name has up to 128 letters, digits, dots, slashes, colons, - and _.")
    parameters = inner.take("parameters", dict, "a JSON Schema, an object") or {"type": "object", "properties": {}}
    if parameters.get("type", "object") != "object":
        raise inner.wrong("parameters", parameters, "Its type must be object.")
    # Arguments are always what the schema allows, whether `strict` or not.
    inner.ignore("strict", "defer_loading", "allowed_callers")
    return Function(name, inner.text("description") or "", parameters if "type" in parameters else _typed(parameters))


def _typed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **parameters}
