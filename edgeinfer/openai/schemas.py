"""JSON Schemas of requests, read as other servers read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

__all__ = ["closed"]

# Beside one of these an object's properties need not be all that it has.
_OPENING = (
    "additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties", "allOf", "anyOf", "oneOf",
    "$ref",
)  # fmt: skip
_MAPS = ("properties", "$defs", "definitions")
# What may stand beside a reference that is followed here.
_BESIDE = frozenset({"$ref", "title", "description", "default", "examples"})
_MOST_HOPS, _MOST_STEPS = 8, 300_000
_LISTS = ("anyOf", "oneOf", "prefixItems")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with objects that name their properties having no others, unless it says that they may.

    By the standard they may have any others, of which small models make up one after another; llama.cpp's server and
    Ollama close them too. Every document of the result is one of the schema. One whose parts say together what an
    object has is left as it is, and so is one with a `oneOf` of which a document that two alternatives allow would fit
    but one of them when it is closed.

    Args:
        schema: plain values of JSON, of bounded depth.
    """
    return dict(schema) if _combines(schema) or _blurs(schema) else dict(_closed(schema))


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


def _blurs(schema: Mapping[str, Any]) -> bool:
    """Whether closing may change which documents fit exactly one alternative of a `oneOf`."""
    parts = list(_parts(schema))
    found = [part["oneOf"] for part in parts if isinstance(part.get("oneOf"), list)]
    if sum(map(len, found)) * len(parts) > _MOST_STEPS:
        return True
    pairs = (permutations([_target(each, schema) for each in alternatives], 2) for alternatives in found)
    return any(_is_closed_by(two) and not _excludes(one, two) for each in pairs for one, two in each)


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """All objects of JSON inside of a value, itself included; without recursion, as a caller's may be deep."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield part
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def _target(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a reference to `$defs` leads to, if it stands alone but for what informs; other schemas as they are."""
    for _ in range(_MOST_HOPS):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            break
        start, _, name = reference.rpartition("/")
        parts = root.get(start.removeprefix("#/"))
        if not schema.keys() <= _BESIDE or not isinstance(parts, Mapping) or name not in parts:
            break
        schema = parts[name]
    return schema


def _is_closed_by(schema: Any) -> bool:
    """Whether closing may leave fewer documents of a schema."""
    return any("properties" in part or "$ref" in part for part in _parts(schema))


def _excludes(one: Any, two: Any) -> bool:
    """Whether surely no document of a schema, when it is closed, is one of another as that stands."""
    if not (isinstance(one, Mapping) and isinstance(two, Mapping)) or "$ref" in one or "$ref" in two:
        return False
    types = [_types(each) for each in (one, two)]
    if types[0] and types[1] and types[0].isdisjoint(types[1]):
        return True
    made = _closed(one)
    named, others = made.get("properties"), two.get("properties")
    if {"object"} not in types or not isinstance(named, Mapping):
        return False
    required = [_listed(each.get("required")) for each in (one, two)]
    ends = made.get("additionalProperties") is False and "patternProperties" not in made
    if ends and any(name not in named for name in required[1]):
        return True
    if not isinstance(others, Mapping):
        return False
    certain = [name for name in named if name in others and (name in required[0] or name in required[1])]
    return any(_differ(_values(named[name]), _values(others[name])) for name in certain)


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows, integers among numbers; none where it says nothing of them."""
    return {"number" if name == "integer" else name for name in _listed(schema.get("type")) if isinstance(name, str)}


def _values(schema: Any) -> list[Any]:
    """What a schema lists; nothing where it lists nothing."""
    if not isinstance(schema, Mapping):
        return []
    return [schema["const"]] if "const" in schema else _listed(schema.get("enum"))


def _differ(one: list[Any], two: list[Any]) -> bool:
    return bool(one and two) and not any(value in two for value in one)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
