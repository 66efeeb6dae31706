"""Grammars of calls in every format, the reader of calls, and schemas of arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.core.errors import GrammarError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.results import Chunk
from edgeinfer.openai.call_grammar import OfferedFunction, calls_grammar
from edgeinfer.openai.calls import ArgumentsPiece, CallReader, TextPiece
from edgeinfer.openai.detection import detect
from edgeinfer.openai.dialects import FORMATS, ToolFormat
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.schemas import argument_rules, closed
from edgeinfer.openai.tools import read_functions
from edgeinfer.runtime.sampling.grammar import GrammarConstraint, fault
from edgeinfer.runtime.sampling.grammar_source import grammar_source
from tests.conformance.random_calls import gathered
from tests.edgeinfer.openai.functions import CLOCK, KINDS, WEATHER, written
from tests.runtime.sampling.json_texts import END, Schema, accepts, vocabulary
from tests.runtime.sampling.test_schemas import PATTERNS
from tests.runtime.sampling.test_schemas import REFUSED as ALL_REFUSED
from tests.tables import each_row

MARKER = 300  # a special token's id, where a marker is one
OSLO = ("get_weather", {"town": "Oslo", "unit": "celsius"})
ZONE = ("time.of", {"zone": 'a "quoted" {zone}]'})
# One of each style, and what is special.
_FEW = ("hermes", "qwen3-coder", "mistral", "kimi-k2", "lfm2", "llama-4", "gemma-4", "llama-3", "glm-4.5")
each_format = each_row("form", [FORMATS[name] for name in _FEW])
Call = tuple[str, dict[str, Any]]


def read(form: ToolFormat, pieces: Sequence[str | int], tokens: Mapping[int, str] | None = None) -> Any:
    reader = CallReader(form, [OSLO[0], ZONE[0]], KINDS, tokens)
    return gathered(reader, [Chunk("", (piece,)) if isinstance(piece, int) else Chunk(piece, ()) for piece in pieces])


def cut(text: str, sizes: list[int]) -> list[str]:
    """A text in pieces of these sizes, and the rest."""
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


@given(sizes=st.lists(st.integers(0, 9), max_size=40))
def test_a_marker_that_is_a_special_token(sizes: list[int]) -> None:
    form = FORMATS["mistral"]
    rest = written(form, [OSLO, ZONE]).removeprefix(form.opening)
    tokens = {MARKER: form.opening}
    assert read(form, ["Well. ", MARKER, *cut(rest, sizes)], tokens) == ("Well.", [OSLO, ZONE])
    # The same text is no marker where a token is one.
    assert read(form, ["[TOOL_CALLS]", *cut(rest, sizes)], tokens) == ("[TOOL_CALLS]" + rest, [])


def test_every_tag_may_be_a_special_token() -> None:
    form = FORMATS["gemma-4"]
    tokens = {400 + place: tag for place, tag in enumerate(form.tag_texts)}
    ids = {tag: id_ for id_, tag in tokens.items()}
    parts = re.split("(" + "|".join(map(re.escape, ids)) + ")", "Well." + written(form, [OSLO, ZONE]))
    assert read(form, [ids.get(part, part) for part in parts], tokens) == ("Well.", [OSLO, ZONE])


@each_row("form", FORMATS.values())
def test_a_call_that_was_cut_short(form: ToolFormat) -> None:
    """The available part of the arguments is returned, and nothing around it."""
    whole = written(form, [OSLO])
    for length in range(len(whole)):
        reader = CallReader(form, [OSLO[0]], KINDS)
        pieces = [*reader.push(Chunk(whole[:length], ())), *reader.finish()]
        arguments = "".join(piece.text for piece in pieces if isinstance(piece, ArgumentsPiece))
        if reader.in_call:
            assert json.dumps(OSLO[1]).startswith(arguments.rstrip("}"))
        begun = length > len(form.markers([OSLO[0]])[0])
        assert not begun or not any(isinstance(piece, TextPiece) for piece in pieces)


@each_row("form", [form for form in FORMATS.values() if "{name}" not in form.opening])
def test_what_is_no_call_is_text(form: ToolFormat) -> None:
    marker = form.markers([OSLO[0]])[0]
    text, calls = read(form, [marker, "oops!", " and more"])
    assert (text.lstrip(), calls) == (f"{marker}oops! and more".lstrip(), [])
    assert read(form, [written(form, [OSLO]), " and more"])[1] == [OSLO]


class Bytes:
    """A vocabulary of single bytes for the engine, with a special token."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256, MARKER)

    def __init__(self) -> None:
        self.tokens = [bytes([value]) for value in range(256)] + [b"\xff<|end|>"]
        self.tokens += [b""] * (MARKER - len(self.tokens)) + [b"\xff[TOOL_CALLS]"]

    def __call__(self, text: str | bytes) -> list[int]:
        return []


def follows(grammar: str, *parts: str | int) -> str:
    """Whether a reply is no text of a grammar, the beginning of one, or one ("no", "open", "end")."""
    llguidance = pytest.importorskip("llguidance")
    vocabulary: Any = Bytes()
    source = grammar + '\n%llguidance {"no_forcing": true}\n'
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(vocabulary), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]
    if matcher.try_consume_tokens(ids) < len(ids):
        return "no"
    return "end" if matcher.is_accepting() else "open"


