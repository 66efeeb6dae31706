"""LangChain's ChatOpenAI, unmodified, against a real server; in a process of its own, where its warnings may be."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.apps.server.served import Local
from tests.cli import TIME_LIMIT
from tests.speculation import needs_builtin

pytestmark = [
    pytest.mark.slow,
    needs_builtin,
    pytest.mark.skipif(
        importlib.util.find_spec("langchain_openai") is None, reason="langchain-openai is not installed"
    ),
]

SCRIPT = """
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

chat = ChatOpenAI(model="tales", base_url=sys.argv[1], api_key="none", max_tokens=60, temperature=0, max_retries=0)
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
chat = ChatOpenAI(model="tales", base_url=sys.argv[1], api_key="none", max_tokens=600, temperature=1, seed=1)
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


@pytest.fixture(scope="module")
def told(server: Local) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    environment |= {"LANGCHAIN_TRACING_V2": "false", "LANGSMITH_TRACING": "false"}
    command = [sys.executable, "-c", SCRIPT, server.api]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_invoke_and_stream(told: Any) -> None:
    assert told["invoke"]
    assert told["stream"] == told["invoke"]
    assert told["usage"]["output_tokens"] > 0
    assert len(told["many"]) == 3


def test_structured_output(told: Any) -> None:
    for way in ("animal", "by_tool", "json"):
        assert told[way]["kind"] in ("dog", "cat")
        assert 0 <= told[way]["legs"] <= 8


def test_tools(told: Any) -> None:
    assert told["calls"] == [{"name": "weather", "args": ["city"]}]
    assert isinstance(told["after"], str)
