"""A window of the app in a browser, with what users do there; knows nothing of what the tests expect."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Route, expect

from tests.waiting import TIME_LIMIT

STORY = "Tell me a story about a little boat."


@dataclass
class Window:
    """A window.

    Attributes:
        problems: what the page complained about: errors of scripts, and of the browser such as refused inline styles.
    """

    page: Page
    problems: list[str] = field(default_factory=list)

    @property
    def prompt(self) -> Locator:
        """The field messages are written in."""
        return self.page.get_by_role("textbox", name="Message", exact=True)

    @property
    def replies(self) -> Locator:
        """The replies on show."""
        return self.page.locator("article.assistant")

    @property
    def questions(self) -> Locator:
        """The user's messages on show."""
        return self.page.locator("article.user")

    @property
    def entries(self) -> Locator:
        """The conversations listed."""
        return self.page.locator(".entry")

    @property
    def models(self) -> Locator:
        """The dialog of models."""
        return self.page.get_by_role("dialog", name="Models")

    def button(self, name: str | re.Pattern[str], within: Locator | None = None) -> Locator:
        """A button by its exact name, or a pattern of it."""
        return (within or self.page).get_by_role("button", name=name, exact=isinstance(name, str))

    def wait_ready(self) -> None:
        """Waits until a model is loaded."""
        expect(self.page.locator("#model-button .dot")).to_have_class("dot ready")

    @contextlib.contextmanager
    def holding(self, address: str) -> Iterator[None]:
        """Holds the requests to addresses of a pattern back until it ends."""
        held, holds = list[Route](), True
        self.page.route(re.compile(address), lambda route: held.append(route) if holds else route.continue_())
        try:
            yield
        finally:
            holds = False
            for route in held:
                route.continue_()

    def send(self, text: str) -> None:
        """Sends a message without waiting for the reply."""
        self.prompt.fill(text)
        self.prompt.press("Enter")

    def ask(self, text: str = STORY) -> str:
        """Sends a message and gives the finished reply."""
        before = self.replies.count()
        self.send(text)
        expect(self.replies).to_have_count(before + 1)
        return self.finished()

    def finished(self) -> str:
        """The last reply once it is finished."""
        last = self.replies.last
        expect(last).to_have_attribute("aria-busy", "false")
        return last.locator(".markdown").inner_text()

    def open(self, id: str) -> None:
        """Shows a conversation."""
        self.page.goto(f"{self.page.url.partition('#')[0]}#/chat/{id}")
        expect(self.replies.first).to_be_visible()

    def new_chat(self) -> None:
        """Begins a new chat."""
        self.page.keyboard.press("Control+Shift+O")
        expect(self.replies).to_have_count(0)

    def choose_model(self, name: str) -> None:
        """Opens the dialog of models with one chosen."""
        self.page.locator("#model-button").click()
        self.models.get_by_role("option", name=re.compile(re.escape(name))).click()
        self.plan_made()

    def set_budget(self, size: str) -> None:
        """Sets a budget in the dialog of models and waits for its plan."""
        switch = self.models.get_by_role("checkbox", name="Keep to a memory budget")
        if not switch.is_checked():
            self.models.locator("label.switch").click()
        field = self.models.locator("#budget-size")
        field.fill(size)
        field.press("Enter")
        self.plan_made()

    def plan_made(self) -> None:
        """Waits for the plan of what is chosen."""
        expect(self.models.locator(".plan")).not_to_have_class(re.compile("stale"))

    def plan_says(self) -> str:
        """What the dialog says of the plan at first."""
        return self.models.locator("#verdict").inner_text()


def open_window(browser: Browser, address: str, **options: Any) -> Window:
    """A window of its own, with its own cookies."""
    return window_in(browser.new_context(**options), address)


def window_in(context: BrowserContext, address: str) -> Window:
    """Another window of a context."""
    context.set_default_timeout(TIME_LIMIT * 1000)
    window = Window(context.new_page())

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            window.problems.append(message.text)

    window.page.on("console", note)
    window.page.on("pageerror", lambda error: window.problems.append(str(error)))
    window.page.goto(address)
    return window
