"""Keywords of JSON Schemas that demand nothing with the value that they have, which are dropped, and others that say in
rare words what the grammar engine knows by common ones.

Clients write such words by the dozen: every `z.record()` of zod has `propertyNames: {"type": "string"}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard
from urllib.parse import unquote

from edgeinfer.runtime.sampling.grammar_drafts import SchemaDraft

_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "string": (
        "minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType", "contentSchema"
    ),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": (
        "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains",
        "minItems", "maxItems", "uniqueItems",
    ),
    "object": (
        "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames", "required",
        "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    ),
}  # fmt: skip
_TYPE_OF = {keyword: kind for kind, keywords in _OF_TYPE.items() for keyword in keywords}
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "$recursiveRef")
# All that says which documents there are; other words are annotations, of the standard or of somebody's own.
DEMANDING = frozenset({"type", "const", "enum", *_IN_PLACE, *_TYPE_OF})
_DATA = ("const", "default", "enum", "examples")  # keywords whose values are no schemas
# As the engine takes these well, or references lead through them, they stay even if they demand nothing.
_KEPT = frozenset(
    {"type", "$ref", "anyOf", "oneOf", "items", "prefixItems", "additionalItems", "properties", "patternProperties",
     "additionalProperties"}
)  # fmt: skip
_ANNOTATIONS = ("contentSchema", "$vocabulary", "$recursiveAnchor")  # which the engine takes for demands
_EVERY_TEXT = frozenset({"", ".*", "^", "$", "^.*", ".*$", r"[\s\S]*", r"^[\s\S]*", r"^[\s\S]*$", r"^[^]*$", "(?:)"})
_SCHEMAS: tuple[str, ...] = ("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if")
_SCHEMAS += ("items", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")


def subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that keywords of one hold, whether they are of use or not."""
    for keyword, value in schema.items():
        if keyword in _SCHEMAS and isinstance(value, dict):
            yield value
        elif keyword in _LISTS and isinstance(value, list):
            yield from value
        elif keyword in _MAPS and isinstance(value, dict):
            yield from value.values()


def malformed(schema: Mapping[str, Any]) -> list[str]:
    """Keywords of a schema with values that no draft gives them."""
    return [keyword for keyword, value in schema.items() if not _is_formed(keyword, value)]


def _is_formed(keyword: str, value: Any) -> bool:
    match keyword:
        case "type":
            names = value if isinstance(value, list) else [value]
            return bool(names) and all(name in (*_TYPES, "integer") for name in names)
        case "pattern" | "format" | "$ref":
            return isinstance(value, str)
        case "allOf" | "anyOf" | "oneOf" | "enum":
            return isinstance(value, list) and bool(value)
        case "required":
            return isinstance(value, list) and all(isinstance(name, str) for name in value)
        case "properties" | "patternProperties":
            return isinstance(value, dict) and all(isinstance(each, dict | bool) for each in value.values())
        case "items" | "additionalItems" | "additionalProperties":
            return isinstance(value, dict | bool | list)
    counts = keyword in _OF_TYPE["number"] or keyword.startswith(("min", "max"))
    return not (counts and keyword in DEMANDING) or isinstance(value, int | float)


