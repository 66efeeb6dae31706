"""Every request that the official clients' types allow is answered, or refused for a documented reason.

Each optional field is tried at null, at every literal and at its extremes.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, Union

import pytest

pytest.importorskip("openai", reason="the official client is not installed")
pytest.importorskip("anthropic", reason="the official client is not installed")
pytest.importorskip("ollama", reason="the official client is not installed")

import anthropic.types
import anthropic.types.beta
import ollama._types
import openai.types
import openai.types.chat.completion_create_params
import openai.types.completion_create_params
import openai.types.responses.response_create_params
import typing_extensions
from pydantic import BaseModel

from edgeinfer.apps.server.anthropic import ANTHROPIC_KINDS
from edgeinfer.apps.server.completions import OPENAI_KINDS
from edgeinfer.apps.server.ollama import OLLAMA_KINDS
from edgeinfer.apps.server.responses import RESPONSE_KIND
from edgeinfer.openai.errors import RequestError
from tests.apps.server.served import Local
from tests.docs.pages import DOCS
from tests.speculation import needs_builtin

pytestmark = needs_builtin

# By field, the ends of what the references document; other numbers are tried at 0 and 1.
_EXTREMES: dict[str, tuple[Any, ...]] = {
    "best_of": (1, 20),
    "budget_tokens": (1024, 10**6),
    "frequency_penalty": (-2, 0.5, 2),
    "max_completion_tokens": (1, 2**31 - 1),
    "max_output_tokens": (16, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "n": (1, 128),
    "num_ctx": (1, 10**6),
    "num_predict": (-2, -1, 1, 10**6),
    "presence_penalty": (-2, 0.5, 2),
    "repeat_last_n": (-1, 0, 64),
    "repeat_penalty": (0.01, 1, 2),
    "seed": (-(2**63), -1, 0, 2**63 - 1),
    "temperature": (0, 1, 2),
    "top_k": (-1, 0, 1, 500),
    "top_logprobs": (0, 20),
    "top_p": (0, 0.5, 1),
}
# Fields without which another one says nothing.
_WITH: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}, "best_of": {"max_tokens": 1}}
_TEXTS = {
    "data": "QQ==",
    "keep_alive": "5m",
    "arguments": "{}",
    "media_type": "text/plain",
    "role": "user",
    "image_url": "data:,",
}
_NONE, _MAPPING = type(None), typing.get_origin(typing.Mapping[str, Any])
_SAY = [{"role": "user", "content": "Hi."}]
# What stands before each value of a list that is a conversation.
_BEFORE = {"messages": _SAY, "input": _SAY}


def requests_of(path: str, depth: int) -> Iterator[dict[str, Any]]:
    """Requests to a path, each with one value of one field more than it must have. Every field is tried as far inside
    of a request as `depth`; objects further inside have what they must."""
    kinds, base, tool = REQUESTS[path]
    seen: set[str] = set()
    for kind in kinds:
        for name, (hint, _) in _fields(kind).items():
            beside = {"tools": [tool]} if name == "tool_choice" else _WITH.get(name, {})
            for value in _values(hint, name, depth) if name != "model" else ():
                if repr((name, value)) not in seen:
                    seen.add(repr((name, value)))
                    yield base | beside | {name: value}


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field of an object, and whether it must be there."""
    if issubclass(kind, BaseModel):
        return {name: (field.annotation, field.is_required()) for name, field in kind.model_fields.items()}
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    # The classes' own list of what must be there does not see through annotations that are texts.
    required: Any = typing_extensions.Required
    return {name: (hint, typing_extensions.get_origin(hint) is required) for name, hint in hints.items()}


def _values(hint: Any, name: str, depth: int) -> Iterator[Any]:
    """Values of a type, the plainest first."""
    origin: Any = typing_extensions.get_origin(hint)
    arguments = typing_extensions.get_args(hint)
    if origin in (typing_extensions.Required, typing_extensions.NotRequired, typing_extensions.Annotated):
        yield from _values(arguments[0], name, depth)
    elif origin in (Union, types.UnionType):
        known = any(map(_is_object, arguments))
        for each in sorted(arguments, key=lambda each: each is _NONE):
            if not (known and typing_extensions.get_origin(each) is _MAPPING):
                yield from _values(each, name, depth)
    elif origin is Literal:
        yield from arguments
    elif hint is _NONE:
        yield None
    elif hint is bool:
        yield from (False, True)
    elif hint in (int, float):
        for value in _EXTREMES.get(name, (0, 1)):
            yield value
            if hint is int and abs(value) < 2**53:
                yield float(value)
    elif hint is str:
        yield _TEXTS.get(name, "abc")
    elif _is_object(hint):
        yield from _objects(hint, depth)
    elif origin in (dict, _MAPPING):
        yield from ({}, *({"5": value} for value in _values(arguments[1], name, 0)))
    elif arguments and origin is not type:  # a kind of list
        yield from ([*_BEFORE.get(name, ()), value] for value in _values(arguments[0], name, depth))
        yield []
    elif hint in (object, Any):
        yield {}


