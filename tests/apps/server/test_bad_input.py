"""Wrong and hostile requests: the right status, OpenAI's format, and a server that goes on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.apps.server.errors import error_answer
from edgeinfer.errors import BundleError
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
        (CHAT, chat_body(temperature=-1), "temperature"),
        (CHAT, chat_body(max_tokens=True), "max_tokens"),
        (CHAT, chat_body(stop=["a"] * 10_000 + [3]), "stop"),
        (CHAT, chat_body(logprobs=True, top_logprobs=1000), "top_logprobs"),
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
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param is not None:
        assert error["param"] == param


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


def test_nothing_is_fetched_from_urls(server: Local) -> None:
    for url in ("file:///etc/passwd", "http://169.254.169.254/", "data:image/png;base64,AAAA"):
        content = [{"type": "image_url", "image_url": {"url": url}}]
        answer = server.post(CHAT, {"messages": [{"role": "user", "content": content}]})
        assert answer.status_code == 400
        assert "root:" not in answer.text


def test_text_that_looks_like_a_template_is_text(server: Local) -> None:
    answer = server.post(CHAT, chat_body("{{ 7 * 7 }}{% for x in range(10**9) %}{{ x }}{% endfor %}", max_tokens=2))
    assert answer.status_code == 200


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.integers(-2, 40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.sampled_from(["user", "assistant", "auto", "required", "text", "json_object", "function", "\x00", "tales"]),
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
MESSAGE = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]), "content": SCALARS},
        optional={"name": JUNK, "tool_calls": JUNK, "tool_call_id": JUNK},
    ),
    JUNK,
)
FIELDS = {
    "model": st.sampled_from(["tales", "small", "other", None]) | JUNK,
    "messages": st.lists(MESSAGE, max_size=4) | JUNK,
    "prompt": st.text(max_size=20) | JUNK,
    "input": st.text(max_size=20) | JUNK,
    "temperature": st.floats(0, 2) | JUNK,
    "top_p": st.floats(0, 1) | JUNK,
    "top_k": JUNK,
    "n": st.integers(1, 3) | JUNK,
    "stop": st.lists(st.text(max_size=4), max_size=4) | JUNK,
    "seed": st.integers(0, 2**32) | JUNK,
    "stream": st.booleans() | JUNK,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | JUNK,
    "logprobs": st.booleans() | st.integers(0, 5) | JUNK,
    "top_logprobs": st.integers(0, 5) | JUNK,
    "logit_bias": st.dictionaries(st.integers(0, 5000).map(str), st.floats(-100, 100), max_size=3) | JUNK,
    "response_format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object", "json_schema"])}) | JUNK,
    "tools": JUNK,
    "tool_choice": JUNK,
    "instructions": JUNK,
    "text": JUNK,
    "echo": JUNK,
    "suffix": JUNK,
    "best_of": JUNK,
    "frequency_penalty": JUNK,
    "unknown": JUNK,
}
PATHS = st.sampled_from([CHAT] * 3 + [TEXT] * 2 + [RESPONSES] * 2 + ["/v1/embeddings", "/tokenize", "/detokenize"])
FEW_FIELDS = st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)
BASES = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    TEXT: {"prompt": "Once", "max_tokens": 4},
    RESPONSES: {"input": "Hello", "max_output_tokens": 4},
}


REQUESTS: dict[str, Any] = {"path": PATHS, "fields": FEW_FIELDS, "complete": st.sampled_from([True, True, True, False])}


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(**REQUESTS)
def test_requests_of_any_kind(server: Local, path: str, fields: dict[str, Any], complete: bool) -> None:
    """Every request gets an answer in OpenAI's format, never an internal error, and the server goes on."""
    # Most of them would be right but for the fields that were made up.
    body = (BASES.get(path, {}) | fields) if complete else fields
    answer = server.post(path, body)
    assert answer.status_code < 600
    assert answer.status_code != 500, body
    if answer.status_code != 200:
        assert answer.status_code in (400, 404, 501), (body, answer.text)
        assert error_of(answer)["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert "internal_error" not in answer.text, body
    assert server.get("/health").status_code == 200


def test_damage_that_is_found_late_is_told_to_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    """Clients learn that the server failed; the log names the file and the remedy."""
    status, body = error_answer(BundleError("weights.bin does not match its sha256.", "Pull it again."))
    assert status == 500
    assert "weights.bin" not in body["error"]["message"]
    assert "weights.bin does not match its sha256. Pull it again." in caplog.text
