"""Calls of tools through the app's API: shown, allowed once or always, refused, stopped, kept, and read again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.mcp.turns import REFUSED, ToolCall, turn_messages
from tests.apps.desktop.served import Window, served
from tests.apps.mcp.calling import served_with_toys
from tests.speculation import needs_builtin
from tests.waiting import TIME_LIMIT

pytestmark = needs_builtin
pytest.importorskip("mcp")

SETTINGS = {"options": {"temperature": 0.0, "max_tokens": 60}}


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    """An app with a model loaded, whose first reply to a message has to call `add`."""
    with served_with_toys(tmp_path_factory.mktemp("data"), settings=SETTINGS) as opened:
        yield opened


def ask(window: Window, id: str) -> Any:
    """Send a message and return the call that waits."""
    window.call("POST", f"/conversations/{id}/messages", {"parent": None, "content": "Add them."}, status=202)
    for kind, data in window.events(f"/conversations/{id}/reply"):
        if data.get("calls") and data["calls"][0]["status"] == "asked":
            return data["calls"][0]
        assert kind == "text", data
    raise AssertionError("the stream ended")


def end(window: Window, id: str) -> Any:
    """Wait for the reply to end."""
    return next(data for kind, data in window.events(f"/conversations/{id}/reply") if kind != "text")


def added(window: Window) -> int:
    log = window.folder.path / "log"
    return len(log.read_text().split()) if log.exists() else 0


def test_a_call_waits_until_it_is_allowed(window: Window) -> None:
    before, id = added(window), window.new()
    call = ask(window, id)
    assert (call["name"], call["server"], added(window)) == ("add", "toys", before)
    window.refused("POST", f"/conversations/{id}/calls/x", {"allow": "once"}, status=409, code="conflict")
    window.refused("POST", f"/conversations/{id}/calls/{call['id']}", {"allow": "yes"}, status=400, code="invalid")
    window.call("POST", f"/conversations/{id}/calls/{call['id']}", {"allow": "once"}, status=202)
    done = end(window, id)
    assert done["status"] == "complete" and done["calls"][0]["status"] == "done" and added(window) == before + 1
    assert int(done["calls"][0]["result"]) == sum(json.loads(done["calls"][0]["arguments"]).values())
    exported = window.call("GET", f"/conversations/{id}/export?format=json")
    again = window.http.post("/app/api/import", json=exported).json()
    assert again["messages"][1]["calls"] == done["calls"]


def test_a_refused_call_does_nothing(window: Window) -> None:
    before, id = added(window), window.new()
    call = ask(window, id)
    window.call("POST", f"/conversations/{id}/calls/{call['id']}", {"allow": "no"}, status=202)
    done = end(window, id)
    assert [(each["status"], each["result"]) for each in done["calls"]] == [("refused", REFUSED)]
    assert done["status"] == "complete" and added(window) == before


def test_a_reply_that_waits_can_be_stopped(window: Window) -> None:
    before, id = added(window), window.new()
    ask(window, id)
    window.call("POST", f"/conversations/{id}/stop", status=202)
    done = end(window, id)
    assert (done["status"], done["calls"][0]["status"], added(window)) == ("stopped", "refused", before)


def test_what_is_allowed_is_seen_and_changed(window: Window) -> None:
    before, id = added(window), window.new()
    call = ask(window, id)
    window.call("POST", f"/conversations/{id}/calls/{call['id']}", {"allow": "always"}, status=202)
    end(window, id)

    def permission() -> Any:
        (server,) = window.call("GET", "/tools")["servers"]
        return {tool["title"]: tool["permission"] for tool in server["tools"]}["add"]

    assert permission() == "always"
    other = window.new()
    window.call("POST", f"/conversations/{other}/messages", {"parent": None, "content": "Add."}, status=202)
    assert end(window, other)["calls"][0]["status"] == "done" and added(window) == before + 2
    window.call("POST", "/tools/allow", {"server": "toys", "tool": "add", "permission": "ask"})
    assert permission() == "ask"
    wrong = {"server": "toys", "tool": "none", "permission": "ask"}
    window.refused("POST", "/tools/allow", wrong, status=400, code="invalid")


def test_chats_may_do_without_tools(window: Window) -> None:
    id = window.new()
    window.call("PATCH", f"/conversations/{id}", {"options": {"tools": "off"}})
    assert window.ask(id, "Add them.")["calls"] == []


def test_servers_are_started_again(window: Window) -> None:
    path = window.services.servers.path
    text = path.read_text()
    path.write_text("{")
    assert "cannot be read" in window.call("POST", "/tools/reload")["error"]
    path.write_text(text)
    assert window.call("POST", "/tools/reload")["servers"][0]["status"] in ("starting", "ready")
    window.services.servers.wait(TIME_LIMIT)


def test_a_reply_with_calls_becomes_messages() -> None:
    calls = [
        ToolCall("1", "add", "toys", "{}", 0, 4, "done", "3"),
        ToolCall("2", "add", "toys", "{}", 0, 4, "refused", REFUSED),
        ToolCall("3", "add", "toys", "{}", 1, 4, "done", "5"),
    ]
    made = turn_messages("One.Two.", calls)
    assert [(each["role"], each["content"]) for each in made] == [
        *(("assistant", "One."), ("tool", "3"), ("tool", REFUSED), ("assistant", ""), ("tool", "5")),
        ("assistant", "Two."),
    ]
    assert [len(each.get("tool_calls", ())) for each in made] == [2, 0, 0, 1, 0, 0]


def test_a_data_folder_without_servers_starts_none(tmp_path: Path) -> None:
    with served(tmp_path, settings=SETTINGS) as opened:
        shown = opened.call("GET", "/tools")
        assert (shown["servers"], shown["error"]) == ([], "") and shown["path"].endswith("mcp.json")
