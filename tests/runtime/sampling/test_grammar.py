"""Grammars as constraints: what may follow, pushes and pops, vocabularies, grammars that are wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from edgeinfer.core.errors import BackendError, GrammarError, TokenizerError, UsageError
from edgeinfer.runtime.sampling import grammar_trial
from edgeinfer.runtime.sampling.grammar_source import MAX_SOURCE
from edgeinfer.runtime.sampling.grammar_tokens import spelled
from edgeinfer.runtime.text.tokenizer import Tokenizer
from tests.runtime.sampling.conftest import drawn, made, text_of

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@cache
def pieces() -> Tokenizer:
    """SentencePiece's: spaces as blocks, bytes as `<0x..>`."""
    texts = ["<unk>", "<s>", "</s>"]
    texts += [f"<0x{byte:02X}>" for byte in range(256)]
    texts += [
        "▁",
        *"{}[]:,.-0123456789abcdefghijklmnopqrstuvwxyz",
        '"',
        '"▁',
        '▁"',
        "name",
        "▁name",
        '{"',
        "age",
        "é",
        "日",
    ]
    made = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, [], unk_token="<unk>"))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return Tokenizer(made)


SCHEMAS: dict[str, Any] = {
    "object": PERSON,
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -2.5, "maximum": 40}, "maxItems": 3},
    "multiples": {"type": "integer", "multipleOf": 5, "minimum": 10, "maximum": 500},
    "enum": {"enum": ["red", "日本", 3, None, {"a": [1]}]},
    "const": {"const": 'with "quotes" and \\'},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+$", "maxLength": 9},
    "date": {"type": "string", "format": "date"},
    "tree": {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "maxProperties": 1,
                           "additionalProperties": False}},
        "$ref": "#/$defs/node",
    },
    "union": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "minItems": 1}]},
    "additional": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": False, "minItems": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_whatever_is_drawn_is_valid(name: str, kind: str, byte_level: Tokenizer) -> None:
    tokenizer, ends = (byte_level, (1,)) if kind == "bytes" else (pieces(), (2,))
    replies = [drawn(made(tokenizer, ends, json_schema=SCHEMAS[name]), ends, seed) for seed in range(8)]
    texts = [text_of(tokenizer, reply) for reply in replies if reply is not None]
    assert texts
    for text in texts:
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(text))


def test_expressions_match_from_end_to_end(byte_level: Tokenizer) -> None:
    for regex in (r"[a-c]{3}x?", r"(yes|no), [A-Z][a-z]{1,5}\.", "^é日[0-9]/\n$", r"(?i)abc"):
        for seed in range(8):
            reply = drawn(made(byte_level, regex=regex), (1,), seed)
            assert reply is not None and re.fullmatch(regex, text_of(byte_level, reply))


def test_a_grammar_of_rules(byte_level: Tokenizer) -> None:
    grammar = 'start: sum\nsum: NUM ("+" NUM)~1..3\nNUM: /[1-9][0-9]?/\n%llguidance {"no_forcing": false}'
    constraint = made(byte_level, grammar=grammar)
    for token in byte_level.encode("12+3", add_special_tokens=False):
        assert token in constraint.allowed()
        constraint.push(token)
    assert 1 in constraint.allowed() and byte_level.token_to_id("+") in constraint.allowed()
    for token in byte_level.encode("+4+5", add_special_tokens=False):
        constraint.push(token)
    assert byte_level.token_to_id("+") not in constraint.allowed()


MOVES = st.lists(st.one_of(st.integers(0, 40), st.none(), st.sampled_from([1, 299, 5000, -3])), max_size=30)


