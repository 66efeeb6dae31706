"""OpenAI's chat completion: shapes of answers and chunks, fields that are mapped, fields that are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.openai import RequestError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


def complete(asked: edgeinfer.Model, /, **options: Any) -> dict[str, Any]:
    answer = asked.create_chat_completion(MESSAGES, **OPTIONS | options)
    assert isinstance(answer, dict)
    return answer


def stream(model: edgeinfer.Model, **options: Any) -> list[dict[str, Any]]:
    chunks = model.create_chat_completion(MESSAGES, stream=True, **OPTIONS | options)
    assert isinstance(chunks, Iterator)
    return list(chunks)


def content(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_an_answer(model: edgeinfer.Model) -> None:
    answer = json.loads(json.dumps(complete(model)))
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert isinstance(answer["created"], int)
    assert answer["model"] == "small"
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert choice["message"]["role"] == "assistant"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert content(answer) == model.chat("Be brief.").send("Hello", **OPTIONS).text


def test_a_streamed_answer(model: edgeinfer.Model) -> None:
    chunks = stream(model)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == content(complete(model))
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)
    json.dumps(chunks)


def test_usage_at_the_end_of_a_stream(model: edgeinfer.Model) -> None:
    last = stream(model, stream_options={"include_usage": True})[-1]
    assert last["choices"] == []
    whole = complete(model)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]


def test_a_stop(model: edgeinfer.Model) -> None:
    options: dict[str, Any] = {"logit_bias": {"1": 100}, "ignore_eos": False}
    assert complete(model, **options)["choices"][0]["finish_reason"] == "stop"
    assert stream(model, **options)[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("as_list", [True, False])
def test_stop_strings(model: edgeinfer.Model, as_list: bool) -> None:
    text = content(complete(model))
    stop = text[4:6]
    answer = complete(model, stop=[stop] if as_list else stop)
    assert content(answer) == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_sampling_fields(model: edgeinfer.Model) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.5}
    expected = model.chat("Be brief.").send("Hello", **OPTIONS | options).text
    assert content(complete(model, **options)) == expected
    assert content(complete(model, **options | {"seed": 6})) != expected


def test_max_completion_tokens(model: edgeinfer.Model) -> None:
    answer = model.create_chat_completion(MESSAGES, max_completion_tokens=3, ignore_eos=True)
    assert isinstance(answer, dict)
    assert answer["usage"]["completion_tokens"] == 3


NEUTRAL: list[dict[str, Any]] = [
    {"n": 1},
    {"logprobs": False},
    {"response_format": {"type": "text"}},
    {"tools": []},
    {"tool_choice": "auto"},
    {"model": "anything"},
    {"user": "someone"},
    {"stop": None},
    {"temperature": None},
    {"seed": None},
    {"logit_bias": None},
    {"stream_options": None},
]
REFUSED: list[dict[str, Any]] = [
    {"n": 0},
    {"top_logprobs": 3},
    {"response_format": {"type": "yaml"}},
    {"tools": [{"type": "retrieval"}]},
    {"functions": [{"name": "f"}]},
    {"audio": {"voice": "alloy"}},
    {"web_search_options": {}},
    {"modalities": ["text", "audio"]},
    {"tool_choice": "required"},
    {"heat": 1},
    {"temperature": -1},
    {"top_p": 7},
    {"max_tokens": 0},
    {"stop": ["a", ""]},
]
MALFORMED: list[dict[str, Any]] = [
    {"temperature": "hot"},
    {"max_tokens": "many"},
    {"seed": "one"},
    {"stop": 5},
    {"stop": [5]},
    {"logit_bias": {"dog": 1}},
    {"logit_bias": {"5": "much"}},
    {"logit_bias": [1]},
    {"stream_options": 5},
]


@pytest.mark.parametrize("option", NEUTRAL, ids=str)
def test_fields_that_ask_for_what_happens_anyway(model: edgeinfer.Model, option: dict[str, Any]) -> None:
    assert content(complete(model, **option)) == content(complete(model))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("option", REFUSED, ids=str)
def test_refused_fields(model: edgeinfer.Model, option: dict[str, Any], streaming: bool) -> None:
    """Refused at once, before the first chunk, and never ignored."""
    (name,) = option
    with pytest.raises(RequestError, match=name) as caught:
        model.create_chat_completion(MESSAGES, stream=streaming, **option)
    assert str(caught.value.param).startswith(name)


@pytest.mark.parametrize("option", MALFORMED, ids=str)
def test_malformed_fields(model: edgeinfer.Model, option: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        model.create_chat_completion(MESSAGES, **option)


@pytest.mark.parametrize(
    "messages",
    [[], "Hello", [{"role": "user"}], [{"content": "Hello"}], ["Hello"], [{"role": "user", "content": 5}]],
    ids=str,
)
def test_malformed_messages(model: edgeinfer.Model, messages: Any) -> None:
    with pytest.raises(EdgeInferError):
        model.create_chat_completion(messages, **OPTIONS)


def test_a_stream_left_early_is_over(model: edgeinfer.Model) -> None:
    chunks = model.create_chat_completion(MESSAGES, stream=True, max_tokens=200, ignore_eos=True)
    assert isinstance(chunks, Iterator)
    for _ in range(4):
        next(chunks)
    expected = content(complete(model))
    assert content(complete(model)) == expected
