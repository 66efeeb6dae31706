"""MCP servers of the official SDK as chats use them: over stdio and HTTP, allowed and refused, dying and hanging."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self, cast

import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.apps.mcp.servers import ServerTool, ToolServers, read_config
from edgeinfer.apps.mcp.turns import REFUSED
from edgeinfer.apps.terminal.app import SwitchedModel, TerminalChat
from edgeinfer.core.errors import UsageError
from tests.apps.mcp.toys import by_http, by_stdio, config
from tests.cli import handling
from tests.fakes import FakeStream
from tests.tables import each_row
from tests.waiting import TIME_LIMIT

pytest.importorskip("mcp")


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolServers]:
    """The server as a process, one that does not start, and one that is switched off."""
    folder = tmp_path_factory.mktemp("toys")
    broken = {"command": sys.executable, "args": ["-c", "import sys; sys.exit('it is broken')"]}
    path = config(folder, toys=by_stdio(folder / "log"), broken=broken, off={"url": "http://x/", "disabled": True})
    with ToolServers(path, folder / "permissions.json") as servers:
        servers.reload()
        servers.wait(TIME_LIMIT)
        yield servers


def test_servers_start_or_say_why_not(toys: ToolServers) -> None:
    states = {state.name: state for state in toys.states}
    assert [state.status for state in states.values()] == ["ready", "failed", "disabled"]
    assert "it is broken" in states["broken"].message
    assert set(toys.tools) == {"add", "long", "die", "hang"}
    add = toys.tools["add"].as_tool["function"]
    assert add["description"] == "Add two numbers." and add["parameters"]["required"] == ["a", "b"]


@each_row(
    ("arguments", "failed", "said"),
    [('{"a": 1, "b": 2}', False, "3"), ('{"a": ', True, "not valid JSON"), ("[]", True, "no object")],
)
def test_a_call(toys: ToolServers, arguments: str, failed: bool, said: str) -> None:
    answer = toys.call(toys.tools["add"], arguments).result(TIME_LIMIT)
    assert answer.failed is failed and said in answer.text


def test_results_are_bounded(toys: ToolServers) -> None:
    text = toys.call(toys.tools["long"], "{}", most=10).result(TIME_LIMIT).text
    assert text == "x" * 10 + "\n[99,990 more characters were left out]"


def test_a_server_that_hangs_or_dies_is_a_message(tmp_path: Path) -> None:
    path = config(tmp_path, slow=by_stdio(timeout=0.3), toys=by_stdio())
    with ToolServers(path, tmp_path / "permissions.json") as servers:
        servers.reload()
        servers.wait(TIME_LIMIT)
        tools = servers.tools
        assert servers.call(tools["hang"], "").result(TIME_LIMIT).text == "It did not answer within 0.3 seconds."
        stopped = servers.call(tools["toys_hang"], "")
        assert stopped.cancel()
        assert servers.call(tools["toys_die"], "").result(TIME_LIMIT).text == "The server toys has ended."
        assert "has ended" in servers.call(tools["toys_add"], '{"a": 1, "b": 2}').result(TIME_LIMIT).text
        assert {tool.server for tool in servers.tools.values()} == {"slow"}
        servers.reload()
        servers.wait(TIME_LIMIT)
        assert servers.call(servers.tools["toys_add"], '{"a": 1, "b": 2}').result(TIME_LIMIT).text == "3"


def test_a_server_at_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOYS_KEY", "secret")
    with by_http() as named:
        path = config(tmp_path, web=named, twin=named, closed={"url": named["url"]})
        with ToolServers(path, tmp_path / "permissions.json") as servers:
            servers.reload()
            servers.wait(TIME_LIMIT)
            assert [state.status for state in servers.states] == ["ready", "ready", "failed"]
            assert {"add", "twin_add"} <= set(servers.tools)
            assert servers.call(servers.tools["twin_add"], '{"a": 1, "b": 2}').result(TIME_LIMIT).text == "3"


def test_what_is_allowed_is_remembered_until_the_tool_says_something_else(tmp_path: Path) -> None:
    kept = tmp_path / "data" / "permissions.json"
    tool = ServerTool("add", "toys", "add", "Add.", {}, "key-1")
    with ToolServers(tmp_path / "mcp.json", kept) as servers:
        assert servers.permission(tool) == "ask"
        servers.allow(tool, "always")
    with ToolServers(tmp_path / "mcp.json", kept) as servers:
        assert servers.permission(tool) == "always"
        assert servers.permission(ServerTool("add", "toys", "add", "Send it all.", {}, "key-2")) == "ask"
        servers.allow(tool, "ask")
    assert json.loads(kept.read_text()) == {}


@each_row(
    "text",
    [
        "{",
        "[]",
        '{"mcpServers": []}',
        '{"mcpServers": {"a": {}}}',
        '{"mcpServers": {"a": {"command": "x", "url": "y"}}}',
        '{"mcpServers": {"a": {"command": "x", "args": [1]}}}',
        '{"mcpServers": {"a": {"url": "x", "timeout": "1"}}}',
    ],
)
def test_files_that_name_no_servers(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"mcp\.json"):
        read_config(path)


class CallingModel:
    """A model that says what a script tells it, in the notation of a model whose template knows no tools."""

    info = SimpleNamespace(name="Toy", parameters=1e6, bits_per_weight=8)
    sampling: Mapping[str, Any] = MappingProxyType({})
    context, tool_template_text, chat_template_text = 4096, None, "{{ messages }}"

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.asked: list[Any] = []

    @property
    def model(self) -> Self:
        return self

    def chat(self, system: str | None = None, history: Sequence[dict[str, Any]] = ()) -> edgeinfer.Chat:
        return edgeinfer.Chat(cast(Any, self), system, history)

    def check(self, **options: Any) -> None:
        assert not options or "grammar" in options

    def render_chat(self, messages: Sequence[Any], **_: Any) -> str:
        return ""

    def tokenize(self, text: str, **_: Any) -> list[int]:
        return [1, 2]

    def tokenize_chat(self, messages: Sequence[Any], **_: Any) -> list[int]:
        self.asked.append(list(messages))
        return [1]

    def stream_chat(self, messages: Sequence[Any], **_: Any) -> FakeStream:
        return FakeStream(list(self.replies.pop(0)))


ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def talk(model: CallingModel, servers: ToolServers, *lines: str, interactive: bool = True) -> str:
    waiting = iter(lines)
    out = io.StringIO()

    def read(prompt: str) -> str:
        out.write(prompt)
        return next(waiting)

    with handling(signal.SIGINT):
        chat = TerminalChat(cast(SwitchedModel, model), servers=servers, read=read, out=out, interactive=interactive)
        chat.run()
    return out.getvalue()


@pytest.fixture
def added(toys: ToolServers) -> Iterator[Callable[[], list[str]]]:
    """What was added since the test began."""
    log = toys.path.with_name("log")
    log.unlink(missing_ok=True)
    yield lambda: log.read_text().split() if log.exists() else []
    toys.allow(next(tool for state in toys.states for tool in state.tools if tool.title == "add"), "ask")


def test_a_call_is_shown_and_allowed_once(toys: ToolServers, added: Callable[[], list[str]]) -> None:
    model = CallingModel(f"Let me see. {ADD}", "It is 3.", ADD, "No?", "Bye.")
    said = talk(model, toys, "How much is it?", "y", "And now?", "n", "So?")
    assert '[toys] add {"a": 1, "b": 2}\nAllow add?' in said and "[done] 3\nIt is 3." in said and "[refused]" in said
    assert added() == ["1+2"]
    texts = [[message["content"] for message in messages] for messages in model.asked]
    results = [[text for text in each if "tool_response" in text] for each in texts]
    assert [len(found) for found in results] == [0, 1, 1, 2, 2]
    assert "3" in results[1][0] and REFUSED in results[3][1]


def test_a_tool_is_allowed_always_or_never(toys: ToolServers, added: Callable[[], list[str]]) -> None:
    said = talk(CallingModel(ADD, ADD, "3"), toys, "Add.", "always", "/tools")
    assert said.count("Allow add?") == 1 and added() == ["1+2", "1+2"] and "add [always] Add two numbers." in said
    model = CallingModel(ADD, "There is none.")
    said = talk(model, toys, "/tools add never", "Add.")
    assert added() == ["1+2", "1+2"] and "There is no tool named add." in said
    assert '"add"' not in model.asked[0][0]["content"] and '"long"' in model.asked[0][0]["content"]


def test_a_script_allows_nothing_by_itself(toys: ToolServers, added: Callable[[], list[str]]) -> None:
    assert talk(CallingModel(ADD, "No."), toys, "Add.", interactive=False) == "> No.\n> "
    assert added() == []


def test_turns_with_calls_are_kept(toys: ToolServers, added: Callable[[], list[str]], tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    talk(CallingModel(ADD, "It is 3."), toys, "Add.", "y", f"/save {path}")
    chat = edgeinfer.Chat.open(cast(Any, CallingModel()), path)
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1]["tool_calls"][0]["function"]["name"] == "add" and chat.messages[2]["content"] == "3"


def test_the_command_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--terminal", "--mcp", str(tmp_path / "none.json")]) == 2
    assert "There is no file" in capsys.readouterr().err
