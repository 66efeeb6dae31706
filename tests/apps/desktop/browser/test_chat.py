"""Talking in the window: sending, figures, versions of messages, editing, continuing and the keyboard."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.apps.desktop.browser.app_process import running
from tests.apps.desktop.browser.conftest import OpenWindow
from tests.apps.desktop.browser.window import STORY, Window, window_in
from tests.speculation import needs_builtin

pytestmark = [needs_builtin, pytest.mark.browser]


def test_first_start_welcomes_and_a_suggestion_begins_a_chat(data: Path, open_at: OpenWindow) -> None:
    with running(data) as app:
        window = open_at(app.address)
        expect(window.page.get_by_role("heading", name="What shall we talk about?")).to_be_visible()
        expect(window.prompt).to_be_focused()
        window.wait_ready()
        expect(window.entries).to_have_count(0)
        window.page.get_by_role("button", name=STORY).click()
        assert len(window.finished()) > 40
        expect(window.entries).to_have_count(1)
        assert "key=" not in window.page.url
        window.page.context.close()


def test_a_reply_has_its_figures_and_fills_the_context_meter(window: Window) -> None:
    reply = window.ask()
    assert len(reply) > 40
    figures = window.replies.last.locator(".figures").inner_text()
    assert re.search(r"[\d.,]+ tokens/s", figures)
    assert re.search(r"[\d.]+ m?s to first token", figures)
    assert re.search(r"\d+ tokens", figures)
    meter = window.page.locator(".meter").inner_text()
    used, holds = (int(text.replace(",", "")) for text in meter.split(" / "))
    assert 40 < used < holds == 1024
    expect(window.page).to_have_title(re.compile("boat.* – edgeinfer"))


def test_a_message_sent_before_the_window_is_connected_is_sent_then(window: Window) -> None:
    with window.holding(r"/app/api/events$"):
        window.page.reload()
        window.wait_ready()
        window.send(STORY)
        expect(window.button("Send")).to_be_disabled()
        expect(window.prompt).to_have_value(STORY)
    assert len(window.finished()) > 40
    expect(window.prompt).to_have_value("")


def test_a_message_sent_while_a_conversation_opens_belongs_to_it(window: Window) -> None:
    window.ask()
    with window.holding(r"/conversations/[\w-]+$"):
        window.page.reload()
        window.wait_ready()
        window.send("What did the boat do then?")
        expect(window.prompt).to_have_value("What did the boat do then?")
    expect(window.questions).to_have_count(2)
    assert len(window.finished()) > 40


def test_regenerating_makes_a_version_and_one_can_go_back(window: Window) -> None:
    first = window.ask()
    window.button("Regenerate", window.replies.last).click()
    expect(window.replies.last.locator(".branches")).to_have_text("2/2")
    second = window.finished()
    window.button("Previous version").click()
    expect(window.replies.last.locator(".branches")).to_have_text("1/2")
    assert window.finished() == first
    window.page.reload()
    expect(window.replies.last.locator(".branches")).to_have_text("1/2")
    window.button("Next version").click()
    expect(window.replies.last.locator(".markdown")).to_have_text(second.replace("\n", " "), use_inner_text=True)


def test_editing_a_question_branches_and_the_old_branch_stays(window: Window) -> None:
    window.ask()
    window.ask("What did the boat do then?")
    window.questions.first.hover()
    window.button("Edit", window.questions.first).click()
    editor = window.page.get_by_role("textbox", name="Edit your message")
    expect(editor).to_be_focused()
    editor.fill("Tell me a story about a kite.")
    editor.press("Enter")
    expect(window.questions).to_have_count(1)
    assert len(window.finished()) > 40
    expect(window.questions.first.locator(".branches")).to_have_text("2/2")
    window.button("Previous version").click()
    expect(window.questions).to_have_count(2)
    expect(window.questions.first.locator(".markdown")).to_have_text(STORY)


def test_editing_a_reply_keeps_it_as_another_version_without_a_new_reply(window: Window) -> None:
    window.ask()
    window.button("Edit", window.replies.last).click()
    editor = window.page.get_by_role("textbox", name="Edit the reply")
    editor.fill("It **sank**.")
    window.button("Save").click()
    expect(window.replies.last.locator("strong")).to_have_text("sank")
    expect(window.replies.last.locator(".branches")).to_have_text("2/2")
    assert window.page.locator(".composer .stop").count() == 0


def test_leaving_the_editor_changes_nothing(window: Window) -> None:
    reply = window.ask()
    window.prompt.press("ArrowUp")
    editor = window.page.get_by_role("textbox", name="Edit your message")
    editor.fill("Something else")
    editor.press("Escape")
    expect(window.questions.last.locator(".markdown")).to_have_text(STORY)
    assert window.finished() == reply


def test_continuing_goes_on_with_the_same_reply(window: Window) -> None:
    window.ask()
    window.button("Edit", window.replies.last).click()
    window.page.get_by_role("textbox", name="Edit the reply").fill("Once upon a time there was a little boat. The")
    window.button("Save").click()
    text = window.replies.last.locator(".markdown")
    expect(text).to_have_text("Once upon a time there was a little boat. The")
    window.button("Continue this reply").click()
    expect(text).to_have_text(re.compile(r"^Once upon a time there was a little boat\. The.{10}", re.DOTALL))
    window.finished()
    expect(window.replies.last.locator(".branches")).to_have_text("2/2")


def test_enter_sends_and_shift_enter_begins_a_line(window: Window) -> None:
    window.prompt.fill("One")
    window.prompt.press("Shift+Enter")
    window.prompt.press_sequentially("two")
    expect(window.prompt).to_have_value("One\ntwo")
    window.prompt.press("Enter")
    expect(window.prompt).to_have_value("")
    window.finished()
    assert window.questions.last.locator(".markdown").inner_text() == "One\ntwo"


def test_keys_search_begin_a_chat_and_list_themselves(window: Window) -> None:
    window.ask()
    window.page.keyboard.press("Control+k")
    expect(window.page.get_by_role("searchbox", name="Search conversations")).to_be_focused()
    window.page.keyboard.press("Control+Shift+O")
    expect(window.replies).to_have_count(0)
    expect(window.prompt).to_be_focused()
    window.page.keyboard.press("Control+/")
    sheet = window.page.get_by_role("dialog", name="Keyboard")
    expect(sheet).to_be_visible()
    window.page.keyboard.press("Escape")
    expect(sheet).to_be_hidden()


def test_unsent_text_and_the_chat_survive_a_reload(window: Window) -> None:
    reply = window.ask()
    window.prompt.fill("Not sent yet")
    window.page.reload()
    expect(window.prompt).to_have_value("Not sent yet")
    assert window.finished() == reply
    window.new_chat()
    expect(window.prompt).to_have_value("")


def test_two_windows_show_the_same(window: Window) -> None:
    window.ask()
    other = window_in(window.page.context, window.page.url)
    assert other.finished() == window.finished()
    # A count does not wait for the list to be there, an expectation does.
    before = window.entries.count()
    expect(other.entries).to_have_count(before)
    window.new_chat()
    window.ask("Tell me a story about a tree.")
    expect(other.entries).to_have_count(before + 1)
    assert other.problems == []
