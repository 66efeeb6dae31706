"""Requests of agents are answered, and what they rely on is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx

from edgeinfer.apps.server.llama import LLAMA_KINDS
from tests.apps.server.served import MESSAGES, Local
from tests.apps.server.test_other_protocols import FUNCTION, WEATHER, ok
from tests.speculation import needs_builtin
from tests.tables import each_row

pytestmark = needs_builtin


# By client, the path and the body of a request in the shape that it sends; the words are our own.
AGENTS = json.loads(Path(__file__).with_name("agents.json").read_text("utf-8"))
CHAT, MESSAGE, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
# By path, the field that says how long the reply may be.
LENGTHS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"max_output_tokens": 1},
    "/completion": {"n_predict": 1},
    CHAT: {"max_completion_tokens": 1},
}


@each_row("agent", AGENTS)
def test_requests_of_agents(server: Local, agent: str) -> None:
    path, body = AGENTS[agent]
    short: dict[str, Any] = LENGTHS.get(path, {"max_tokens": 1})
    if path == "/api/chat":
        short = {"options": {**body["options"], "num_predict": 1}}
    answer = server.post(path, body | short)
    assert answer.status_code == 200, answer.text
    assert '"error": {' not in answer.text and '"error":{' not in answer.text, answer.text


def test_what_another_server_could_do_is_left_out_and_named(server: Local) -> None:
    path, body = AGENTS["Codex"]
    answer = server.post(path, body | {"max_output_tokens": 1, "stream": False})
    named = {line.removesuffix(" is not supported and was ignored.") for line in ok(answer)["warnings"]}
    tools = {"tools[2] (custom)", "tools[3] (web_search)", "tools[4] (local_shell)"}
    assert named == tools | {"client_metadata", "input[9] (web_search_call)"}
    assert all(name in answer.headers["warning"] for name in named)


def test_fields_of_tomorrow(server: Local) -> None:
    """Unknown fields are ignored and named; near misses and fields that matter are errors."""
    body = {"messages": MESSAGES, "max_tokens": 1}
    odd = {"foo_bar": 1, 'a"b\r\nX: y': 1, "é": [1], "stream_options": {"foo": 1}, "empty": [], "off": False}
    answer = server.post(CHAT, body | odd)
    assert answer.headers["warning"] == '299 - "ignored: ?, a?b??X? y, foo_bar, stream_options.foo"'
    assert len(ok(answer)["warnings"]) == 4
    assert len(ok(server.post(CHAT, body | {f"k{place}": 1 for place in range(5000)}))["warnings"]) == 32
    for wrong, said in (
        ({"maxTokens": 5}, "Did you mean 'max_tokens'?"),
        ({"stream_options": {"include_usages": True}}, "Did you mean 'include_usage'?"),
        ({"logits_processors": ["x"]}, "No code that a request names is run here."),
        ({"modalities": ["text", "audio"]}, "This model writes text only."),
        ({"structured_outputs": {"structural_tag": "x"}}, "Give json, regex, choice or grammar."),
    ):
        refused = server.post(CHAT, body | wrong)
        assert refused.status_code == 400 and said in refused.json()["error"]["message"], refused.text


def test_other_words_for_options(server: Local) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8}
    plain = ok(server.post(CHAT, body))["choices"][0]["message"]["content"]
    likeliest = {"temperature": 1, "top_p": 0, "top_k": -1, "stop": ["", ""], "seed": 3.0, "max_tokens": 8.0}
    assert ok(server.post(CHAT, body | likeliest))["choices"][0]["message"]["content"] == plain
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    for form, expected in (
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "a{3}", "json": None}}, {"aaa"}),
        ({"guided_json": schema}, {'{"a": 1}'}),
        ({"guided_grammar": 'root ::= "x"'}, {"x"}),
        ({"response_format": {"type": "regex", "value": "b{2}"}}, {"bb"}),
    ):
        assert ok(server.post(CHAT, body | form))["choices"][0]["message"]["content"] in expected, form
    older = {"messages": MESSAGES, "max_tokens": 8, "output_format": {"type": "json_schema", "schema": schema}}
    assert ok(server.post(MESSAGE, older))["content"] == [{"type": "text", "text": '{"a": 1}'}]


def test_functions_of_before_tools(server: Local) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    body = {"messages": MESSAGES, "functions": [{"name": "weather", "parameters": schema}], "max_tokens": 60}
    body |= {"function_call": {"name": "weather"}}
    (choice,) = ok(server.post(CHAT, body))["choices"]
    called = {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert (choice["message"]["function_call"], choice["finish_reason"]) == (called, "function_call")
    assert "tool_calls" not in choice["message"]
    parts = [event["choices"][0] for event in streamed(server, CHAT, body)]
    pieces = [part["delta"]["function_call"] for part in parts if "function_call" in part["delta"]]
    assert pieces[0] == {"name": "weather", "arguments": ""} and parts[-1]["finish_reason"] == "function_call"
    assert "".join(piece["arguments"] for piece in pieces) == called["arguments"]
    talk = [*MESSAGES, choice["message"], {"role": "function", "name": "weather", "content": "sunny"}]
    assert ok(server.post(CHAT, body | {"messages": talk, "function_call": "none", "max_tokens": 4}))


def test_tokens_of_the_prompt_and_too_many(server: Local) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2}
    start, *_, last, _ = streamed(server, MESSAGE, body)
    counted = ok(server.post(COUNT, {"messages": MESSAGES, "betas": ["x"]}))["input_tokens"]
    assert start["message"]["usage"]["input_tokens"] == counted > 0
    assert last["usage"]["input_tokens"] + last["usage"]["cache_read_input_tokens"] == counted
    cached = ok(server.post(MESSAGE, body | {"max_tokens": 0}))
    assert (cached["content"], cached["stop_reason"], cached["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    for words in (2000, 300_000):
        long = {"messages": [{"role": "user", "content": "word " * words}], "max_tokens": 2}
        asked = [(MESSAGE, {}), (MESSAGE, {"stream": True}), *([(COUNT, {})] if words > 10_000 else [])]
        for path, more in asked:
            refused = server.post(path, long | more)
            said = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", refused.json()["error"]["message"])
            assert said and int(said[1]) > int(said[2]) == server.host.require_model().context
            assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_blocks_inside_of_answers_of_tools(server: Local) -> None:
    """Text is read wherever Anthropic's reference allows it; a refusal names the block."""
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    text: dict[str, Any] = {"type": "text", "text": "sunny", "citations": [], "cache_control": None}
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}

    def tokens(*blocks: Any) -> Any:
        turn = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": list(blocks)}]}
        talk = [*MESSAGES, {"role": "assistant", "content": [use]}, turn]
        answer = server.post(COUNT, {"messages": talk}).json()
        return answer.get("input_tokens") or answer["error"]["message"]

    none, plain = tokens(), tokens(text)
    assert none < plain
    for block in (
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "sunny"}, "title": None},
        {"type": "document", "source": {"type": "content", "content": [text]}},
        {"type": "search_result", "source": "a", "title": "b", "content": [text], "citations": {"enabled": True}},
    ):
        assert tokens(block) >= plain, block
    assert "messages[2].content[0].content[1] is of type 'image'" in tokens(text, image)
    inner = {"type": "document", "source": {"type": "content", "content": [text, image]}}
    assert "messages[2].content[0].content[0].source.content[1] is of type 'image'" in tokens(inner)


