"""Functions that tests offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.openai.dialects import Kinds, ToolFormat
from edgeinfer.openai.tools import ToolFunction

WEATHER = ToolFunction(
    "get_weather",
    "The weather of a town.",
    {
        "type": "object",
        "properties": {
            "town": {"type": "string", "maxLength": 12},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["town", "unit"],
    },
)
CLOCK = ToolFunction(
    "time.of",
    "",
    {
        "type": "object",
        "properties": {"zone": {"$ref": "#/$defs/zone"}},
        "required": ["zone"],
        "$defs": {"zone": {"enum": ["Europe/Oslo", 'a "quoted" {zone}]', "Ω"]}},
    },
)


KINDS = Kinds({function.name: function.parameters for function in (WEATHER, CLOCK)})


def as_tools(*functions: ToolFunction) -> list[dict[str, Any]]:
    """As chat completions offer them."""
    return [function.as_tool() for function in functions]


def flat(*functions: ToolFunction) -> list[dict[str, Any]]:
    """As responses offer them."""
    return [{"type": "function", **tool["function"]} for tool in as_tools(*functions)]


def written(form: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The text of calls, each a name and arguments."""
    return form.write(calls, KINDS).removesuffix("<|call|>")
