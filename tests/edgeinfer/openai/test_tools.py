"""Calls of functions from request to answer: what the model sees, what is enforced, what a client gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.core.errors import UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.openai.dialects import FORMATS, Dialect
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.messages import read_messages
from edgeinfer.openai.tools import conversation
from tests.cache import made
from tests.edgeinfer.openai.functions import CLOCK, WEATHER, as_tools
from tests.factories import make_checkpoint
from tests.tables import each_row

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

ASKED = [{"role": "user", "content": "What is the weather in Oslo?"}]
HISTORY: list[dict[str, Any]] = [
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"town": "Oslo"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "time.of", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
    {"role": "user", "content": "Thanks"},
]
CALLED: dict[str, Any] = {"tools": as_tools(WEATHER, CLOCK), "tool_choice": "required", "max_tokens": 300}


def ask(model: edgeinfer.Model, messages: Any = ASKED, **request: Any) -> dict[str, Any]:
    answer = model.create_chat_completion(messages, **request)
    assert isinstance(answer, dict)
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def check_calls(choice: dict[str, Any]) -> list[str]:
    """That all calls are valid; the names."""
    schemas = {function.name: function.arguments for function in (WEATHER, CLOCK)}
    calls = choice["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == len(calls) > 0
    for call in calls:
        assert call["type"] == "function"
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.Draft202012Validator(schemas[call["function"]["name"]]).validate(arguments)
    return [call["function"]["name"] for call in calls]


@pytest.mark.parametrize("seed", range(6))
def test_required_calls_are_valid(tales: edgeinfer.Model, seed: int) -> None:
    choice = ask(tales, temperature=1.0, seed=seed, parallel_tool_calls=False, **CALLED)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert len(check_calls(choice)) == 1


def test_a_named_function_is_called(tales: edgeinfer.Model) -> None:
    for name in ("get_weather", "time.of"):
        choice = ask(tales, **CALLED | {"tool_choice": {"type": "function", "function": {"name": name}}})
        assert check_calls(choice) == [name]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": as_tools(CLOCK)}}
    assert set(check_calls(ask(tales, **CALLED | {"tool_choice": allowed, "parallel_tool_calls": False}))) == {
        "time.of"
    }


def test_several_calls(tales: edgeinfer.Model) -> None:
    found = [
        len(check_calls(choice))
        for seed in range(8)
        if (choice := ask(tales, temperature=1.2, seed=seed, **CALLED))["finish_reason"] == "tool_calls"
    ]
    assert max(found) > 1


def test_auto_leaves_text_as_it_is(tales: edgeinfer.Model) -> None:
    offered = conversation(read_messages(ASKED), Dialect(FORMATS["hermes"], native=False), (WEATHER, CLOCK))
    plain = ask(tales, offered, max_tokens=40)
    free = ask(tales, **CALLED | {"tool_choice": "auto", "max_tokens": 40})
    assert free["message"] == plain["message"]


def test_none_calls_nothing(tales: edgeinfer.Model) -> None:
    choice = ask(tales, **CALLED | {"tool_choice": "none", "max_tokens": 30})
    assert choice["message"] == ask(tales, max_tokens=30)["message"]


@each_row("options", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_stream_says_the_same(tales: edgeinfer.Model, options: dict[str, Any]) -> None:
    whole = ask(tales, **CALLED, **options)
    chunks = tales.create_chat_completion(ASKED, stream=True, **CALLED, **options)
    assert isinstance(chunks, Iterator)
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        for delta in choice["delta"].get("tool_calls", []):
            if "id" in delta:
                assert delta["index"] == len(calls) and delta["type"] == "function"
                calls.append({"name": delta["function"]["name"], "arguments": ""})
            calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
        reason = choice["finish_reason"]
    assert reason == whole["finish_reason"]
    assert calls == [call["function"] for call in whole["message"]["tool_calls"]]


def test_log_probabilities_of_calls(tales: edgeinfer.Model) -> None:
    choice = ask(tales, logprobs=True, parallel_tool_calls=False, **CALLED)
    text = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] in text


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools[0].function.parameters", {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}),
    ("tools[1]", {"tools": as_tools(WEATHER, WEATHER)}),
    ("tools", {"tools": "f"}),
    ("tool_choice", {"tools": as_tools(WEATHER), "tool_choice": "maybe"}),
    ("tool_choice", {"tools": as_tools(WEATHER), "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ("regex", {"tools": as_tools(WEATHER), "regex": "a+"}),
    ("parallel_tool_calls", {"tools": as_tools(WEATHER), "parallel_tool_calls": "no"}),
]


@each_row(("param", "request_"), REFUSED)
def test_refused(tales: edgeinfer.Model, param: str, request_: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        ask(tales, **request_)
    assert caught.value.param == param


def test_a_schema_that_cannot_be_followed_is_loosened_or_refused(tales: edgeinfer.Model) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"pattern": "a+"}}}}
    function: dict[str, Any] = {"name": "f", "parameters": parameters}
    for strict, choice in (
        (None, "auto"),
        (False, "required"),
        (False, {"type": "function", "function": {"name": "f"}}),
    ):
        tools = [*as_tools(WEATHER), {"type": "function", "function": {**function, "strict": strict}}]
        answer = tales.create_chat_completion(ASKED, tools=tools, tool_choice=choice, max_tokens=8)
        assert answer["warnings"] == ["not of the tool f is not supported and was ignored."]
    with pytest.raises(RequestError, match=r"strict tool f .*not") as caught:
        ask(tales, tools=[{"type": "function", "function": {**function, "strict": True}}])
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_schema")
    # What is never called is held to nothing.
    ask(tales, tools=[{"type": "function", "function": {**function, "strict": True}}], tool_choice="none", max_tokens=2)


def test_a_schema_or_a_call(tales: edgeinfer.Model) -> None:
    moods = {"mood": {"enum": ["good", "bad"]}}
    schema = {"type": "object", "properties": moods, "required": ["mood"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "m", "schema": schema}}
    choice = ask(tales, tools=as_tools(WEATHER), response_format=form, max_tokens=200)
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    else:
        check_calls(choice)


def test_messages_tell_of_functions_where_the_template_does_not() -> None:
    told = conversation(read_messages(HISTORY), Dialect(FORMATS["hermes"], native=False), (WEATHER,))
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user", "user"]
    assert '"name": "get_weather"' in told[0]["content"] and "<tools>" in told[0]["content"]
    assert told[2]["content"].count("<tool_call>") == 2 and '"arguments": {"town": "Oslo"}' in told[2]["content"]
    assert told[3]["content"] == "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    with_system = [{"role": "developer", "content": "Be brief."}, *HISTORY]
    told = conversation(read_messages(with_system), Dialect(FORMATS["hermes"], native=False), (WEATHER,))
    assert told[0]["role"] == "system" and told[0]["content"].startswith("Be brief.\n\n# Tools")
    assert told[1]["role"] == "user"


def test_templates_that_know_functions_get_them_as_they_are() -> None:
    told = conversation(read_messages(HISTORY), Dialect(FORMATS["hermes"], native=True), (WEATHER,))
    assert told[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"town": "Oslo"}}
    assert told[2] == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    told = conversation(read_messages(HISTORY), Dialect(FORMATS["mistral"], native=True), (WEATHER,))
    ids = [call["id"] for call in told[1]["tool_calls"]]
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)
    assert [told[2]["tool_call_id"], told[3]["tool_call_id"]] == ids


TEMPLATE = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}"
    "{{ mood }}{% if add_generation_prompt %}assistant:{% endif %}"
)


def add_marker(path: Path) -> None:
    """Makes the last token of a tokenizer a special one."""
    tokenizer = json.loads(path.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    token = {**tokenizer["added_tokens"][0], "id": vocabulary.pop(last), "content": "[TOOL_CALLS]"}
    vocabulary[token["content"]] = token["id"]
    tokenizer["added_tokens"].append(token)
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) != last]
    path.write_text(json.dumps(tokenizer), "utf-8")


def make_marked(folder: Path) -> None:
    """A bundle whose marker is a special token."""
    make_checkpoint(folder / "checkpoint", "llama", chat_template=TEMPLATE, max_position_embeddings=2048)
    add_marker(folder / "checkpoint" / "tokenizer.json")
    export_checkpoint(
        folder / "checkpoint", folder / "bundle", ExportConfig(bits=4, keep_small=False, calibration="none")
    )


@pytest.fixture(scope="module")
def mistral() -> Iterator[edgeinfer.Model]:
    """A random model whose marker is a special token."""
    with edgeinfer.load(made(make_marked) / "bundle", threads=1, context=2048, speculation="off") as model:
        yield model


@each_row("mode", ["auto", "required"])
def test_a_special_token_begins_calls(mistral: edgeinfer.Model, mode: str) -> None:
    """In "auto" the model is made to write the marker; what follows is the grammar's doing."""
    (marker,) = mistral.tokenize("[TOOL_CALLS]")
    for seed in range(4):
        options: dict[str, Any] = {"temperature": 0.5, "seed": seed, "logit_bias": {str(marker): 100}}
        options |= CALLED | {"tool_choice": mode, "parallel_tool_calls": False, "max_tokens": 1000}
        choice = ask(mistral, **options)
        if choice["finish_reason"] == "tool_calls":
            assert len(check_calls(choice)) == 1
        else:  # a random model may write a number's digits for ever
            assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] is None
        assert len(choice["message"]["tool_calls"][0]["id"]) == 9


def test_the_template_is_given_what_the_request_says(mistral: edgeinfer.Model) -> None:
    def tokens(messages: Any, **request: Any) -> int:
        answer = mistral.create_chat_completion(messages, max_tokens=1, **request)
        assert isinstance(answer, dict)
        count: int = answer["usage"]["prompt_tokens"]
        return count

    bare = tokens(ASKED)
    assert tokens(ASKED, tools=as_tools(WEATHER)) > bare + 20
    assert tokens(ASKED, tools=as_tools(WEATHER), tool_choice="none") == bare
    assert tokens(ASKED, chat_template_kwargs={"mood": "cheerful as can be"}) > bare
    assert tokens(HISTORY) > bare
    with pytest.raises(UsageError):
        tokens(ASKED, chat_template_kwargs="mood")
