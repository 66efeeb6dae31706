"""Unmodified clients of other libraries against a real server, in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.apps.server.served import Local
from tests.cli import TIME_LIMIT, environment
from tests.speculation import needs_builtin

pytestmark = [pytest.mark.slow, needs_builtin]

OLLAMA = """
import json, sys
import ollama

def weather(city: str) -> str:
    '''Tells the weather.

    Args:
        city: its name
    '''
    return "sunny"

client = ollama.Client(host=sys.argv[1])
asked = [{"role": "user", "content": "Tell me about a dog."}]
options = {"num_predict": 12, "temperature": 0, "num_ctx": 256}
told = {"listed": [model.model for model in client.list().models], "loaded": client.ps().models[0].model}
name = told["listed"][0]
told["tools"] = client.show(name).capabilities
told["chat"] = client.chat(name, asked, options=options).message.content
told["stream"] = "".join(part.message.content for part in client.chat(name, asked, stream=True, options=options))
told["reason"] = client.chat(name, asked, options=options).done_reason
parts = client.generate(name, asked[0]["content"], stream=True, options=options)
told["text"] = "".join(part.response for part in parts)
schema = {"type": "object", "properties": {"kind": {"enum": ["dog", "cat"]}}, "required": ["kind"]}
told["json"] = json.loads(client.chat(name, asked, format=schema).message.content)
call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
called = {"role": "assistant", "content": "", "tool_calls": [call]}
answered = {"role": "tool", "tool_name": "weather", "content": "sunny"}
told["after"] = client.chat(name, [*asked, called, answered], tools=[weather], options=options).message.content
client.generate(name, keep_alive=0)
try:
    client.chat("nobody", asked)
except ollama.ResponseError as error:
    told["unknown"] = error.status_code
print(json.dumps(told))
"""
ANTHROPIC = """
import json, sys
import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
asked = {"model": "small", "max_tokens": 12, "messages": [{"role": "user", "content": "Tell me about a dog."}]}
told = {"chat": client.messages.create(**asked).content[0].text}
with client.messages.stream(**asked) as stream:
    told["stream"] = "".join(stream.text_stream)
    told["reason"] = stream.get_final_message().stop_reason
schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
tools = {"tools": [{"name": "weather", "input_schema": schema}], "max_tokens": 100}
choice = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
message = client.messages.create(**asked | tools | choice)
(call,) = message.content
told["called"] = [message.stop_reason, call.name, call.input["city"] in ("Rome", "Paris")]
with client.messages.stream(**asked | tools | choice) as stream:
    told["streamed call"] = stream.get_final_message().content[0].input == call.input
result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}
turns = [*asked["messages"], {"role": "assistant", "content": message.content}, result]
told["after"] = bool(client.messages.create(**asked | tools | {"messages": turns, "max_tokens": 4}).content)
told["tokens"] = client.messages.count_tokens(model="small", messages=asked["messages"]).input_tokens
try:
    client.messages.create(**asked | {"model": "nobody"})
except anthropic.NotFoundError as error:
    told["unknown"] = error.status_code
print(json.dumps(told))
"""
LANGCHAIN_OPENAI = """
import asyncio, json, sys
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: str = Field(pattern="^(dog|cat)$")
    legs: int = Field(ge=0, le=8)

@tool
def weather(city: str) -> str:
    '''Tells the weather of a city.'''
    return "sunny"

given = {"model": "tales", "base_url": sys.argv[1] + "/v1", "api_key": "none"}
chat = ChatOpenAI(**given, max_tokens=60, temperature=0, max_retries=0)
told = {}
asked = [SystemMessage("Be brief."), HumanMessage("Tell me about a dog.")]
answer = chat.invoke(asked)
told["invoke"] = answer.content
told["usage"] = answer.usage_metadata
told["stream"] = "".join(part.content for part in chat.stream(asked))
async def many():
    answers = await asyncio.gather(*(chat.ainvoke("A story about " + what) for what in "abc"))
    return [answer.content for answer in answers]
told["many"] = asyncio.run(many())
# The likeliest white space of a model of stories is more of it; drawn, it comes to an end.
chat = ChatOpenAI(**given, max_tokens=600, temperature=1, seed=1)
told["animal"] = chat.with_structured_output(Animal).invoke("An animal.").model_dump()
told["by_tool"] = chat.with_structured_output(Animal, method="function_calling").invoke("An animal.").model_dump()
told["json"] = chat.with_structured_output(Animal.model_json_schema(), method="json_schema").invoke("An animal.")
bound = chat.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False)
call = bound.invoke("What is the weather in Rome?")
told["calls"] = [{"name": c["name"], "args": sorted(c["args"])} for c in call.tool_calls]
follow = [HumanMessage("What is the weather?"), call, ToolMessage("sunny", tool_call_id=call.tool_calls[0]["id"])]
told["after"] = chat.invoke(follow).content
print(json.dumps(told))
"""


def told_by(server: Local, package: str, script: str) -> Any:
    """Run a script with the server's address and return what it prints."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-c", script, server.url]
    given = {name: value for name, value in environment().items() if name != "PYTHONWARNINGS"}
    given |= {"LANGCHAIN_TRACING_V2": "false", "LANGSMITH_TRACING": "false"}
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ollama_s_client(server: Local) -> None:
    told = told_by(server, "ollama", OLLAMA)
    assert told["chat"] == told["stream"] == told["text"] != ""
    assert told["loaded"] == told["listed"][0] and "tools" in told["tools"]
    assert told["json"]["kind"] in ("dog", "cat") and told["after"]
    assert (told["reason"], told["unknown"]) == ("length", 404)


def test_anthropic_s_client(server: Local) -> None:
    told = told_by(server, "anthropic", ANTHROPIC)
    assert told["chat"] == told["stream"] != ""
    assert told["called"] == ["tool_use", "weather", True] and told["streamed call"] and told["after"]
    assert (told["reason"], told["unknown"]) == ("max_tokens", 404) and told["tokens"] > 0


def test_langchain_s_client_for_openai(server: Local) -> None:
    told = told_by(server, "langchain_openai", LANGCHAIN_OPENAI)
    assert told["invoke"] == told["stream"] != "" and told["usage"]["output_tokens"] > 0 and len(told["many"]) == 3
    for way in ("animal", "by_tool", "json"):
        assert told[way]["kind"] in ("dog", "cat") and 0 <= told[way]["legs"] <= 8
    assert told["calls"] == [{"name": "weather", "args": ["city"]}] and isinstance(told["after"], str)