class Neutral:
    """Takes words without effect out of the parts of one document.

    Args:
        root: the document, in which references are looked up.
        draft: that it is by.
        formats: that are checked; others are annotations.
    """

    def __init__(self, root: Any, draft: SchemaDraft, formats: frozenset[str]) -> None:
        self._root, self._draft, self._formats = root, draft, formats
        self._seen: set[int] = set()
        self._followed: list[str] = []  # references on the way to what is looked at

    def drop(self, schema: Any) -> None:
        """Drops them from a schema and from all inside it, in place, each once."""
        waiting = [schema]
        while waiting:
            part = waiting.pop()
            if isinstance(part, dict) and id(part) not in self._seen:
                self._seen.add(id(part))
                self._drop(part)
                waiting.extend(subschemas(part))

    def _drop(self, schema: dict[str, Any]) -> None:
        for keyword in [each for each in schema if schema[each] is None and each not in _DATA]:
            del schema[keyword]  # as serializers write what is not set
        kinds = _types(schema.get("type"))
        open_ended = any(
            name in schema and not self._asks_nothing(name, schema, kinds)
            for name in ("unevaluatedProperties", "unevaluatedItems")
        )  # which depend on what other words say of names and items, though that be nothing
        if not open_ended:
            self._rewrite_contains(schema)
        for keyword in [each for each in schema if each in DEMANDING or each in _ANNOTATIONS]:
            kept = (keyword in _KEPT and schema[keyword] not in (True, {})) or (
                open_ended and keyword in (*_IN_PLACE, "contains", "dependentSchemas")
            )
            if not kept and self._asks_nothing(keyword, schema, kinds):
                del schema[keyword]
        if open_ended:
            self._close(schema)
        if isinstance(schema.get("propertyNames"), dict):
            self._rewrite_names(schema)

    def _allows_all(self, schema: Any, kinds: frozenset[str] = _TYPES) -> bool:
        """Whether every document of some types surely is one of a schema."""
        if not isinstance(schema, dict):
            return schema is True
        return all(self._asks_nothing(keyword, schema, kinds) for keyword in schema)

    def _asks_nothing(self, keyword: str, schema: Mapping[str, Any], kinds: frozenset[str]) -> bool:
        """Whether every document of some types surely has what one keyword of a schema asks for."""
        value, kind = schema[keyword], _TYPE_OF.get(keyword)
        if keyword not in DEMANDING or (kind is not None and kind not in kinds):
            return True
        if value is None:
            return keyword != "const"
        if kind is not None:
            return self._asks_nothing_of(kind, keyword, value, schema)
        match keyword:
            case "type":
                return kinds <= _covered(value)
            case "allOf":
                return isinstance(value, list) and all(self._allows_all(each, kinds) for each in value)
            case "anyOf":
                return isinstance(value, list) and any(self._allows_all(each, kinds) for each in value)
            case "not":
                return value is False
            case "if":
                return all(self._allows_all(schema.get(word, True), kinds) for word in ("then", "else"))
            case "then" | "else":
                return "if" not in schema or self._allows_all(value, kinds)
            case "$ref" if isinstance(value, str) and value not in self._followed:
                self._followed.append(value)
                allows = self._allows_all(self._target(value), kinds)
                self._followed.pop()
                return allows
        return False

    def _asks_nothing_of(self, kind: str, keyword: str, value: Any, schema: Mapping[str, Any]) -> bool:
        """The same of a keyword that speaks of one type."""
        match keyword:
            case "minLength" | "minItems" | "minProperties":
                return _is_count(value) and value <= 0
            case "required" | "dependentRequired":
                return not any(value.values() if isinstance(value, dict) else value) if _is_group(value) else False
            case "properties" | "patternProperties" | "dependentSchemas" | "dependencies":
                each_one = list(value.values()) if isinstance(value, dict) else [False]
                return all(each == [] or self._allows_all(each) for each in each_one)
            case "uniqueItems":
                most = schema.get("maxItems")
                return value is False or (_is_count(most) and most <= 1)
            case "minContains" | "maxContains":
                return "contains" not in schema or self._asks_nothing("contains", schema, frozenset({kind}))
            case "contains":
                return self._draft.recent and schema.get("minContains") == 0 and "maxContains" not in schema
            case "propertyNames":
                return self._allows_all(value, frozenset({"string"}))
            case "unevaluatedProperties" if "additionalProperties" in schema:
                return True
            case "unevaluatedItems" if isinstance(schema.get("items"), dict | bool):
                return True
            case "pattern":
                return isinstance(value, str) and value in _EVERY_TEXT
            case "format":
                return isinstance(value, str) and value not in self._formats
            case "contentSchema":
                return True
            case "contentEncoding" | "contentMediaType":
                return not self._draft.checks_content
            case "exclusiveMinimum" | "exclusiveMaximum":
                return value is False or (value is True and keyword.replace("exclusiveM", "m") not in schema)
        items = value if isinstance(value, list) else [value]
        return keyword in (*_LISTS, *_SCHEMAS) and all(map(self._allows_all, items))

    def _target(self, reference: str) -> Any:
        """What a reference leads to; False where that is unknown."""
        if not reference.startswith("#"):
            return False
        value = self._root
        for part in unquote(reference[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            value = value.get(name, False) if isinstance(value, dict) else False
        return value if reference == "#" or reference.startswith("#/") else False

    def _rewrite_contains(self, schema: dict[str, Any]) -> None:
        """`contains` of what every item is counts the items."""
        if "contains" not in schema or self._draft.number < 6 or not self._allows_all(schema["contains"]):
            return
        least, most = 1, None
        if self._draft.recent:
            least, most = schema.get("minContains", 1), schema.get("maxContains")
        if not _is_count(least) or not (most is None or _is_count(most)):
            return
        for keyword in ("contains", "minContains", "maxContains"):
            schema.pop(keyword, None)
        for keyword, bound, closer in (("minItems", least, max), ("maxItems", most, min)):
            if bound is not None:
                given = schema.get(keyword)
                schema[keyword] = closer(bound, given) if _is_count(given) else bound

    def _close(self, schema: dict[str, Any]) -> None:
        """`unevaluatedProperties` is `additionalProperties` where no other schema speaks of the same object."""
        others = (*_IN_PLACE, "dependentSchemas", "additionalProperties")
        if self._draft.recent and "unevaluatedProperties" in schema and schema.keys().isdisjoint(others):
            schema["additionalProperties"] = schema.pop("unevaluatedProperties")

    def _rewrite_names(self, schema: dict[str, Any]) -> None:
        """`propertyNames` by a list of names, an expression or lengths, in keywords that name properties."""
        if self._draft.number < 6 or "unevaluatedProperties" in schema:
            return
        names, rest = schema["propertyNames"], schema.get("additionalProperties", True)
        for _ in range(_MOST_HOPS):
            if not isinstance(names, dict) or "$ref" not in names:
                break
            names = self._target(str(names["$ref"])) if names.keys() <= {"$ref", "title", "description"} else False
        if not isinstance(names, dict):
            return
        said = {word: value for word, value in names.items() if word in DEMANDING}
        if said.get("type") == "string":
            del said["type"]
        known, expressions = schema.get("properties", {}), schema.get("patternProperties", {})
        listed = [said["const"]] if said.keys() == {"const"} else said.get("enum") if said.keys() == {"enum"} else None
        if isinstance(listed, list) and isinstance(known, dict) and not expressions:
            allowed = [name for name in listed if isinstance(name, str)]
            named = {name: value if name in allowed else False for name, value in known.items()}
            schema["properties"] = named | {name: rest for name in allowed if name not in known}
        elif (pattern := _pattern(said)) is not None and not known and not expressions:
            schema["patternProperties"] = {pattern: rest}
        else:
            return
        schema["additionalProperties"] = False
        del schema["propertyNames"]


_MOST_HOPS = 8


def _pattern(said: Mapping[str, Any]) -> str | None:
    """An expression of the texts that a schema's keywords allow; None where these are others."""
    if said.keys() == {"pattern"} and isinstance(said["pattern"], str):
        return said["pattern"]
    least, most = said.get("minLength", 0), said.get("maxLength")
    if said.keys() <= {"minLength", "maxLength"} and _is_count(least) and (most is None or _is_count(most)):
        return rf"^[\s\S]{{{int(least)},{'' if most is None else int(most)}}}$"
    return None


def _is_count(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)


def _is_group(value: Any) -> bool:
    return isinstance(value, list | dict)


def _types(given: Any) -> frozenset[str]:
    """The types that `type` allows, integers among numbers; all where it says nothing that is known."""
    names = given if isinstance(given, list) else [given]
    found = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    return frozenset(found) if found and found <= _TYPES else _TYPES


def _covered(given: Any) -> frozenset[str]:
    """The types of which it allows all documents."""
    names = given if isinstance(given, list) else [given]
    return frozenset(name for name in names if isinstance(name, str))
