"""Wrong and hostile requests: the right status, OpenAI's format, and a server that goes on."""

from __future__ import annotations

from typing import Any

import pytest

from edgeinfer.apps.server.errors import error_answer
from edgeinfer.core.errors import BundleError
from tests.apps.server.served import Local, chat_body
from tests.speculation import needs_builtin
from tests.tables import each_row

pytestmark = needs_builtin

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"


def error_of(answer: Any) -> dict[str, Any]:
    inner: dict[str, Any] = answer.json()["error"]
    sizes = {"n_prompt_tokens", "n_ctx"} if inner["code"] == "context_length_exceeded" else set()
    assert set(inner) == {"message", "type", "param", "code"} | sizes
    return inner


# One or two of each kind; tests/edgeinfer/openai has all.
@each_row(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": [3]}, None),
        (CHAT, chat_body(model=3), "model"),
        (CHAT, chat_body(max_tokens=True), "max_tokens"),
        (CHAT, chat_body(tools=[{"type": "function"}]), None),
        (TEXT, {"prompt": [-1], "echo": True}, "prompt"),
        (TEXT, {"prompt": [10**9]}, None),
        (RESPONSES, {"input": 3}, "input"),
    ],
)
def test_wrong_fields(server: Local, path: str, body: Any, param: str | None) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["type"] == "invalid_request_error" and error["message"]
    assert param is None or error["param"] == param


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}, "required": ["a"]}
    return schema


BOMBS: dict[str, dict[str, Any]] = {
    "a regular expression": {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
    "long arrays": {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}},
    "definitions": {
        "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 20} for i in range(20)} | {"d20": {"const": 1}},
        "$ref": "#/$defs/d0",
    },
    "depth": {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"},
    "halves": nested(12),
    "many words": {"enum": [f"word {i}" for i in range(15_000)]},
}


@each_row("bomb", BOMBS)
def test_schema_bombs(server: Local, bomb: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": BOMBS[bomb]}}
    answer = server.post(CHAT, chat_body(response_format=form, max_tokens=16))
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert error_of(answer)["message"]
    assert server.post(CHAT, chat_body(max_tokens=2)).status_code == 200


def test_damage_that_is_found_late_is_told_to_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    """Clients learn that the server failed; the log names the file and the remedy."""
    status, body = error_answer(BundleError("weights.bin does not match its sha256.", "Pull it again."))
    assert status == 500
    assert "weights.bin" not in body["error"]["message"]
    assert "weights.bin does not match its sha256. Pull it again." in caplog.text
