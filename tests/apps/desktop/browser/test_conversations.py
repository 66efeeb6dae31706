"""The list of conversations in the window: search, rename, delete, export, import, and what a chat is set to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Route, expect

from tests.apps.desktop.browser.window import STORY, Window
from tests.apps.desktop.served import Window as Api
from tests.speculation import needs_builtin

pytestmark = [needs_builtin, pytest.mark.browser]


def entry(window: Window, title: str) -> Locator:
    """The line of a conversation."""
    return window.entries.filter(has_text=title)


def choose(window: Window, title: str, item: str) -> None:
    """Choose from the menu of a conversation."""
    entry(window, title).first.hover()
    window.button(f"Menu of {title}").first.click()
    window.page.get_by_role("menuitem", name=item).click()


def test_searching_finds_what_was_said(window: Window) -> None:
    window.ask("Tell me a story about a zebra.")
    window.new_chat()
    window.ask("Tell me a story about an owl.")
    search = window.page.get_by_role("searchbox", name="Search conversations")
    search.fill("zebra")
    expect(window.entries).to_have_count(1)
    expect(entry(window, "zebra")).to_be_visible()
    search.press("ArrowDown")
    window.page.keyboard.press("Enter")
    expect(window.questions.last).to_contain_text("zebra")
    search.fill("no such words")
    expect(window.page.get_by_text("Nothing found.")).to_be_visible()
    search.press("Escape")
    expect(entry(window, "owl")).to_have_count(1)


def test_renaming_in_place(window: Window) -> None:
    window.ask("Tell me a story about a fox.")
    choose(window, "Tell me a story about a fox.", "Rename")
    field = window.page.get_by_role("textbox", name="Title")
    expect(field).to_be_focused()
    field.fill("The fox")
    field.press("Enter")
    expect(entry(window, "The fox")).to_be_visible()
    window.page.reload()
    expect(entry(window, "The fox")).to_be_visible()
    expect(window.page).to_have_title("The fox – edgeinfer")
    entry(window, "The fox").get_by_role("link").press("F2")
    field.fill("Not this")
    field.press("Escape")
    expect(entry(window, "The fox")).to_be_visible()


def test_a_deleted_conversation_can_be_brought_back(window: Window) -> None:
    reply = window.ask("Tell me a story about a hen.")
    choose(window, "Tell me a story about a hen.", "Delete")
    expect(entry(window, "hen")).to_have_count(0)
    expect(window.replies).to_have_count(0)
    window.button("Undo").click()
    expect(entry(window, "hen")).to_be_visible()
    assert window.finished() == reply


def test_a_deleted_conversation_is_gone_when_the_window_closes(window: Window) -> None:
    window.ask("Tell me a story about a yak.")
    choose(window, "Tell me a story about a yak.", "Delete")
    expect(entry(window, "yak")).to_have_count(0)
    window.page.reload()
    expect(window.entries.first.or_(window.page.get_by_text("Conversations are kept here."))).to_be_visible()
    expect(entry(window, "yak")).to_have_count(0)


def test_exporting_and_importing(window: Window, tmp_path: Path) -> None:
    reply = window.ask("Tell me a story about a seal.")
    saved = {}
    for kind in ("JSON", "Markdown"):
        with window.page.expect_download() as download:
            choose(window, "Tell me a story about a seal.", f"Export as {kind}")
        saved[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(saved[kind])
    assert saved["Markdown"].suffix == ".md"
    assert "Tell me a story about a seal." in saved["Markdown"].read_text("utf-8")
    assert json.loads(saved["JSON"].read_text("utf-8"))
    before = entry(window, "seal").count()
    window.new_chat()
    window.page.get_by_label("Conversation to import").set_input_files(saved["JSON"])
    expect(window.replies).to_have_count(1)
    assert window.finished() == reply
    expect(entry(window, "seal")).to_have_count(before + 1)


def test_a_file_that_is_no_conversation_is_refused(window: Window, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[1, 2", "utf-8")
    window.page.get_by_label("Conversation to import").set_input_files(wrong)
    expect(window.page.locator(".toast")).to_be_visible()
    window.problems.clear()


def test_a_chats_settings_hold_for_it_alone_and_can_be_reset(window: Window) -> None:
    window.ask()
    window.button("Chat settings").click()
    panel = window.page.get_by_role("complementary", name="Chat settings")
    temperature = panel.get_by_role("spinbutton", name="Temperature")
    usual = temperature.input_value()
    with window.page.expect_response(lambda answer: answer.request.method == "PATCH"):
        temperature.fill("0")
        temperature.press("Tab")
    with window.page.expect_response(lambda answer: answer.request.method == "PATCH"):
        panel.get_by_role("textbox", name="System prompt").fill("Be brief.")
        panel.get_by_role("textbox", name="System prompt").blur()
    replies = []
    for version in ("2/2", "3/3"):
        window.button("Regenerate", window.replies.last).click()
        expect(window.replies.last.locator(".branches")).to_have_text(version)
        replies.append(window.finished())
    assert replies[0] == replies[1]
    window.page.reload()
    window.button("Chat settings").click()
    expect(temperature).to_have_value("0")
    expect(panel.get_by_role("textbox", name="System prompt")).to_have_value("Be brief.")
    window.button("Defaults", panel).click()
    expect(temperature).to_have_value(usual)
    window.button("This chat", panel).click()
    window.button("Reset to the model's defaults", panel).click()
    expect(temperature).to_have_value(usual)
    expect(window.button("Reset to the model's defaults", panel)).to_be_disabled()


def settings_panel(window: Window) -> Locator:
    """Open the settings of the chat; return its system prompt."""
    window.button("Chat settings").click()
    return window.page.get_by_role("textbox", name="System prompt")


def id_of(window: Window) -> str:
    """The id of the conversation shown."""
    return window.page.url.rpartition("/")[2]


def test_a_panel_opened_before_its_chat_is_read_shows_the_chats_prompt(window: Window, app: Api) -> None:
    window.ask()
    app.call("PATCH", f"/conversations/{id_of(window)}", {"system": "Be brief."})
    with window.holding(f"conversations/{id_of(window)}$"):
        window.page.reload()
        system = settings_panel(window)
        expect(system).to_be_focused()
        expect(system).not_to_be_editable()
    expect(system).to_have_value("Be brief.")


def test_what_is_typed_belongs_to_the_chat_shown_then(window: Window, app: Api) -> None:
    window.ask()
    first = id_of(window)
    window.new_chat()
    window.ask()
    second = id_of(window)
    system = settings_panel(window)
    system.fill("Be brief.")
    # As with the browser's button, the field keeps the focus.
    window.page.evaluate("address => { location.hash = address }", f"#/chat/{first}")
    system.fill("Be kind.")
    with window.page.expect_response(lambda answer: answer.request.method == "PATCH"):
        system.blur()
    expect(system).to_have_value("Be kind.")
    assert app.call("GET", "/state")["settings"]["system"] == ""
    window.page.reload()
    window.open(second)
    expect(settings_panel(window)).to_have_value("Be brief.")
    window.open(first)
    expect(system).to_have_value("Be kind.")


def test_the_latest_of_several_changes_holds(window: Window, app: Api) -> None:
    window.ask()
    system = settings_panel(window)
    held, free = list[Route](), list[bool]()
    address = re.compile(f"conversations/{id_of(window)}$")
    window.page.route(address, lambda route: route.continue_() if free else held.append(route))
    with window.page.expect_request(address):
        system.fill("Be brief.")
        system.blur()
    system.fill("Be kind.")
    system.blur()
    free.append(True)
    while held:
        with window.page.expect_response(address):
            held.pop().continue_()
    expect(system).to_have_value("Be kind.")
    window.page.reload()
    expect(settings_panel(window)).to_have_value("Be kind.")


def test_what_was_typed_last_outlives_the_window(window: Window) -> None:
    window.ask()
    system = settings_panel(window)
    system.fill("Be brief.")
    window.page.reload()
    expect(window.replies).to_have_count(1)
    expect(settings_panel(window)).to_have_value("Be brief.")


def test_changes_wait_for_a_server_that_does_not_answer(window: Window, app: Api) -> None:
    window.ask()
    system = settings_panel(window)
    address = re.compile(f"conversations/{id_of(window)}$")
    window.page.route(address, lambda route: route.abort())
    with window.page.expect_request(address):
        system.fill("Be brief.")
        system.blur()
    with window.page.expect_response(address):
        window.page.unroute(address)
    assert app.call("GET", f"/conversations/{id_of(window)}")["system"] == "Be brief."
    window.problems.clear()


def test_an_option_out_of_range_is_not_kept(window: Window) -> None:
    window.ask(STORY)
    window.button("Chat settings").click()
    field = window.page.get_by_role("spinbutton", name="Longest reply")
    field.fill("0")
    field.press("Tab")
    window.page.reload()
    window.button("Chat settings").click()
    expect(field).to_have_value("")
