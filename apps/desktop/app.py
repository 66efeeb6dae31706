"""Puts the app together, serves its page, and shows it in a window, in the browser, or by its address alone."""

from __future__ import annotations

import contextlib
import hmac
import importlib.util
import os
import secrets
import sys
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route, request_response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeinfer.apps.desktop.api_conversations import AttachmentEndpoints, ConversationEndpoints
from edgeinfer.apps.desktop.api_models import CatalogEndpoints, ModelEndpoints
from edgeinfer.apps.desktop.services import Services
from edgeinfer.apps.desktop.settings import DataFolder, data_folder
from edgeinfer.apps.desktop.transfer import MOST_BYTES
from edgeinfer.apps.server.app import make_app
from edgeinfer.apps.server.host import ModelHost
from edgeinfer.apps.server.security import ApiKey, Security
from edgeinfer.apps.server.serving import Server

STATIC = Path(__file__).parent / "static"
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"
_REFUSED = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>edgeinfer</title></head><body>
<h1>This window is not signed in</h1>
<p>Open the address that edgeinfer showed when it was started; it carries the key of this run.
If edgeinfer was started again, its address is a new one.</p>
</body></html>
"""


class Access:
    """The keys of one run. `key` is in the address."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        # Not the key itself: browsers send cookies to other servers of this machine too.
        self._session = secrets.token_urlsafe(24)

    def admits(self, connection: HTTPConnection) -> bool:
        """Whether a request has the cookie or the key."""
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.knows(given.strip()):
            return True
        return _same(connection.cookies.get(_cookie(connection), ""), self._session)

    def knows(self, key: str) -> bool:
        return _same(key, self.key)

    def let_in(self, request: Request, response: Response) -> None:
        """Set the window's cookie."""
        response.set_cookie(_cookie(request), self._session, httponly=True, samesite="strict", path="/")


class AccessRequired:
    """Middleware that refuses requests without access."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._access.admits(HTTPConnection(scope)):
            await self._app(scope, receive, send)
            return
        error = {
            "message": "This window is not signed in.",
            "hint": "Open the address that edgeinfer showed when it was started.",
            "code": "signed_out",
        }
        await JSONResponse({"error": error}, status_code=401)(scope, receive, send)


class _Policed:
    """Middleware that adds security headers to the page's files."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                headers["Cache-Control"] = "no-cache"
            await send(message)

        await self._app(scope, receive, add)


def page_routes(access: Access) -> list[BaseRoute]:
    """Make the routes of the page and its files, which hold no user data."""

    async def page(request: Request) -> Response:
        key = request.query_params.get("key")
        if key is not None and access.knows(key):
            response: Response = RedirectResponse("/", status_code=303)
            access.let_in(request, response)
            return response
        if access.admits(request):
            return FileResponse(STATIC / "index.html")
        return HTMLResponse(_REFUSED, status_code=401)

    routes: list[BaseRoute] = [Route("/", _Policed(request_response(page)), methods=["GET"])]
    for entry in sorted(STATIC.iterdir()):
        if entry.is_dir():
            routes.append(Mount(f"/{entry.name}", _Policed(StaticFiles(directory=entry))))
        elif entry.name != "index.html":
            routes.append(
                Route(f"/{entry.name}", _Policed(request_response(partial(_send_file, entry))), methods=["GET"])
            )
    return routes


async def _send_file(path: Path, _: Request) -> Response:
    return FileResponse(path)


def _cookie(connection: HTTPConnection) -> str:
    """The cookie's name: the ports of a host share cookies, and several apps may run."""
    return f"edgeinfer_{connection.url.port or 80}"


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode("ascii"))


_HOST = "127.0.0.1"
# Replies at once: the user's, and another program's.
_PARALLEL = 2
_SIZE = (1180, 820)


@dataclass(frozen=True)
class DesktopConfig:
    """How the app runs."""

    data: Path | None = None  # folder of history and settings; None is the user's own
    port: int = 0  # 0 picks a free one
    window: bool = True  # show the page; otherwise only report its address
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of this run only
    # LoadOptions fields for every model, but for memory and context.
    options: Mapping[str, Any] = field(default_factory=dict)
    models: Sequence[Path] = ()  # further folders to search for models
    mcp: Path | None = None  # file of MCP servers; None is that of the data folder


def run(config: DesktopConfig, tell: Callable[[str], None]) -> None:
    """Run the app until its window is closed or it is interrupted. Without a window, the first line given is the
    address."""
    folder = data_folder() if config.data is None else DataFolder(config.data.expanduser().absolute())
    access = Access()
    # Other users of the machine can connect too.
    security = Security(host=_HOST, max_body=MOST_BYTES, api_keys=(ApiKey(access.key),))
    services = Services(
        folder,
        security,
        ModelHost(parallel=_PARALLEL),
        settings=config.settings,
        options=config.options,
        models=config.models,
        mcp=config.mcp,
    )
    own_window = config.window and _has_display() and importlib.util.find_spec("webview") is not None
    opened = Future[str]()

    def ready(url: str) -> None:
        url = f"{url}/?key={access.key}"
        if own_window:
            opened.set_result(url)
        elif config.window:
            tell(f"edgeinfer is open at {url}")
            tell("Ctrl-C ends it.")
            # Some browsers block until they are closed.
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        else:
            tell(url)
        for notice in services.notices:
            tell(notice)

    try:
        app = make_desktop(services, access)
        server = Server(app, _HOST, config.port, ready=ready, stopping=services.stop)
    except BaseException:
        services.close()
        raise
    if own_window:
        _run_in_window(server, opened)
    else:
        server.run()


def _run_in_window(server: Server, url: Future[str]) -> None:
    """Serve while a window shows the page."""

    def serve() -> None:
        try:
            server.run()
        finally:
            url.cancel()  # if the server ended before it had one

    with ThreadPoolExecutor(1, thread_name_prefix="edgeinfer-server") as pool:
        serving = pool.submit(serve)
        try:
            # Window systems need the main thread.
            with contextlib.suppress(CancelledError):
                _open_window(url.result())
        finally:
            server.stop()
            serving.result()


class _Dialogs:
    """The system's file dialogs, which the page calls from a window of its own."""

    # Private names are not exposed to the page.
    _window: Any = None

    def choose_file(self) -> str | None:
        import webview

        kinds = ("GGUF models (*.gguf)", "All files (*.*)")
        return _first(self._window.create_file_dialog(webview.FileDialog.OPEN, file_types=kinds))

    def choose_folder(self) -> str | None:
        import webview

        return _first(self._window.create_file_dialog(webview.FileDialog.FOLDER))


def _first(chosen: Sequence[str] | None) -> str | None:
    return chosen[0] if chosen else None


def _open_window(url: str) -> None:
    """Show a page until its window is closed."""
    import webview

    width, height = _SIZE
    dialogs = _Dialogs()
    dialogs._window = webview.create_window(
        "edgeinfer", url, width=width, height=height, min_size=(420, 480), js_api=dialogs
    )
    # Cookies are useless after this run.
    webview.start(private_mode=True)


def _has_display() -> bool:
    on_desktop = sys.platform in ("win32", "darwin")
    return on_desktop or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def make_desktop(services: Services, access: Access) -> Starlette:
    """Make the application; it closes `services` when it ends."""
    parts = (ModelEndpoints, CatalogEndpoints, ConversationEndpoints, AttachmentEndpoints)
    api = [route for part in parts for route in part(services).routes()]
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
