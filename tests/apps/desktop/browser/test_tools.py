"""Tools of an MCP server in the window: a call is shown and waits, and the settings say what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.apps.desktop.browser.conftest import OpenWindow
from tests.apps.mcp.calling import served_with_toys
from tests.speculation import needs_builtin

pytest.importorskip("mcp")
pytestmark = [needs_builtin, pytest.mark.browser]

SETTINGS = {"options": {"temperature": 0.0, "max_tokens": 60}}


def test_calls_are_shown_and_answered(data: Path, open_at: OpenWindow) -> None:
    data.mkdir()
    log = data / "log"
    with served_with_toys(data, settings=SETTINGS) as app:
        window = open_at(app.address)
        window.wait_ready()
        window.send("Add them.")
        call = window.replies.last.get_by_role("region", name="Call of add")
        expect(call).to_contain_text("waits for you")
        expect(call).to_contain_text('"b": 3')
        window.button("Refuse", call).click()
        expect(window.replies.last.locator("details.call.refused")).to_contain_text("was refused")
        window.finished()
        assert not log.exists()
        window.send("Add them.")
        call = window.replies.last.get_by_role("region", name="Call of add")
        window.button("Always allow", call).click()
        done = window.replies.last.locator("details.call.done")
        expect(done).to_contain_text("of toys")
        window.finished()
        assert len(log.read_text().split()) == 1
        window.page.reload()
        expect(window.page.locator("details.call")).to_have_count(2)
        window.page.locator("#panel-button").click()
        choice = window.page.get_by_role("combobox", name="What add may do")
        expect(choice).to_have_value("always")
        choice.select_option("never")
        expect(choice).to_have_value("never")
        window.page.context.close()