def _is_object(hint: Any) -> bool:
    return isinstance(hint, type) and (issubclass(hint, BaseModel) or typing_extensions.is_typeddict(hint))


def _objects(kind: Any, depth: int) -> Iterator[dict[str, Any]]:
    """An object with what it must have, and those that have one field more or of another value."""
    fields = _fields(kind)
    least = {name: next(_values(hint, name, depth - 1), None) for name, (hint, required) in fields.items() if required}
    yield least
    if depth <= 0:
        return
    for name, (hint, required) in fields.items():
        values = _values(hint, name, depth - 1)
        if required:
            next(values, None)
        for value in values:
            yield {**least, name: value}


_CHAT = openai.types.chat.completion_create_params
_BETA = anthropic.types.beta.message_create_params
_FUNCTION = {"name": "abc", "parameters": {"type": "object", "properties": {}}}
_TOOL = {"type": "function", "function": _FUNCTION}
_OPTIONS = {"options": {"num_predict": 1}, "stream": False}
# By path, the types of its requests, one that says no more than it must, and a tool.
REQUESTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        (_CHAT.CompletionCreateParamsNonStreaming, _CHAT.CompletionCreateParamsStreaming),
        {"messages": _SAY, "max_tokens": 1},
        _TOOL,
    ),
    "/v1/completions": (
        (openai.types.completion_create_params.CompletionCreateParamsNonStreaming,),
        {"prompt": "Hi.", "max_tokens": 1},
        {},
    ),
    "/v1/responses": (
        (openai.types.responses.response_create_params.ResponseCreateParamsNonStreaming,),
        {"input": "Hi.", "max_output_tokens": 1},
        {"type": "function", **_FUNCTION},
    ),
    "/v1/messages": (
        (anthropic.types.message_create_params.MessageCreateParamsNonStreaming, _BETA.MessageCreateParamsNonStreaming),
        {"messages": _SAY, "max_tokens": 1},
        {"name": "abc", "input_schema": {"type": "object"}},
    ),
    "/v1/messages/count_tokens": (
        (
            anthropic.types.message_count_tokens_params.MessageCountTokensParams,
            anthropic.types.beta.message_count_tokens_params.MessageCountTokensParams,
        ),
        {"messages": _SAY},
        {"name": "abc", "input_schema": {"type": "object"}},
    ),
    "/api/chat": ((ollama._types.ChatRequest,), {"messages": _SAY} | _OPTIONS, _TOOL),
    "/api/generate": ((ollama._types.GenerateRequest,), {"prompt": "Hi."} | _OPTIONS, {}),
}

KINDS = {f"/v1{path}": kind for path, kind in {**OPENAI_KINDS, "/responses": RESPONSE_KIND}.items()}
KINDS |= {**ANTHROPIC_KINDS, **OLLAMA_KINDS}


def documented() -> list[tuple[set[str], str]]:
    """The fields and the reason of each row of the reference's table."""
    text = (DOCS / "reference" / "server.md").read_text()
    table = text.partition("| refused field |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [(set(re.findall("`([^`]+)`", row[0])), row[-1]) for row in rows]


def reason_of(error: RequestError, table: list[tuple[set[str], str]]) -> int | None:
    """The place of the row that gives the reason of a refusal."""
    field = re.sub(r"\[\d+\]", "[]", error.param or "")
    return next((place for place, (fields, why) in enumerate(table) if field in fields and why in str(error)), None)


def test_requests_of_the_official_clients_types(server: Local) -> None:
    """Every refusal has a row in the reference's table, and every row a refusal."""
    model, table = server.host.model, documented()
    assert model is not None
    used: set[int | None] = set()
    for path, kind in KINDS.items():
        for body in requests_of(path, depth=1):
            try:
                completion = kind.make(dict(body), model)
                completion.check(model)
                completion.prepare(model)
            except RequestError as error:
                place = reason_of(error, table)
                assert place is not None, (path, body, error.param, str(error))
                used.add(place)
    assert used == set(range(len(table))), [row for place, row in enumerate(table) if place not in used]


@pytest.mark.slow
@pytest.mark.parametrize("path", REQUESTS)
def test_all_requests_of_the_official_clients_types(server: Local, path: str) -> None:
    """Every field of inner objects too, over HTTP to the end of the answer. Objects still further inside stand nearer
    to the surface in other requests."""
    reasons = [why for _, why in documented()]
    for body in requests_of(path, depth=3):
        short = {"n": 3} if body.get("n") == 128 else {}
        short |= {"options": {"num_predict": 1} | body["options"]} if body.get("options") else {}
        answer = server.post(path, body | short)
        assert answer.status_code in (200, 400), (path, body, answer.text)
        if answer.status_code == 400:
            assert any(why in message_of(answer.json()) for why in reasons), (path, body, answer.text)
        elif "text/event-stream" in answer.headers["content-type"]:
            assert '"error"' not in answer.text, (path, body, answer.text)


def message_of(answer: Mapping[str, Any]) -> str:
    """What an error says, in any protocol."""
    error = answer["error"]
    return str(error["message"] if isinstance(error, dict) else error)
