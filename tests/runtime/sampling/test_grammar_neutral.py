"""Words of JSON Schemas that demand nothing change nothing: not what is taken, and not what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.errors import GrammarError
from edgeinfer.runtime.sampling.grammar_schema import mended
from tests.runtime.sampling.json_texts import Schema, accepts, follow
from tests.runtime.sampling.test_drawn_schemas import SCHEMAS

pytest.importorskip("llguidance")

ANY: list[Any] = [True, {}, {"title": "any", "x-of-mine": 1}, {"allOf": [{}, True]}, {"anyOf": [{"type": "null"}, {}]}]
ANY += [{"type": ["null", "boolean", "object", "array", "string", "number"]}, {"$ref": "#/$defs/any"}, {"if": False}]
TEXTS: list[Any] = [*ANY, {"type": "string"}, {"type": ["string", "null"]}, {"minLength": 0}, {"pattern": ".*"}]
TEXTS += [
    {"type": "string", "format": "of-mine", "minimum": 3},
    {"$ref": "#/$defs/text"},
    {"allOf": [{"type": "string"}]},
]
DEFS = {
    "any": {"description": "anything"},
    "text": {"type": "string", "title": "Name"},
    "loop": {"$ref": "#/$defs/loop"},
}
# What may be written into every schema, and changes none.
EVERYWHERE: list[Schema] = [
    *({"propertyNames": each} for each in TEXTS),
    *({"unevaluatedProperties": each} for each in ANY),
    *({"unevaluatedItems": each} for each in ANY),
    *({"allOf": [each]} for each in ANY),
    *({"dependentSchemas": {"a": each}} for each in ANY[:3]),
    *({"dependencies": {"a": each}} for each in (*ANY[:3], [])),
    *({"contains": each, "minContains": 0} for each in (*ANY[:3], {"type": "null"}, {"format": "iri"}, False)),
    *({"if": each} for each in (*ANY[:3], False, {"type": "null"}, {"uniqueItems": True})),
    *({"then": each, "else": each} for each in (*ANY[:3], False, {"type": "null"})),
    *({"if": {"type": "null"}, "then": each} for each in ANY),
    *({"if": {"type": "null"}, "then": each, "else": each} for each in ANY[:3]),
    {"dependentSchemas": {}}, {"dependencies": {}}, {"dependentRequired": {}}, {"dependentRequired": {"a": []}},
    {"allOf": []}, {"not": False}, {"uniqueItems": False}, {"minContains": 2}, {"maxContains": 1, "minContains": 3},
    {"minLength": 0}, {"minLength": 0.0}, {"minItems": 0}, {"minProperties": 0}, {"required": []}, {"properties": {}},
    {"patternProperties": {}}, {"pattern": ""}, {"pattern": ".*"}, {"pattern": r"^[\s\S]*$"}, {"format": "of-mine"},
    {"format": ""}, {"exclusiveMinimum": False}, {"exclusiveMaximum": False}, {"contentEncoding": "base64"},
    {"contentMediaType": "application/json", "contentSchema": {"type": "array", "uniqueItems": True}},
    {"title": "A"}, {"description": "b"}, {"$comment": "c"}, {"default": 7}, {"examples": [1]}, {"example": 1},
    {"deprecated": True}, {"readOnly": True}, {"writeOnly": True}, {"nullable": False}, {"x-order": 3},
    {"$anchor": "z"},
    {"$vocabulary": {"https://x/y": True}}, {"discriminator": {"propertyName": "a"}}, {"externalDocs": {"url": "u"}},
    {"const_": 1}, {"divisibleBy": 2}, {"$recursiveAnchor": True},
    *({keyword: None} for keyword in (
        "type", "enum", "properties", "required", "items", "additionalProperties", "anyOf", "allOf", "oneOf", "not",
        "$ref", "pattern", "format", "minimum", "maximum", "multipleOf", "minLength", "maxItems", "uniqueItems",
        "propertyNames", "default", "description", "$schema", "$defs",
    )),
]  # fmt: skip
# Words of one type where a schema is of another.
ELSEWHERE: dict[str, Schema] = {
    "string": {"minLength": 3, "maxLength": 1, "pattern": "(?=a)", "format": "iri"},
    "number": {"minimum": 5, "maximum": 1, "multipleOf": 7, "exclusiveMinimum": 10**30},
    "array": {"minItems": 2, "maxItems": 1, "uniqueItems": True, "contains": {"type": "null"}},
    "object": {"minProperties": 7, "propertyNames": {"format": "iri"}, "dependentRequired": {"a": ["b"]},
               "required": ["z"], "unevaluatedProperties": False, "dependentSchemas": {"a": False}},
}  # fmt: skip
BASES: dict[str, Schema] = {
    "string": {"type": "string", "maxLength": 4},
    "number": {"type": "integer", "minimum": -2, "maximum": 40},
    "array": {"type": "array", "items": {"type": "null"}, "maxItems": 2},
    "object": {"type": "object", "additionalProperties": {"type": "boolean"}},
}
TAKEN = {"string": ['"a"', '"abcd"'], "number": ["7", "-2"], "array": ["[]", "[null]"], "object": ["{}", '{"a": true}']}
OTHERS = ['"abcde"', "41", "[1]", '{"a": 1}', "null", "1.5"]
NESTED: list[Callable[[Schema], Schema]] = [
    lambda inner: inner,
    lambda inner: {"type": "object", "properties": {"p": inner}, "required": ["p"], "additionalProperties": False},
    lambda inner: {"type": "array", "items": inner},
    lambda inner: {"type": "array", "prefixItems": [{"type": "null"}, inner]},
    lambda inner: {"anyOf": [{"type": "null"}, inner]},
    lambda inner: {"allOf": [inner, {"title": "x"}]},
    lambda inner: {"oneOf": [{"type": "null"}, inner]},
    lambda inner: {"type": "object", "patternProperties": {"^p": inner}},
    lambda inner: {"additionalProperties": inner},
    lambda inner: {"not": {"not": inner}},
    lambda inner: {"$ref": "#/$defs/inner", "$defs": {"inner": inner}},
    lambda inner: {"properties": {"q": {"items": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/inner"}]}}},
                   "$defs": {"inner": inner}},
]  # fmt: skip


def decorated(base: Schema, more: Schema) -> Schema:
    """The schema with words that it does not have."""
    return {**base, **{word: value for word, value in more.items() if word not in base}}


def essence(value: Any) -> Any:
    """What is left of a mended schema without words that the engine does not know."""
    if isinstance(value, list):
        return [essence(each) for each in value]
    if not isinstance(value, dict):
        return value
    annotations = (
        "x-",
        "$anchor",
        "$comment",
        "example",
        "nullable",
        "discriminator",
        "externalDocs",
        "const_",
        "divisibleBy",
    )
    return {word: essence(each) for word, each in value.items() if not word.startswith(annotations) and word != "$defs"}


def with_definitions(schema: Schema) -> Schema:
    return {**schema, "$defs": {**DEFS, **(schema.get("$defs") or {})}}


def test_words_that_demand_nothing_leave_what_is_taken() -> None:
    for kind, base in BASES.items():
        words: Schema = {}
        for more in EVERYWHERE:
            if "$schema" not in more:
                words = decorated(words, more)
            mended(with_definitions(decorated(base, more)))
        constraint = follow(with_definitions(decorated(base, words)))
        for text in (*OTHERS, *TAKEN[kind]):
            assert accepts(constraint, text) == (text in TAKEN[kind]), (kind, text)
    for more in (*EVERYWHERE, {"exclusiveMaximum": True}):
        if "$schema" not in more:
            constraint = follow(with_definitions(more))
            for text in ("null", '{"b": 1}', "[1]", "[]", '"x"', "1.5"):
                assert accepts(constraint, text), (more, text)


def test_words_that_demand_nothing_do_so_at_every_place() -> None:
    plain = [(base, nest, essence(mended(with_definitions(nest(base))))) for base in BASES.values() for nest in NESTED]
    for base, nest, expected in plain:
        for more in EVERYWHERE:
            found = mended(with_definitions(nest(decorated(base, more))))
            assert essence(found) == expected, (more, nest(base))


def test_words_of_other_types_demand_nothing() -> None:
    for kind, base in BASES.items():
        for other, words in ELSEWHERE.items():
            for nest in NESTED:
                if other != kind:
                    assert essence(mended(nest({**base, **words}))) == essence(mended(nest(base))), (kind, other)


@pytest.mark.parametrize("draft", ["draft-04/schema#", "draft-06/schema#", "draft-07/schema#", "draft/2019-09/schema"])
def test_they_demand_nothing_by_any_draft(draft: str) -> None:
    scheme = "https" if "2019" in draft else "http"
    head = {"$schema": f"{scheme}://json-schema.org/{draft}"}
    for base in BASES.values():
        for more in EVERYWHERE:
            if more.keys().isdisjoint(("contentEncoding", "contentMediaType", "$ref", "$schema", "contains")):
                follow_like = mended(with_definitions({**head, **decorated(base, more)}))
                assert essence(follow_like) == essence(mended({**head, **base})), (draft, more)


def test_what_demands_something_still_does() -> None:
    for schema in (
        {"propertyNames": {"type": "integer"}}, {"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}},
        {"propertyNames": {"$ref": "#/$defs/loop"}, "$defs": DEFS}, {"dependentRequired": {"a": ["b"]}},
        {"contains": {"type": "null"}}, {"contains": {"minLength": 1}, "minContains": 0, "maxContains": 0},
        {"if": {"type": "string"}, "then": {"minLength": 1}}, {"uniqueItems": True, "maxItems": 2},
        {"unevaluatedItems": False}, {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        {"not": {"pattern": "a"}}, {"dependencies": {"a": ["b"]}}, {"dependentSchemas": {"a": False}},
        {"type": ["array", "null"], "uniqueItems": True}, {"$dynamicRef": "#x"},
    ):  # fmt: skip
        with pytest.raises(GrammarError, match="not supported"):
            follow(schema)
    for kept, text in (
        ({"minLength": 1}, '""'), ({"type": "integer"}, "1.5"), ({"allOf": [{"type": "null"}]}, "1"),
        ({"anyOf": [{"type": "null"}, False]}, "1"), ({"required": ["a"]}, "{}"), ({"pattern": "^.*$"}, '"\\n"'),
        ({"not": True}, "1"), ({"additionalProperties": False}, '{"a": 1}'), ({"type": "null", "enum": None}, "1"),
    ):  # fmt: skip
        try:
            assert not accepts(follow(kept), text), kept
        except GrammarError:
            assert kept == {"not": True}


WORDS = st.lists(st.sampled_from([each for each in EVERYWHERE if not {"$schema", "$anchor"} & each.keys()]), max_size=3)


def _scatter(value: Any, draw: Callable[[], list[Schema]]) -> Any:
    """A schema with words that demand nothing at any of its schemas."""
    if not isinstance(value, dict):
        return value
    made: Schema = {}
    for word, inner in value.items():
        if word in ("properties", "patternProperties") and isinstance(inner, dict):
            made[word] = {name: _scatter(each, draw) for name, each in inner.items()}
        elif word in ("anyOf", "allOf", "oneOf", "prefixItems"):
            made[word] = [_scatter(each, draw) for each in inner]
        else:
            made[word] = _scatter(inner, draw) if word in ("items", "additionalProperties") else inner
    for more in draw():
        made = decorated(made, more)
    return made


@settings(max_examples=80, deadline=None, derandomize=True)
@given(schema=SCHEMAS, data=st.data())
def test_drawn_schemas_allow_the_same_with_words_that_demand_nothing(schema: Schema, data: st.DataObject) -> None:
    odd = _scatter(schema, lambda: data.draw(WORDS))
    try:
        expected = mended(with_definitions(schema))
    except GrammarError:
        return  # by name
    assert essence(mended(with_definitions(odd))) == essence(expected)
