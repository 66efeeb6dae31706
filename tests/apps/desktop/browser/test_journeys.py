"""Ways through the app as a person goes them: files with a question, models of chats, replies that ran out of room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import FilePayload, expect

from tests.apps.desktop.browser.app_process import make_models
from tests.apps.desktop.browser.conftest import OpenWindow
from tests.apps.desktop.browser.window import Window
from tests.apps.desktop.documents import pdf
from tests.apps.desktop.served import served
from tests.speculation import needs_builtin

pytestmark = [needs_builtin, pytest.mark.browser]

NOTES: FilePayload = {
    "name": "notes.md",
    "mimeType": "text/markdown",
    "buffer": b"# The boat\n\nIts captain is called Tom.",
}
HARBOUR: FilePayload = {
    "name": "harbour.pdf",
    "mimeType": "application/pdf",
    "buffer": pdf(["Open from nine.", "To five."]),
}
STORY: FilePayload = {
    "name": "story.txt",
    "mimeType": "text/plain",
    "buffer": b"Tom had a red ball. It fell into the river and swam away.\n" * 24,
}
# Dropping and pasting differ only in the event that brings the files.
GIVE = """([selector, kind, name, text]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name, { type: "text/plain" }));
    const target = document.querySelector(selector);
    const options = { bubbles: true, cancelable: true };
    target.dispatchEvent(kind === "paste"
        ? new ClipboardEvent("paste", { ...options, clipboardData: data })
        : new DragEvent(kind, { ...options, dataTransfer: data }));
}"""


def attach(window: Window, *files: FilePayload) -> None:
    """Choose files as the system's dialog does, and wait until they are read."""
    before = window.page.locator(".composer .chip").count()
    window.page.get_by_label("Files to attach").set_input_files(list(files))
    expect(window.page.locator(".composer .chip:not(.busy)")).to_have_count(before + len(files))


def test_files_are_attached_counted_asked_about_and_kept(window: Window) -> None:
    chips, note = window.page.locator(".composer .chip"), window.page.locator(".chips-note")
    attach(window, NOTES, HARBOUR)
    for kind in ("dragenter", "drop", "paste"):
        selector = "#prompt" if kind == "paste" else "#messages"
        window.page.evaluate(GIVE, [selector, kind, f"{kind}.txt", f"text of the {kind}"])
    expect(window.page.locator(".composer .chip:not(.busy)")).to_have_count(4)
    expect(note).to_have_text(re.compile(r"This message takes [\d]{2,3} of 1,024 tokens\."))
    expect(chips.first).to_contain_text(re.compile(r"notes\.md\s*38 B · \d+ tokens"))
    expect(chips.nth(1)).to_contain_text("2 pages")
    for name in ("drop.txt", "paste.txt"):
        window.button(f"Remove {name}").click()
    window.page.reload()
    window.wait_ready()
    expect(chips).to_have_count(2)
    window.ask("Who is the captain?")
    expect(chips).to_have_count(0)
    sent = window.questions.last.locator(".chip")
    expect(sent).to_have_count(2)
    sent.first.get_by_role("button").click()
    sheet = window.page.get_by_role("dialog", name="notes.md")
    expect(sheet.locator("pre")).to_have_text("# The boat\n\nIts captain is called Tom.")
    window.page.keyboard.press("Escape")
    window.questions.last.hover()
    window.button("Edit", window.questions.last).click()
    window.page.get_by_role("textbox", name="Edit your message").fill("And who is Tom?")
    window.button("Send", window.questions.last).click()
    expect(window.questions.last.locator(".branches")).to_have_text("2/2")
    expect(window.questions.last.locator(".chip")).to_have_count(2)
    assert window.finished()
    # One that is long enough is kept for other conversations.
    window.new_chat()
    expect(window.button("Kept files")).to_be_hidden()
    attach(window, STORY)
    window.button("Keep story.txt for later conversations").click()
    expect(chips.first).to_contain_text("kept · ")
    window.button("Remove story.txt").click()
    window.button("Kept files").click()
    shelf = window.page.get_by_role("dialog", name="Kept files")
    expect(shelf).to_contain_text(re.compile(r"story\.txt\s*1\.4 KB · \d{3} tokens · [\d.]+ [KM]B on the disk"))
    window.button("Attach story.txt", shelf).click()
    window.ask("Who has a ball?")
    expect(window.questions.last.locator(".chip")).to_contain_text("kept")
    window.button("Kept files").click()
    window.button("Remove story.txt", shelf).click()
    window.button("Remove?", shelf).click()
    expect(shelf).to_be_hidden()
    expect(window.button("Kept files")).to_be_hidden()


