"""JSON Schemas in the keywords that the grammar engine follows.

Drafts of JSON Schema differ in what keywords mean; keywords that demand nothing are dropped, as clients write them by
the dozen (every `z.record()` of zod has `propertyNames: {"type": "string"}`); others say in rare words what the engine
knows by common ones; and `not` and `oneOf`, which the engine does not know, are written as what is left: of `required`,
that one of the properties is absent; of `minLength`, shorter texts. Where a keyword has no such opposite, nothing is
changed, and the engine refuses the schema by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, TypeGuard
from urllib.parse import unquote

from edgeinfer.core.errors import GrammarError
from edgeinfer.core.records import dataclass


@dataclass(frozen=True)
class SchemaDraft:
    number: int  # of the draft, or the year of those since the seventh
    uri: str  # of its own schema, as the grammar engine knows it, by which it tells what keywords there are
    ids: tuple[str, ...] = ("$id",)  # keywords that name a schema
    # `$ref` makes a reference of an object whose other keywords say nothing (draft 7, core, 8.3).
    lone_ref: bool = False
    # `contentEncoding` and `contentMediaType` may be assertions (draft 7, validation, 8), which later drafts forbid and
    # earlier ones do not know.
    checks_content: bool = False

    @property
    def recent(self) -> bool:
        """Whether the draft has the keywords of 2019."""
        return self.number >= 2019

    def overrides(self, schema: Mapping[str, Any], keyword: str) -> bool:
        """Whether a keyword is ignored because the schema has a `$ref`."""
        return self.lone_ref and keyword in _OVERRIDDEN and isinstance(schema.get("$ref"), str)


NEWEST = SchemaDraft(2020, "https://json-schema.org/draft/2020-12/schema")
_DRAFTS: Mapping[str, SchemaDraft] = {
    "draft-04": SchemaDraft(4, "http://json-schema.org/draft-04/schema#", ids=("id", "$id"), lone_ref=True),
    "draft-06": SchemaDraft(6, "http://json-schema.org/draft-06/schema#", lone_ref=True),
    "draft-07": SchemaDraft(7, "http://json-schema.org/draft-07/schema#", lone_ref=True, checks_content=True),
    "draft/2019-09": SchemaDraft(2019, "https://json-schema.org/draft/2019-09/schema"),
    "draft/2020-12": NEWEST,
}
_URI = re.compile(r"https?://json-schema\.org/(draft[-/][\d-]+)/(?:hyper-)?schema#?")
# Keywords that demand something. Others may stay: references lead through some.
_OVERRIDDEN = frozenset(
    {"$id", "id", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "contains", "contentEncoding"}
)
_OVERRIDDEN |= {"contentMediaType", "dependencies", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "format"}
_OVERRIDDEN |= {"if", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minimum"}
_OVERRIDDEN |= {"minProperties", "multipleOf", "not", "oneOf", "pattern", "patternProperties", "properties", "then"}
_OVERRIDDEN |= {"propertyNames", "required", "type", "uniqueItems"}
# As encoders write it: RFC 4648, section 4, with padding, of which the bits that stand for nothing are 0 (3.5).
_BASE64 = "^(?:[0-9A-Za-z+/]{4})*(?:[0-9A-Za-z+/][AQgw]==|[0-9A-Za-z+/]{2}[AEIMQUYcgkosw048]=)?$"
# Of which every text is a document.
_ANY_TEXT = ("text/plain", "text/markdown")


def draft_of(schema: Mapping[str, Any]) -> SchemaDraft:
    """The draft that a schema names; the newest where it names none."""
    uri = schema.get("$schema")
    if not isinstance(uri, str):
        return NEWEST
    found = _URI.fullmatch(uri)
    if found is None or found[1] not in _DRAFTS:
        hint = "Name draft-04, -06, -07, 2019-09 or 2020-12 by its full address, or leave $schema out for the last."
        raise GrammarError(f"json_schema cannot be used: $schema: {uri[:80]!r} is not supported.", hint)
    return _DRAFTS[found[1]]


def content_pattern(schema: Mapping[str, Any], draft: SchemaDraft) -> str | None:
    """The expression of the texts that a schema's content keywords allow; None if all."""
    encoding, kind = schema.get("contentEncoding"), schema.get("contentMediaType")
    if not draft.checks_content:
        return None
    hint = "Leave it out, or $schema: by the newest draft it describes texts and demands nothing."
    if isinstance(kind, str) and (encoding is not None or kind.partition(";")[0].strip().lower() not in _ANY_TEXT):
        raise GrammarError(f"json_schema cannot be used: contentMediaType: {kind[:80]!r} is not supported.", hint)
    if not isinstance(encoding, str):
        return None
    if encoding.lower() != "base64":
        raise GrammarError(f"json_schema cannot be used: contentEncoding: {encoding[:80]!r} is not supported.", hint)
    return _BASE64


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
    """Removes keywords without effect from one document; other `formats` than these are annotations."""

    def __init__(self, root: Any, draft: SchemaDraft, formats: frozenset[str]) -> None:
        self._root, self._draft, self._formats = root, draft, formats
        self._seen: set[int] = set()
        self._followed: list[str] = []  # references on the way to what is looked at

    def drop(self, schema: Any) -> None:
        """Drop neutral keywords from a schema and everything inside it, in place."""
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
        """Apply `_asks_nothing` to a keyword about one type."""
        match keyword:
            case "minLength" | "minItems" | "minProperties":
                return _is_count(value) and value <= 0
            case "required" | "dependentRequired":
                return isinstance(value, list | dict) and not any(value.values() if isinstance(value, dict) else value)
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
        """Replace a `contains` that every item satisfies by a number of items."""
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


def _types(given: Any) -> frozenset[str]:
    """The types that `type` allows, integers among numbers; all where it says nothing that is known."""
    names = given if isinstance(given, list) else [given]
    found = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    return frozenset(found) if found and found <= _TYPES else _TYPES


def _covered(given: Any) -> frozenset[str]:
    names = given if isinstance(given, list) else [given]
    return frozenset(name for name in names if isinstance(name, str))


Schema: TypeAlias = bool | dict[str, Any]

_NEGATED_TYPES = ("null", "boolean", "object", "array", "string", "number")
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
    types = [_named_types(each) for each in (one, two)]
    return bool(types[0] and types[1]) and types[0].isdisjoint(types[1])


def _named_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows, integers among numbers; none where it says nothing of them."""
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    return {"number" if name == "integer" else name for name in names if isinstance(name, str)}


def _opposite(schema: Any) -> Schema | None:
    """Write the opposite of a schema; None where that is impossible."""
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
    """Write the opposite of one keyword."""
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
    left = [name for name in _NEGATED_TYPES if name not in names]
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
    """Build a schema that allows what any part allows."""
    if any(part is True for part in parts):
        return True
    left = [part for part in parts if part is not False]
    return False if not left else left[0] if len(left) == 1 else {"anyOf": left}


def _all(parts: list[Schema]) -> Schema:
    """Build a schema that allows what all parts allow."""
    if any(part is False for part in parts):
        return False
    left = [part for part in parts if part is not True]
    return True if not left else left[0] if len(left) == 1 else {"allOf": left}
