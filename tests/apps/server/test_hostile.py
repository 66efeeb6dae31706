"""300 hostile requests over all routes and fields: each is refused in its protocol's format and leaves no memory
behind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from edgeinfer.runtime.system.memory import process_memory, release_freed
from edgeinfer.runtime.text.tokenizer import Tokenizer
from tests.apps.server.served import Local, chat_body
from tests.apps.server.test_bad_input import CHAT, RESPONSES, TEXT, error_of
from tests.speculation import needs_builtin
from tests.waiting import TIME_LIMIT

pytestmark = needs_builtin

COUNT = 300
BASES: dict[str, dict[str, Any]] = {
    CHAT: chat_body(max_tokens=2),
    TEXT: {"prompt": "Once", "max_tokens": 2},
    RESPONSES: {"input": "Hello", "max_output_tokens": 2},
}
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
OPENAI = tuple(BASES)
# Those of other servers, whose fields stand elsewhere or whose errors have another shape.
OLLAMA, GENERATE, MESSAGES, LLAMA = "/api/chat", "/api/generate", "/v1/messages", "/completion"
BASES |= {
    OLLAMA: chat_body(stream=False),
    GENERATE: {"prompt": "Once", "stream": False},
    MESSAGES: chat_body(max_tokens=2),
    LLAMA: {"prompt": "Once", "n_predict": 2},
}
# Bytes by which the process may have grown while any of them was answered: the largest body, and what is made of it.
MOST_GROWTH = 60 * 1000**2

Make = Callable[[random.Random], Any]


def text(chance: random.Random) -> str:
    """A long text of one character."""
    return chance.choice(["a", "\u0000", "é", "😀", " ", "\n", "<|end|>"]) * chance.choice([5_000, 50_000, 300_000])


def deep(chance: random.Random) -> Any:
    value: Any = chance.choice([1, "a", None])
    for _ in range(chance.choice([3, 20, 90])):
        value = [value] if chance.random() < 0.5 else {"a": value}
    return value


def wrong(chance: random.Random) -> Any:
    """A value that no field accepts."""
    return chance.choice([[], {}, [[]], {"a": [None]}, [1, "a", {}], -(10**15), 1.5e200, "x" * 100_000])


# Of any endpoint: values that none takes. Ranges of finite penalties are the configuration's, whose tests have them.
FIELDS: dict[str, Make] = {
    "stop": lambda c: c.choice([["a" * 950_000] * 2, ["b" * 1001], [f"s{i}" for i in range(17)], 3, [[]], {"a": 1}]),
    "stop_token_ids": lambda c: c.choice([list(range(2000)), ["a"], "a", [1.5], {}]),
    "logit_bias": lambda c: c.choice([{str(i): 1 for i in range(5000)}, {"a": 1}, {"1": "b"}, [1], {"1": [2]}]),
    "choices": lambda c: c.choice([["a"] * 2000, ["a" * 300_000], [""], "a", [3], {}]),
    "regex": lambda c: c.choice(["a" * 300_000, "(" * 5000, "[", 3, [], "(?<=a)b"]),
    "grammar": lambda c: c.choice(["a" * 300_000, "start: start", "x", 3, [], "start: " + '"a" ' * 60_000]),
    "temperature": lambda c: c.choice([-1, "hot", [], {}, True]),
    "top_p": lambda c: c.choice([2, -1, "a", [1]]),
    "top_k": lambda c: c.choice([1.5, "a", [1]]),
    "seed": lambda c: c.choice(["a", 1.5, [], {}]),
    "draft_max": lambda c: c.choice([0, 10**9, "a", 1.5]),
    "speculation": lambda c: c.choice(["nobody", "a" * 100_000, 3, []]),
    "search": lambda c: c.choice(["nothing", "a" * 100_000, 3, []]),
    "stream": lambda c: c.choice(["yes", 3, [], {}]),
    "temprature": wrong,
}
OF_ONE: dict[str, dict[str, Make]] = {
    CHAT: {
        "messages": lambda c: c.choice([
            [{"role": "user", "content": text(c) * 2}, {"role": "user", "content": "dog " * 200_000}],
            [{"role": "user", "content": [{"type": "text", "text": "dog"}] * 20_000}],
            [{"role": "user", "content": deep(c)}], [{"role": text(c), "content": "a"}], [[]] * 1000, deep(c), "a",
            [{"role": "user", "content": "dog"}] * 5000, [{"role": "user"}], [{"role": "tool", "content": "a"}],
        ]),
        "tools": lambda c: c.choice([
            [{"type": "function", "function": {"name": f"f{i}"}} for i in range(600)], deep(c) or 1, "all",
            [{"type": "function", "function": {"name": "a" * 5000}}],
            [{"type": "function", "function": {"name": "f"}}] * 2,
            [{"type": "function", "function": {"name": "f", "parameters": {"description": text(c)}}}] * 2,
        ]),
        "tool_choice": lambda c: c.choice(["required", {"type": "function", "function": {"name": "x" * 100_000}}, 3]),
        "n": lambda c: c.choice([0, 129, 10**9, "a", 1.5]),
        "top_logprobs": lambda c: c.choice([21, -1, "a", 5]),
        "max_tokens": lambda c: c.choice([0, -2, 1.5, "a", []]),
        "chat_template_kwargs": lambda c: c.choice(["a", [1], 3]),
        "stream_options": lambda c: c.choice([3, "a", [1]]),
        "functions": lambda c: [deep(c)],
        "response_format": lambda c: c.choice([deep(c), "json", {"type": "x" * 100_000}, {"type": "json_schema"}]),
    },
    TEXT: {
        "prompt": lambda c: c.choice([
            "dog " * c.choice([3_000, 100_000, 400_000]), [1] * 100_000, ["dog"] * 129, [[1] * 3000] * 10, [10**9],
            [-1],             {"a": 1}, [[[1]]], [None], [1.5], ["a", 3], [True], 3, "😀" * 100_000,
        ]),
        "n": lambda c: c.choice([0, 129, "a"]),
        "best_of": lambda c: c.choice([1_000, 10**9, "a"]),
        "logprobs": lambda c: c.choice([21, -1, "a"]),
        "suffix": text,
        "echo": lambda c: c.choice(["a", 3, []]),
        "max_tokens": lambda c: c.choice([0, -5, "a"]),
    },
    RESPONSES: {
        "input": lambda c: c.choice(["dog " * 200_000, deep(c) or 1, [{"type": "x" * 100_000}], [[]] * 2000, [], 3]),
        "metadata": lambda c: c.choice([[1], "a", 3]),
        "reasoning": lambda c: c.choice(["a", 3, [1]]),
        "text": lambda c: c.choice(["a", 3, {"format": {"type": "x"}}, {"formats": deep(c)}]),
        "max_output_tokens": lambda c: c.choice([0, "many", 1.5]),
        "previous_response_id": text,
        "instructions": lambda c: c.choice([3, [1], "dog " * 200_000]),
    },
    OLLAMA: {
        "messages": lambda c: c.choice([deep(c) or 1, [{"role": "tool", "content": deep(c)}], [[]] * 1000, "a",
            [{"role": "user", "content": "dog " * 200_000}], [{"role": "user", "content": "a", "images": [text(c)]}]]),
        "options": lambda c: c.choice(["a", [1], {"seed": "a"}, {"stop": ["b" * 1001]}, {"num_predict": "a"},
            {"num_ctx": 1.5}, {"temperature": -1}, {"temprature": deep(c)}]),
        "format": lambda c: c.choice(["xml", 3, [1], {"type": "string", "pattern": "(?=a)b"}]),
        "keep_alive": lambda c: c.choice(["soon", text(c), [], True]),
        "model": lambda c: c.choice([3, text(c) + "x", "../../etc/passwd", "/etc/passwd", []]),
        "tools": lambda c: c.choice(["all", [deep(c)] if deep(c) else [3], [{"type": "function"}]]),
        "think": lambda c: c.choice([3, [1], {"a": 1}]),
        "stream": lambda c: c.choice(["yes", 3]),
    },
    GENERATE: {
        "prompt": lambda c: c.choice([3, [1], {}, "dog " * 200_000]),
        "system": lambda c: c.choice([3, [1], "dog " * 200_000]),
        "images": lambda c: [text(c)],
        "template": text,
        "context": lambda c: [1] * 1000,
        "raw": lambda c: c.choice(["a", 3]),
    },
    MESSAGES: {
        "messages": lambda c: c.choice([deep(c) or 1, [{"role": "king", "content": "a"}], [[]] * 1000, "a",
            [{"role": "user", "content": [{"type": "image", "source": deep(c)}]}], [{"role": "user", "content": [3]}],
            [{"role": "user", "content": [{"type": "text", "text": deep(c)}]}], [{"role": "user"}]]),
        "system": lambda c: c.choice([3, [3], [{"type": "text"}], "dog " * 200_000]),
        "max_tokens": lambda c: c.choice(["a", None, -1]),
        "stop_sequences": lambda c: c.choice(["a", [3], ["a" * 1001], [f"s{i}" for i in range(17)]]),
        "tools": lambda c: c.choice(["all", [{"name": "a" * 500, "input_schema": {}}], [{"type": 3}], [3]]),
        "tool_choice": lambda c: c.choice(["any", {"type": "tool", "name": text(c)}, {"type": "x"}, {"type": "any"}]),
        "output_config": lambda c: c.choice(["a", {"format": {"type": "x"}}, {"formats": deep(c)}]),
        "thinking": lambda c: c.choice([[1], 3]),
    },
    LLAMA: {
        "prompt": lambda c: c.choice(["dog " * 200_000, [1] * 100_000, ["a"] * 129, [10**9], [-1], {"a": 1}, [[]], 3,
            {"prompt_string": "a", "multimodal_data": [text(c)]}, [1, "dog " * 100_000], [None], deep(c) or 1]),
        "n_cmpl": lambda c: c.choice([0, 129, "a"]),
        "n_probs": lambda c: c.choice([21, -1, "a"]),
        "n_predict": lambda c: c.choice(["a", 1.5, [], 2**63]),
        "logit_bias": lambda c: c.choice([[1], [[1]], [["a", 1]], [[[1], 1]], {"a": 1}, [[i, 1] for i in range(5000)]]),
        "json_schema": lambda c: c.choice(["a", [1], {"type": "x"}, {"minItems": deep(c) or 1, "type": "array"}]),
        "grammar": lambda c: c.choice(["root ::= (", "root ::= " + "(" * 9000, "root ::= " + '"a" ' * 60_000, 3]),
    },
    TOKENIZE: {"content": lambda c: c.choice([3, [], {}, "dog " * 200_000]), "unused": wrong},
    DETOKENIZE: {"tokens": lambda c: c.choice(["a", [1.5], [-1], [10**12], [[1]], [1] * 100_000, {}])},
}  # fmt: skip

# Invalid or oversized JSON for any endpoint; test_guard.py has smaller cases.
RAW: list[bytes] = [
    *(b"", b"[]", b'{"a": Infinity}', b'{"a": "\xff\xfe"}', rb'{"\udfff": 1}', b'{"a": "\x00"}', b'{"a": "b\nc"}'),
    b"[" * 250_000,
    b'{"a":' * 100_000,
    b'{"a": [' + b"1," * 900_000 + b"1]}",
    b'{"messages": "' + b"\\u00e9" * 200_000 + b'"}',
    b'{"prompt": ["' + b'","' * 200_000 + b'"]}',
    b'{"a": "' + b"x" * 3_900_000 + b'"}',
    b'{"a": "' + b"x" * 1_400_000 + b'"}',
    b"{" + b",".join(b'"k%d": 1' % i for i in range(100_000)) + b"}",
    b'{"stop": 3, ' + b'"stop": 3, ' * 20_000 + b'"stop": 3}',
]


def hostile(seed: int) -> Iterator[tuple[str, bytes]]:
    """Paths and bodies, each wrong in at least one way."""
    chance = random.Random(seed)
    for path in (*BASES, TOKENIZE, DETOKENIZE):
        yield from ((path, raw) for raw in RAW[:: 1 if path == CHAT else 6])
    while True:
        path = chance.choice([CHAT, CHAT, TEXT, RESPONSES, OLLAMA, GENERATE, MESSAGES, LLAMA, TOKENIZE, DETOKENIZE])
        own = OF_ONE[path]
        fields = own if path not in OPENAI or chance.random() < 0.6 else FIELDS
        name = chance.choice(sorted(fields))
        if name == "unused":  # what /tokenize ignores, it must not choke on; without content it refuses
            yield path, json.dumps({name: fields[name](chance)}).encode()
        else:
            yield path, json.dumps(BASES.get(path, {}) | {name: fields[name](chance)}).encode()


def message_of(answer: httpx.Response, path: str) -> str:
    """The message of an error in the path's protocol."""
    if path in (OLLAMA, GENERATE):
        return str(answer.json()["error"])
    if path == MESSAGES:
        assert answer.json()["type"] == "error"
        return str(answer.json()["error"]["message"])
    return str(error_of(answer)["message"])