@settings(max_examples=30, deadline=None)
@given(MOVES, st.sampled_from(["object", "numbers", "tree"]))
def test_after_pushes_and_pops_all_is_as_afresh(moves: list[int | None], name: str) -> None:
    """Most of the moves are choices among what may follow; some are tokens that may not, and ends."""
    tokenizer, reply = pieces(), list[int]()
    constraint, fresh = (made(tokenizer, (2,), json_schema=SCHEMAS[name]) for _ in range(2))
    for move in moves:
        if move is None:
            count = min(len(reply), 1 + len(moves) % 3)
            constraint.pop(count)
            del reply[len(reply) - count :]
            continue
        ids = constraint.allowed()
        token = int(ids[move % len(ids)]) if 0 <= move <= 40 and move != 1 else move
        constraint.push(token)
        reply.append(token)
    for token in reply:
        fresh.push(token)
    np.testing.assert_array_equal(constraint.allowed(), fresh.allowed())
    assert constraint.forced() == fresh.forced()
    constraint.pop(len(reply))
    np.testing.assert_array_equal(constraint.allowed(), made(tokenizer, (2,), json_schema=SCHEMAS[name]).allowed())


def test_only_the_end_follows_what_may_not_follow_and_an_end(byte_level: Tokenizer) -> None:
    constraint = made(byte_level, (1, 0), json_schema=PERSON)
    wrong = byte_level.token_to_id("x")
    assert wrong is not None
    for token in (wrong, 1):
        constraint.push(token)
        assert constraint.allowed().tolist() == [0, 1] and constraint.forced() == []
        constraint.push(wrong)
        assert constraint.allowed().tolist() == [0, 1]
        constraint.pop(2)
        assert 1 not in constraint.allowed()
    for token in byte_level.encode('{"name": "A", "age": 1}', add_special_tokens=False):
        assert token in constraint.allowed()
        constraint.push(token)
    assert constraint.allowed().tolist() == [0, 1] and constraint.forced() == []


def test_grammars_of_llama_cpp_are_translated(byte_level: Tokenizer) -> None:
    grammar = '# either\nroot ::= "yes" | "no" ws\nws ::= [ \\t]+\n'
    replies = [drawn(made(byte_level, grammar=grammar), (1,), seed) for seed in range(8)]
    texts = {text_of(byte_level, reply) for reply in replies if reply is not None}
    assert texts and all(re.fullmatch(r"yes|no[ \t]+", text) for text in texts)
    for wrong in ("root ::= (", "root ::= [a", "root ::= " + "(" * 10_000, "root ::= missing"):
        with pytest.raises(GrammarError):
            made(byte_level, grammar=wrong)


def test_what_is_certain_is_forced(byte_level: Tokenizer) -> None:
    constraint = made(byte_level, regex=r"[ab] hello hello[cd]")
    assert constraint.forced() == []
    constraint.push(byte_level.encode("a", add_special_tokens=False)[0])
    forced = constraint.forced()
    assert forced and " hello hello".startswith(text_of(byte_level, forced))
    for token in forced:
        assert token in constraint.allowed()
        constraint.push(token)


def test_stop_tokens_are_no_text(byte_level: Tokenizer) -> None:
    """A token of text that stops replies may not come where the reply is not complete."""
    b = byte_level.token_to_id("b")
    assert b is not None
    constraint = made(byte_level, (b,), regex="ab?c")
    constraint.push(byte_level.encode("a", add_special_tokens=False)[0])
    assert b not in constraint.allowed()


def test_what_tokens_spell(byte_level: Tokenizer) -> None:
    found = spelled(byte_level, byte_level.vocab_size + 3)
    assert found[:2] == [b"\xff<s>", b"\xff</s>"] and found[-3:] == [b"", b"", b""]
    assert set(found) >= {bytes([byte]) for byte in range(256)}
    found = spelled(pieces(), pieces().vocab_size)
    assert found[0].startswith(b"\xff") and found[3 + 0xE6] == b"\xe6"
    assert {b" name", b'" ', "é".encode()} <= set(found)
    # A model with fewer logits than its tokenizer has tokens is never asked for more.
    constraint = made(pieces(), (2,), size=290, json_object=True)
    assert constraint.allowed().max() < 290