def test_files_that_do_not_fit_or_are_no_text_say_so(window: Window) -> None:
    picture: FilePayload = {"name": "cat.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x1a\n\x00\x00"}
    window.page.get_by_label("Files to attach").set_input_files([picture])
    expect(window.page.locator(".toast")).to_contain_text("cat.png is neither text nor a PDF.")
    # The browser notes every refusal of a server.
    assert [problem for problem in window.problems if "400" not in problem] == []
    window.problems.clear()
    attach(window, {"name": "long.txt", "mimeType": "text/plain", "buffer": b"one word after the other " * 400})
    window.prompt.fill("Sum it up")
    said = r"too long: it takes [2-9],\d{3} tokens, and the context holds 1,024\. tales holds no more\. Remove a file\."
    expect(window.page.locator(".chips-note")).to_contain_text(re.compile(said))
    expect(window.button("Send")).to_be_disabled()
    window.button("Choose another model").click()
    expect(window.models).to_be_visible()
    window.page.keyboard.press("Escape")
    window.button("Remove long.txt").click()
    expect(window.button("Send")).to_be_enabled()


def test_a_chat_goes_back_to_its_model_only_when_asked(data: Path, open_at: OpenWindow) -> None:
    models = make_models(data.parent / "models")
    with served(data, models=[models], settings={"options": {"max_tokens": 12}}) as app:
        window = open_at(app.address)
        window.wait_ready()
        window.ask("Tell me a story about an owl.")
        expect(window.replies.last).to_contain_text("The reply stopped at its length limit.")
        before = window.finished()
        window.button("Continue", window.replies.last.locator(".mishap")).click()
        expect(window.replies.last.locator(".markdown")).not_to_have_text(before)
        window.finished()
        window.new_chat()
        window.ask("Tell me a story about a fox.")
        window.choose_model("second-tales")
        window.models.get_by_label("Use it for new chats too").uncheck()
        window.models.locator("#load-button").click()
        expect(window.models).to_be_hidden()
        window.wait_ready()
        window.ask("And then?")
        window.button("Chat settings").click()
        expect(window.page.locator(".panel-model")).to_contain_text("second-tales")
        window.entries.filter(has_text="owl").get_by_role("link").click()
        notice = window.page.get_by_role("region", name="This chat used tales")
        expect(notice).to_contain_text("second-tales is loaded now.")
        window.button("Load it", notice).click()
        expect(notice).to_be_hidden()
        window.wait_ready()
        window.entries.filter(has_text="fox").get_by_role("link").click()
        other = window.page.get_by_role("region", name="This chat used second-tales")
        window.button("Stay with tales", other).click()
        expect(other).to_be_hidden()
        window.page.reload()
        window.wait_ready()
        expect(window.replies.last).to_be_visible()
        expect(other).to_be_hidden()
        window.page.context.close()


def test_a_full_context_is_continued_in_a_larger_one(data: Path, open_at: OpenWindow) -> None:
    with served(data, settings={"context": 64, "options": {"temperature": 2.0, "top_p": 1.0, "seed": 1}}) as app:
        window = open_at(app.address)
        window.wait_ready()
        before = window.ask("Tell me a story about a boat, a kite, a fox and an owl, and how they met.")
        notice = window.page.get_by_role("region", name="The context is full")
        expect(notice).to_contain_text("used all 64 tokens")
        expect(notice).to_contain_text("room for 128")
        window.button("Continue", notice).click()
        expect(window.page.locator("#model-button")).to_contain_text("128 context")
        expect(window.replies.last).to_have_attribute("aria-busy", "false")
        assert len(window.finished()) > len(before)
        assert app.call("GET", "/state")["settings"]["context"] == 64
        window.page.context.close()


def test_a_message_that_is_too_long_is_counted_before_it_is_sent(data: Path, open_at: OpenWindow) -> None:
    with served(data, settings={"context": 256}) as app:
        window = open_at(app.address)
        window.wait_ready()
        window.prompt.fill("word " * 300)
        # Before it has been counted.
        window.prompt.press("Enter")
        note = window.page.locator(".composer .chips-note")
        expect(note).to_contain_text(re.compile(r"too long: it takes 3\d\d tokens, and the context holds 256\."))
        expect(window.page.locator(".meter")).to_have_class("meter full")
        expect(window.button("Send")).to_be_disabled()
        expect(window.questions).to_have_count(0)
        window.button("Load with 1,024 tokens").click()
        expect(window.page.locator(".meter")).to_contain_text(re.compile(r"3\d\d / 1,024"))
        expect(note).to_be_hidden()
        window.prompt.press("Enter")
        expect(window.questions).to_have_count(1)
        window.finished()
        assert app.call("GET", "/state")["settings"]["context"] == 256
        window.page.context.close()