def check_refused(server: Local, path: str, body: bytes) -> None:
    answer = server.http.post(server.url + path, content=body, headers={"Content-Type": "application/json"})
    shown = (path, body[:200])
    assert 400 <= answer.status_code < 500, (shown, answer.status_code, answer.text[:300])
    message = message_of(answer, path)
    assert message and len(answer.content) < 3000, (shown, message[:300])


@pytest.mark.slow
def test_300_hostile_requests(hostile_server: Local) -> None:
    server, requests = hostile_server, hostile(seed=20)
    release_freed()
    before, most = process_memory().anonymous, 0
    for _ in range(COUNT):
        check_refused(server, *next(requests))
        most = max(most, process_memory().anonymous)
    assert most - before < MOST_GROWTH
    assert server.post(CHAT, chat_body(max_tokens=2)).status_code == 200
    release_freed()
    assert process_memory().anonymous - before < MOST_GROWTH / 3
    assert server.metric("requests_processing") == server.metric("requests_deferred") == 0


def test_some_hostile_requests(hostile_server: Local) -> None:
    requests = hostile(seed=21)
    for _ in range(40):
        check_refused(hostile_server, *next(requests))
    assert hostile_server.get("/health").status_code == 200


def test_huge_stop_strings_take_nothing(hostile_server: Local) -> None:
    """Four of them once took 1.1 GB."""
    stops = [letter * 250_000 for letter in "abcd"]
    hostile_server.post(CHAT, chat_body(stop=["a"], max_tokens=4))
    before = process_memory().anonymous
    for _ in range(3):
        answer = hostile_server.post(CHAT, chat_body(stop=stops, max_tokens=4))
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "stop"
        assert process_memory().anonymous - before < 50 * 1000**2
    assert hostile_server.post(CHAT, chat_body(stop=["x" * 1000] * 16, max_tokens=2)).status_code == 200


def test_huge_prompts_are_refused_by_their_size(hostile_server: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.6 MB were once tokenized before the prompt was found too long; now nothing is, or a part."""
    longest = 0
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *arguments: Any, **options: Any) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    for size in (25_000, 100_000, 900_000):
        words = "dog " * (size // 4)
        for path, body in ((CHAT, chat_body(words)), (TEXT, {"prompt": words}), (RESPONSES, {"input": words})):
            answer = hostile_server.post(path, body)
            assert answer.status_code == 400, answer.text
            assert error_of(answer)["code"] == "context_length_exceeded"
    assert longest <= 70_000
    # What no context could hold is not even received.
    answer = httpx.post(
        hostile_server.url + CHAT, content=json.dumps(chat_body("dog " * 900_000)).encode(), timeout=TIME_LIMIT
    )
    assert answer.status_code == 413
