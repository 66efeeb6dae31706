"""`curl` against every endpoint of a real server, as its users type it."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.apps.server.served import Local
from tests.cli import TIME_LIMIT
from tests.speculation import needs_builtin
from tests.tables import each_row

pytestmark = [needs_builtin, pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")]

ASKED = {"messages": [{"role": "user", "content": "Hello"}]}


def curl(server: Local, path: str, *arguments: str, stdin: bytes = b"") -> tuple[int, str]:
    """Status and body."""
    words = ["curl", "-sS", "--max-time", "60", "-w", "\n%{http_code}", *arguments, server.url + path]
    done = subprocess.run(words, input=stdin, capture_output=True, check=True, timeout=TIME_LIMIT)
    body, _, status = done.stdout.decode().rpartition("\n")
    return int(status), body


def answer(server: Local, path: str, *arguments: str) -> Any:
    status, body = curl(server, path, *arguments)
    assert status == 200, body
    return json.loads(body)


@each_row("prefix", ["/v1", ""])
def test_facts(server: Local, prefix: str) -> None:
    assert answer(server, f"{prefix}/health") == {"status": "ok"}
    models = answer(server, f"{prefix}/models")
    assert [model["id"] for model in models["data"]] == ["tales", "small"]
    assert models["data"][0]["meta"]["n_ctx"] == 1024
    assert answer(server, f"{prefix}/models/tales")["id"] == "tales"
    props = answer(server, f"{prefix}/props")
    assert props["context"] == props["default_generation_settings"]["n_ctx"] == 1024
    assert props["plan"]["fits"]
    assert props["total_slots"] == 8
    assert "<|assistant|>" in props["chat_template"]


SPECIAL: tuple[dict[str, bool], ...] = ({}, {"parse_special": True}, {"parse_special": False})


def test_tokens(server: Local) -> None:
    ids = answer(server, "/tokenize", "-d", '{"content": "Once upon a time"}')["tokens"]
    assert answer(server, "/detokenize", "-d", json.dumps({"tokens": ids}))["content"].strip() == "Once upon a time"
    assert answer(server, "/tokenize", "-d", '{"content": ""}') == {"tokens": []}
    with_begin = answer(server, "/tokenize", "-d", '{"content": "Once upon a time", "add_special": true}')["tokens"]
    assert with_begin[-len(ids) :] == ids
    marked = [
        answer(server, "/tokenize", "-d", json.dumps({"content": "<|end|>"} | more))["tokens"] for more in SPECIAL
    ]
    assert marked[0] == marked[1] == [3] and len(marked[2]) > 1
    # The model's begin token, which its tokenizer does not add, is kept where a text spells it.
    begun = answer(server, "/tokenize", "-d", json.dumps({"content": "<|endoftext|><|user|>hi"}))["tokens"]
    assert begun[:2] == [0, 1]
    assert answer(server, "/detokenize", "-d", json.dumps({"tokens": begun})) == {"content": "<|endoftext|><|user|>hi"}


def test_pieces_of_tokens(server: Local) -> None:
    asked = {"content": "<|user|>hi 😀", "with_pieces": True}
    told = answer(server, "/tokenize", "-d", json.dumps(asked))["tokens"]
    assert [each["id"] for each in told] == answer(
        server, "/tokenize", "-d", json.dumps(asked | {"with_pieces": False})
    )["tokens"]
    pieces = [each["piece"] for each in told]
    assert pieces[0] == "<|user|>" and any(isinstance(piece, list) for piece in pieces)
    data = [bytes(piece) if isinstance(piece, list) else piece.encode() for piece in pieces]
    assert b"".join(data).decode() == asked["content"]


def test_a_template_without_what_introduces_the_reply(server: Local) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
    prompts = {
        wanted: answer(server, "/apply-template", "-d", json.dumps(body | {"add_generation_prompt": wanted}))["prompt"]
        for wanted in (True, False, None)
    }
    assert prompts[True] == prompts[None] == prompts[False] + "<|assistant|>"
    counts = [
        answer(
            server, "/v1/chat/completions", "-d", json.dumps(body | {"max_tokens": 1, "add_generation_prompt": wanted})
        )
        for wanted in (True, False)
    ]
    assert counts[0]["usage"]["prompt_tokens"] == counts[1]["usage"]["prompt_tokens"] + 1


def test_wrong_tokens(server: Local) -> None:
    texts = [{}, {"content": 3}, {"content": "a", "add_special": "yes"}, {"content": "a", "parse_special": 1}]
    texts += [{"content": "a", "with_pieces": "id"}, {"content": "a", "with_piece": True}]
    asked: dict[str, dict[str, Any]] = {
        "/tokenize": {"content": "a"},
        "/detokenize": {"tokens": [5]},
        "/apply-template": ASKED,
    }
    for path, fields in asked.items():
        told = server.post(path, {**fields, "other": 1})
        assert (told.status_code, told.headers["warning"]) == (200, '299 - "ignored: other"')
    ids = [{}, *({"tokens": wrong} for wrong in ("abc", [-1], [1.5], [True], [10**30]))]
    for path, bodies in (("/tokenize", texts), ("/detokenize", ids)):
        for body in bodies:
            answer = server.post(path, body)
            assert answer.status_code == 400, body
            assert answer.json()["error"]["param"]
    answer = server.post("/detokenize", {"tokens": [5, 10**6]})
    assert answer.status_code == 400 and "1000000" in answer.json()["error"]["message"]


def test_head_and_options(server: Local) -> None:
    words = ["curl", "-sSI", "--max-time", "60", f"{server.url}/v1/models"]
    done = subprocess.run(words, capture_output=True, check=True, text=True, timeout=TIME_LIMIT)
    assert done.stdout.startswith("HTTP/1.1 200")
    assert "server:" not in done.stdout.lower()
    assert curl(server, "/v1/models", "-X", "OPTIONS") == (204, "")
