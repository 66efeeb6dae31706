"""Puts the app together, runs its server and shows its page: in a window of its own, in the browser, or by its address
alone."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount

from edgeinfer.apps.desktop.api_attachments import attachment_routes
from edgeinfer.apps.desktop.api_catalog import catalog_routes
from edgeinfer.apps.desktop.api_conversations import conversation_routes
from edgeinfer.apps.desktop.api_models import model_routes
from edgeinfer.apps.desktop.folders import DataFolder, data_folder
from edgeinfer.apps.desktop.page import Access, AccessRequired, page_routes
from edgeinfer.apps.desktop.services import Services
from edgeinfer.apps.desktop.transfer import MOST_BYTES
from edgeinfer.apps.server.app import make_app
from edgeinfer.apps.server.host import ModelHost
from edgeinfer.apps.server.keys import ApiKey
from edgeinfer.apps.server.security import Security
from edgeinfer.apps.server.serving import Server

_HOST = "127.0.0.1"
# Replies that take turns: the user's, and another program's.
_PARALLEL = 2
_SIZE = (1180, 820)


@dataclass(frozen=True)
class DesktopConfig:
    """How the app runs.

    Attributes:
        data: folder of history and settings; None is the user's own.
        port: 0 picks a free one.
        window: show the page; else its address is told, and no more.
        settings: settings of this run only.
        options: fields of LoadConfig that hold for every model, but for memory and context.
        models: folders that are searched for models, beside the one in the data folder.
    """

    data: Path | None = None
    port: int = 0
    window: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    models: Sequence[Path] = ()


def run(config: DesktopConfig, tell: Callable[[str], None]) -> None:
    """Runs the app until its window is closed, or it is interrupted.

    Args:
        tell: takes lines for whoever started it; the address is the first where there is no window.
    """
    folder = data_folder() if config.data is None else DataFolder(config.data.expanduser().absolute())
    access = Access()
    # Other users of the machine reach its loopback too.
    security = Security(host=_HOST, max_body=MOST_BYTES, api_keys=(ApiKey(access.key),))
    services = Services.make(
        folder,
        security,
        ModelHost(parallel=_PARALLEL),
        settings=config.settings,
        options=config.options,
        models=config.models,
    )
    show = _way(config)

    def ready(url: str) -> None:
        show.ready(f"{url}/?key={access.key}", tell)
        for notice in services.notices:
            tell(notice)

    try:
        app = make_desktop(services, access)
        server = Server(app, _HOST, config.port, ready=ready, stopping=services.stop)
    except BaseException:
        services.close()
        raise
    show.run(server)


class _Address:
    """Tells where the page is."""

    def ready(self, url: str, tell: Callable[[str], None]) -> None:
        """The server takes connections."""
        tell(url)

    def run(self, server: Server) -> None:
        """Serves to the end."""
        server.run()


class _Browser(_Address):
    """Opens the page in the default browser."""

    def ready(self, url: str, tell: Callable[[str], None]) -> None:
        tell(f"edgeinfer is open at {url}")
        tell("Ctrl-C ends it.")
        # Some browsers keep the call until they are closed.
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


class _OwnWindow(_Address):
    """Opens the page in a window of its own."""

    def __init__(self) -> None:
        self._url: str | None = None
        self._answered = threading.Event()
        self._error: BaseException | None = None

    def ready(self, url: str, tell: Callable[[str], None]) -> None:
        self._url = url
        self._answered.set()

    def run(self, server: Server) -> None:
        # Window systems want the main thread.
        thread = threading.Thread(target=self._serve, args=(server,), name="edgeinfer-server")
        thread.start()
        self._answered.wait()
        try:
            if self._url is not None:
                _open_window(self._url)
        finally:
            server.stop()
            thread.join()
        if self._error is not None:
            raise self._error

    def _serve(self, server: Server) -> None:
        try:
            server.run()
        except BaseException as error:
            self._error = error
        finally:
            self._answered.set()


class _Dialogs:
    """The system's dialogs of files and folders, which the page asks for where it has a window of its own."""

    # Underscored, so that the page does not get it.
    _window: Any = None

    def choose_file(self) -> str | None:
        """The path of a GGUF file that the user chose."""
        import webview

        kinds = ("GGUF models (*.gguf)", "All files (*.*)")
        return _first(self._window.create_file_dialog(webview.FileDialog.OPEN, file_types=kinds))

    def choose_folder(self) -> str | None:
        """The path of a folder that the user chose."""
        import webview

        return _first(self._window.create_file_dialog(webview.FileDialog.FOLDER))


def _first(chosen: Sequence[str] | None) -> str | None:
    return chosen[0] if chosen else None


def _open_window(url: str) -> None:
    """Shows a page until its window is closed."""
    import webview

    width, height = _SIZE
    dialogs = _Dialogs()
    dialogs._window = webview.create_window(
        "edgeinfer", url, width=width, height=height, min_size=(420, 480), js_api=dialogs
    )
    # Cookies of one run are of no use to the next.
    webview.start(private_mode=True)


def _way(config: DesktopConfig) -> _Address:
    if not config.window:
        return _Address()
    return _OwnWindow() if _has_display() and importlib.util.find_spec("webview") is not None else _Browser()


def _has_display() -> bool:
    on_desktop = sys.platform in ("win32", "darwin")
    return on_desktop or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def make_desktop(services: Services, access: Access) -> Starlette:
    """The application; it closes what `services` hold when it ends."""
    parts = (model_routes, catalog_routes, conversation_routes, attachment_routes)
    api = [route for routes in parts for route in routes(services)]
    guarded = Mount("/app/api", routes=api, middleware=[Middleware(AccessRequired, access=access)])
    app = make_app(services.host, services.security, extra_routes=[guarded, *page_routes(access)])
    serve = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await services.start()
        try:
            async with serve(app):
                try:
                    yield
                finally:
                    await services.stop()
        finally:
            services.close()

    app.router.lifespan_context = lifespan
    return app
