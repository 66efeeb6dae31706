"""Messages that are read, and errors as clients read them."""

from __future__ import annotations

from typing import Any

import pytest

from edgeinfer.errors import (
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
from edgeinfer.openai.errors import RequestError, error_body, unknown_model
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
