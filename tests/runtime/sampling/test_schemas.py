"""JSON schemas as grammars: what is accepted, what is refused by name, and what people's schemas give."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.core.errors import GrammarError
from edgeinfer.runtime.sampling.grammar_source import json_rule
from edgeinfer.runtime.sampling.grammar_trial import needs_trial
from tests.runtime.sampling.json_texts import Schema, accepts, check_replies, follow
from tests.tools.json_schema_suite import DRAFTS, READINGS, verdicts

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

DRAFT_4, DRAFT_6, DRAFT_7 = (f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7))
A = {"properties": {"a": {"type": "integer"}}}
LABEL = "a" * 63
# A schema, texts that it allows, and texts that it does not.
VERDICTS: list[tuple[Schema, list[str], list[str]]] = [
    (A, ['{"a": 1}', '{"b": "x"}', '{"a": 1, "b": "x"}', "7"], ['{"a": "x"}', '{"\\u0061": "x"}', '{"a": 1, "a": 2}']),
    (A, ['{"a\\n": "x"}'], ['{"b": 1, "\\u0061": "x"}', '{"\\u0062": {}, "\\u0061": "x"}']),
    ({"properties": {"é": {"type": "integer"}}}, ['{"é": 1}'], ['{"é": "x"}', '{"\\u00e9": "x"}', '{"\\u00E9": "x"}']),
    ({"properties": {"😀": False}}, ['{"x": 1}'], ['{"😀": 1}', '{"\\ud83d\\ude00": 1}']),
    ({"properties": {'"': False, "\n": False}}, ["{}"],
     ['{"\\u0022": 1}', '{"\\u000a": 1}', '{"\\"": 1}', '{"\\n": 1}']),
    ({"patternProperties": {"^x": {"type": "null"}}}, ['{"x": null}', '{"y": 1}'], ['{"x": 1}', '{"\\u0078": 1}']),
    ({"patternProperties": {"^🐲*$": {"type": "null"}}}, ['{"🐲": null}'], ['{"🐲🐲": 1}', '{"\\ud83d\\udc32": 1}']),
    ({"patternProperties": {"\\d": False}}, ['{"x": 1}'], ['{"a1": 1}', '{"a\\u0031": 1}']),
    ({"not": {"type": ["string", "object"]}}, ["1", "null", "[]"], ['"a"', "{}"]),
    ({"type": "object", "not": {"required": ["a", "b"]}}, ['{"a": 1}', '{"b": 1, "c": 2}', "{}"], ['{"a": 1, "b": 2}']),
    ({"type": "object", "not": {"required": ["a"]}}, ["{}", '{"b": 1}'], ['{"a": 1}', '{"b": 2, "\\u0061": 1}']),
    ({"not": {"properties": {"a": {"type": "string"}}}}, ['{"a": 1}'], ['{"a": "x"}', "{}", "3"]),
    ({"type": "number", "not": {"minimum": 2}}, ["1", "1.98", "-7"], ["2", "3"]),
    ({"type": "string", "oneOf": [{"minLength": 2}, {"maxLength": 4}]}, ['"a"', '"abcde"'], ['"abc"', '"abcd"', "3"]),
    ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a": 1}', '{"b": 1, "c": 1}'],
     ["{}", '{"a": 1, "b": 2}']),
    ({"required": ["a"]}, ['{"a": 1}'], ['{"\\u0061": 1}', "{}"]),
    ({"properties": {"a": {}}, "allOf": [{"type": "object"}], "additionalProperties": False}, ["{}"], ['{"b": 1}']),
    ({"items": [{"type": "null"}], "allOf": [True], "additionalItems": False}, ["[null]"], ["[null, 1]", "[1]"]),
    ({"patternProperties": {"^a": {}}, "allOf": [{}], "additionalProperties": False}, ['{"ab": 1}'], ['{"b": 1}']),
    ({"minProperties": 1}, ['{"x": 1}'], ["{}"]),
    ({"required": ["x", "y"], "minProperties": 3}, ['{"x": 1, "y": 2, "z": 3}'], ['{"x": 1, "y": 2}']),
    ({"exclusiveMinimum": 2, "exclusiveMaximum": 2.5}, ["2.1", "2.25"], ["2", "2.0", "2.5", "2.00000000000000000001"]),
    ({"exclusiveMaximum": 2}, ["1", "1.9", "1.98", "1.99", "-1.9"], ["2", "2.0", "1.99999999999999999999"]),
    ({"type": "number", "minimum": -1.55, "maximum": 2.525}, ["-1.5", "-1.55", "2.5", "2.52"], ["-1.6", "2.53"]),
    ({"maximum": 1.55, "multipleOf": 0.5, "allOf": [{"minimum": 1}]}, ["1.5", "1"], ["1.55", "1.25", "0.5"]),
    ({"exclusiveMinimum": 0}, ["1", "0.001"], ["0", "-0", "0.0", "-1"]),
    ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, ["-0.1"], ["-0", "0", "0.0", "-0.5"]),
    ({"exclusiveMinimum": 99.99}, ["100"], ["99.99", "99.990", "99.99000000000000000001"]),
    ({"minimum": 3, "exclusiveMinimum": True}, ["4"], ["3", "2"]),
    ({"type": "integer", "exclusiveMinimum": 2**53, "maximum": 2**63 - 1}, [str(10**17)], [str(2**53), "1"]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["0", "-5", str(10**17)], [str(2**63), "1.5"]),
    ({"type": "integer", "minimum": 1 - 2**53, "maximum": 2**53 - 1}, [str(2**53 - 1)], [str(2**53)]),
    ({"type": "string", "maxLength": 2.0}, ['"ab"'], ['"abc"']),
    ({"type": "string", "pattern": "^.$"}, ['"a"', '"é"', '"😀"'], ['"\\n"', '"\\r"', '"\u2028"', '""']),
    ({"type": "string", "pattern": r"^\s$"}, ['" "', '"\\t"', '"\ufeff"', '"\u2003"'], ['"\x85"', '"a"']),
    ({"type": "string", "pattern": r"^\S$"}, ['"a"', '"\x85"'], ['"\ufeff"', '" "']),
    ({"type": "string", "pattern": r"^\w\d$"}, ['"a1"'], ['"é1"', '"a١"']),
    ({"type": "string", "pattern": "^[a&&b]$"}, ['"a"', '"&"', '"b"'], ['"c"']),
    ({"type": "string", "pattern": r"^[\w-.]+\.5$"}, ['"a-.5"'], ['"a+.5"', '"a-x5"']),
    ({"type": "string", "pattern": r"^\u0041\x42\cJ\u{1F600}\ud83d\ude00$"}, ['"AB\\n😀😀"'], ['"AB\\n😀"']),
    ({"type": "string", "pattern": "^(?:a{2}|b{1,}?|(?<n>c{0,2})d)$"}, ['"aa"', '"bb"', '"ccd"'], ['"a"', '"cccd"']),
    ({"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"', '"bx"']),
    ({"type": "string", "pattern": "a{,2}"}, ['"a{,2}"'], ['"aa"']),
    ({"type": "string", "pattern": r"^\p{Lu}\P{L}$"}, ['"É1"'], ['"é1"', '"ÉÉ"']),
    ({"format": "date"}, ['"2024-02-29"', '"2000-02-29"', "5"], ['"2023-02-29"', '"1900-02-29"', '"2023-04-31"']),
    ({"format": "date"}, ['"0004-02-29"', '"0001-01-01"'], ['"0000-01-01"', '"2023-13-01"', '"2023-1-1"']),
    ({"format": "time"}, ['"23:59:60Z"', '"08:30:06.28+01:00"'], ['"22:59:60Z"', '"23:59:60+01:00"', '"24:00:00Z"']),
    ({"format": "date-time"}, ['"1998-12-31T23:59:60.5Z"'], ['"1998-12-31T22:59:60Z"', '"2023-02-29T00:00:00Z"']),
    ({"format": "time"}, ['"01:29:60+01:30"', '"23:29:60+23:30"', '"00:29:60-23:30"', '"23:59:60.5-00:00"'],
     ['"23:59:60+00:30"', '"01:28:60+01:30"', '"00:29:60+01:30"', '"23:59:60"', '"23:60:00Z"', '"99:59:60-08:00"']),
    ({"format": "date-time", "pattern": "8"}, ['"1998-12-31T15:59:60.1-08:00"'],
     ['"1998-12-31T15:59:60-07:00"', '"2023-02-29T15:59:60-08:00"', '"2024-12-31T22:59:60-01:00"']),
    ({"format": "email"}, ['"a.b@c"', '"\\"a b..@\\"@c-d.e"', '"\\"\\\\\\"\\"@c"', '"a@[127.0.0.1]"', "5"],
     ['"a..b@c"', '".a@c"', '"a b@c"', '"\\"a\\"b\\"@c"', '"a@[127.0.0.300]"', '"a@[::1]"', '"a@-c"', '"a@c."']),
    ({"format": "email"}, ['"a@[IPv6:::1]"', '"a@[IPv6:1:2:3:4:5:6::]"', '"a@[IPv6:1::1.2.3.4]"'],
     ['"a@[IPv6:1:2:3:4:5:6:7::]"', '"a@[IPv6:1:2]"', '"é@c"']),
    # Control characters, in texts alone.
    ({"pattern": r"^\s$"}, ['"\\u000b"', '"\\u000B"', '"\\t"'], ['"\\u0008"', '"\\u0020"', '"\x0b"']),
    ({"type": "array", "items": {"pattern": r"^\S$"}}, ['["\\u0001"]', '["a"]'], ['["\\u000b"]', '["\\u0061"]']),
    ({"pattern": "^[^b]$", "properties": {"a": {"type": "null"}}}, ['"a"', '{"a": null}', '{"b": 1}'],
     ['{"\\u0061": 1}', '{"b": 1, "\\u0061": 1}', '"b"']),
    ({"pattern": "^a$", "not": {"required": ["a"]}}, ["{}", '{"b": 1}'], ['{"\\u0061": 1}', '"a"']),
    ({"type": "integer"}, [str(10**15), str(-(10**15))], ["1" + "0" * 53, "1.5"]),
    ({"type": "integer", "maximum": 9223372036854776000}, [str(10**17)], [str(2**64)]),
    ({"format": "hostname"}, [f'"{LABEL}"', '"a-b.c"', '"a.b.c.d.e"'], ['"xn--X"', '"ab--c"', '"-a"', '"a."']),
    ({"format": "hostname"}, ['"abcd"', '"a-cd"'], [f'"{LABEL}a"', '"' + ".".join([LABEL] * 4) + '"', '"abc-"']),
    ({"format": "ipv6"}, ['"::ffff:192.168.0.1"', '"1:2::1.2.3.4"', '"::"', '"1::"'],
     ['"1::2::3"', '"5:c:0::a:A:f:1:B:F"']),
    ({"format": "ipv6", "pattern": "^2"}, ['"2::1"'], ['"::1"', '"2:"']),
    # Keywords next to $ref count by the drafts since 2019-09, and where no draft is named.
    *(({"$schema": draft, "definitions": {"a": {"type": "array"}}, "$ref": "#/definitions/a", "maxItems": 1, "if": {},
        "required": ["b"], "format": "iri"}, ["[1]", "[1, 2]"], ["1"])
      for draft in (DRAFT_4, DRAFT_6, DRAFT_7, DRAFT_7.replace("http", "https").replace("#", ""))),
    *(({"$schema": draft, "definitions": {"a": {"type": "array"}}, "$ref": "#/definitions/a", "maxItems": 1},
       ["[1]"], ["[1, 2]", "1"])
      for draft in ("https://json-schema.org/draft/2019-09/schema", "https://json-schema.org/draft/2020-12/schema#")),
    ({"$schema": DRAFT_7, "properties": {"$ref": {"type": "null"}}}, ['{"$ref": null}'], ['{"$ref": 1}']),
    ({"$schema": DRAFT_7, "$ref": "#/x-parts/a/definitions/b", "x-parts": {"a": {
        "$ref": "#/nowhere", "definitions": {"b": {"type": "null"}}}}}, ["null"], ["1"]),
    ({"$schema": DRAFT_7, "properties": {"a": {"$id": "http://x/y", "$ref": "#/definitions/b"}},
      "definitions": {"b": {"type": "null"}}}, ['{"a": null}'], ['{"a": 1}']),
    ({"$schema": DRAFT_4, "$ref": "#day", "definitions": {"a": {"id": "#day", "format": "date"}}}, ['"2024-02-29"'],
     ['"2023-02-29"']),
    ({"anyOf": [{"$ref": "#a"}, {"$ref": "#/$defs/b"}], "$defs": {
        "a": {"$anchor": "a", "type": "null"}, "b": {"const": {"$anchor": "a", "format": "date"}}}},
     ["null", '{"$anchor": "a", "format": "date"}'], ['{"$anchor": "a", "pattern": "date"}']),
    ({"$schema": DRAFT_4, "const": 1, "if": {}}, ["1", "2"], []),
    ({"$schema": DRAFT_7, "prefixItems": [{"type": "null"}], "dependentRequired": {"a": ["b"]}}, ["[1]"], []),
    # By draft 7 encodings are checked, in the form that encoders write; by others they describe texts.
    ({"$schema": DRAFT_7, "contentEncoding": "base64"}, ['""', '"QUI="', '"QQ=="', '"+/9A"', "5"],
     ['"QQ"', '"Q==="', '"QR=="', '"QUJ="', '"QU%C"', '"QQ==QQ=="', '"+_9A"', '"QUI=\\n"']),
    ({"$schema": DRAFT_7, "contentEncoding": "BASE64", "pattern": "^Q", "format": "date", "type": ["string", "null"]},
     ["null"], ['"QQ=="', '"2024-02-29"']),
    ({"$schema": DRAFT_7, "contentEncoding": "base64", "pattern": "^Q"}, ['"QQ=="'], ['"AA=="', '"Q"']),
    ({"$schema": DRAFT_7, "contentMediaType": "text/plain; charset=utf-8"}, ['"a%"'], []),
    *(({**draft, "contentEncoding": "base64", "contentMediaType": "image/png"}, ['"%"'], [])
      for draft in ({"$schema": DRAFT_6}, {"$schema": "https://json-schema.org/draft/2019-09/schema"}, {})),
    ({"$ref": "#/$defs/a", "maxItems": 1, "$defs": {"a": {"type": "array"}}}, ["[1]"], ["[1, 2]"]),
    ({"$ref": "#/x-parts/a", "x-parts": {"a": {"format": "date"}}}, ['"2024-02-29"'], ['"2023-02-29"']),
    ({"$ref": "#day", "$defs": {"a": {"$anchor": "day", "format": "date"}}}, ['"2024-02-29"'], ['"2023-02-29"']),
    # Rare words for common things.
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "properties": {"a": {"type": "null"}, "c": {}},
      "additionalProperties": {"type": "boolean"}}, ['{"a": null, "b": true}', "{}"],
     ['{"a": true}', '{"b": 1}', '{"c": 1}', '{"d": true}']),
    ({"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "string", "const": "a"}}}, ['{"a": 1}', "1"],
     ['{"b": 1}']),
    ({"propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "null"}}, ['{"xa": null}', "{}"],
     ['{"a": null}', '{"xa": 1}']),
    ({"propertyNames": {"minLength": 2.0, "maxLength": 3}}, ['{"ab": 1}', '{"😀éa": 2}'], ['{"a": 1}', '{"abcd": 1}']),
    ({"contains": {"title": "any"}, "maxContains": 2}, ["[1]", "[1, 2]", "7"], ["[]", "[1, 2, 3]"]),
    ({"contains": True, "minContains": 2, "minItems": 1}, ["[1, 2]"], ["[1]"]),
    ({"$schema": DRAFT_7, "contains": {}, "minContains": 0}, ["[1]"], ["[]"]),
    ({"$schema": DRAFT_4, "contains": {"type": "null"}, "propertyNames": False}, ["[]", '{"a": 1}'], []),
    ({"properties": {"a": {}}, "unevaluatedProperties": False}, ['{"a": 1}'], ['{"b": 1}']),
    ({"properties": {"format": {"const": "date"}}, "required": ["format"]}, ['{"format": "date"}'], ["{}"]),
]  # fmt: skip

REFUSED: list[tuple[Schema, str]] = [
    ({"minProperties": 2}, "minProperties: 2 of names that are open"),
    ({"minProperties": 2, "additionalProperties": False, "patternProperties": {"x": {}}}, "minProperties"),
    ({"const": "a\x00"}, r"const: the character U\+0000"),
    ({"enum": ["a", {"b": ["\x7f"]}]}, r"enum: the character U\+007F"),
    ({"const": 2**53 + 1}, "const: .* beyond 2"),
    ({"minimum": 10**18}, r"minimum: .* beyond 10\*\*18"),
    ({"maximum": 2**64 - 1}, r"maximum: .* beyond 10\*\*18"),
    ({"exclusiveMinimum": -1e20}, r"exclusiveMinimum: .* beyond 10\*\*18"),
    ({"allOf": [{"multipleOf": 100003}, {"multipleOf": 100019}]}, "multipleOf: the least common multiple"),
    ({"multipleOf": 0.123456789}, "multipleOf"),
    ({"prefixItems": [{}], "additionalItems": False}, "additionalItems"),
    ({"$ref": "other.json"}, r"\$ref: 'other.json' is elsewhere"),
    ({"$id": "http://x/a", "$ref": "http://x/b#/c"}, r"\$ref: 'http://x/b#/c' is elsewhere"),
    ({"$ref": "#/nowhere"}, r"\$ref: '#/nowhere' is not there"),
    ({"$ref": "#/const", "const": {"type": "null"}}, r"\$ref: '#/const' leads through const"),
    ({"$defs": {"a": {"$id": "http://x/", "$ref": "#/b", "b": {}}}, "$ref": "#/$defs/a", "b": {}}, r"\$ref: .* \$id"),
    ({"$schema": DRAFT_7, "items": {"$schema": DRAFT_4}}, r"\$schema: there is a second"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, r"\$schema: .*draft-03/schema#' is not supported"),
    ({"$schema": "http://json-schema.org/schema#"}, r"\$schema: .* is not supported"),
    ({"items": {"$schema": "http://x/y"}}, r"\$schema: 'http://x/y' is not supported"),
    ({"$schema": DRAFT_7, "contentMediaType": "application/json"}, "contentMediaType: 'application/json' is not"),
    ({"$schema": DRAFT_7, "contentMediaType": "text/plain", "contentEncoding": "base64"}, "contentMediaType"),
    ({"$schema": DRAFT_7, "contentEncoding": "base32"}, "contentEncoding: 'base32' is not supported"),
    ({"$schema": DRAFT_7, "$ref": "#/properties/a", "properties": {"a": {}}}, r"\$ref: .* through properties next to"),
    ({"properties": {"const": {"const": 1}, "a": {"$ref": "#/properties/const/const"}}}, r"\$ref: .* through const"),
    ({"properties": {"properties": {"const": 1}, "a": {"$ref": "#/properties/properties/const"}}}, "through const"),
    ({"patternProperties": {"\\d": {}, "[0-9]": {}}}, "patternProperties: two"),
    ({"format": "idn-hostname"}, "format: idn-hostname is not supported"),
    ({"format": "iri"}, "format: iri is not supported"),
    ({"uniqueItems": True}, "uniqueItems is not supported"),
    ({"contains": {"type": "null"}}, "contains is not supported"),
    ({"if": {}, "then": {"type": "null"}}, "if, then is not supported"),
    ({"propertyNames": {"format": "date"}}, "propertyNames is not supported"),
    ({"propertyNames": {"enum": ["a"]}, "patternProperties": {"x": {}}}, "propertyNames is not supported"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired is not supported"),
    ({"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]}, "unevaluatedProperties is not supported"),
]
PATTERNS = (
    r"\bword", r"\Bword", "(?=a)", "(?!a)", "(?<=a)b", "(?<!a)b", r"(a)\1", r"(?<n>a)\k<n>", "(?i)a", "(?P<n>a)", r"\A",
    r"\Z", r"\z", r"\a", r"\pL", r"\p{Foo Bar}", r"\x{41}", r"\u12", r"\ud800", r"\c1", r"\07", "a**", "*a", "(|*)",
    "a{2}{3}", "(a", "a)", "[a", "[]", "[^]", "[z-a]", "\\", r"\Q.\E", r"\é", "x(?#c)",
)  # fmt: skip


def test_official_verdicts_and_other_spellings() -> None:
    for schema, good, bad in VERDICTS:
        constraint = follow(schema)
        for text in good:
            assert accepts(constraint, text), (schema, text)
        for text in bad:
            assert not accepts(constraint, text), (schema, text)


def test_leap_seconds_are_the_last_of_a_day_in_utc() -> None:
    constraint = follow({"format": "time"})
    for offset in range(-1439, 1440, 61):
        for minutes in (-60, -1, 0, 1, 60):
            local = (1439 + offset + minutes) % 1440
            shift = f"{'-' if offset < 0 else '+'}{abs(offset) // 60:02}:{abs(offset) % 60:02}"
            text = f'"{local // 60:02}:{local % 60:02}:60{shift}"'
            assert accepts(constraint, text) == (minutes == 0), text


# Where the suite and this project differed at any time; the whole suite takes minutes.
DISPUTED = (*READINGS, "optional/ecmascript-regex", "optional/format/date-time", "optional/format/email")
DISPUTED += ("optional/format/time", "minProperties", "not", "ref")
OF_OLDER_DRAFTS = ("ref", "optional/content", "optional/zeroTerminatedFloats")


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_official_suite_and_what_is_read_otherwise(draft: str, shared: Path, tmp_path: Path) -> None:
    suite = shared / "data" / "json_schema_test_suite" / "tests" / draft
    if not suite.is_dir():
        pytest.skip(f"needs JSON Schema's official tests of {draft} in ../shared/data/json_schema_test_suite")
    newest = draft == "draft2020-12"
    for name in DISPUTED if newest else OF_OLDER_DRAFTS:
        copy = tmp_path / f"{name}.json"
        copy.parent.mkdir(parents=True, exist_ok=True)
        if newest or (suite / f"{name}.json").is_file():
            shutil.copyfile(suite / f"{name}.json", copy)
    found = list(verdicts(tmp_path, draft))
    assert not [each for each in found if each[1] in ("accepts", "rejects")]
    right = {name for name, outcome, _ in found if outcome == "right"}
    if newest:
        assert {name for name, outcome, _ in found if outcome == "reading"} == set(READINGS)
        assert right >= set(DISPUTED) - {"optional/float-overflow"}
    else:
        assert "ref" in right


def test_what_cannot_be_followed_is_refused_by_name() -> None:
    patterns = [({"type": "string", "pattern": pattern}, "pattern: ") for pattern in PATTERNS]
    names: list[tuple[Schema, str]] = [({"patternProperties": {each: {}}}, "patternProperties: ") for each in PATTERNS]
    for schema, says in (*REFUSED, *patterns, *names):
        with pytest.raises(GrammarError) as caught:
            follow(schema)
        assert re.search(says, caught.value.message), (schema, caught.value.message)
        assert caught.value.hint and len(caught.value.message.splitlines()) == 1


def test_parts_that_are_never_used_refuse_nothing() -> None:
    odd: Schema = {"format": "iri", "pattern": "(?=a)", "minProperties": 7}
    for name in ("$defs", "definitions", "x-other"):
        assert accepts(follow({"type": "null", name: {"unused": odd}}), "null")
    assert accepts(follow({"type": "null", "default": odd, "examples": [odd]}), "null")


def test_common_schemas_are_not_tried_in_a_process_of_their_own() -> None:
    common = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "description": "word " * 1000,
        "properties": {"a": {"type": "integer", "title": "A", "default": 12345}, "b": {"format": "date"}},
        "items": {"type": "number", "minimum": -12345.5, "maximum": 2**53},
    }
    assert not needs_trial(json_rule(common))
    for hostile in (
        {"maxLength": 9999},
        {"multipleOf": 12345},
        {"enum": ["x" * 5000]},
        {"pattern": '"minimum": (a{9999})'},
    ):
        assert needs_trial(json_rule({**common, **hostile})), hostile
    assert needs_trial('start: /"minimum": 1{9999}/') and needs_trial('start: %json {"minimum": 12345678901234567890}')


def test_the_callers_schema_is_not_changed() -> None:
    shared = {"format": "date", "minimum": 1.0}
    schema = {"properties": {"a": shared, "b": shared}, "patternProperties": {"\\d": shared}}
    before = json.dumps(schema)
    follow(schema)
    assert json.dumps(schema) == before


# As pydantic, zod and OpenAI's and others' tool definitions write them.
PEOPLE: dict[str, Schema] = {
    "pydantic": {
        "$defs": {
            "Kind": {"enum": ["cat", "dog"], "title": "Kind", "type": "string"},
            "Pet": {
                "properties": {
                    "kind": {"$ref": "#/$defs/Kind"},
                    "born": {"anyOf": [{"format": "date", "type": "string"}, {"type": "null"}], "default": None},
                    "weight": {"exclusiveMinimum": 0, "title": "Weight", "type": "number"},
                },
                "required": ["kind", "weight"],
                "title": "Pet",
                "type": "object",
            },
        },
        "properties": {
            "name": {"maxLength": 20, "minLength": 1, "pattern": "^[A-Z]\\w*$", "title": "Name", "type": "string"},
            "pets": {"items": {"$ref": "#/$defs/Pet"}, "maxItems": 2, "title": "Pets", "type": "array"},
            "best": {"$ref": "#/$defs/Pet", "description": "Of them all."},
            "scores": {"additionalProperties": {"type": "integer"}, "minProperties": 1, "type": "object"},
            "pair": {"maxItems": 2, "minItems": 2, "prefixItems": [{"type": "integer"}, {}], "type": "array"},
            "seen": {"format": "date-time", "title": "Seen", "type": "string"},
            "id": {"format": "uuid", "type": "string"},
            "site": {"format": "uri", "maxLength": 2083, "minLength": 1, "type": "string"},
            "mail": {"format": "email", "type": "string"},
            "took": {"format": "duration", "type": "string"},
            "blob": {"format": "binary", "type": "string"},
            "secret": {"format": "password", "type": "string", "writeOnly": True},
            "price": {"anyOf": [{"type": "number"},
                                {"pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "type": "string"}]},
            "flag": {"const": True, "default": True, "title": "Flag", "type": "boolean"},
            "any": {"title": "Any"},
        },
        "required": ["name", "pets"],
        "title": "Owner",
        "type": "object",
    },
    "pydantic's tagged union": {
        "$defs": {
            "Circle": {"properties": {"type": {"const": "circle", "type": "string"}, "r": {"type": "number"}},
                       "required": ["type", "r"], "type": "object"},
            "Square": {"properties": {"type": {"const": "square", "type": "string"}, "a": {"type": "number"}},
                       "required": ["type", "a"], "type": "object"},
        },
        "anyOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Square"}],
    },
    "zod": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/Person",
        "definitions": {
            "Person": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "age": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
                    "role": {"type": "string", "enum": ["admin", "user"]},
                    "nick": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "at": {"type": "string", "format": "date-time"},
                },
                "required": ["name", "age"],
                "additionalProperties": False,
            }
        },
    },
    "openai, strict": {
        "type": "object",
        "properties": {
            "steps": {"type": "array", "items": {"type": "object", "properties": {
                "explanation": {"type": "string"}, "output": {"type": "string"}},
                "required": ["explanation", "output"], "additionalProperties": False}},
            "final_answer": {"type": ["string", "null"]},
        },
        "required": ["steps", "final_answer"],
        "additionalProperties": False,
    },
    "a tool": {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "zip": {"type": "string", "pattern": "^\\d{5}(-\\d{4})?$"},
            "phone": {"type": "string", "pattern": "^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$"},
            "ip": {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]},
            "host": {"type": "string", "format": "hostname"},
            "limit": {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1},
            "filter": {"type": "object", "additionalProperties": True},
        },
        "required": ["location"],
    },
    "no parameters": {"type": "object", "properties": {}},
}  # fmt: skip
# What of them the engine has never followed, with what it is refused for.
PARTLY = {("pydantic", "price"): r"pattern: \(\?! in"}


def test_schemas_of_people_are_followed() -> None:
    for (name, part), says in PARTLY.items():
        with pytest.raises(GrammarError, match=says):
            follow(PEOPLE[name])
        del PEOPLE[name]["properties"][part]
    for name, schema in PEOPLE.items():
        assert check_replies(schema, 7, 20), name


NAMES = ("a", "b", "ab", "é", "😀", 'a"b', "a\nb", "x1", "$ref", "type")
TEXTS = st.one_of(
    st.fixed_dictionaries({"type": st.just("string")}, optional={"maxLength": st.integers(3, 6)}),
    st.sampled_from(["^[a-c]{1,3}$", "a|b$", "^x", r"\d+", "^(ab|cd)*$", r"[^\w]", "^.$", "^[A-Z][a-z]?$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "ipv4", "ipv6", "uuid", "email"]).map(lambda name: {"type": "string", "format": name}),
    st.lists(st.sampled_from(["a", "\n", "é", '"', "\\", "/", "", 0, -1, 1.5, None]), min_size=1, unique=True).map(
        lambda values: {"enum": values}
    ),
)
NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={
        "minimum": st.sampled_from([-1000.25, -3, -0.5, 0, 0.001]),
        "exclusiveMinimum": st.sampled_from([-7, -0.5, 0.0, 0.25]),
        "maximum": st.sampled_from([2, 2.5, 99.99, 10**6]),
        "exclusiveMaximum": st.sampled_from([3, 2.75, 1e9]),
        "multipleOf": st.sampled_from([0.25, 0.5, 1, 3]),
    },
)


def _objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
            "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
            "additionalProperties": st.one_of(st.just(False), inner),
            "patternProperties": st.dictionaries(
                st.sampled_from(["^x", "[0-9]", "^[a-z]{2}$", "😀"]), inner, max_size=1
            ),
            "minProperties": st.integers(0, 2),
        },
    )


def _lists(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    options = {"items": inner, "prefixItems": st.lists(inner, max_size=2), "minItems": st.integers(0, 2)}
    return st.fixed_dictionaries({"type": st.just("array"), "maxItems": st.integers(2, 3)}, optional=options)


SCHEMAS = st.recursive(
    st.one_of(TEXTS, NUMBERS, st.just({"type": ["boolean", "null"]})),
    lambda inner: st.one_of(
        _objects(inner),
        _lists(inner),
        st.lists(inner, min_size=2, max_size=2).flatmap(
            lambda parts: st.sampled_from(["anyOf", "oneOf", "allOf"]).map(lambda word: {word: parts})
        ),
    ),
    max_leaves=6,
)  # fmt: skip
REQUIRED = st.lists(st.sampled_from("ab"), min_size=1, max_size=2, unique=True)
DECIDABLE = st.recursive(
    st.one_of(
        st.sampled_from([True, False, {"minimum": 2}, {"maxLength": 1}, {"minItems": 1}, {"exclusiveMaximum": 1.5}]),
        st.lists(st.sampled_from(["null", "boolean", "object", "array", "string", "number"]), min_size=1, max_size=3)
        .map(lambda kinds: {"type": sorted(set(kinds))}),
        REQUIRED.map(lambda names: {"required": names}),
    ),
    lambda inner: st.one_of(
        inner.map(lambda part: {"not": part}),
        st.lists(inner, min_size=1, max_size=3).flatmap(
            lambda parts: st.sampled_from(["anyOf", "oneOf", "allOf", "oneOf"]).map(lambda word: {word: parts})
        ),
        inner.map(lambda part: {"properties": {"a": part}}),
        st.tuples(inner, REQUIRED).map(lambda both: {"not": both[0], "required": both[1]}),
    ),
    max_leaves=4,
)  # fmt: skip
DOCUMENTS: list[Any] = [None, True, -3, 1, 1.5, 2, 7, "", "x", "xy", [], [1], [None, "x"], {}, {"a": 1}, {"a": "x"}]
DOCUMENTS += [{"a": None}, {"a": []}, {"b": 1}, {"b": "xy", "c": 2}, {"a": 3, "b": 1}, {"a": {"a": 1}}, {"a": {"b": 0}}]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(schema=st.one_of(DECIDABLE.map(lambda part: {"not": part}), st.lists(DECIDABLE, max_size=3).map(
    lambda parts: {"oneOf": parts or [True]})))  # fmt: skip
def test_what_is_left_by_not_and_one_of_is_what_a_validator_takes(schema: Schema) -> None:
    """Neither a document too many nor one too few, wherever the schema is followed."""
    with contextlib.suppress(GrammarError):  # by name, or nothing satisfies it
        constraint, validator = follow(schema), jsonschema.Draft202012Validator(schema)
        for document in DOCUMENTS:
            texts = [json.dumps(document)]
            if isinstance(document, dict):
                texts.append(json.dumps(dict(reversed(document.items()))))
            assert any(accepts(constraint, text) for text in texts) == validator.is_valid(document), document


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_whatever_is_drawn_is_valid(schema: Schema, seed: int) -> None:
    with contextlib.suppress(GrammarError):  # by name, or nothing satisfies it
        check_replies(schema, seed, 3)
