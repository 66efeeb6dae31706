"""How schemas of requests are read: objects have the properties that are named, where nothing speaks for others."""

from __future__ import annotations

from typing import Any

from edgeinfer.openai.schemas import closed

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CLOSED = {**NAMED, "additionalProperties": False}


def test_objects_have_the_properties_that_they_name() -> None:
    for schema, expected in (
        (NAMED, CLOSED),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": CLOSED}),
        ({"$defs": {"n": NAMED}, "$ref": "#/$defs/n"}, {"$defs": {"n": CLOSED}, "$ref": "#/$defs/n"}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
    ):
        assert closed(schema) == expected
    for schema in (
        {**NAMED, "additionalProperties": {"type": "string"}},
        {**NAMED, "required": ["a", "b"]},
        {**NAMED, "anyOf": [{"properties": {"b": {}}}]},
        {"allOf": [NAMED, {"properties": {"b": {}}}]},
        {"$defs": {"n": NAMED}, "properties": {"b": {}}, "$ref": "#/$defs/n"},
        {"type": "object"},
    ):
        assert closed(schema) == schema
