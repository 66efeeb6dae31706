"""Responses: items become messages, functions are called, and what would need a memory of the server's is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

import edgeinfer
from edgeinfer.openai import make_completion, whole
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.response import read_input
from tests.edgeinfer.openai.functions import WEATHER, flat
from tests.tables import each_row


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


REFUSED: list[tuple[str, dict[str, Any]]] = [
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


@each_row(("param", "body"), REFUSED)
def test_refused(tales: edgeinfer.Model, param: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        make_completion("response", body, tales)
    assert caught.value.param == param


def test_an_unsupported_schema_names_its_field(tales: edgeinfer.Model) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "name": "x", "schema": {"not": {"pattern": "a+"}}}
    completion = make_completion("response", {"input": "Hi", "text": {"format": form}}, tales)
    with pytest.raises(RequestError, match="not") as caught:
        completion.start(tales, 0)
    assert (caught.value.param, caught.value.code) == ("text.format", "unsupported_schema")
