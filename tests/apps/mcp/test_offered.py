"""The model as an MCP server, asked by the SDK's client in process and by a chat as a command."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.mcp.servers import ToolServers
from tests.apps.mcp.toys import ROOT, config
from tests.speculation import needs_builtin
from tests.waiting import TIME_LIMIT

pytestmark = needs_builtin
mcp = pytest.importorskip("mcp")


def test_the_model_answers_extracts_and_chooses() -> None:
    from edgeinfer.apps.mcp.offered import OfferedModel, make_server

    seen: list[float] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)

    async def talk() -> dict[str, Any]:
        offered = OfferedModel(edgeinfer.load, {"temperature": 0.0})
        async with mcp.Client(make_server(offered)) as client:
            listed = await client.list_tools()
            assert [tool.name for tool in listed.tools] == ["ask", "extract", "choose", "about"]
            schema = {"type": "object", "properties": {"boat": {"enum": ["red", "blue"]}}, "required": ["boat"]}
            asked = {
                "ask": {"question": "Tell me a story.", "max_tokens": 40},
                "extract": {"text": "The boat is red.", "schema": schema},
                "choose": {"question": "Which?", "choices": ["one", "two"]},
                "about": {},
            }
            answers = {}
            for name, given in asked.items():
                result = await client.call_tool(name, given, progress_callback=note)
                assert not result.is_error, result
                answers[name] = result.content[0].text
        await offered.close()
        return answers

    answers = asyncio.run(talk())
    with edgeinfer.load() as model:
        assert answers["ask"] == model.chat().send("Tell me a story.", max_tokens=40, temperature=0.0).text
    assert json.loads(answers["extract"])["boat"] in ("red", "blue") and answers["choose"] in ("one", "two")
    assert json.loads(answers["about"])["context"] == 1024 and seen == [16, 32]


def test_a_program_starts_it_as_a_command(tmp_path: Path) -> None:
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "HOME": str(tmp_path)}
    command = {"command": sys.executable, "args": ["-m", "edgeinfer", "mcp"], "env": env, "cwd": str(ROOT)}
    with ToolServers(config(tmp_path, model=command), tmp_path / "permissions.json") as servers:
        servers.reload()
        servers.wait(TIME_LIMIT)
        assert [state.message for state in servers.states] == [""]
        answer = servers.call(servers.tools["choose"], '{"question": "Which?", "choices": ["a"]}').result(TIME_LIMIT)
        assert (answer.text, answer.failed) == ("a", False)
