"""A made-up model that thinks, through every API, whole and streamed, cut after every token; schemas after thoughts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

import edgeinfer
from edgeinfer.apps.server.anthropic import MessagesReply
from edgeinfer.apps.server.ollama import OllamaReply
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.openai import events, whole
from edgeinfer.openai.chat import ChatCompletion
from edgeinfer.openai.response import ResponseCompletion
from tests.cache import made
from tests.factories import make_checkpoint

TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}: {{ m.reasoning_content or '' }}{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is not defined or enable_thinking %}<think>"
    "{% else %}<think></think>{% endif %}{% endif %}"
)
ASKED = [{"role": "user", "content": "Hello"}]
COMMON: dict[str, Any] = {"ignore_eos": True, "thinking_budget": 5}
Said = tuple[str, str]  # thought and answer


def make_thinking(folder: Path) -> None:
    """A random model with tags as tokens, whose template opens the thought."""
    make_checkpoint(folder / "checkpoint", "llama", chat_template=TEMPLATE, max_position_embeddings=1024)
    path = folder / "checkpoint" / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    for tag in ("<think>", "</think>"):
        last = max(vocabulary, key=vocabulary.__getitem__)
        token = {**tokenizer["added_tokens"][0], "id": vocabulary.pop(last), "content": tag, "special": False}
        tokenizer["added_tokens"].insert(2, token)
        tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) != last]
    path.write_text(json.dumps(tokenizer), "utf-8")
    export_checkpoint(
        folder / "checkpoint", folder / "bundle", ExportConfig(bits=4, keep_small=False, calibration="none")
    )


@pytest.fixture(scope="module")
def thinker() -> Iterator[edgeinfer.Model]:
    with edgeinfer.load(made(make_thinking) / "bundle", threads=1, speculation="off") as model:
        yield model


def chat_whole(answer: dict[str, Any]) -> Said:
    message = answer["choices"][0]["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    return message.get("reasoning_content", ""), message["content"]


def chat_streamed(found: Sequence[dict[str, Any]]) -> Said:
    deltas = [event["choices"][0]["delta"] for event in found]
    return "".join(d.get("reasoning_content", "") for d in deltas), "".join(d.get("content") or "" for d in deltas)


def response_whole(answer: dict[str, Any]) -> Said:
    kinds = {item["type"]: item for item in answer["output"]}
    assert list(kinds) == sorted(kinds, reverse=True)  # the thought comes first
    thought = kinds["reasoning"]["content"][0]["text"] if "reasoning" in kinds else ""
    return thought, kinds["message"]["content"][0]["text"]


def response_streamed(found: Sequence[dict[str, Any]]) -> Said:
    def deltas(kind: str) -> str:
        return "".join(event["delta"] for event in found if event["type"] == f"response.{kind}.delta")

    said = deltas("reasoning_text"), deltas("output_text")
    assert said == response_whole(found[-1]["response"])
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return said


def messages_whole(answer: dict[str, Any]) -> Said:
    blocks = {block["type"]: block for block in answer["content"]}
    assert "thinking" not in blocks or blocks["thinking"]["signature"]
    return blocks.get("thinking", {}).get("thinking", ""), blocks.get("text", {}).get("text", "")


def messages_streamed(found: Sequence[dict[str, Any]]) -> Said:
    opened = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
    assert opened in (["thinking", "text"], ["thinking"])
    assert len([event for event in found if event["type"] == "content_block_stop"]) == len(opened)
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert sum(delta["type"] == "signature_delta" for delta in deltas) == 1
    return "".join(d.get("thinking", "") for d in deltas), "".join(d.get("text", "") for d in deltas)


def ollama_whole(answer: dict[str, Any]) -> Said:
    return answer["message"].get("thinking", ""), answer["message"]["content"]


def ollama_streamed(found: Sequence[dict[str, Any]]) -> Said:
    lines = list(map(ollama_whole, found))
    return "".join(thought for thought, _ in lines), "".join(text for _, text in lines)


APIS: dict[str, tuple[Any, Callable[[int], dict[str, Any]], Callable[..., Said], Callable[..., Said]]] = {
    "chat": (ChatCompletion, lambda n: {"messages": ASKED, "max_tokens": n} | COMMON, chat_whole, chat_streamed),
    "responses": (
        ResponseCompletion,
        lambda n: {"input": "Hello", "max_output_tokens": n} | COMMON,
        response_whole,
        response_streamed,
    ),
    "messages": (
        MessagesReply,
        lambda n: {
            "messages": ASKED,
            "max_tokens": n,
            "ignore_eos": True,
            "thinking": {"type": "enabled", "budget_tokens": 5},
        },
        messages_whole,
        messages_streamed,
    ),
    "ollama": (
        partial(OllamaReply, True),
        lambda n: {"messages": ASKED, "think": True, "options": {"num_predict": n} | COMMON},
        ollama_whole,
        ollama_streamed,
    ),
}


@pytest.mark.parametrize("api", APIS)
def test_every_api_tells_thoughts_apart_wherever_the_reply_ends(thinker: edgeinfer.Model, api: str) -> None:
    make, body, read_whole, read_streamed = APIS[api]
    for most in range(1, 12):
        result = thinker.stream_chat(ASKED, max_tokens=most, **COMMON).complete()
        assert result.usage.reasoning_tokens == min(most, 6) and bool(result.text) == (most > 6)
        asked = make(body(most) | {"stream": False}, thinker)
        asked.prepare(thinker)
        assert read_whole(whole(thinker, asked)) == (result.reasoning, result.text)
        asked = make(body(most) | {"stream": True}, thinker)
        asked.prepare(thinker)
        assert read_streamed(list(events(thinker, asked))) == (result.reasoning, result.text)


def test_a_reply_that_does_not_think_has_the_fields_it_had(thinker: edgeinfer.Model) -> None:
    body = {"messages": ASKED, "max_tokens": 6, "ignore_eos": True, "enable_thinking": False}
    answer = whole(thinker, ChatCompletion(body, thinker))
    assert set(answer["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert "completion_tokens_details" not in answer["usage"] and "thought_end" not in answer


def test_tokens_and_what_ended_the_thought_are_counted(thinker: edgeinfer.Model) -> None:
    answer = whole(thinker, ChatCompletion({"messages": ASKED, "max_tokens": 12} | COMMON, thinker))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert answer["thought_end"] == "budget"
    raw = {"messages": ASKED, "max_tokens": 12, "reasoning_format": "none"} | COMMON
    inline = whole(thinker, ChatCompletion(raw, thinker))["choices"][0]["message"]["content"]
    thought, end, text = inline.partition("</think>")
    assert end and (thought.strip(), text.lstrip()) == chat_whole(answer)


def test_a_conversation_gives_thoughts_to_the_template(thinker: edgeinfer.Model) -> None:
    chat = thinker.chat()
    first = chat.send("Hello", max_tokens=12, **COMMON)
    assert chat.messages[-1] == {
        "role": "assistant",
        "content": first.text,
        "reasoning_content": first.reasoning,
    }
    again = [*chat.messages, {"role": "user", "content": "And?"}]
    known = thinker.tokenize_chat(again)
    body = {"messages": [{**m, "reasoning": m.get("reasoning_content")} for m in again], "max_tokens": 1}
    assert whole(thinker, ChatCompletion(body, thinker))["usage"]["prompt_tokens"] == len(known)


def test_a_thought_ends_when_its_reader_asks(thinker: edgeinfer.Model) -> None:
    asked = ChatCompletion({"messages": ASKED, "max_tokens": 20, "ignore_eos": True, "stream": True}, thinker)
    stream = asked.start(thinker, 0)
    assert asked.id.startswith("chatcmpl-") and asked.answer_now() == 1
    result = stream.complete()
    assert (result.usage.reasoning_tokens, result.thought_end) == (1, "request") and result.text
    assert asked.answer_now() == 0


SCHEMA = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["good", "size"],
    "additionalProperties": False,
}


def check_schemas(model: edgeinfer.Model, count: int) -> None:
    for seed in range(count):
        options: dict[str, Any] = {"temperature": 1.5, "seed": seed, "max_tokens": 80, "json_schema": SCHEMA}
        options |= {"thinking_budget": seed % 9} if seed % 2 else {}
        result = model.stream_chat(ASKED, **options).complete()
        assert set(result.parsed) == {"good", "size"}
        assert result.usage.reasoning_tokens in range(1, 43)


def test_a_schema_begins_behind_the_thought(thinker: edgeinfer.Model) -> None:
    check_schemas(thinker, 8)


@pytest.mark.slow
def test_five_hundred_schemas_are_met(thinker: edgeinfer.Model) -> None:
    check_schemas(thinker, 500)


def test_a_call_follows_a_thought(thinker: edgeinfer.Model) -> None:
    mood = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"]}
    asked: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f", "parameters": mood}}]}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "thinking_budget": 5, "max_tokens": 200}
    answer = thinker.create_chat_completion(ASKED, **asked)
    assert isinstance(answer, dict)
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert message["reasoning_content"] and message["content"] is None
    assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"])["mood"] in ("good", "bad")
    chunks = thinker.create_chat_completion(ASKED, stream=True, **asked)
    assert isinstance(chunks, Iterator)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    parts = [part["function"].get("arguments", "") for delta in deltas for part in delta.get("tool_calls", [])]
    assert "".join(parts) == call["function"]["arguments"]
