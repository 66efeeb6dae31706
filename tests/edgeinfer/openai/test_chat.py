"""OpenAI's chat completion: shapes of answers and chunks, fields that are mapped, fields that are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgeinfer
from edgeinfer.core.errors import EdgeInferError, UsageError
from edgeinfer.openai import make_completion
from edgeinfer.openai.errors import RequestError, error_body
from tests.tables import each_row

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


def test_a_stop(model: edgeinfer.Model) -> None:
    options: dict[str, Any] = {"logit_bias": {"1": 100}, "ignore_eos": False}
    assert complete(model, **options)["choices"][0]["finish_reason"] == "stop"
    assert stream(model, **options)[-1]["choices"][0]["finish_reason"] == "stop"


@each_row("as_list", [True, False])
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
    {"response_format": "json"},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
    {"response_format": {"type": "json_object", "schema": 5}},
    {"audio": {"voice": "alloy"}},
    {"web_search_options": {"search_context_size": "low"}},
    {"modalities": ["text", "audio"]},
    {"tool_choice": "required"},
    {"temperature": -1},
    {"top_p": 7},
    {"max_tokens": 0},
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


@pytest.mark.parametrize(
    "messages",
    [[], "Hello", [{"role": "user"}], [{"content": "Hello"}], ["Hello"], [{"role": "user", "content": 5}]],
    ids=str,
)
def test_malformed_messages(model: edgeinfer.Model, messages: Any) -> None:
    with pytest.raises(EdgeInferError):
        model.create_chat_completion(messages, **OPTIONS)


def test_several_replies(model: edgeinfer.Model) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 2**64 - 1}
    answer = complete(model, n=3, **options)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [content(complete(model, **options | {"seed": seed})) for seed in (-1, 0, 1)]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 36
    assert answer["usage"]["prompt_tokens"] == complete(model)["usage"]["prompt_tokens"]
    chunks = stream(model, n=3, **options)
    for index, text in enumerate(texts):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert mine[-1]["finish_reason"] == "length"


def test_a_reply_goes_on_with_the_last_message(model: edgeinfer.Model) -> None:
    whole = content(complete(model, max_tokens=20))
    begun = [*MESSAGES, {"role": "assistant", "content": whole[:5]}]
    answer = model.create_chat_completion(begun, continue_final_message=True, **OPTIONS)
    assert isinstance(answer, dict)
    count = len(model.tokenize_chat(MESSAGES, prefill=whole[:5]))
    assert answer["usage"]["prompt_tokens"] == count
    for messages in (MESSAGES, [begun[-1]]):
        with pytest.raises(RequestError):
            model.create_chat_completion(messages, continue_final_message=True)


def test_a_prompt_that_is_too_long_names_it(model: edgeinfer.Model) -> None:
    with pytest.raises(RequestError) as caught:
        model.create_chat_completion([{"role": "user", "content": "word " * 600}])
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


def test_a_form_can_be_checked_before_the_reply(model: edgeinfer.Model) -> None:
    pytest.importorskip("llguidance")
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("response_format", {"response_format": form}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep, "strict": True}}]}),
        ("regex", {"regex": "a" * 5000}),
    ]
    for param, request in requests:
        completion = make_completion("chat.completion", {"messages": MESSAGES, **request}, model)
        with pytest.raises(RequestError) as caught:
            completion.check(model)
        assert (caught.value.param, caught.value.code) == (param, "unsupported_schema")
    make_completion("chat.completion", {"messages": MESSAGES, "response_format": {"type": "json_object"}}, model).check(
        model
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "text", "role", "content", "schema"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
FIELDS = (
    *("messages", "input", "prompt", "tools", "tool_choice", "response_format", "text", "stop", "logit_bias", "n"),
    *(
        "temperature",
        "max_tokens",
        "seed",
        "logprobs",
        "top_logprobs",
        "stream_options",
        "reasoning",
        "include",
        "stream",
    ),
    *("chat_template_kwargs", "continue_final_message", "choices", "regex", "metadata", "echo", "instructions"),
)


NEEDED: dict[str, dict[str, Any]] = {
    "chat.completion": {"messages": MESSAGES},
    "text_completion": {"prompt": "Hi"},
    "response": {"input": "Hi"},
}


anything = given(
    kind=st.sampled_from(["chat.completion", "text_completion", "response"]),
    body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5),
    whole=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@anything
def test_whatever_is_asked_is_answered_or_refused(
    loaded: edgeinfer.Model, kind: str, body: dict[str, Any], whole: bool
) -> None:
    check_answer(loaded, kind, body, whole)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@anything
def test_much_that_is_asked_is_answered_or_refused(
    loaded: edgeinfer.Model, kind: str, body: dict[str, Any], whole: bool
) -> None:
    check_answer(loaded, kind, body, whole)


def check_answer(model: edgeinfer.Model, kind: str, body: dict[str, Any], whole: bool) -> None:
    """Checks that a request is taken, or refused as the caller's fault."""
    body = {**NEEDED[kind], **body} if whole else body
    try:
        completion = make_completion(kind, body, model)
    except UsageError as error:
        status, _ = error_body(error)
        assert 400 <= status < 500
    else:
        json.dumps(completion.opening())
