"""How the window looks and is used: themes, narrow windows, names for screen readers, and what its policy allows."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.apps.desktop.browser.conftest import OpenWindow
from tests.apps.desktop.browser.window import STORY, Window
from tests.apps.desktop.served import Window as Api
from tests.speculation import needs_builtin

pytestmark = [needs_builtin, pytest.mark.browser]

GROUND = "getComputedStyle(document.body).backgroundColor"
REPLY = """A list:

1. one
2. two

```python
import os  # a comment
print("hello", 42)
```

| name | bytes |
|---|---:|
| a | 12 |

<script>alert(1)</script> ![picture](http://127.0.0.1:9/x.png) [bad](javascript:alert(1)) [good](https://example.org)
"""


@pytest.fixture(scope="module")
def conversation(app: Api) -> str:
    """A conversation whose reply has all kinds of Markdown, a long line among them."""
    id = app.new()
    reply = app.ask(id, STORY)
    text = REPLY + "\n" + "x" * 400
    app.call("POST", f"/conversations/{id}/messages/{reply['id']}/edit", {"content": text}, status=202)
    return id


@pytest.fixture
def written(window: Window, conversation: str) -> Window:
    """A window that shows the conversation."""
    window.open(conversation)
    expect(window.replies.last.locator("ol")).to_be_visible()
    return window


def brightness(window: Window) -> int:
    """The brightness of the page's background, 0 to 255."""
    colour: str = window.page.evaluate(GROUND)
    return int(colour.partition("(")[2].split(",")[0])


def test_the_theme_is_the_systems_until_one_is_chosen(app: Api, open_at: OpenWindow) -> None:
    window = open_at(app.address, color_scheme="dark")
    window.wait_ready()
    assert brightness(window) < 60
    window.button("Light theme").click()
    assert brightness(window) > 200
    window.page.reload()
    expect(window.button("Light theme")).to_have_attribute("aria-pressed", "true")
    assert brightness(window) > 200
    window.button("Theme of the system").click()
    assert brightness(window) < 60


def test_markdown_is_shown_and_nothing_in_it_runs_or_is_fetched(written: Window) -> None:
    requests: list[str] = []
    written.page.on("request", lambda request: requests.append(request.url))
    written.page.reload()
    reply = written.replies.last
    expect(reply.locator("ol li")).to_have_count(2)
    assert reply.locator(".code .lang").inner_text() == "python"
    assert reply.locator(".code span").count() > 3
    assert reply.locator("td").last.evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    assert reply.locator("script, img").count() == 0
    addresses = reply.locator("a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert not any(address and address.startswith("javascript") for address in addresses)
    good = reply.get_by_role("link", name="good")
    assert good.get_attribute("rel") == "noopener noreferrer"
    assert all(url.startswith(written.page.url.split("#")[0]) for url in requests)


def test_code_is_copied(written: Window) -> None:
    written.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    written.button("Copy", written.replies.last.locator(".code")).click()
    expect(written.replies.last.locator(".code .copy")).to_have_text("Copied")
    copied: str = written.page.evaluate("navigator.clipboard.readText()")
    assert copied == 'import os  # a comment\nprint("hello", 42)\n'


def test_nothing_overflows_at_any_width(written: Window) -> None:
    for width in (380, 600, 820, 1000, 1600):
        written.page.set_viewport_size({"width": width, "height": 700})
        assert written.page.evaluate("document.documentElement.scrollWidth") <= width
        thread = "(() => { const t = document.getElementById('thread'); return t.scrollWidth - t.clientWidth; })()"
        assert written.page.evaluate(thread) <= 0, width
        expect(written.prompt).to_be_in_viewport(ratio=1)
        expect(written.button("Send")).to_be_in_viewport(ratio=1)


def test_a_narrow_window_has_the_list_in_a_drawer(app: Api, open_at: OpenWindow) -> None:
    window = open_at(app.address, viewport={"width": 380, "height": 700})
    window.wait_ready()
    window.ask("Tell me a story about a drawer.")
    expect(window.entries.first).to_be_hidden()
    window.button("Show or hide the conversations").click()
    expect(window.entries.filter(has_text="drawer")).to_be_visible()
    window.page.keyboard.press("Escape")
    expect(window.entries.first).to_be_hidden()
    window.choose_model("second-tales")
    expect(window.models.locator("#load-button")).to_be_in_viewport(ratio=1)
    window.button("Back to the list").click()
    expect(window.models.get_by_role("option", name="second-tales")).to_be_visible()


def test_everything_that_can_be_pressed_has_a_name(written: Window) -> None:
    written.button("Chat settings").click()
    written.page.locator("#model-button").click()
    nameless = written.page.evaluate(
        """() => [...document.querySelectorAll("button, a[href], input, select, textarea")].filter((element) => {
            const labels = [...(element.labels ?? [])].map((label) => label.textContent).join("");
            const name = element.getAttribute("aria-label") || element.textContent.trim() || labels.trim();
            return !name;
        }).map((element) => element.outerHTML)"""
    )
    assert nameless == []


def test_the_keyboard_reaches_everything_and_shows_where_it_is(written: Window) -> None:
    written.prompt.focus()
    reached = []
    for _ in range(12):
        written.page.keyboard.press("Shift+Tab")
        reached.append(
            written.page.evaluate(
                "(() => { const e = document.activeElement; const s = getComputedStyle(e);"
                " return [e.getAttribute('aria-label') || e.textContent, s.outlineStyle]; })()"
            )
        )
    assert all(style != "none" for name, style in reached if name), json.dumps(reached)
    names = [name for name, _ in reached]
    assert "Regenerate" in names and "Copy" in names