def grammar(
    form: ToolFormat, mode: Any, several: bool = True, tokens: Mapping[int, str] | None = None, content: Any = None
) -> str:
    functions = [OfferedFunction(each.name, each.strict, each.parameters) for each in (WEATHER, CLOCK)]
    options: dict[str, Any] = {"tokens": tokens, "content": content}
    return calls_grammar(form, functions, required=mode == "required", several=several, **options)[0]


@each_format
def test_auto_is_free_up_to_the_marker(form: ToolFormat) -> None:
    source = grammar(form, "auto")
    for text in ("", "Hello.", '{"na', '{"nam": 1}', "<tool_cal", "[TOOL_CALL]", "a\nb"):
        assert follows(source, text) == "end"
    for calls in ([OSLO], [ZONE], [OSLO, ZONE, OSLO]):
        expected = "end" if form.several or len(calls) == 1 else "no"
        assert follows(source, written(form, calls)) == expected
    if form.anywhere:
        assert follows(source, "Let me see.\n" + written(form, [OSLO])) == "end"
    assert follows(source, form.markers([OSLO[0]])[0]) == "open"
    if "{name}" not in form.opening:  # else it is text
        assert follows(source, written(form, [("rm_rf", {})])) == "no"


@each_row(("form", "mode"), [(FORMATS[name], mode) for name in _FEW for mode in ("auto", "required")])
def test_arguments_are_what_the_schema_allows(form: ToolFormat, mode: str) -> None:
    source = grammar(form, mode)
    wrong: list[dict[str, Any]] = [
        {"town": "Oslo"},
        {"town": "Oslo", "unit": "kelvin"},
        {"town": "Oslo", "unit": "celsius", "days": 10},
        {"town": "Oslo", "unit": "celsius", "mood": 1},
        {"town": 5, "unit": "celsius"},
    ]
    # Between tags, 5 is a text.
    for arguments in wrong[: -1 if form.style == "tagged" else None]:
        assert follows(source, written(form, [("get_weather", arguments)])) == "no"
    assert follows(source, written(form, [("get_weather", {**OSLO[1], "days": 9})])) == "end"


@each_format
def test_required_is_a_call(form: ToolFormat) -> None:
    source = grammar(form, "required", several=False)
    assert follows(source, written(form, [ZONE])) == "end"
    assert follows(source, "") == "open"
    assert follows(source, "Hello") == "no"
    assert follows(source, written(form, [OSLO, OSLO])) == "no"


def test_special_tokens_are_not_text() -> None:
    form = FORMATS["mistral"]
    rest, tokens = written(form, [OSLO]).removeprefix(form.opening), {MARKER: form.opening}
    for source in (grammar(form, "auto", tokens=tokens), grammar(form, "required", tokens=tokens)):
        assert follows(source, MARKER, rest) == "end"
        assert follows(source, MARKER, "x") == "no"
    assert follows(grammar(form, "auto", tokens=tokens), "Well. ", MARKER, rest) == "end"
    assert follows(grammar(form, "required", tokens=tokens), form.opening) == "no"


def test_ids_of_any_vocabulary_are_tried() -> None:
    """A grammar that is tried in another process knows no vocabulary."""
    source = grammar_source(ReplyOptions(grammar=grammar(FORMATS["gemma-4"], "auto", tokens={262_000: "<|tool_call>"})))
    assert source is not None and fault(source) == ""


@each_row("form", [FORMATS[name] for name in _FEW if FORMATS[name].anywhere])
def test_a_reply_by_a_schema_or_a_call(form: ToolFormat) -> None:
    content = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"]}
    source = grammar(form, "auto", content=content)
    assert follows(source, '{"mood": "good"}') == "end"
    assert follows(source, written(form, [OSLO])) == "end"
    assert follows(source, "Hello") == "no"


def test_hopeless_schemas() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(GrammarError, match="deep"):
        calls_grammar(FORMATS["hermes"], [OfferedFunction("f", True, deep)], required=False, several=True)


TEMPLATES = {
    "qwen3-coder": "{{ tools }}<tool_call>\n<function=f>\n<parameter=",
    "glm-4.5": "{{ tools }}<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>",
    "mistral-args": "{{ tools }}[TOOL_CALLS]f[ARGS]{}",
    "hermes": "{%- if tools %}<tools>{% endif %}<tool_call>",
    "mistral": "{% if tools is not none %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]",
    "llama-3": "{% if not tools is defined %}{% endif %}<|python_tag|>",
}


@each_row("name", TEMPLATES)
def test_formats_are_known_by_templates(name: str) -> None:
    dialect = detect(TEMPLATES[name])
    assert dialect.native and dialect.format is FORMATS[name]


@each_row(
    "template",
    [
        None,
        "",
        "{{ messages }}",
        "{{ tools }} <|other_call|>",
        "a text about <tool_call>",
    ],
)
def test_others_are_told_in_messages(template: str | None) -> None:
    dialect = detect(template)
    assert not dialect.native and dialect.format is FORMATS["hermes"]


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
    source = grammar_source(ReplyOptions(grammar=f"start: {rule}"))
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


def test_parameters_need_not_say_that_they_are_an_object() -> None:
    open_ended: list[Any] = [None, {}, {"type": None}, {"type": ["object", "null"]}, {"properties": {"a": {}}}]
    for parameters in open_ended:
        (function,) = read_functions([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
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
