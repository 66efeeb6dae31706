"""JSON Schemas of requests, read as other servers read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["closed"]

# Beside one of these an object's properties need not be all that it has.
_OPENING = (
    "additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties", "allOf", "anyOf", "oneOf",
    "$ref",
)  # fmt: skip
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with objects that name their properties having no others, unless it says that they may.

    By the standard they may have any others, of which small models make up one after another; llama.cpp's server and
    Ollama close them too. Every document of the result is one of the schema. One whose parts say together what an
    object has is left as it is.

    Args:
        schema: plain values of JSON, of bounded depth.
    """
    return dict(schema) if _combines(schema) else dict(_closed(schema))


def _combines(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_combines, value))
    if not isinstance(value, Mapping):
        return False
    several = isinstance(value.get("allOf"), list) and len(value["allOf"]) > 1
    beside = "properties" in value and any(keyword in value for keyword in ("allOf", "anyOf", "oneOf", "$ref"))
    return several or beside or any(map(_combines, value.values()))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, Mapping):
            made[keyword] = {name: _closed(each) for name, each in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            made[keyword] = list(map(_closed, value))
        else:
            made[keyword] = _closed(value) if keyword == "items" else value
    named, required = made.get("properties"), made.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list) or any(keyword in made for keyword in _OPENING):
        return made
    if all(name in named for name in required if isinstance(name, str)):
        made["additionalProperties"] = False
    return made
