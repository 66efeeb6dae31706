"""Every way of searching with every form that a reply can be given: it keeps to the form, or is refused by name."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import UsageError
from tests.methods import all_methods
from tests.speculation import known_costs

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
CHOICES = ("yes", "no", "yes indeed", "perhaps not")


def is_json(schema: dict[str, Any]) -> Callable[[str], None]:
    return lambda text: jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def matches(expression: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(expression, text, re.DOTALL), text

    return check


# What is asked for, and what a reply that ended by itself must be.
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], None]]] = {
    "none": ({}, matches(".*")),
    "schema": ({"json_schema": SCHEMA}, is_json(SCHEMA)),
    "object": ({"json_object": True}, is_json({"type": "object"})),
    "regex": ({"regex": "(yes|no), [a-z]{2,5}[.]"}, matches("(yes|no), [a-z]{2,5}[.]")),
    "grammar": ({"grammar": 'start: "the " ("cat" | "dog")~1..3'}, matches("the (cat|dog){1,3}")),
    "choices": ({"choices": CHOICES}, matches("|".join(CHOICES))),
}
WARM: dict[str, Any] = {"temperature": 0.9, "seed": 7}
WAYS: dict[str, dict[str, Any]] = {
    "off": {},
    "samples": WARM,
    "first-finish": WARM,
    "best-of": WARM,
    "vote": WARM,
    "cautious": WARM,
    "lookahead": {"method_options": {"uncertainty": 0.0}},
    # Every token is moved, and far: what is plausible among all tokens is seldom what a form allows.
    "contrast": {"method_options": {"lame_prompt": "A dog. The", "uncertainty": 0.0, "contrast_strength": 100.0}},
    "momentum": {},
    "extract": {"passage": "Tom had a red ball. He met a dog in the park."},
    "aligned": WARM,
    "particles": WARM | {"method_options": {"resample_every": 2}},
    "astar": WARM | {"samples": 2, "rounds": 2},
    "beam": {"beams": 4, "beam_groups": 2},
    "anchored": WARM,
}
FOLLOWS = ("off", "cautious", "contrast", "aligned", "particles", "astar", "beam", "anchored")
DRAWS_BY_RULE = ("lookahead", "momentum", "extract", "beam")
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": WARM,
    "speculation": {"speculation": "forced,ngram"},
    "stop": {"stop": ("d", '"')},
    "stop ids": {"stop_token_ids": (9, 10**6)},
    "bias": {"logit_bias": {7: 50.0, 9: -math.inf, 11: -1e6, 13: 1e6}},
    "bans the likely": {"logit_bias": dict.fromkeys(range(40, 90), -math.inf)},
    "repetition": {"repetition_penalty": 100.0},
    "penalties": {"frequency_penalty": -100.0, "presence_penalty": 100.0},
    "truncation": {"top_k": 3, "top_p": 1e-6, "min_p": 1.0},
    "logprobs": {"logprobs": 20},
}


@pytest.fixture(scope="module")
def model(small_bundle: Path) -> Iterator[edgeinfer.Model]:
    options: dict[str, Any] = {"draft_model": small_bundle, "context": 400, "remember": False}
    with known_costs(), edgeinfer.load(small_bundle, threads=1, **options) as loaded:
        yield loaded


def check(model: edgeinfer.Model, way: str, form: str, extra: str) -> bool:
    """Whether there was a reply, which keeps to its form; where there was none, it was refused for a reason."""
    options, fits = FORMS[form]
    try:
        asked = WAYS[way] | options | EXTRAS[extra]
        found = model.generate("One day", max_tokens=40, **{"search": way, **asked})
    except UsageError as error:
        by_form = form != "none" and way not in FOLLOWS and "cannot follow a grammar" in error.message
        by_rule = way in DRAWS_BY_RULE and "by a rule of its own" in error.message
        beside = extra == "speculation" and way != "off" and "cannot be combined" in error.message
        banned = "bias" in extra and "bans every token" in error.message
        formless = way == "aligned" and form == "none" and "a form that they must have" in error.message
        stuck = {"aligned": "led nowhere", "particles": "can become the reply"}.get(way, "?") in error.message
        reasons = (by_form, by_rule, beside, banned, formless, stuck, "bans" in extra)
        assert any(reasons), (way, form, extra, error.message)
        return False
    assert form == "none" or way in FOLLOWS
    if found.finish_reason == "stop" and "stop" not in extra:
        fits(found.text)
    assert model.generate("One day", max_tokens=2).usage.completion_tokens
    return True


def test_all_ways_and_extras_are_tried() -> None:
    assert {*WAYS} == {"off", *all_methods("searches")}


def test_all_ways_and_forms(model: edgeinfer.Model) -> None:
    extras = itertools.cycle(EXTRAS)
    replies = {(way, form): check(model, way, form, "plain") for way, form in itertools.product(WAYS, FORMS)}
    for way, form in itertools.product(WAYS, FORMS):
        assert replies[way, form] == (way in FOLLOWS if form != "none" else way != "aligned")
    # The other combinations are tried by the slow test.
    for way, form in itertools.product(FOLLOWS, FORMS):
        check(model, way, form, next(extras))


def test_contrast_ends_a_form(model: edgeinfer.Model) -> None:
    """Where what is likely may not follow, the reply still comes to its end."""
    for form in ("regex", "grammar", "choices", "schema"):
        options, fits = FORMS[form]
        for temperature in (0.0, 1.0):
            asked = {"temperature": temperature, "seed": 1, "max_tokens": 90} | WAYS["contrast"] | options
            found = model.generate("One day", search="contrast", **asked)
            if form != "schema":
                assert found.finish_reason == "stop"
            if found.finish_reason == "stop":
                fits(found.text)


@pytest.mark.slow
def test_all_ways_forms_and_extras(model: edgeinfer.Model) -> None:
    replies = sum(check(model, *case) for case in itertools.product(WAYS, FORMS, EXTRAS))
    assert replies > 150