def test_what_grammars_need(byte_level: Tokenizer) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(TokenizerError, match="decoding steps: none"):
        made(Tokenizer(words), json_object=True)
    with pytest.raises(UsageError, match="needs a stop token"):
        made(byte_level, (), json_object=True)


def test_what_is_wrong_is_said_in_one_line(byte_level: Tokenizer) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"json_schema": {"not": {"pattern": "a"}}}, "not is not supported"),
        # A schema cannot loosen how it is followed.
        ({"json_schema": {"not": {"pattern": "a"}, "x-guidance": {"lenient": True}}}, "not is not supported"),
        ({"json_schema": {"uniqueItems": True, "unevaluatedItems": False}}, "uniqueItems"),
        ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}}, r"minLength \(5\)"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 2}}, "minimum"),
        ({"json_schema": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "required property 'a'"),
        ({"json_schema": {"type": "strin"}}, "type: strin"),
        ({"json_schema": {"$ref": "https://example.com/x"}}, r"\$ref: 'https://example.com/x' is elsewhere"),
        ({"json_schema": {"$ref": "#/nowhere"}}, r"\$ref: '#/nowhere' is not there"),
        ({"json_schema": {"$ref": "#"}}, "no text at all satisfies it"),
        ({"json_schema": {"type": "string", "pattern": "(a"}}, "pattern: a group without its end"),
        ({"json_schema": {"type": "string", "format": "regex"}}, "format: regex is not supported"),
        ({"json_schema": {"oneOf": [{"pattern": "a"}, {"maxLength": 3}]}}, "oneOf constraints are not supported. Ch"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "[]"}, "not an object"),
        ({"json_schema": '{"minimum": NaN}'}, "NaN is not a number"),
        ({"json_schema": {"const": {1, 2}}}, "cannot be written as JSON"),
        ({"regex": "["}, "unclosed character class"),
        ({"regex": r"(?=a)b"}, "look-around"),
        ({"regex": "\ud800"}, "not valid Unicode"),
        ({"grammar": 'start: "a" b'}, 'line 1, column 12: unknown name: "b"|line 1, column 8: unknown name: "b"'),
        ({"grammar": "x"}, "cannot be used"),
        ({"grammar": ""}, "no start rule found"),
    ]
    for form, says in wrong:
        with pytest.raises(UsageError, match=says) as caught:
            made(byte_level, **form)
            pytest.fail(f"{form} was taken")
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_formats_that_no_standard_has_are_annotations(byte_level: Tokenizer) -> None:
    kept = {"const": {"format": "color"}}
    schema = {"type": "object", "properties": {"format": {"format": "color", **kept}}, "required": ["format"]}
    reply = drawn(made(byte_level, json_schema={**schema, "additionalProperties": False}), (1,), 0)
    assert reply is not None and json.loads(text_of(byte_level, reply)) == {"format": {"format": "color"}}


def test_the_engine_may_be_missing(monkeypatch: pytest.MonkeyPatch, byte_level: Tokenizer) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"edgeinfer\[structured\]"):
        made(byte_level, json_object=True)


def chain(count: int, below: Callable[[str], Any]) -> dict[str, Any]:
    defs = {f"d{i}": below(f"#/$defs/d{i + 1}") for i in range(count)} | {f"d{count}": {"type": "string"}}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


