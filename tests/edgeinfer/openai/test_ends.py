"""Why replies end that are complete when their tokens run out, and what is said of fields that change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import edgeinfer
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import OTHERS_FIELDS
from tests.edgeinfer.openai.functions import CLOCK, as_tools
from tests.speculation import needs_builtin

MESSAGES = [{"role": "user", "content": "Tell me about a dog."}]
ANIMAL = {
    "type": "object",
    "properties": {"kind": {"enum": ["dog", "cat"]}, "legs": {"type": "integer"}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


def answered(model: edgeinfer.Model, **request: Any) -> dict[str, Any]:
    answer = model.create_chat_completion(MESSAGES, **request)
    assert isinstance(answer, dict)
    return answer


def cut(model: edgeinfer.Model, **request: Any) -> Iterator[dict[str, Any]]:
    """The choices of a request as they are with fewer and fewer tokens, from the whole reply on."""
    tokens = answered(model, **request)["usage"]["completion_tokens"]
    for missing in (0, 1, 2, 8, 16, 24):
        yield answered(model, **request, max_tokens=max(tokens - missing, 1))["choices"][0]


@needs_builtin
def test_what_is_complete_was_not_cut_off() -> None:
    """At each length a reply ends with "length" where something is missing, and with what completes it not."""
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}}
    calling = {"tools": as_tools(CLOCK), "tool_choice": "required", "parallel_tool_calls": False}
    with edgeinfer.load(context=1024, threads=1) as model:
        document, *shorter = cut(model, response_format=form)
        text = document["message"]["content"]
        # One way to write it: a blank behind colons and commas, and no more digits than readers of JSON take.
        assert text == json.dumps(json.loads(text)) and len(text) < 50
        wholes = [choice["message"]["content"] == text for choice in shorter]
        assert [choice["finish_reason"] == "stop" for choice in shorter] == wholes
        assert set(wholes) == {True, False}
        called, *shorter = cut(model, **calling)
        (call,) = called["message"]["tool_calls"]
        arguments = [choice["message"]["tool_calls"][0]["function"]["arguments"] for choice in shorter]
        wholes = [argument == call["function"]["arguments"] for argument in arguments]
        assert [choice["finish_reason"] == "tool_calls" for choice in shorter] == wholes
        assert set(wholes) == {True, False}


def test_fields_of_other_servers_are_ignored_and_told_of(model: edgeinfer.Model) -> None:
    neutral = {name: values[0] for name, values in OTHERS_FIELDS.items() if values}
    answer = model.create_chat_completion(MESSAGES, max_tokens=1, **neutral)
    assert isinstance(answer, dict) and "warnings" not in answer
    others: dict[str, Any] = {"mirostat": 2, "dry_multiplier": 0.8, "cache_prompt": True}
    answer = model.create_chat_completion(MESSAGES, max_tokens=1, **others)
    assert isinstance(answer, dict)
    ignored = ("dry_multiplier", "mirostat")
    assert answer["warnings"] == [f"{name} is not supported and was ignored." for name in ignored]


def test_fields_that_nobody_has_are_refused_where_they_are_nearly_others(model: edgeinfer.Model) -> None:
    with pytest.raises(RequestError, match=r"Unknown field 'temprature'\. Did you mean 'temperature'\?"):
        model.create_chat_completion(MESSAGES, temprature=1)  # type: ignore[call-overload]
    answer = model.create_chat_completion(MESSAGES, max_tokens=1, zzz=1)  # type: ignore[call-overload]
    assert answer["warnings"] == ["zzz is not supported and was ignored."]
