"""Requests of every protocol: messages, prompts and items that are read, answers, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.core.errors import (
    BackendError,
    BudgetError,
    BundleError,
    CapabilityError,
    ContextLengthError,
    EdgeInferError,
    GrammarError,
    PromptError,
    TemplateError,
    UsageError,
)
from edgeinfer.openai import make_completion, whole
from edgeinfer.openai.errors import RequestError, error_body, unknown_model
from edgeinfer.openai.messages import read_messages
from edgeinfer.openai.response import read_input
from tests.edgeinfer.openai.functions import WEATHER, flat
from tests.tables import each_row


def test_texts_in_every_shape() -> None:
    read = read_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": None, "refusal": "I will not."},
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": "", "reasoning_content": "hm"},
        ]
    )
    assert [message["role"] for message in read] == ["system", "user", "assistant", "assistant", "assistant"]
    assert [message["content"] for message in read] == ["Be brief.", "ab", "I will not.", "", ""]
    assert read[1]["name"] == "Ann" and read[4]["reasoning_content"] == "hm"


USER = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "Hi"),
    ("messages[0].role", ["Hi"]),
    ("messages[0].role", [{"content": "Hi"}]),
    ("messages[1].role", [USER, {"role": "function", "name": "f", "content": "x"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": None}]),
    ("messages[0].content", [{"role": "user", "content": 5}]),
    ("messages[1].tool_call_id", [USER, {"role": "tool", "content": "x"}]),
    ("messages[0].tool_calls", [{"role": "assistant", "tool_calls": 5}]),
    ("messages[0].tool_calls[0]", [{"role": "assistant", "tool_calls": [{"id": "a"}]}]),
    (
        "messages[0].tool_calls[1].function.arguments",
        [{"role": "assistant", "tool_calls": [CALL, {"function": {"name": "f", "arguments": [1]}}]}],
    ),
]
PARTS: list[Any] = [
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}},
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    {"type": "file", "file": {"file_id": "x"}},
    {"type": "text"},
    "text",
]


@each_row(("param", "messages"), MESSAGES)
def test_messages_that_are_none(param: str, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read_messages(messages)
    assert caught.value.param == param


@each_row("part", PARTS)
def test_nothing_but_text_is_read(part: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read_messages([USER, {"role": "user", "content": [{"type": "text", "text": "See:"}, part]}])
    assert caught.value.param == "messages[1].content[1]"


class BusyError(UsageError):
    """An error that names its own status."""

    status = 503
    code = "busy"


CASES: list[tuple[EdgeInferError, int, str, str | None, str | None]] = [
    (UsageError("No.", "Do."), 400, "invalid_request_error", None, None),
    (PromptError("No."), 400, "invalid_request_error", None, None),
    (ContextLengthError("No."), 400, "invalid_request_error", "context_length_exceeded", None),
    (GrammarError("No."), 400, "invalid_request_error", "unsupported_schema", None),
    (TemplateError("No."), 400, "invalid_request_error", "template_rejected", None),
    (CapabilityError("No."), 501, "not_supported_error", "not_supported", None),
    (BudgetError("No."), 503, "unavailable_error", "insufficient_memory", None),
    (BusyError("No."), 503, "unavailable_error", "busy", None),
    (BundleError("No."), 500, "server_error", "internal_error", None),
    (RequestError("No.", param="n", code="x", status=429), 429, "rate_limit_error", "x", "n"),
    (unknown_model("gpt"), 404, "invalid_request_error", "model_not_found", "model"),
]


@each_row(("error", "status", "kind", "code", "param"), CASES)
def test_errors(error: EdgeInferError, status: int, kind: str, code: Any, param: Any) -> None:
    found, body = error_body(error)
    assert found == status
    assert set(body) == {"error"}
    told = body["error"]
    assert (told["type"], told["code"], told["param"]) == (kind, code, param)
    assert status == 500 or told["message"] == str(error)


def test_nothing_of_what_broke_inside_is_told() -> None:
    status, body = error_body(BackendError("onnxruntime failed at /home/someone/model.onnx", "secret hint"))
    assert status == 500
    assert "someone" not in str(body) and "secret" not in str(body)


def complete(model: edgeinfer.Model, **body: Any) -> dict[str, Any]:
    return whole(model, make_completion("text_completion", {"ignore_eos": True, **body}, model))


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_prompts_in_every_form(model: edgeinfer.Model) -> None:
    ids = model.tokenize("the cat")
    expected = model.generate("the cat", max_tokens=16, ignore_eos=True).text
    for prompt in ("the cat", ["the cat"], ids, [ids]):
        assert texts(complete(model, prompt=prompt)) == [expected]
    both = complete(model, prompt=["the cat", "a dog"])
    assert texts(both) == [expected, *texts(complete(model, prompt="a dog"))]
    assert both["usage"]["prompt_tokens"] == len(ids) + len(model.tokenize("a dog"))
    begun = complete(model, prompt="")
    assert begun["usage"]["prompt_tokens"] == 1


def test_several_replies(model: edgeinfer.Model) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
    answer = complete(model, prompt=["a", "b"], n=2, best_of=2, **options)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for place, prompt in enumerate("ab"):
        for reply in range(2):
            alone = complete(model, prompt=prompt, **options | {"seed": 7 + reply})
            assert texts(alone) == [texts(answer)[2 * place + reply]]
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 2, "completion_tokens": 48, "total_tokens": 50}
    assert answer["timings"]["predicted_n"] == 48


def test_the_best_of_several_replies(model: edgeinfer.Model) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
    answer = complete(model, prompt=["a", "b"], n=2, best_of=4, **options)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    best = []
    for prompt in "ab":
        every = complete(model, prompt=prompt, n=4, logprobs=0, **options)["choices"]
        every.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))  # of as many tokens
        best += [choice["text"] for choice in every[:2]]
    assert texts(answer) == best
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 2, "completion_tokens": 96}
    searched = model.generate("a", search="best-of", samples=4, ignore_eos=True, **options)
    assert searched.text == best[0]


def test_echo(model: edgeinfer.Model) -> None:
    reply = texts(complete(model, prompt="the cat"))[0]
    assert texts(complete(model, prompt="the cat", echo=True)) == ["the cat" + reply]
    assert texts(complete(model, prompt=model.tokenize("the cat"), echo=True)) == ["the cat" + reply]


def test_log_probabilities(tales: edgeinfer.Model) -> None:
    (choice,) = complete(tales, prompt="Once upon a time", logprobs=2)["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    for token, logprob, top, offset in zip(*(told[name] for name in FIELDS), strict=True):
        assert choice["text"][offset:].startswith(token)
        assert top[token] == logprob <= max(top.values()) <= 0
        assert 2 <= len(top) <= 3


def test_log_probabilities_of_an_echoed_prompt(tales: edgeinfer.Model) -> None:
    prompt = "Once upon a time, there was"
    ids = tales.tokenize_prompt(prompt)
    scores = tales.score(ids).logprobs
    reply = complete(tales, prompt=prompt, logprobs=2)["choices"][0]
    for given in (prompt, ids):
        (choice,) = complete(tales, prompt=given, logprobs=2, echo=True)["choices"]
        table = choice["logprobs"]
        assert table["token_logprobs"][0] is table["top_logprobs"][0] is None
        np.testing.assert_allclose(table["token_logprobs"][1 : len(ids)], scores, atol=1e-4)
        assert table["token_logprobs"][len(ids) :] == reply["logprobs"]["token_logprobs"]
        assert all(2 <= len(top) <= 3 for top in table["top_logprobs"][1:])
        assert "".join(table["tokens"]).strip() == choice["text"].strip() == (prompt + reply["text"]).strip()
        scored = complete(tales, prompt=given, logprobs=0, echo=True, max_tokens=0)["choices"][0]
        assert scored["text"].strip() == prompt
        assert scored["logprobs"]["token_logprobs"] == table["token_logprobs"][: len(ids)]


FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": ["a", 5]}),
    ("prompt", {"prompt": [5, "a"]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": ["a"] * 200}),
    ("n", {"prompt": ["a"] * 100, "n": 2}),
    ("best_of", {"prompt": "a", "best_of": 1, "n": 2}),
    ("best_of", {"prompt": "a", "best_of": 2, "stream": True}),
    ("best_of", {"prompt": ["a"] * 100, "best_of": 2}),
    ("logprobs", {"prompt": "a", "logprobs": True}),
    ("logprobs", {"prompt": "a", "logprobs": 21}),
    ("logprobs", {"prompt": "a", "logprobs": 1, "echo": True, "stream": True}),
    ("max_tokens", {"prompt": "a", "max_tokens": -2}),
    ("messages", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
    ("stream", {"prompt": "a", "stream": "yes"}),
]


def test_a_prompt_that_is_too_long_names_it(model: edgeinfer.Model) -> None:
    with pytest.raises(RequestError) as caught:
        complete(model, prompt=[5] * 600)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def respond(model: edgeinfer.Model, **body: Any) -> dict[str, Any]:
    return whole(model, make_completion("response", body, model))


def test_a_text(tales: edgeinfer.Model) -> None:
    answer = respond(tales, input="Tell a story.", max_output_tokens=20)
    expected = tales.create_chat_completion([{"role": "user", "content": "Tell a story."}], max_tokens=20)
    assert isinstance(expected, dict)
    (item,) = answer["output"]
    assert item["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert answer["status"] == item["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 20
    assert answer["timings"]["predicted_n"] == 20


def test_an_empty_reply_is_a_message(tales: edgeinfer.Model) -> None:
    answer = respond(tales, input="Hi", logit_bias={str(tales.end_ids[0]): 100})
    assert answer["status"] == "completed"
    assert [item["content"][0]["text"] for item in answer["output"]] == [""]


def test_calls(tales: edgeinfer.Model) -> None:
    pytest.importorskip("llguidance")
    body: dict[str, Any] = {"input": "Weather?", "tools": flat(WEATHER), "parallel_tool_calls": False}
    answer = respond(tales, **body, tool_choice="required")
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "get_weather", "completed")
    assert set(json.loads(item["arguments"])) >= {"town", "unit"}
    assert item["call_id"] != item["id"]
    assert answer["tools"][0]["name"] == "get_weather"


def test_items_become_messages() -> None:
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    messages = read_input(items, "Be brief.")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool"]
    assert messages[2]["content"] == "I look."
    functions = [call["function"] for call in messages[2]["tool_calls"]]
    assert functions == [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    assert [message["content"] for message in messages[3:]] == ["rain", "sun"]


RESPONSES: list[tuple[str, dict[str, Any]]] = [
    ("input", {}),
    ("input", {"input": []}),
    ("input", {"input": 5}),
    ("input[0]", {"input": ["Hi"]}),
    ("input[0]", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input[0]", {"input": [{"type": "computer_call_output"}]}),
    ("input", {"input": [{"type": "web_search_call"}]}),
    ("input[0].role", {"input": [{"role": "king", "content": "Hi"}]}),
    (
        "input[0].content[0]",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///x"}]}]},
    ),
    ("previous_response_id", {"input": "Hi", "previous_response_id": "resp_1"}),
    ("conversation", {"input": "Hi", "conversation": "conv_1"}),
    ("background", {"input": "Hi", "background": True}),
    ("prompt", {"input": "Hi", "prompt": {"id": "x"}}),
    ("tools[0].name", {"input": "Hi", "tools": [{"type": "function", "name": ""}]}),
    ("text.format.type", {"input": "Hi", "text": {"format": {"type": "yaml"}}}),
    ("text.formatt", {"input": "Hi", "text": {"formatt": 1}}),
    ("temperature", {"input": "Hi", "temperature": "hot"}),
    ("max_tokens", {"input": "Hi", "max_tokens": 0}),
]


@each_row(
    ("kind", "param", "body"),
    [*(("text_completion", *row) for row in TEXTS), *(("response", *row) for row in RESPONSES)],
)
def test_refused(tales: edgeinfer.Model, kind: str, param: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        make_completion(kind, body, tales)
    assert caught.value.param == param


def test_an_unsupported_schema_names_its_field(tales: edgeinfer.Model) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "name": "x", "schema": {"not": {"pattern": "a+"}}}
    completion = make_completion("response", {"input": "Hi", "text": {"format": form}}, tales)
    with pytest.raises(RequestError, match="not") as caught:
        completion.start(tales, 0)
    assert (caught.value.param, caught.value.code) == ("text.format", "unsupported_schema")
