"""Answers and events are what the official client's own types say, strictly."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

import edgeinfer
from edgeinfer.openai import events, make_completion, whole
from tests.edgeinfer.openai.functions import CLOCK, WEATHER, as_tools, flat
from tests.tables import each_row

pytest.importorskip("openai", reason="the official client is not installed")
pytest.importorskip("llguidance")

import openai.types
from openai.types import chat
from openai.types import responses as official
from pydantic import BaseModel, TypeAdapter

SAY = {"messages": [{"role": "user", "content": "Tell a story."}]}
CALL = {"tools": as_tools(WEATHER, CLOCK), "tool_choice": "required", "max_tokens": 200}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 12},
    "several": {"max_tokens": 8, "n": 3, "temperature": 1.0, "seed": 1},
    "logprobs": {"max_tokens": 8, "logprobs": True, "top_logprobs": 4},
    "no alternatives": {"max_tokens": 8, "logprobs": True},
    "calls": CALL,
    "calls with logprobs": {**CALL, "logprobs": True, "n": 2},
    "schema": {"response_format": {"type": "json_object"}, "max_tokens": 20},
}
TEXTS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "Once upon a time"},
    "lists": {"prompt": ["Once upon", "The dog"], "n": 2, "max_tokens": 4, "logprobs": 0},
    "ids": {"prompt": [5, 6, 7], "echo": True, "stop": ["a"]},
    "lists of ids": {"prompt": [[5, 6], [7]], "max_tokens": 3, "logprobs": 3},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {"input": "Tell a story.", "max_output_tokens": 12},
    "to its end": {"input": "Tell a story.", "stop": "."},
    "logprobs": {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 5},
    "calls": {"input": "Hi", "tools": flat(WEATHER, CLOCK), "tool_choice": "required", "max_output_tokens": 200},
    "named": {"input": "Hi", "tools": flat(CLOCK), "tool_choice": {"type": "function", "name": "time.of"}},
    "schema": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "text": {
            "format": {"type": "json_schema", "name": "x", "schema": {"type": "object", "additionalProperties": False}}
        },
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
    },
}


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """What reads a type; making it takes a tenth of a second."""
    return TypeAdapter(kind)


def strictly(kind: Any, value: dict[str, Any]) -> Any:
    """The value as the client's type, and nothing in it that would need another type."""
    return adapter(kind).validate_json(json.dumps(value, allow_nan=False), strict=True)


def unknown(value: BaseModel, where: str = "") -> list[str]:
    """Fields that the official types do not have."""
    found = [where + name for name in value.model_extra or {}]
    for name in type(value).model_fields:
        inner = getattr(value, name)
        for item in inner if isinstance(inner, list) else [inner]:
            if isinstance(item, BaseModel):
                found += unknown(item, f"{where}{name}.")
    return found


@pytest.mark.parametrize("name", CHATS)
def test_chat_completions(tales: edgeinfer.Model, name: str) -> None:
    body = {**SAY, **CHATS[name]}
    answer = strictly(chat.ChatCompletion, whole(tales, make_completion("chat.completion", body, tales)))
    assert unknown(answer) == ["timings"]
    assert len(answer.choices) == body.get("n", 1)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [
        strictly(chat.ChatCompletionChunk, event)
        for event in events(tales, make_completion("chat.completion", body, tales))
    ]
    assert {field for chunk in chunks for field in unknown(chunk)} == {"timings"}
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in answer.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == (choice.message.content or "")
        assert mine[-1].finish_reason == choice.finish_reason
        told = [entry for c in mine if c.logprobs for entry in c.logprobs.content]
        assert told == (choice.logprobs.content if choice.logprobs else [])


@each_row("name", TEXTS)
def test_completions(tales: edgeinfer.Model, name: str) -> None:
    body = TEXTS[name]
    answer = strictly(openai.types.Completion, whole(tales, make_completion("text_completion", body, tales)))
    assert unknown(answer) == ["timings"]
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(tales, make_completion("text_completion", body, tales))
    # The official type has no null for a reply that goes on, which the official server sends.
    for chunk in chunks:
        reasons = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
        strictly(openai.types.Completion, {**chunk, "choices": reasons})
    assert last["usage"]["completion_tokens"] == answer.usage.completion_tokens
    for choice in answer.choices:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice.index]
        assert "".join(c["text"] for c in mine) == choice.text
        assert mine[-1]["finish_reason"] == choice.finish_reason
        if choice.logprobs:
            for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                told = [value for c in mine if c["logprobs"] for value in c["logprobs"][field]]
                assert told == getattr(choice.logprobs, field)


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(tales: edgeinfer.Model, name: str) -> None:
    body = RESPONSES[name]
    answer = strictly(official.Response, whole(tales, make_completion("response", body, tales)))
    assert unknown(answer) == ["timings"]
    told = [
        strictly(official.ResponseStreamEvent, event)
        for event in events(tales, make_completion("response", {**body, "stream": True}, tales))
    ]
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert [event.type for event in told[:2]] == ["response.created", "response.in_progress"]
    last = told[-1]
    assert last.type == f"response.{answer.status}"
    assert last.response.output_text == answer.output_text
    check_items(told[2:-1], last.response.output)
    assert [item.type for item in last.response.output] == [item.type for item in answer.output]


def check_items(told: list[Any], output: list[Any]) -> None:
    """The events of each item come together, in the official order, and say what the item says."""
    for place, item in enumerate(output):
        mine = [event for event in told if event.output_index == place]
        kinds = list(dict.fromkeys(event.type for event in mine))
        deltas = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        if item.type == "message":
            assert kinds in (MESSAGE, [kind for kind in MESSAGE if not kind.endswith("delta")])
            assert deltas == item.content[0].text == mine[-3].text
            logprobs = [
                entry.logprob for event in mine if event.type.endswith("text.delta") for entry in event.logprobs
            ]
            assert logprobs == [entry.logprob for entry in item.content[0].logprobs]
        else:
            assert kinds == CALLED
            assert deltas == item.arguments == mine[-2].arguments
        assert mine[-1].item == item
        assert len({event.item_id for event in mine if hasattr(event, "item_id")}) == 1
    assert [event.output_index for event in told] == sorted(event.output_index for event in told)


MESSAGE = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
CALLED = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]
