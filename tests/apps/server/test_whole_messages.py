"""What a client sent reaches the model by every way into a template: the built-in one knows users and assistants."""

from __future__ import annotations

from typing import Any

from tests.apps.server.served import Local
from tests.apps.server.test_other_protocols import FUNCTION, WEATHER, ok
from tests.speculation import needs_builtin
from tests.tables import each_row

pytestmark = needs_builtin

SYSTEM = {"role": "system", "content": "Be brief"}
PARTS = {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief"}]}
USER = {"role": "user", "content": "Hello"}
# Anthropic's.
TOOL = {"name": "weather", "input_schema": WEATHER}
BLOCKS = [{"type": "text", "text": "Be brief"}]


def asked(server: Local, path: str, **body: Any) -> Any:
    return ok(server.post(path, body))


def ollama(server: Local, path: str = "/api/chat", **body: Any) -> int:
    """Tokens of the prompt."""
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
