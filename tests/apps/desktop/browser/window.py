"""A window of the app in a browser, and what users do there."""

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
    """A window."""

    page: Page
    # Console errors and warnings of the page, such as refused inline styles.
    problems: list[str] = field(default_factory=list)

    @property
    def prompt(self) -> Locator:
        return self.page.get_by_role("textbox", name="Message", exact=True)

    @property
    def replies(self) -> Locator:
        return self.page.locator("article.assistant")

    @property
    def questions(self) -> Locator:
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
        """A button by its exact name, or a pattern."""
        return (within or self.page).get_by_role("button", name=name, exact=isinstance(name, str))

    def wait_ready(self) -> None:
        """Wait until a model is loaded."""
        expect(self.page.locator("#model-button .dot")).to_have_class("dot ready")

    @contextlib.contextmanager
    def holding(self, address: str) -> Iterator[None]:
        """Hold back requests to matching addresses during the block."""
        held, holds = list[Route](), True
        self.page.route(re.compile(address), lambda route: held.append(route) if holds else route.continue_())
        try:
            yield
        finally:
            holds = False
            for route in held:
                route.continue_()

    def send(self, text: str) -> None:
        """Send a message without waiting for the reply."""
        self.prompt.fill(text)
        self.prompt.press("Enter")

    def ask(self, text: str = STORY) -> str:
        """Send a message and return the finished reply."""
        before = self.replies.count()
        self.send(text)
        expect(self.replies).to_have_count(before + 1)
        return self.finished()

    def finished(self) -> str:
        """Return the last reply once it is finished."""
        last = self.replies.last
        expect(last).to_have_attribute("aria-busy", "false")
        return last.locator(".markdown").inner_text()

    def open(self, id: str) -> None:
        """Show a conversation."""
        self.page.goto(f"{self.page.url.partition('#')[0]}#/chat/{id}")
        expect(self.replies.first).to_be_visible()

    def new_chat(self) -> None:
        self.page.keyboard.press("Control+Shift+O")
        expect(self.replies).to_have_count(0)

    def choose_model(self, name: str) -> None:
        """Open the dialog of models and choose one."""
        self.page.locator("#model-button").click()
        self.models.get_by_role("option", name=re.compile(re.escape(name))).click()
        self.plan_made()

    def set_budget(self, size: str) -> None:
        """Set a budget in the dialog of models and wait for its plan."""
        switch = self.models.get_by_role("checkbox", name="Keep to a memory budget")
        if not switch.is_checked():
            self.models.locator("label.switch").click()
        field = self.models.locator("#budget-size")
        field.fill(size)
        field.press("Enter")
        self.plan_made()

    def plan_made(self) -> None:
        """Wait for the plan of the chosen model."""
        expect(self.models.locator(".plan")).not_to_have_class(re.compile("stale"))

    def plan_says(self) -> str:
        """The verdict of the plan."""
        return self.models.locator("#verdict").inner_text()


def open_window(browser: Browser, address: str, **options: Any) -> Window:
    """Open a window with cookies of its own."""
    return window_in(browser.new_context(**options), address)


def window_in(context: BrowserContext, address: str) -> Window:
    """Open another window of a context."""
    context.set_default_timeout(TIME_LIMIT * 1000)
    window = Window(context.new_page())

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            window.problems.append(message.text)

    window.page.on("console", note)
    window.page.on("pageerror", lambda error: window.problems.append(str(error)))
    window.page.goto(address)
    return window
