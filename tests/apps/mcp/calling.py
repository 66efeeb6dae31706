"""The app with a server of tools and a model that has to call one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.desktop import replies
from edgeinfer.apps.mcp.turns import tool_prompt
from edgeinfer.openai.tools import ToolChoice
from tests.apps.desktop.served import Window, served
from tests.apps.mcp.toys import by_stdio, config
from tests.waiting import TIME_LIMIT


@contextlib.contextmanager
def served_with_toys(folder: Path, **options: Any) -> Iterator[Window]:
    """The app with this server, whose model is made to call `add` in its first reply to a message."""

    def calling(model: Any, messages: Any, tools: Any, given: Any) -> Any:
        add = next(tool for tool in tools if tool.title == "add")
        numbers = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"const": 3}}, "required": ["a", "b"]}
        made = tool_prompt(model, messages, [dataclasses.replace(add, parameters=numbers)], given)
        if messages[-1]["role"] != "user":
            return made
        choice = ToolChoice("required", made.tools.choice.functions, several=False)
        return dataclasses.replace(made, tools=dataclasses.replace(made.tools, choice=choice, made={}))

    path = config(folder, toys=by_stdio(folder / "log"))
    with pytest.MonkeyPatch.context() as patch, served(folder, mcp=path, **options) as opened:
        patch.setattr(replies, "tool_prompt", calling)
        opened.services.servers.wait(TIME_LIMIT)
        yield opened
