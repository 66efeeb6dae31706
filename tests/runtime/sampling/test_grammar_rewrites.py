"""Keywords of schemas that demand nothing, and numbers whose digits come to an end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from edgeinfer.core.errors import GrammarError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.sampling.grammar import GrammarConstraint
from edgeinfer.runtime.sampling.grammar_schema import mended
from edgeinfer.runtime.sampling.grammar_source import grammar_source
from edgeinfer.runtime.sampling.grammar_tokens import NumberLimit, digits_ahead
from tests.runtime.sampling.conftest import made
from tests.runtime.sampling.json_texts import END, Schema, accepts, follow, vocabulary

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
    known = "$anchor $comment example nullable discriminator externalDocs const_ divisibleBy"
    annotations = ("x-", *known.split())
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


CLOSED = {"type": "object", "additionalProperties": False}
# Forms of values that have digits, and how long one of them may get.
FORMS: list[tuple[Schema, int]] = [
    ({"type": "number"}, 40),
    ({"type": "integer"}, 20),
    ({"type": "number", "minimum": 0, "maximum": 1}, 20),
    ({"type": "number", "minimum": 1e-5, "maximum": 2e-5}, 20),
    ({"type": "number", "exclusiveMinimum": 0}, 40),
    ({"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 1000}, 40),
    ({"type": "number", "maximum": 99.99}, 40),
    ({"type": "number", "multipleOf": 0.01}, 40),
    ({"type": "number", "multipleOf": 0.5, "minimum": -3}, 40),
    ({"type": "integer", "multipleOf": 7}, 40),
    ({"type": ["number", "null"]}, 40),
    ({"anyOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, 40),
    ({"allOf": [{"type": "number"}, {"maximum": 10**17}]}, 40),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}}, 40),
    ({}, 40),
    ({"title": "any"}, 40),
    ({"not": {"type": ["string", "array", "object"]}}, 40),
    ({"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3}, 130),
    ({"type": "array", "items": True, "minItems": 2, "maxItems": 2}, 90),
    ({**CLOSED, "properties": {"pi": {"type": "number"}}, "required": ["pi"]}, 60),
    ({**CLOSED, "properties": {"a": {}, "b": True}, "required": ["a", "b"]}, 110),
    *(({"type": "string", "format": name}, 90) for name in ("date-time", "time", "date", "duration", "ipv4", "uuid")),
]  # fmt: skip
PREFERRED = (b"7123456890", b" 7", b"01.eE+-\n ", b".0", b"T.:9PZ-")
NUMBERS = ("3.141592653589793", "6.02e23", "-1.5E-10", "0.3000000000000004", "1e308", "9007199254740993", "-0.0", "12")


def made_of(form: Mapping[str, Any]) -> GrammarConstraint:
    source = grammar_source(ReplyOptions(**form))
    assert source is not None
    return GrammarConstraint(vocabulary(), source, [END])


def written(constraint: GrammarConstraint, preferred: bytes, limit: int) -> str:
    """The text of a model that writes what it prefers as long as it may."""
    reply = bytearray()
    while len(reply) <= limit:
        ids = constraint.allowed().tolist()
        byte = next((each for each in preferred if each in ids), END if END in ids else ids[-1])
        if byte == END:
            break
        constraint.push(byte)
        reply.append(byte)
    constraint.pop(len(reply))
    return reply.decode()


def test_whatever_has_digits_comes_to_an_end() -> None:
    for schema, longest in FORMS:
        constraint = follow(schema)
        for preferred in PREFERRED:
            if schema.keys() <= {"title"} and preferred[:1] not in b"-0123456789":
                continue  # a text, which may be as long as it likes
            text = written(constraint, preferred, longest)
            assert len(text) <= longest and accepts(constraint, text), (schema, preferred, text)
            json.loads(text)


def test_digits_of_texts_come_to_an_end() -> None:
    for text in ({"type": "string"}, {"type": "string", "maxLength": 100}, {}, {"type": "object"}):
        constraint = follow(text)
        opening = b'{"' if text == {"type": "object"} else b'"'
        for byte in opening:
            constraint.push(byte)
        assert max(map(len, re.findall(r"\d+", written(constraint, b"3141592650789", 60)))) == 40, text
    for pattern in (r"^\d+$", "^[0-9]*$", r"^[\d]{3,}$", r"^0?\d*\.?\d*$"):
        assert len(written(follow({"type": "string", "pattern": pattern}), b"123", 200)) < 90, pattern
    for pattern, most in ((r"^(\d)+$", 40), (r"^[\d.]+$", 40), (r"^(\d|x)+$", 40), (r"^([0-9]{1,60})+$", 60)):
        ones = written(follow({"type": "string", "pattern": pattern}), b"1", 80)
        assert max(map(len, re.findall("1+", ones))) == most, (pattern, ones)
    email = written(follow({"type": "string", "format": "email"}), b"7", 200)
    assert re.search("[^7]", email[1:70])


def test_numbers_of_an_object_of_any_form_come_to_an_end() -> None:
    constraint = made_of({"json_object": True})
    for opening in ('{"a": ', '{"a": [1, -', '{"7777777777777777777777777": {"b": 0.'):
        pushed = [*opening.encode()]
        for byte in pushed:
            constraint.push(byte)
        assert len(written(constraint, b"7", 60).partition(",")[0]) < 40
        constraint.pop(len(pushed))


def test_numbers_that_people_write_and_that_a_schema_names_are_taken() -> None:
    for text in NUMBERS:
        assert accepts(follow({"type": "number"}), text) and accepts(follow({}), f'{{"a": [{text}]}}'), text
    long = 0.12345678901234567
    for schema, text in (
        ({"enum": [long, 1]}, repr(long)),
        ({"const": 0.00001234567890123}, "0.00001234567890123"),
        ({"minimum": 1e-20, "maximum": 2e-20}, "0.000000000000000000015"),
        ({"type": "integer", "minimum": 10**17, "maximum": 10**18 - 128}, "123456789012345678"),
        ({"type": "string", "pattern": r"^\d+$"}, '"12345678901234567890"'),
        ({"type": "string", "pattern": r"^\d+\.\d+$"}, '"12345678901234567890.12345678901234567890"'),
        ({"type": "string"}, '"12345678901234567890 98765432109876543210"'),
        ({"type": "string", "pattern": r"^\d{2,50}x$"}, f'"{"0" * 50}x"'),
        ({"type": "string", "pattern": r"^\d{50,}$"}, f'"{"0" * 50}"'),
        ({"properties": {"12345678901234567890": {"type": "null"}}}, '{"12345678901234567890": null}'),
    ):
        assert accepts(follow(schema), text), (schema, text)
    for text in ("0." + "1" * 17, "1" * 17, "1e1000", "[" + "1" * 17 + "]"):
        assert not accepts(follow({}), text), text


def test_numbers_behind_free_text_are_bounded_and_the_text_is_not() -> None:
    grammar = 'start: TEXT "<call>" args\nTEXT: /[^<]*/\nargs: %json {"type": "object"}'
    constraint = made_of({"grammar": grammar})
    pi = "3." + "1" * 40
    assert accepts(constraint, f'{pi} "{pi}<call>{{"a": 3.14}}') and not accepts(constraint, f'<call>{{"a": {pi}}}')
    # Whoever writes a grammar without %json says how many digits there are.
    assert accepts(made_of({"regex": r"\d+"}), "1" * 40)


def test_tokens_of_several_digits_stay_within_the_rest() -> None:
    tokens = [b"1", b"22", b"333", b".", b"x", b"5" * 20, b"\xff</s>", b"", b" 1", b"0,7", b"-", b'"', b"\n"]
    ahead = digits_ahead(tokens, b"\xff")
    limit = NumberLimit('start: %json {"type": "number"}', ahead, tokens.__getitem__)
    number, end = np.array([0, 1, 2, 3, 5, 6, 9]), np.array([6])
    for reply, left in (
        ([2], [0, 1, 2, 3, 6, 9]),
        ([2] * 4 + [1], [0, 1, 3, 6, 9]),
        ([2] * 5, [0, 3, 6, 9]),
        ([8, *[2] * 5], [3, 6]),
        ([2] * 5 + [0, 3], number.tolist()),
        ([2] * 5 + [0, 3] + [2] * 5, [0, 3, 6, 9]),
    ):
        assert limit.within(number, end, reply).tolist() == left, reply
    # Digits that have no other way to go on, free text, and a text of JSON's.
    for ids, left in (
        ([0, 1, 2], [0, 1, 2]),
        ([0, 2, 4, 10, 11, 12], [0, 2, 4, 10, 11, 12]),
        ([0, 2, 4, 11], [0, 4, 11]),
    ):
        assert limit.within(np.array(ids), end, [4, *[2] * 13]).tolist() == left, ids


def test_bytes_of_a_real_vocabulary_are_followed(byte_level: Any) -> None:
    constraint = made(byte_level, json_schema={"type": "number"})
    ids = byte_level.encode("1" * 16, add_special_tokens=False)
    for token in ids:
        assert token in constraint.allowed()
        constraint.push(token)
    assert not any((byte_level.id_to_token(id_) or "")[:1].isdigit() for id_ in constraint.allowed().tolist())
    constraint.pop()
    assert ids[-1] in constraint.allowed()
