"""What the window does when a reply is stopped, the context fills, or the app ends and comes back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.apps.desktop.browser.conftest import OpenWindow
from tests.apps.desktop.browser.window import Window
from tests.apps.desktop.held_app import held
from tests.apps.desktop.served import Gate, gated, served
from tests.apps.desktop.served import Window as Api
from tests.speculation import needs_builtin

pytestmark = [needs_builtin, pytest.mark.browser]

# Text without an end in sight: with some seeds a reply ends by itself.
ENDLESS = {"options": {"temperature": 2.0, "top_p": 1.0, "seed": 2}}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An app whose replies go on as long as a test lets them."""
    with served(tmp_path_factory.mktemp("data"), settings=ENDLESS) as started:
        yield started


def replying(window: Window) -> None:
    """Wait until some of a reply is there and more to come."""
    expect(window.button("Stop the reply")).to_be_visible()
    expect(window.replies.last.locator(".markdown p").first).not_to_be_empty()


def wait_longer(window: Window, than: int) -> None:
    """Wait until more than so many characters of the last reply are shown."""
    grown = "n => [...document.querySelectorAll('article.assistant')].at(-1).innerText.length > n"
    window.page.wait_for_function(grown, arg=than)


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stopping_keeps_what_there_is(window: Window, gate: Gate, how: str) -> None:
    gate.let(30)
    window.send("Tell me a story.")
    replying(window)
    if how == "button":
        window.button("Stop the reply").click()
    else:
        window.page.keyboard.press("Escape")
    expect(window.replies.last).to_contain_text("Stopped.")
    text = window.finished()
    assert text
    expect(window.button("Send")).to_be_visible()
    window.page.reload()
    assert window.finished() == text
    window.button("Continue", window.replies.last.locator(".mishap")).click()
    replying(window)
    gate.let(30)
    wait_longer(window, len(text) + 20)
    window.page.keyboard.press("Escape")
    assert window.finished().startswith(text[:20])
    expect(window.replies).to_have_count(1)


def test_a_reply_goes_on_while_one_looks_elsewhere(app: Api, window: Window, gate: Gate) -> None:
    gate.let(10)
    window.send("Tell me a story.")
    replying(window)
    address = window.page.url
    id = address.rpartition("/")[2]
    window.new_chat()
    expect(window.prompt).to_be_focused()
    gate.let(150)
    assert app.grown(id, than=100)
    window.page.goto(address)
    replying(window)
    wait_longer(window, 100)
    window.page.reload()
    replying(window)
    wait_longer(window, 100)
    window.button("Stop the reply").click()
    assert window.finished()


def test_reading_back_is_not_disturbed_by_a_growing_reply(app: Api, open_at: OpenWindow) -> None:
    id = app.new()
    app.call("PATCH", f"/conversations/{id}", {"options": {"max_tokens": 250}})
    app.ask(id, "Tell me a story.")
    app.call("PATCH", f"/conversations/{id}", {"options": {"max_tokens": None}})
    window = open_at(app.address, viewport={"width": 900, "height": 420})
    window.wait_ready()
    window.open(id)
    thread = window.page.locator("#thread")
    with gated() as gate:
        # Too little to move anything: the reader goes back while the page is at rest.
        gate.let(1)
        window.send("And then?")
        expect(window.replies).to_have_count(2)
        replying(window)
        assert thread.evaluate("t => t.scrollTop") > 60
        thread.hover()
        window.page.mouse.wheel(0, -5000)
        newest = window.button("Go to the newest message")
        expect(newest).to_be_visible()
        window.page.wait_for_function("() => document.getElementById('thread').scrollTop === 0")
        gate.let(100)
        wait_longer(window, 200)
        assert thread.evaluate("t => t.scrollTop") == 0
        newest.click()
        expect(newest).to_be_hidden()
        left = (
            "() => { const t = document.getElementById('thread'); return t.scrollHeight - t.scrollTop - t.clientHeight"
        )
        window.page.wait_for_function(f"{left} < 80; }}")
        window.page.keyboard.press("Escape")
        window.finished()


def test_a_full_context_is_told_with_a_way_out(data: Path, open_at: OpenWindow) -> None:
    with served(data, settings={"context": 256}) as app:
        window = open_at(app.address)
        window.wait_ready()
        notice = window.page.get_by_role("region", name="The context is full")
        asked = 0
        for _ in range(8):
            window.ask("Tell me a long story about a boat, a kite, a fox and an owl.")
            asked += 1
            if notice.is_visible() and asked > 1:
                break
            if notice.is_visible():  # a first reply so long that there is nothing before it to leave out
                window.button("New chat").first.click()
                asked = 0
        expect(notice).to_be_visible()
        window.button("Leave out the oldest", notice).click()
        expect(window.replies.last.get_by_text(re.compile(r"without the first \d+ messages"))).to_be_visible()
        window.finished()
        window.button("New chat").first.click()
        expect(notice).to_be_hidden()
        assert len(window.ask()) > 40
        window.page.context.close()


