"""A browser and an app per module, and windows whose pages must not complain.

The app runs in a thread of this process, so that tests can hold its replies; tests of its memory use a process.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

pytest.importorskip("starlette", reason="the chat app needs the extra `desktop`")
pytest.importorskip("playwright.sync_api", reason="playwright drives the browser and is not installed")

from tests.apps.desktop.browser.app_process import make_models
from tests.apps.desktop.browser.window import Window, open_window
from tests.apps.desktop.served import Gate, gated, served
from tests.apps.desktop.served import Window as Api
from tests.waiting import TIME_LIMIT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")

OpenWindow = Callable[..., Window]


class App(Protocol):
    """A running app. `address` has the key that signs a window in."""

    @property
    def address(self) -> str:
        """With the key that signs a window in."""


# While its driver runs, the thread has a running event loop, in which tests of other modules could not begin theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a display."""
    from playwright.sync_api import expect, sync_playwright

    # A plan takes a second of a processor that others may be using.
    expect.set_options(timeout=TIME_LIMIT * 1000)
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(_BROWSERS)} is installed")
    with sync_playwright() as driver:
        # Chromium's own sandbox needs what containers do not give.
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The app with the built-in model, a copy of it and a broken copy."""
    models = make_models(tmp_path_factory.mktemp("models"))
    with served(tmp_path_factory.mktemp("data"), models=[models]) as started:
        yield started


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Hold the replies of apps in this process."""
    with gated() as made:
        yield made


@pytest.fixture
def open_at(browser: Browser) -> Iterator[OpenWindow]:
    """Open windows at an address; none of them may have complained at the end."""
    opened: list[Window] = []

    def open_one(address: str, **options: Any) -> Window:
        opened.append(open_window(browser, address, **options))
        return opened[-1]

    yield open_one
    problems = [problem for window in opened for problem in window.problems]
    for window in opened:
        window.page.context.close()
    assert problems == []


@pytest.fixture
def window(app: App, open_at: OpenWindow) -> Window:
    """A window of the module's app with a model loaded."""
    opened = open_at(app.address, accept_downloads=True)
    opened.wait_ready()
    return opened


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder for an app of the test's own."""
    return tmp_path / "data"