# Fields of llama.cpp's server: its defaults, and the ends of what its reference says of them.
LLAMA: dict[str, tuple[Any, ...]] = {
    "temperature": (0.8, 0),
    "dynatemp_range": (0.0, 1.0),
    "dynatemp_exponent": (1.0,),
    "top_k": (40, 0, -1),
    "top_p": (0.95, 0, 1),
    "min_p": (0.05, 0, 1),
    "n_predict": (0, 1, 1.0),
    "n_indent": (0, 4),
    "n_keep": (0, -1),
    "stream": (False,),
    "stop": ([], "", [""], ["x"]),
    "typical_p": (1.0,),
    "repeat_penalty": (1.1, 1.0),
    "repeat_last_n": (64, 0, -1),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "dry_multiplier": (0.0, 0.8),
    "dry_base": (1.75,),
    "dry_allowed_length": (2,),
    "dry_penalty_last_n": (-1, 0),
    "dry_sequence_breakers": (["\n", ":"], []),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.1,),
    "mirostat": (0, 1, 2),
    "mirostat_tau": (5.0,),
    "mirostat_eta": (0.1,),
    "grammar": ("",),
    "json_schema": ({"const": 1},),
    "seed": (-1, 2**32 - 1),
    "ignore_eos": (False, True),
    "logit_bias": ([], [[5, False]], {"5": -1.0}),
    "n_probs": (0, 20),
    "min_keep": (0,),
    "t_max_predict_ms": (0, 1000),
    "id_slot": (-1, 0),
    "cache_prompt": (True, False),
    "return_tokens": (False, True),
    "samplers": (["top_k", "temperature"], []),
    "timings_per_token": (False, True),
    "return_progress": (False, True),
    "post_sampling_probs": (False, True),
    "response_fields": ([], ["content"]),
    "lora": ([],),
    "n_cache_reuse": (0, 256),
}