BOMBS: dict[str, dict[str, Any]] = {
    "references": {"json_schema": chain(20_000, lambda to: {"type": "array", "items": {"$ref": to}})},
    "alternatives": {"json_schema": chain(20_000, lambda to: {"anyOf": [{"$ref": to}, {"type": "integer"}]})},
    "product": {"json_schema": {"allOf": [
        {"oneOf": [{"type": "object", "properties": {"k": {"const": f"{i}-{j}"}}} for j in range(6)]} for i in range(14)
    ]}},
    "multiple": {"json_schema": {"type": "integer", "multipleOf": 1_000_003_000_000_007}},
    "properties": {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(40_000)}}},
    "depth": {"json_schema": nested(5000)},
    "deep text": {"json_schema": '{"items":' * 50_000 + "{}" + "}" * 50_000},
    "long": {"json_schema": {"const": "x" * MAX_SOURCE}},
    "rules": {"grammar": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(20_000)) + 'r20000: "b"'},
    "parentheses": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "expression": {"regex": "a?" * 20_000},
    "overlap": {"grammar": "start: A\nA: " + " & ".join(f"/.*{chr(97 + i)}.{{{i}}}/" for i in range(20))},
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_take_too_long_is_refused(name: str, byte_level: Tokenizer) -> None:
    with pytest.raises(UsageError):
        made(byte_level, **BOMBS[name])


def test_a_trial_ends_after_some_seconds(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without the limits that the process has of its own, which other systems do not know."""
    limits: list[float] = []
    run = subprocess.run

    def waits(command: list[str], *, input: bytes, timeout: float, **options: Any) -> Any:
        limits.append(timeout)
        return run([sys.executable, "-c", "import time; time.sleep(1000)"], input=input, timeout=0.3, **options)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", waits)
        with pytest.raises(BackendError, match="not found out in time"):
            made(byte_level, regex="a{1234}")
        patched.setattr(grammar_trial, "_BOUNDED", False)
        with pytest.raises(GrammarError, match="too large, too deeply nested or too ambiguous"):
            made(byte_level, regex="b{1234}")
    assert len(limits) == 2 and max(limits) <= 10
    # A machine that slept is no reason to refuse a grammar for good.
    assert len(made(byte_level, regex="a{1234}").allowed())


def test_where_nothing_can_be_tried_only_what_is_harmless_is_taken(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **options: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(UsageError, match=r"without trying it in another process first \(no more processes\)"):
        made(byte_level, regex="c{1234}")
    assert len(made(byte_level, regex="c{123}").allowed())


def test_large_but_harmless(byte_level: Tokenizer) -> None:
    """What is tried in another process first is used all the same."""
    values = [f"value number {i}" for i in range(2000)]
    constraint = made(byte_level, json_schema={"enum": values})
    reply = drawn(constraint, (1,), 0)
    assert reply is not None and json.loads(text_of(byte_level, reply)) in values
    constraint = made(byte_level, grammar='start: r{1000000}\nr: "a" | "b"')
    assert drawn(constraint, (1,), 0) is None
    constraint = made(byte_level, json_schema={"type": "array", "items": {"type": "boolean"}, "minItems": 10**9})
    assert drawn(constraint, (1,), 0) is None
    # All of this one is certain, which is more than the engine looks ahead.
    constraint = made(byte_level, json_schema={"type": "array", "items": {"type": "null"}, "minItems": 10**9})
    with pytest.raises(UsageError, match="became too complex"):
        drawn(constraint, (1,), 0)


def test_a_reply_that_becomes_too_complex_is_an_error(byte_level: Tokenizer) -> None:
    rules = "".join(f'r{i}: "x" /[a-z]/ "{i}"\n' for i in range(3000))
    constraint = made(
        byte_level, grammar='start: "ab" x\nx: ' + " | ".join(f"r{i}" for i in range(3000)) + "\n" + rules
    )
    with pytest.raises(UsageError, match=r"became too complex after \d tokens: .*2000"):
        drawn(constraint, (1,), 0)


def test_grammars_are_tried_where_the_system_keeps_no_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS refuses to set one."""
    resource = pytest.importorskip("resource")
    kept = []

    def set_limit(kind: int, limits: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")
        kept.append(kind)

    monkeypatch.setattr(resource, "setrlimit", set_limit)
    grammar_trial._bounded()
    assert kept == [resource.RLIMIT_CPU, resource.RLIMIT_CORE]
