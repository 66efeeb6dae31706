"""JSON Schemas made such that the grammar engine follows them to the letter, or refused by the keyword that it would
not. What the engine gets wrong was found by the official tests of JSON Schema (`tests/tools/json_schema_suite.py`)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any, NoReturn, TypeGuard
from urllib.parse import unquote

from edgeinfer.core.errors import GrammarError
from edgeinfer.runtime.sampling.grammar_patterns import FORMATS, translated, without_assertions
from edgeinfer.runtime.sampling.grammar_rewrites import (
    NEWEST,
    Neutral,
    SchemaDraft,
    content_pattern,
    decide_alternatives,
    draft_of,
    malformed,
)
from edgeinfer.runtime.sampling.grammar_tokens import NEXT_TO_ZERO

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OUTERMOST = 10**18  # bounds of 64-bit integers are taken for this, up to which the engine writes ranges
_WIDEST = 2**63 + 192  # the bound of such integers, also as JavaScript writes it
_DIGITS, _PLACES = 15, 22
_SPACING = 128  # at most, between doubles below 10**18
# Integers without a bound are kept within this, which every reader of JSON takes: small models do not stop writing
# digits. Not where a schema speaks of larger ones.
_MOST_INTEGER = 10**15
_LARGER = re.compile(r"\d{16}|\d[eE]\+?\d")
EXACT = 2**53  # up to which the engine's numbers have all integers


def refuse(what: str, hint: str) -> NoReturn:
    """Raises the error of a schema that cannot be followed; `what` begins with the keyword at fault and a colon."""
    raise GrammarError(f"json_schema cannot be used: {what}.", hint)


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def mend_numbers(schema: dict[str, Any]) -> None:
    """Writes numbers as the engine reads them, bounds not wider than they are."""
    for keyword in _COUNTS:
        value = schema.get(keyword)
        if isinstance(value, float) and value.is_integer():
            schema[keyword] = int(value)
    for (including, excluding), inward in ((LOWER, 1), (UPPER, -1)):
        value, without = schema.get(including), schema.get(excluding)
        bounds = [_bound(including, value, inward)]
        bounds.append(_bound(excluding, value if without is True else without, inward, excluded=True))
        known = [bound for bound in bounds if bound is not None]
        if known:
            schema.pop(excluding, None)
            bound = max(known, key=lambda bound: bound * inward)
            schema[including] = int(bound) if bound == int(bound) else float(bound)


def add_short_decimals(schema: dict[str, Any]) -> None:
    """Allows decimals with which a bound begins: the engine's range up to 1.55 has 1.50, but not 1.5."""
    if "number" not in schema.get("type", "number") or "const" in schema or "enum" in schema:
        return
    for keyword, far in (("maximum", 1), ("minimum", -1)):
        bound = schema.get(keyword)
        if not isinstance(bound, float) or bound * far <= 0 or not isinstance(schema.get("allOf", []), list):
            continue
        whole, _, decimals = format(Decimal(repr(bound)), "f").partition(".")
        beginnings = [
            float(f"{whole}.{decimals[:size]}") for size in range(1, len(decimals)) if decimals[size - 1] != "0"
        ]
        if beginnings:
            del schema[keyword]
            schema.setdefault("allOf", []).append({"anyOf": [{keyword: bound}, {"enum": beginnings}]})


