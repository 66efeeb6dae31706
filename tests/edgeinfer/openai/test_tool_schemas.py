"""Schemas of replies and of tools' arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgeinfer.errors import GrammarError
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.schemas import argument_rules, closed
from edgeinfer.openai.tools import read_functions
from edgeinfer.options.reply import GenerationConfig
from edgeinfer.runtime.sampling.grammar import GrammarConstraint
from edgeinfer.runtime.sampling.grammar_source import grammar_source
from tests.runtime.sampling.json_texts import END, Schema, accepts, vocabulary
from tests.runtime.sampling.test_schemas import PATTERNS
from tests.runtime.sampling.test_schemas import REFUSED as ALL_REFUSED

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
TAGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
DEEP: Schema = {"type": "object"}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
# Without multiples of six digits, for which the engine takes seconds.
REFUSED = [(schema, word) for schema, word in ALL_REFUSED if "allOf" not in schema]
# Which of two alternatives matches is unknown here, as is the combined effect of several constraints.
ENGINES: list[tuple[Schema, str]] = [
    ({"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}, "oneOf"),
    ({"properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False, "minProperties": 2}, "minProperties"),
    ({"patternProperties": {"^a": {"type": "null"}, "b$": {"type": "string"}}}, "patternProperties"),
    ({"type": "string", "enum": 5}, "enum"),
    ({"anyOf": 5}, "anyOf"),
    ({"properties": {"a": "string", "b": {"type": "null"}}}, "properties"),
    ({"properties": [], "additionalProperties": False}, "properties"),
    ({"type": "object", "required": True}, "required"),
    ({"type": "integer", "minimum": "3"}, "minimum"),
    ({"items": "string"}, "items"),
    ({"enum": []}, "enum"),
    ({"anyOf": [{"type": "null"}, {"type": "String"}]}, "type"),
    (DEEP, "the schema"),
    ({"type": "nothing"}, "type"),
    ({"pattern": 5}, "pattern"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems"),
    ({"$schema": "http://json-schema.org/schema#", "type": "null"}, "$schema"),
]  # fmt: skip
VALUES: list[Any] = [
    None,
    True,
    0,
    3,
    1.5,
    "",
    "a",
    "ab",
    "a@b.cd",
    [],
    ["a"],
    ["a", "a"],
    {},
    {"a": 1},
    {"a": 1, "b": 2},
]


def constraint(rule: str) -> GrammarConstraint:
    source = grammar_source(GenerationConfig(grammar=f"start: {rule}"))
    assert source is not None
    return GrammarConstraint(vocabulary(), source, [END])


def parameter(schema: Schema) -> Schema:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}


def test_one_schema_beyond_the_engine_takes_nothing_from_other_functions() -> None:
    inner: list[tuple[Schema, Schema]] = [
        ({"$ref": "#/$defs/y"}, {"y": TAGS}),
        ({"type": "array", "items": TAGS}, {}),
        ({"anyOf": [TAGS, {}]}, {}),
    ]
    inner += [({"type": "object", "additionalProperties": TAGS}, {}), ({"allOf": [TAGS]}, {}), (TAGS, {})]
    good = parameter({"enum": ["celsius"]})
    for schema, definitions in inner:
        bad = {**parameter(schema), "$defs": definitions}
        others = 30 if definitions else 3
        held = argument_rules([*((f"f{n}", n % 2 > 0, good) for n in range(others)), ("set_tags", False, bad)])
        assert held.left_out == ("uniqueItems of the tool set_tags",)
        for rule in held.rules[:2]:
            assert accepts(constraint(rule), '{"x": "celsius"}') and not accepts(constraint(rule), '{"x": "kelvin"}')
        with pytest.raises(GrammarError, match=r"strict tool set_tags .*uniqueItems") as caught:
            argument_rules([("f", False, good), ("set_tags", True, bad)])
        assert caught.value.hint


def test_what_is_refused_of_a_strict_function_is_loosened_of_another() -> None:
    mended = [*REFUSED, *(({"type": "string", "pattern": each}, "pattern") for each in PATTERNS[::8])]
    mended += [({"patternProperties": {each: {}}, "additionalProperties": False}, "patternP") for each in PATTERNS[::8]]
    for schema, _ in mended:
        if "$ref" in schema or "$schema" in schema:  # which speak of the root
            continue
        held = argument_rules([("f", False, parameter(schema))])
        assert held.left_out and all(each.endswith(" of the tool f") for each in held.left_out), schema
        assert not any(each.startswith("the schema") for each in held.left_out), schema
        with pytest.raises(GrammarError, match=r"strict tool f\b"):
            argument_rules([("f", True, parameter(schema))])


def test_no_document_of_a_loosened_schema_is_lost() -> None:
    """Leaving out a demand must not turn another into more."""
    for schema in (
        *(each for each, _ in REFUSED if '"$' not in json.dumps(each)),
        *(each for each, word in ENGINES[:3] if word != "the schema"),
        {"patternProperties": {"(?=a)": {"type": "integer"}}, "additionalProperties": False},
        {"not": {"uniqueItems": True}}, {"oneOf": [{"uniqueItems": True}, {"type": "string", "pattern": "b"}]},
        {"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"not": {"const": 3}}},
        {"contains": {"const": "a"}, "minContains": 2}, {"type": "string", "format": "email", "pattern": EMAIL},
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
    ):  # fmt: skip
        rule = argument_rules([("f", False, parameter(schema))]).rules[0]
        held, validator = constraint(rule), jsonschema.Draft202012Validator(schema)
        for value in VALUES:
            if validator.is_valid(value):
                assert accepts(held, json.dumps({"x": value})), (schema, value)


def test_most_of_a_loosened_schema_is_kept() -> None:
    (rule,) = argument_rules([("f", False, parameter({"type": "string", "format": "email", "pattern": EMAIL}))]).rules
    assert accepts(constraint(rule), '{"x": "ann@example.org"}') and not accepts(constraint(rule), '{"x": "ann"}')
    (rule,) = argument_rules([("f", False, parameter({**TAGS, "maxItems": 1, "minItems": 1}))]).rules
    assert not accepts(constraint(rule), '{"x": []}') and not accepts(constraint(rule), '{"x": [1]}')


def test_what_only_the_engine_finds_is_loosened_too() -> None:
    for schema, word in ENGINES:
        own = "$schema" in schema or schema is DEEP
        given = {"type": "object", "$schema": schema["$schema"]} if own and schema is not DEEP else parameter(schema)
        held = argument_rules([("f", False, given), ("g", True, parameter({"type": "null"}))])
        assert f"{word} of the tool f" in held.left_out, (schema, held.left_out)
        assert (
            accepts(constraint(held.rules[0]), "{}" if own and schema is not DEEP else '{"x": null}')
            or word != "the schema"
        )
        with pytest.raises(GrammarError, match="strict tool f"):
            argument_rules([("f", True, given)])


def test_functions_that_are_too_much_together_are_held_to_objects() -> None:
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string", "maxLength": 3000} for n in range(8)}}
    functions = [(f"f{n}", n == 0, {**wide, "title": str(n)}) for n in range(40)]
    held = argument_rules(functions)
    loose = [f"the schema of the tool f{n}" for n in range(1, 40)]
    assert held.left_out in ((), tuple(loose))


def test_parameters_need_not_say_that_they_are_an_object() -> None:
    open_ended: list[Any] = [None, {}, {"type": None}, {"type": ["object", "null"]}, {"properties": {"a": {}}}]
    for given in open_ended:
        (function,) = read_functions([{"type": "function", "function": {"name": "f", "parameters": given}}])
        assert next(iter(function.parameters.items())) == ("type", "object")
        rules = argument_rules([("f", True, function.arguments)])
        assert accepts(constraint(rules.rules[0]), "{}") and not rules.left_out
    for wrong in ({"type": "string"}, {"type": ["array"]}, {"type": 5}):
        with pytest.raises(RequestError, match="object"):
            read_functions([{"type": "function", "function": {"name": "f", "parameters": wrong}}])


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
    # Drafts before 2019-09 lack keywords that distinguish alternatives.
    for draft in ("https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-04/schema#"):
        dated = {"$schema": draft, "oneOf": [CAT, DOG]}
        assert (closed(dated) == dated) == ("04" in draft)