def test_the_oldest_are_offered_to_be_left_out_where_that_helps(data: Path, open_at: OpenWindow) -> None:
    """Not where the settings do so already, nor where files are read apart; nothing follows a chat that was left."""
    with served(data, settings={"context": 256}) as app:
        window = open_at(app.address)
        window.wait_ready()
        notice = window.page.get_by_role("region", name="The message is too long")
        offer = window.button("Leave out the oldest", notice)
        file = app.http.post("/app/api/attachments?name=a.txt", content=b"Tom has a boat.").json()["id"]
        kept = app.call("POST", f"/attachments/{file}/keep", {"conversation": None}, status=201)["id"]
        plain, apart = app.new(), app.new()
        begun = {id: app.ask(id, "Hi")["id"] for id in (plain, apart)}
        app.ask(plain, "word " * 2000, begun[plain])
        asked = {"parent": begun[apart], "content": "word " * 2000, "attachments": [kept]}
        app.call("POST", f"/conversations/{apart}/messages", asked, status=202)
        assert app.end(apart)["error"]["code"] == "context_full"
        window.page.reload()
        window.open(apart)
        expect(notice).to_be_visible()
        expect(offer).to_have_count(0)
        window.open(plain)
        expect(offer).to_be_visible()
        asks = list[str]()
        window.page.on("request", lambda request: asks.append(request.url))
        with window.page.expect_response(lambda answer: answer.request.method == "PATCH"), window.holding(f"{plain}$"):
            offer.click()
            window.new_chat()
        window.ask()
        assert not any(url.endswith("/regenerate") for url in asks)
        app.call("PATCH", f"/conversations/{plain}", {"options": {"when_full": None}})
        app.call("PATCH", "/settings", {"options": {"when_full": "leave_out_oldest"}})
        window.page.reload()
        window.wait_ready()
        window.open(plain)
        expect(notice).to_be_visible()
        expect(offer).to_have_count(0)


def test_a_reply_that_a_crash_cut_short_is_shown_and_goes_on(data: Path, open_at: OpenWindow) -> None:
    with held(data) as process:
        process.let(20)
        window = open_at(process.address)
        window.wait_ready()
        window.send("Tell me a story about a crab.")
        replying(window)
        process.kill()
        expect(window.page.get_by_text("The app's server does not answer.")).to_be_visible()
        window.page.context.close()
        window.problems.clear()
    with served(data) as app:
        window = open_at(app.address)
        window.wait_ready()
        window.entries.filter(has_text="crab").click()
        expect(window.replies.last).to_contain_text("interrupted")
        window.button("Continue", window.replies.last.locator(".mishap")).click()
        expect(window.replies.last).not_to_contain_text("interrupted")
        assert window.finished()
        window.page.context.close()


def test_a_window_says_that_it_is_signed_out_by_a_restart_on_the_same_port(data: Path, open_at: OpenWindow) -> None:
    with served(data) as app:
        window = open_at(app.address)
        window.wait_ready()
        window.ask("Tell me a story about a crow.")
    expect(window.page.get_by_text("The app's server does not answer.")).to_be_visible()
    window.prompt.fill("Not lost")
    expect(window.button("Send")).to_be_disabled()
    with served(data, port=app.port) as again:
        expect(window.page.get_by_text("This window is no longer signed in.")).to_be_visible()
        window.page.goto(again.address)
        window.wait_ready()
        expect(window.entries.filter(has_text="crow")).to_be_visible()
        window.page.context.close()
    window.problems.clear()


def test_text_that_grows_moves_nothing_else(window: Window, gate: Gate) -> None:
    window.page.evaluate(
        """() => {
            window.shifts = [];
            new PerformanceObserver((list) => window.shifts.push(...list.getEntries().map((entry) => entry.value)))
                .observe({ type: "layout-shift" });
        }"""
    )
    composer = window.page.locator(".composer")
    before = composer.bounding_box()
    gate.let(300)
    window.send("Tell me a story.")
    replying(window)
    wait_longer(window, 600)
    window.page.keyboard.press("Escape")
    window.finished()
    assert composer.bounding_box() == before
    # The first message takes the place of the welcome, and is the only thing that does.
    shifts: list[float] = window.page.evaluate("window.shifts")
    assert sum(shifts) < 0.1, shifts