def bound_integers(schema: dict[str, Any]) -> None:
    """Add bounds to integers that have none."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" not in kinds or "number" in kinds or "const" in schema or "enum" in schema:
        return
    schema.setdefault("minimum", -_MOST_INTEGER)
    schema.setdefault("maximum", _MOST_INTEGER)


def _bound(keyword: str, value: Any, inward: int, *, excluded: bool = False) -> Decimal | None:
    """A bound as the engine reads it without error, no further out; None where there is none. It reads decimals of up
    to `_DIGITS` digits, and integers that a double has; its ranges without their ends are not always without them, so
    that one that is excluded becomes the next one."""
    if not is_number(value):
        return None
    outer = -_OUTERMOST * inward
    if value * inward >= _OUTERMOST or abs(value) > _WIDEST:
        refuse(f"{keyword}: {value} is beyond 10**18", "Leave it out, or take a smaller number.")
    if value * inward < outer * inward:
        return Decimal(outer)
    exact = Decimal(str(value))
    if not exact:
        return exact if not excluded else NEXT_TO_ZERO * inward
    step = Decimal(_SPACING)
    if abs(exact) < EXACT:
        step = Decimal((0, (1,), min(0, max(exact.adjusted() - _DIGITS + 1, -_PLACES))))
    near = (exact / step).to_integral_value(ROUND_CEILING if inward > 0 else ROUND_FLOOR) * step
    return near + step * inward if excluded and near == exact else near


# Of all drafts since the fourth. Others are annotations, by the standard; one of these that neither the engine nor
# `FORMATS` has is refused.
_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4"}
)
_FORMATS |= {"ipv6", "uri", "uri-reference", "uri-template", "iri", "iri-reference", "uuid", "regex", "json-pointer"}
_FORMATS |= {"relative-json-pointer"}
_FOLLOWED = ("ipv4", "uri", "uuid")  # as the engine has them
# Left out, as a long text is tried in another process first (`grammar_trial`).
_INFORMING = ("title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly")
_DATA = ("const", "default", "enum", "examples")  # keywords whose values are no schemas
_SCHEMAS = ("additionalItems", "additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")
_OF_NAMES = ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties")
# What of a schema the engine must read together; it reads one part before `allOf` and its like, another behind.
_TOGETHER: tuple[tuple[str, ...], ...] = (
    ("properties", "patternProperties", "additionalProperties"),
    ("prefixItems", "items", "additionalItems"),
    LOWER,
    UPPER,
)
_NEXT_TO_REF = "By this draft nothing else counts there: put what it means under definitions."
_MOST_MULTIPLE = 2**32  # of the least common multiple of all that a schema asks for; the engine's wraps there
# Demands that the engine refuses, by its own words, where nothing above rewrites them.
_LACKING: tuple[str, ...] = ("$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired")
_LACKING += ("dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames", "then")
_LACKING += ("unevaluatedItems", "unevaluatedProperties", "uniqueItems")
_AT_FAULT = re.compile(r"json_schema cannot be used: (\$?\w+):")
# What JSON writes only by \u.
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def mended(schema: Mapping[str, Any], left_out: set[str] | None = None) -> dict[str, Any]:
    """A schema of the same documents that the engine follows. Keywords that cannot be followed are refused, or added to
    `left_out`: then more documents are allowed."""
    # Through its text, so that what stands in several places is mended in each, once.
    text = json.dumps(schema, allow_nan=False)
    root = json.loads(text)
    if left_out is not None and not _names_known_draft(root):
        left_out.add("$schema")
        del root["$schema"]
    bounded = _LARGER.search(text) is None  # `bound_integers` would leave larger ones out
    return _Document(root, bounds_integers=bounded, left_out=left_out).mended()


def _names_known_draft(root: dict[str, Any]) -> bool:
    try:
        draft_of(root)
    except GrammarError:
        return False
    return True


def has_open_escapes(schema: Mapping[str, Any]) -> bool:
    """Whether control characters, which JSON writes by \\u alone, may be in replies.

    They may where a mended schema has expressions for texts and says nothing of properties: by \\u their names have a
    second spelling, which would get past what is said of them.
    """
    names: set[str] = set()
    waiting: list[Any] = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            names.update(value)
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return "pattern" in names and names.isdisjoint(_OF_NAMES)


class _Document:
    """One schema, mended in place, each part once and only if it is of use."""

    def __init__(self, root: dict[str, Any], *, bounds_integers: bool, left_out: set[str] | None) -> None:
        self._root = root
        self._bounds_integers = bounds_integers
        self._left_out = left_out
        self._seen: set[int] = set()
        self._waiting: list[Any] = [root]
        self._multiple = Fraction(0)
        self._refers = self._moves_base = False
        self._draft = draft_of(root)
        self._neutral = Neutral(root, self._draft, _FORMATS)
        self._names_draft = isinstance(root.get("$schema"), str)

    def mended(self) -> dict[str, Any]:
        while self._waiting:
            schema = self._waiting.pop()
            if isinstance(schema, dict) and id(schema) not in self._seen:
                self._seen.add(id(schema))
                for keyword in [each for each in schema if self._draft.overrides(schema, each)]:
                    del schema[keyword]
                self._neutral.drop(schema)
                decide_alternatives(schema)
                self._loosen(schema, [*malformed(schema), *(each for each in _LACKING if each in schema)])
                self._waiting.extend(_inner(schema))
                self._mend_or_loosen(schema)
        if self._refers and self._moves_base:
            refuse("$ref: references together with $id inside of the schema", "Leave the inner $id out.")
        return self._root

    def _loosen(self, schema: dict[str, Any], keywords: Iterable[str]) -> None:
        """Leave out keywords that cannot be followed, if allowed."""
        if self._left_out is None:
            return
        for keyword in keywords:
            value = schema.pop(keyword)
            self._left_out.add(keyword)
            if keyword == "pattern" and isinstance(value, str) and (rest := without_assertions(value)) != value:
                schema["pattern"] = rest
            if keyword == "properties" and isinstance(value, dict):
                schema[keyword] = {
                    name: each if isinstance(each, dict | bool) else True for name, each in value.items()
                }
            elif keyword in ("properties", "patternProperties"):  # whose names would not be allowed
                schema.pop("additionalProperties", None)

    def _mend_or_loosen(self, schema: dict[str, Any]) -> None:
        """Mend a schema, without keywords that cannot be followed if allowed."""
        for _ in range(len(schema) + 2):
            before = {keyword: list(value) if isinstance(value, list) else value for keyword, value in schema.items()}
            try:
                self._mend(schema)
                return
            except GrammarError as error:
                found = _AT_FAULT.match(error.message)
                if self._left_out is None or found is None or found[1] not in before:
                    raise
                schema.clear()
                schema.update(before)
                self._loosen(schema, [found[1]])
        self._mend(schema)

    def _mend(self, schema: dict[str, Any]) -> None:
        self._check_base(schema)
        if isinstance(schema.get("$ref"), str):
            self._follow(schema["$ref"])
        if "additionalItems" in schema and "prefixItems" in schema:
            refuse("additionalItems: it is used with prefixItems", "Write items for what follows those.")
        for keyword in ("const", "enum"):
            if keyword in schema:
                _check_data(keyword, schema[keyword])
        mend_numbers(schema)
        if self._bounds_integers:
            bound_integers(schema)
        self._check_multiple(schema.get("multipleOf"))
        _check_properties(schema)
        _mend_texts(schema, self._draft)
        add_short_decimals(schema)
        names = schema.get("patternProperties")
        if isinstance(names, dict):
            schema["patternProperties"] = _mended_names(names)
        ordered = _ordered(schema)
        schema.clear()
        schema.update(ordered)

    def _check_base(self, schema: dict[str, Any]) -> None:
        draft, names_draft = draft_of(schema), isinstance(schema.get("$schema"), str)
        if draft is NEWEST:
            schema.pop("$schema", None)  # the engine's own choice where none is named
        elif names_draft:
            schema["$schema"] = draft.uri
        if schema is self._root:
            return
        bases = [schema.get(name) for name in self._draft.ids if not self._draft.overrides(schema, name)]
        self._moves_base = self._moves_base or any(isinstance(b, str) and not b.startswith("#") for b in bases)
        if names_draft and self._names_draft and draft is not self._draft:
            refuse("$schema: there is a second one", "Write all of the schema by one draft.")

    def _follow(self, reference: str) -> None:
        """Mend the target of a reference."""
        base, _, fragment = reference.partition("#")
        self._refers = self._refers or bool(fragment)
        own = next((str(self._root[name]) for name in self._draft.ids if name in self._root), "")
        if base and base != own.partition("#")[0]:
            refuse(f"$ref: {reference[:80]!r} is elsewhere", "Put that under $defs, and refer to '#/$defs/...'.")
        if not fragment.startswith("/"):
            self._waiting.extend(_called(self._root, fragment, self._draft))
            return
        value: Any = self._root
        is_map = False
        for part in unquote(fragment).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and not is_map:
                if name in (*_DATA, "patternProperties"):
                    refuse(f"$ref: {reference[:80]!r} leads through {name}", "Put what it means under $defs.")
                if self._draft.overrides(value, name):
                    refuse(f"$ref: {reference[:80]!r} leads through {name} next to another $ref", _NEXT_TO_REF)
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            elif isinstance(value, dict) and name in value:
                value = value[name]
            else:
                refuse(f"$ref: {reference[:80]!r} is not there", "Refer to a part of the schema.")
            is_map = name in _MAPS and not is_map
            if isinstance(value, dict) and not is_map:
                self._check_base(value)
        self._waiting.append(value)

    def _check_multiple(self, value: Any) -> None:
        if not is_number(value) or not value:
            return
        step = Fraction(str(abs(value)))
        both = Fraction(
            math.lcm(step.numerator * self._multiple.denominator, self._multiple.numerator * step.denominator),
            step.denominator * self._multiple.denominator,
        )
        both = both if self._multiple else step
        if both.numerator * 10 ** len(str(both.denominator)) >= _MOST_MULTIPLE:
            refuse("multipleOf: the least common multiple of all is too large", "Take numbers of fewer digits.")
        self._multiple = both


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    """List the subschemas that restrict a schema."""
    for keyword, value in schema.items():
        if keyword in _SCHEMAS and isinstance(value, dict):
            yield value
        elif keyword in _LISTS and isinstance(value, list):
            yield from value
        elif keyword in ("properties", "patternProperties") and isinstance(value, dict):
            yield from value.values()


def _called(root: Any, name: str, draft: SchemaDraft) -> Iterator[Any]:
    """List the parts of a document with this name."""
    waiting = [(root, False)] if name else []
    while waiting:
        value, is_map = waiting.pop()
        if isinstance(value, dict):
            anchors = (value.get("$anchor"), value.get("$dynamicAnchor"))
            if not is_map and (name in anchors or f"#{name}" in map(value.get, draft.ids)):
                yield value
            below = [keyword for keyword in value if is_map or keyword not in _DATA]
            waiting.extend((value[keyword], keyword in _MAPS and not is_map) for keyword in below)
        elif isinstance(value, list):
            waiting.extend((each, False) for each in value)


def _check_data(keyword: str, value: Any) -> None:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, str) and (found := _UNWRITTEN.search(part)):
            refuse(f"{keyword}: the character U+{ord(found[0]):04X} is not written in replies", "Leave it out.")
        elif is_number(part) and abs(part) > EXACT:
            refuse(f"{keyword}: {part} is beyond 2**53, where numbers are not exact", "Write it as a text.")


def _check_properties(schema: dict[str, Any]) -> None:
    """Refuse `minProperties` of open names: a name that occurs twice counts once."""
    least = schema.get("minProperties")
    required = schema.get("required")
    certain = len(set(map(str, required))) if isinstance(required, list) else 0
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if is_number(least) and least - certain > 1 and not closed:
        hint = "Name the properties, require them, and set additionalProperties to false; or ask for an array."
        refuse(f"minProperties: {least} of names that are open cannot be distinguished", hint)


def _mend_texts(schema: dict[str, Any], draft: SchemaDraft) -> None:
    """Write expressions, formats and encodings in the engine's notation."""
    pattern, kind = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str):
        schema["pattern"] = translated(pattern, "pattern")
    encoded = content_pattern(schema, draft)
    further = [] if encoded is None else [encoded]
    if isinstance(kind, str) and kind not in _FOLLOWED:
        del schema["format"]
        if kind in _FORMATS and kind not in FORMATS:
            refuse(f"format: {kind} is not supported", "Leave it out, or give a pattern.")
        further.extend(FORMATS.get(kind, ()))
    if further and "pattern" not in schema:
        schema["pattern"] = further.pop(0)
    if further and isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].extend({"pattern": each} for each in further)


def _mended_names(names: dict[str, Any]) -> dict[str, Any]:
    made = {translated(name, "patternProperties"): value for name, value in names.items()}
    if len(made) < len(names):
        refuse("patternProperties: two of its expressions are the same", "Put what they say into one, by allOf.")
    return made


def _ordered(schema: dict[str, Any]) -> dict[str, Any]:
    """Order the keywords so that those the engine reads together are adjacent; drop annotations."""
    ordered: dict[str, Any] = {}
    for keyword in schema:
        if keyword in _INFORMING:
            continue
        group = next((group for group in _TOGETHER if keyword in group), (keyword,))
        for name in group:
            if name in schema:
                ordered.setdefault(name, schema[name])
    return ordered
