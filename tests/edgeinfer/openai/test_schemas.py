"""How schemas of requests are read: objects have the properties that are named, where nothing speaks for others."""

from __future__ import annotations

from typing import Any

from edgeinfer.openai.schemas import closed

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CLOSED = {**NAMED, "additionalProperties": False}
WIDER: dict[str, Any] = {**NAMED, "properties": {"a": {"type": "string"}, "b": {}}, "required": ["a", "b"]}
OTHER: dict[str, Any] = {"type": "object", "properties": {"b": {}}, "required": ["b"]}
LONG = {**OTHER, "examples": [{}] * 700}
CAT, DOG = (
    {"type": "object", "properties": {"kind": {"const": kind}, "a": {}}, "required": ["kind"]}
    for kind in ("cat", "dog")
)


def test_objects_have_the_properties_that_they_name() -> None:
    for schema, expected in (
        (NAMED, CLOSED),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": CLOSED}),
        ({"$defs": {"n": NAMED}, "$ref": "#/$defs/n"}, {"$defs": {"n": CLOSED}, "$ref": "#/$defs/n"}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
    ):
        assert closed(schema) == expected
    # Words that say nothing.
    words: dict[str, Any] = {"minProperties": 0, "allOf": [], "patternProperties": {}, "$ref": None, "anyOf": None}
    for idle in ({word: value} for word, value in words.items()):
        assert closed({**NAMED, **idle}) == {**NAMED, **idle, **CLOSED}
    for schema in (
        {**NAMED, "additionalProperties": {"type": "string"}},
        {**NAMED, "unevaluatedProperties": {}},
        {**NAMED, "required": ["a", "b"]},
        {**NAMED, "anyOf": [{"properties": {"b": {}}}]},
        {"allOf": [NAMED, {"properties": {"b": {}}}]},
        {"$defs": {"n": NAMED}, "properties": {"b": {}}, "$ref": "#/$defs/n"},
        {"type": "object"},
    ):
        assert closed(schema) == schema


def test_one_of_is_closed_where_no_document_of_two_alternatives_becomes_one_of_one() -> None:
    end = {"additionalProperties": False}
    for schema, expected in (
        ({"oneOf": [NAMED, {"type": "null"}]}, {"oneOf": [CLOSED, {"type": "null"}]}),
        ({"oneOf": [NAMED, OTHER]}, {"oneOf": [CLOSED, OTHER | end]}),
        ({"oneOf": [CAT, DOG]}, {"oneOf": [CAT | end, DOG | end]}),
        (
            {
                "$defs": {"cat": CAT, "dog": DOG},
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog", "title": "D"}],
            },
            {
                "$defs": {"cat": CAT | end, "dog": DOG | end},
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog", "title": "D"}],
            },
        ),
    ):
        assert closed(schema) == expected
    # A document of a and b fits both alternatives, so it is none of the schema.
    for alternatives in (
        [NAMED, WIDER],
        [NAMED, {**OTHER, "properties": {"a": {}, "b": {}}}],
        [{"$ref": "#/$defs/n"}, WIDER],
        [CAT, {**DOG, "properties": {"kind": {"enum": ["dog", "cat"]}}}],
        [{"type": "array", "items": NAMED}, {"type": "array", "items": WIDER}],
        # What is required is no text.
        [NAMED, {**OTHER, "required": [{}]}],
        # So many, or so large, that comparing them would take minutes.
        [{"$ref": "#/$defs/long"}] * 250,
        [{**NAMED, "required": ["a", str(number)], "properties": {"a": {"const": number}}} for number in range(5000)],
    ):
        whole = {"$defs": {"n": NAMED, "long": LONG}, "type": "object", "properties": {"c": {"oneOf": alternatives}}}
        assert closed(whole) == whole
    # Drafts before 2019-09 leave out keywords by which alternatives are told apart.
    for draft in ("https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-04/schema#"):
        dated = {"$schema": draft, "oneOf": [CAT, DOG]}
        assert (closed(dated) == dated) == ("04" in draft)
