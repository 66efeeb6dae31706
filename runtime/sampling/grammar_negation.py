"""`not` and `oneOf` of JSON Schemas in keywords that the grammar engine follows, where that can be decided.

The engine knows neither, but for alternatives that it sees to exclude each other. What a schema forbids is written as
what is left: of `required`, that one of the properties is absent; of `minLength`, shorter texts; and so on. Where any
keyword has no such opposite, nothing is changed, and the engine refuses the schema by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from edgeinfer.runtime.sampling.grammar_neutral import DEMANDING

Schema: TypeAlias = bool | dict[str, Any]

_TYPES = ("null", "boolean", "object", "array", "string", "number")
# What a keyword speaks of, its opposite, and by how much that is further.
_COUNTED: Mapping[str, tuple[str, str, int]] = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
_BOUNDED: Mapping[str, str] = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
# Alternatives, of which each is written with the opposites of all others, and parts of an opposite.
_MOST_ALTERNATIVES, _MOST_PARTS = 6, 64


def decide_alternatives(schema: dict[str, Any]) -> None:
    """Writes a schema's own `not` and `oneOf` in other keywords, in place; what cannot be decided stays."""
    if "not" in schema and (opposite := _opposite(schema["not"])) is not None:
        del schema["not"]
        _add(schema, opposite)
    alternatives = schema.get("oneOf")
    if isinstance(alternatives, list) and (one := _one_of(alternatives)) is not None:
        del schema["oneOf"]
        _add(schema, one)


def _add(schema: dict[str, Any], part: Schema) -> None:
    """Demands a further schema."""
    if part is not True and isinstance(parts := schema.setdefault("allOf", []), list):
        parts.append(part)


def _one_of(alternatives: list[Any]) -> Schema | None:
    """A schema of what exactly one of them allows; None where that is unknown, or the engine sees it itself."""
    possible = [each for each in alternatives if each is not False]
    if len(possible) == len(alternatives) and all(
        _exclude(one, two) for at, one in enumerate(possible) for two in possible[:at]
    ):
        return None
    if not 1 <= len(possible) <= _MOST_ALTERNATIVES:
        return None if possible else False
    opposites = [_opposite(each) for each in possible]
    if len(possible) > 1 and any(opposite is None for opposite in opposites):
        return None
    found = []
    for at, each in enumerate(possible):
        parts = [each, *(opposite for other, opposite in enumerate(opposites) if other != at)]
        if False not in [part for part in parts if isinstance(part, bool)]:
            found.append(_all([part for part in parts if part is not True and part is not None]))
    return _any(found)


def _exclude(one: Any, two: Any) -> bool:
    """Whether two schemas surely allow no document both: by their types."""
    if not (isinstance(one, dict) and isinstance(two, dict)):
        return False
    types = [_types(each) for each in (one, two)]
    return bool(types[0] and types[1]) and types[0].isdisjoint(types[1])


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows, integers among numbers; none where it says nothing of them."""
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    return {"number" if name == "integer" else name for name in names if isinstance(name, str)}


def _opposite(schema: Any) -> Schema | None:
    """A schema of what a schema does not allow; None where that cannot be written."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return None
    found: list[Schema] = []
    for keyword, value in schema.items():
        if keyword not in DEMANDING:
            continue
        part = _opposite_of(keyword, value)
        if part is None:
            return None
        found.append(part)
    return _any(found) if len(found) <= _MOST_PARTS else None


def _opposite_of(keyword: str, value: Any) -> Schema | None:
    """The same of one keyword."""
    if keyword == "type":
        return _other_types(value)
    if keyword == "not":
        return value if isinstance(value, bool | dict) else None
    if keyword in ("allOf", "anyOf") and isinstance(value, list):
        opposites = [_opposite(each) for each in value]
        known = [opposite for opposite in opposites if opposite is not None]
        if len(known) < len(opposites):
            return None
        return _any(known) if keyword == "allOf" else _all(known)
    if keyword == "required" and isinstance(value, list) and all(isinstance(name, str) for name in value):
        return _any([{"type": "object", "properties": {name: False}} for name in value])
    if keyword == "properties" and isinstance(value, dict):
        return _other_properties(value)
    if keyword in _COUNTED and isinstance(value, int) and not isinstance(value, bool):
        kind, other, further = _COUNTED[keyword]
        return {"type": kind, other: value + further} if value + further >= 0 else False
    if keyword in _BOUNDED and isinstance(value, int | float) and not isinstance(value, bool):
        return {"type": "number", _BOUNDED[keyword]: value}
    return None


def _other_types(value: Any) -> Schema | None:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) for name in names):
        return None
    # Numbers that are no integers have no schema.
    if "integer" in names and "number" not in names:
        return None
    left = [name for name in _TYPES if name not in names]
    return {"type": left} if left else False


def _other_properties(properties: Mapping[str, Any]) -> Schema | None:
    found: list[Schema] = []
    for name, schema in properties.items():
        opposite = _opposite(schema)
        if opposite is None:
            return None
        if opposite is not False:
            found.append({"type": "object", "properties": {name: opposite}, "required": [name]})
    return _any(found)


def _any(parts: list[Schema]) -> Schema:
    """What at least one of them allows."""
    if any(part is True for part in parts):
        return True
    left = [part for part in parts if part is not False]
    return False if not left else left[0] if len(left) == 1 else {"anyOf": left}


def _all(parts: list[Schema]) -> Schema:
    """What all of them allow."""
    if any(part is False for part in parts):
        return False
    left = [part for part in parts if part is not True]
    return True if not left else left[0] if len(left) == 1 else {"allOf": left}