def test_fields_of_llama_cpp_s_server(server: Local) -> None:
    base = {"prompt": MESSAGES[0]["content"], "n_predict": 1}
    model = server.host.require_model()
    for name, values in LLAMA.items():
        for value in (*values, None):
            completion = LLAMA_KINDS["/completion"].make(base | {name: value}, model)
            completion.check(model)
    filled = ok(server.post("/completion", base | {"n_predict": 0, "return_tokens": True}))
    assert (filled["content"], filled["tokens"], filled["tokens_predicted"]) == ("", [], 0)
    (last,) = streamed(server, "/completion", base | {"n_predict": 0})
    assert (last["content"], last["stop_type"], last["stop"]) == ("", "limit", True)
    # What /props tells of a completion can be sent back.
    settings = ok(server.get("/props"))["default_generation_settings"]["params"]
    assert ok(server.post("/completion", settings | base | {"max_tokens": 1}))["tokens_predicted"] == 1


def streamed(server: Local, path: str, body: dict[str, Any]) -> list[Any]:
    return events_of(server.post(path, body | {"stream": True}))


def events_of(answer: httpx.Response) -> list[Any]:
    """The JSON events of a stream."""
    found = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in found if line != "[DONE]"]


SYSTEM = {"role": "system", "content": "Be brief"}
PARTS = {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief"}]}
USER = {"role": "user", "content": "Hello"}
# Anthropic's.
TOOL = {"name": "weather", "input_schema": WEATHER}
BLOCKS = [{"type": "text", "text": "Be brief"}]


def asked(server: Local, path: str, **body: Any) -> Any:
    return ok(server.post(path, body))


def ollama(server: Local, path: str = "/api/chat", **body: Any) -> int:
    """Prompt tokens."""
    count: int = asked(server, path, stream=False, options={"num_predict": 1}, **body)["prompt_eval_count"]
    return count


def test_system_text_reaches_the_model_by_every_way(server: Local) -> None:
    prompt = asked(server, "/apply-template", messages=[SYSTEM, USER])["prompt"]
    assert (
        prompt == asked(server, "/apply-template", messages=[PARTS, USER])["prompt"] and "Be brief\n\nHello" in prompt
    )
    tokens = len(asked(server, "/tokenize", content=prompt, parse_special=True, add_special=False)["tokens"])
    chat = asked(server, "/v1/chat/completions", messages=[SYSTEM, USER], max_tokens=1)
    responses = asked(server, "/v1/responses", input="Hello", instructions="Be brief", max_output_tokens=16)
    message = asked(server, "/v1/messages", system=BLOCKS, messages=[USER], max_tokens=1)["usage"]
    assert {
        chat["usage"]["prompt_tokens"],
        responses["usage"]["input_tokens"],
        message["input_tokens"] + message["cache_read_input_tokens"],
        asked(server, "/v1/messages/count_tokens", system="Be brief", messages=[USER])["input_tokens"],
        ollama(server, messages=[SYSTEM, USER]),
        ollama(server, "/api/generate", prompt="Hello", system="Be brief"),
    } == {tokens}


def test_tools_reach_the_model_by_every_way(server: Local) -> None:
    tools: dict[str, Any] = {"messages": [USER], "tools": [FUNCTION]}
    prompt = asked(server, "/apply-template", **tools)["prompt"]
    assert '"name": "weather"' in prompt and prompt.index("# Tools") < prompt.index("Hello")
    tokens = asked(server, "/v1/messages/count_tokens", messages=[USER], tools=[TOOL])["input_tokens"]
    chat = asked(server, "/v1/chat/completions", max_tokens=1, **tools)
    assert chat["usage"]["prompt_tokens"] == ollama(server, **tools) == tokens > 100


@each_row("arguments", ["{", "null", "[]", "{'city': 'Rome'}"])
def test_a_call_that_was_cut_is_taken_back_by_every_way(server: Local, arguments: str) -> None:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "Error"}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, answer]
    prompt = asked(server, "/apply-template", messages=messages)["prompt"]
    assert f'{{"name": "weather", "arguments": {arguments}}}' in prompt and "Error" in prompt
    called = {"type": "function_call", "call_id": "call_1", **function}
    items = [USER, called, {"type": "function_call_output", "call_id": "call_1", "output": "Error"}]
    tokens = asked(server, "/v1/chat/completions", messages=messages, max_tokens=1)["usage"]["prompt_tokens"]
    responses = asked(server, "/v1/responses", input=items, max_output_tokens=16)
    assert responses["usage"]["input_tokens"] == ollama(server, messages=messages) == tokens


def test_stops_are_of_the_text_before_calls_by_every_way(server: Local) -> None:
    wanted = {"messages": [USER], "max_tokens": 200}
    chat = asked(server, "/v1/chat/completions", tools=[FUNCTION], tool_choice="required", stop=["\n", "}"], **wanted)
    assert chat["choices"][0]["finish_reason"] == "tool_calls"
    message = asked(server, "/v1/messages", tools=[TOOL], tool_choice={"type": "any"}, stop_sequences=["}"], **wanted)
    assert message["stop_reason"] == "tool_use" and message["content"][0]["input"]["city"] in ("Rome", "Paris")
