"""JSON schemas drawn at random: replies are valid by them, and what is left over by them is what a validator takes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.errors import GrammarError
from tests.runtime.sampling.json_texts import Schema, accepts, check_replies, follow

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

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


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_whatever_is_drawn_of_many_is_valid(schema: Schema, seed: int) -> None:
    with contextlib.suppress(GrammarError):  # by name, or nothing satisfies it
        check_replies(schema, seed, 4)
