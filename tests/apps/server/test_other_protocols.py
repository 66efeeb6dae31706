"""The APIs of llama-server, Ollama and Anthropic: OpenAI's text, ignored fields, errors, prefilled replies."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from edgeinfer.apps.server.ollama import keep_seconds
from edgeinfer.core.errors import UsageError
from tests.apps.server.served import MESSAGES, Local, chat_body
from tests.recorded import check_recorded
from tests.speculation import needs_builtin

pytestmark = needs_builtin


# Of answers: other each time, or of the machine.
TIMES = (
    *("id", "created_at", "load_duration", "total_duration", "prompt_eval_duration", "eval_duration", "model_path"),
    *("timings", "tokens_cached", "tokens_evaluated", "prompt_eval_count", "modified_at", "expires_at", "build_info"),
    "digest",
)

MESSAGE = {"model": "small", "max_tokens": 12, "messages": MESSAGES}
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson", answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


@pytest.fixture(scope="module")
def expected(server: Local) -> str:
    text: str = ok(server.post("/v1/chat/completions", {**MESSAGE}))["choices"][0]["message"]["content"]
    return text


def test_ollama(server: Local, expected: str) -> None:
    options = {"num_predict": 12, "num_ctx": 10**6, "num_thread": 4, "mirostat": 1, "typical_p": 1.0}
    chat = {"model": "small:latest", "messages": MESSAGES, "options": options}
    answer = server.post("/api/chat", {**chat, "stream": False})
    whole = ok(answer)
    assert whole["message"] == {"role": "assistant", "content": expected}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("small:latest", True, "length")
    check_recorded("server-ollama", whole, without=TIMES)
    assert whole["eval_count"] == 12 and min(whole["total_duration"], whole["eval_duration"]) > 0
    # A context that is too large cannot be had; what speaks of loading changes no text, and needs no word.
    assert answer.headers["warning"] == '299 - "ignored: options.mirostat, options.num_ctx"'
    assert [line.split()[0] for line in whole["warnings"]] == ["options.mirostat", "options.num_ctx"]
    *parts, last = lines(server.post("/api/chat", chat))
    assert "".join(part["message"]["content"] for part in parts) == expected
    assert last["done"] and last["message"]["content"] == "" and last["prompt_eval_count"] > 0
    said = MESSAGES[0]["content"]
    *parts, last = lines(server.post("/api/generate", {"model": "small", "prompt": said, "options": options}))
    assert "".join(part["response"] for part in parts) == expected
    raw = ok(
        server.post(
            "/api/generate", {"model": "small", "prompt": said, "raw": True, "stream": False, "options": options}
        )
    )
    plain = ok(server.post("/v1/completions", {"prompt": said, "max_tokens": 12}))
    assert raw["response"] == plain["choices"][0]["text"]
    form = ok(server.post("/api/chat", {**chat, "format": WEATHER, "stream": False, "options": {}}))
    assert form["done_reason"] == "stop" and json.loads(form["message"]["content"])["city"] in ("Rome", "Paris")
    assert ok(server.post("/api/generate", {"model": "small"}))["done_reason"] == "load"
    (listed,) = ok(server.get("/api/tags"))["models"]
    assert len(listed["digest"]) == 64 and listed["size"] > 10**6
    shown = ok(server.post("/api/show", {"model": listed["name"]}))
    check_recorded("server-ollama-show", [listed, shown], without=TIMES)
    assert shown["capabilities"] == ["completion", "tools"] and "messages" in shown["template"]
    (running,) = ok(server.get("/api/ps"))["models"]
    assert running["name"] == listed["name"] and running["expires_at"] > "2100"


def test_a_tool_beyond_the_engine_is_loosened_in_every_protocol(server: Local) -> None:
    """One of several tools, whole and streamed; a strict one is refused by name."""
    tags = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    asked = {"model": "small", "messages": MESSAGES}

    def flat(extra: dict[str, Any]) -> list[dict[str, Any]]:
        named = [{"name": "weather", "parameters": WEATHER}, {"name": "set_tags", "parameters": tags, **extra}]
        return [{"type": "function", **each} for each in named]

    def nested(extra: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {**each, "type": None}} for each in flat(extra)]

    def anthropic(extra: dict[str, Any]) -> list[dict[str, Any]]:
        named = [{"name": "weather", "input_schema": WEATHER}, {"name": "set_tags", "input_schema": tags, **extra}]
        return [{**each, "type": "custom"} for each in named]

    protocols = (
        ("/v1/chat/completions", {**asked, "max_tokens": 2}, nested),
        ("/v1/chat/completions", {**asked, "max_tokens": 2, "tool_choice": "required"}, nested),
        ("/v1/responses", {"model": "small", "input": "Hi", "max_output_tokens": 2}, flat),
        ("/v1/messages", {**asked, "max_tokens": 2}, anthropic),
        ("/v1/messages", {**asked, "max_tokens": 2, "tool_choice": {"type": "any"}}, anthropic),
        ("/api/chat", {**asked, "options": {"num_predict": 2}}, nested),
    )
    for path, body, tools in protocols:
        for extra in ({}, {"strict": False}):
            for stream in (False, True):
                answer = server.post(path, {**body, "tools": tools(extra), "stream": stream})
                assert answer.status_code == 200, (path, answer.text)
                assert answer.headers["warning"] == '299 - "ignored: uniqueItems of the tool set_tags"', path
                assert stream or any("uniqueItems of the tool set_tags" in each for each in ok(answer)["warnings"]), (
                    path
                )
        refused = server.post(path, {**body, "tools": tools({"strict": True}), "stream": False})
        assert refused.status_code == 400 and "uniqueItems" in refused.text and "set_tags" in refused.text, path


def test_llama(server: Local) -> None:
    asked = {"prompt": "Once upon", "n_predict": 12, "cache_prompt": True, "typical_p": 0.8, "n_keep": 0}
    answer = server.post("/completion", asked)
    whole = ok(answer)
    text = ok(server.post("/v1/completions", {"prompt": "Once upon", "max_tokens": 12}))["choices"][0]["text"]
    assert (whole["content"], whole["stop_type"], whole["tokens_predicted"]) == (text, "limit", 12)
    assert whole["timings"]["predicted_n"] == 12 and whole["generation_settings"]["n_predict"] == 12
    assert answer.headers["warning"] == '299 - "ignored: typical_p"'
    *parts, last = events(server.post("/completion", {**asked, "stream": True}))
    assert "".join(part["content"] for part in parts) == text and not any(part["stop"] for part in parts)
    assert last["stop"] and last["content"] == ""
    word = text.split()[-1]
    ended = ok(server.post("/completion", {**asked, "stop": [word]}))
    assert (ended["stop_type"], ended["stopping_word"]) == ("word", word)
    several = ok(
        server.post("/completion", {**asked, "prompt": ["Once upon", [5, "a"]], "n_probs": 2, "return_tokens": True})
    )
    assert several[0]["content"] == text and len(several) == 2
    first = several[0]["completion_probabilities"][0]
    check_recorded("server-llama", [whole, several, last], without=TIMES)
    assert first["id"] == several[0]["tokens"][0] and len(first["top_logprobs"]) == 2
    grammar = ok(server.post("/completion", {**asked, "grammar": 'root ::= "yes" | "no"'}))
    assert grammar["content"] in ("yes", "no") and grammar["stop_type"] == "eos"
    prompt = ok(server.post("/apply-template", {"messages": MESSAGES}))["prompt"]
    assert MESSAGES[0]["content"] in prompt and prompt != MESSAGES[0]["content"]
    slots, props = ok(server.get("/slots")), ok(server.get("/props"))
    assert len(slots) == props["total_slots"] and not any(slot["is_processing"] for slot in slots)
    check_recorded("server-llama-props", [slots, props], without=(*TIMES, "plan", "kernel", "verified"))
    assert props["modalities"] == {"vision": False, "audio": False} and props["eos_token"] and props["model_path"]
    meta = ok(server.get("/v1/models"))["data"][0]["meta"]
    assert meta["n_vocab"] > 0 and meta["n_ctx_train"] >= meta["n_ctx"] and meta["size"] > 10**6
    gap = server.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert gap.status_code == 400 and "it cannot fill in the middle" in gap.text
    for path in ("/embedding",):
        assert server.post(path, {}).status_code == 501, path


def test_stops_that_are_special_tokens(server: Local) -> None:
    """In every protocol; the token is the likeliest of all."""
    bias, stop = {"sampling": {"logit_bias": {"1": 100.0}}}, ["<|user|>"]
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES, "stop": stop}),
        ("/v1/completions", {"prompt": "Once", "stop": stop}),
        ("/v1/messages", {**MESSAGE, "stop_sequences": stop}),
        ("/completion", {"prompt": "Once", "stop": stop}),
    ):
        answer = ok(server.post(path, {"max_tokens": 9, **bias, **body}))
        told = json.dumps(answer)
        assert '"finish_reason": "length"' not in told and "<|user|>" not in json.dumps(answer.get("content", "")), path
        counted = answer.get("usage", {})
        assert counted.get("completion_tokens", counted.get("output_tokens", answer.get("tokens_predicted"))) == 1, path
        if path == "/v1/messages":
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "<|user|>")
        if path == "/completion":
            assert (answer["stop_type"], answer["stopping_word"]) == ("word", "<|user|>")
    options = {"stop": stop, "num_predict": 9, **bias}
    told = ok(server.post("/api/chat", {"messages": MESSAGES, "options": options, "stream": False}))
    assert (told["eval_count"], told["done_reason"]) == (1, "stop")


def test_anthropic(server: Local, expected: str) -> None:
    whole = ok(server.post("/v1/messages", MESSAGE))
    assert whole["content"] == [{"type": "text", "text": expected}]
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert whole["usage"]["output_tokens"] == 12
    answer = server.post("/v1/messages", {**MESSAGE, "stream": True})
    told = events(answer)
    check_recorded("server-anthropic", [whole, told], without=TIMES)
    kinds = [event["type"] for event in told]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for event in told if event["type"] == "content_block_delta") == expected
    assert f"event: {kinds[0]}\n" in answer.text and "[DONE]" not in answer.text
    word = expected.split()[-1]
    ended = ok(server.post("/v1/messages", {**MESSAGE, "stop_sequences": [word]}))
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", word)
    tool = {"name": "weather", "input_schema": WEATHER}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    called = ok(server.post("/v1/messages", {**MESSAGE, "max_tokens": 99, "tools": [tool], "tool_choice": choice}))
    (block,) = called["content"]
    assert called["stop_reason"] == "tool_use" and block["input"]["city"] in ("Rome", "Paris")
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "sunny"}]}
    turns = [*MESSAGES, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    assert ok(server.post("/v1/messages", {**MESSAGE, "messages": turns, "tools": [tool]}))["content"]
    limited = {**MESSAGE, "thinking": {"type": "enabled", "budget_tokens": "many"}}
    refused = server.post("/v1/messages", limited)
    assert refused.status_code == 400 and "thinking_budget='many'" in refused.text
    limited["thinking"] = {"type": "enabled", "budget_tokens": 5}
    assert ok(server.post("/v1/messages", limited))["content"] == whole["content"]
    plain = ok(server.post("/v1/messages/count_tokens", {"model": "small", "messages": MESSAGES}))["input_tokens"]
    assert plain == whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]


def test_errors_have_the_shape_of_their_protocol(server: Local) -> None:
    image = {"role": "user", "content": "a", "images": ["AAAA"]}
    block = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}]}
    for path, body, status, said in (
        ("/api/chat", {"model": "large", "messages": MESSAGES}, 404, "does not exist"),
        ("/api/chat", {"messages": [image]}, 400, "images"),
        ("/api/chat", {"messages": MESSAGES, "options": {"temprature": 1}}, 400, "Did you mean 'temperature'?"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "fill in the middle"),
        ("/api/generate", {"prompt": "a", "keep_alive": "soon"}, 400, "keep_alive"),
        ("/api/pull", {"model": "a"}, 501, "edgeinfer pull"),
        ("/api/embed", {"input": 1}, 400, "input"),
        ("/api/nothing", {}, 404, "no path"),
        ("/v1/messages", {"messages": MESSAGES}, 400, "max_tokens is missing"),
        ("/v1/messages", {**MESSAGE, "messages": [block]}, 400, "not opened"),
        ("/v1/messages", {**MESSAGE, "model": "large"}, 404, "does not exist"),
    ):
        answer = server.post(path, body)
        assert answer.status_code == status, (path, answer.text)
        told = answer.json()
        message = told["error"] if path.startswith("/api/") else told["error"]["message"]
        assert said in message and (path.startswith("/api/") or told["type"] == "error"), told


def test_how_long_to_keep_a_model() -> None:
    for value, seconds in ((None, None), (0, 0), ("5m", 300), ("1h30m", 5400), ("300ms", 0.3), (-1, float("inf"))):
        assert keep_seconds(value) == seconds
    refused: tuple[Any, ...] = ("soon", "", True, [], "5m soon", "5" * 100)
    for wrong in refused:
        with pytest.raises(UsageError, match="keep_alive"):
            keep_seconds(wrong)


PREFILLED = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]


def test_a_reply_that_was_begun_goes_on(server: Local) -> None:
    body = chat_body(messages=PREFILLED, max_tokens=8, continue_final_message=True)
    expected = ok(server.post("/v1/chat/completions", body))["choices"][0]["message"]["content"]
    asked = {"model": "small", "messages": PREFILLED}
    assert ok(server.post("/v1/messages", {**asked, "max_tokens": 8}))["content"][0]["text"] == expected
    body = {**asked, "options": {"num_predict": 8, "temperature": 0}, "stream": False}
    assert ok(server.post("/api/chat", body))["message"]["content"] == expected
    # One that opens the conversation is no beginning of its answer.
    alone = {"messages": PREFILLED[-1:], "max_tokens": 1}
    assert ok(server.post("/v1/messages", alone))["content"]


def test_a_reply_that_was_begun_has_no_form_of_its_own(server: Local) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"name": "look", "input_schema": schema}
    asked = {"max_tokens": 4, "messages": [*MESSAGES, {"role": "assistant", "content": '{"a":'}]}
    for field, path, body in (
        (
            "output_config.format",
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        ("tool_choice", "/v1/messages", {"tools": [tool], "tool_choice": {"type": "any"}}),
        ("format", "/api/chat", {"format": "json"}),
        ("format", "/api/chat", {"format": schema}),
    ):
        refused = server.post(
            path, {**asked, **body} if path == "/v1/messages" else {**body, "messages": asked["messages"]}
        )
        assert refused.status_code == 400 and f"the form that {field} asks for" in refused.text
    assert ok(server.post("/v1/messages", {**asked, "tools": [tool]}))["content"]


def test_documents_of_text(server: Local) -> None:
    def counted(*blocks: Any) -> int:
        told = ok(server.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": list(blocks)}]}))
        return int(told["input_tokens"])

    question = {"type": "text", "text": "Who is it about?"}
    text = "Tom had a dog."
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}}
    parts = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": text}]}}
    whole = counted({"type": "text", "text": f"{text}\n\n"}, question)
    assert counted(plain, question) == counted(parts, question) == whole
    assert counted({**plain, "title": "A dog"}, question) > whole
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    refused = server.post("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [pdf]}]})
    assert refused.status_code == 400 and "not text" in refused.text


def test_no_limit_of_tokens(server: Local) -> None:
    without = ok(server.post("/v1/chat/completions", {"messages": MESSAGES, "stop": ["."]}))
    for field in ("max_tokens", "max_completion_tokens"):
        limited = ok(server.post("/v1/chat/completions", {"messages": MESSAGES, "stop": ["."], field: -1}))
        assert limited["choices"] == without["choices"]
    for path, value in (("/v1/messages", -1), ("/v1/chat/completions", -1.5)):
        refused = server.post(path, {"messages": MESSAGES, "max_tokens": value})
        assert refused.status_code == 400 and "out of range" in refused.text


def test_the_thought_of_an_unknown_answer_cannot_be_ended(server: Local) -> None:
    path = "/v1/chat/completions/control"
    assert server.post(path, {"id": "chatcmpl-1", "action": "reasoning_end"}).status_code == 404
    assert server.post(path, {"id": "chatcmpl-1", "action": "stop"}).status_code == 400
