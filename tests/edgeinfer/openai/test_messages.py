"""Messages of a request: text in every shape is taken, nothing else, and errors say where."""

from __future__ import annotations

from typing import Any

import pytest

from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.messages import read_messages
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
REFUSED: list[tuple[str, Any]] = [
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


@each_row(("param", "messages"), REFUSED)
def test_refused(param: str, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read_messages(messages)
    assert caught.value.param == param


@each_row("part", PARTS)
def test_nothing_but_text_is_read(part: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read_messages([USER, {"role": "user", "content": [{"type": "text", "text": "See:"}, part]}])
    assert caught.value.param == "messages[1].content[1]"
