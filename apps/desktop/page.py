"""The page and who may see it: a key in the address, then a cookie."""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route, request_response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    """The keys of one run.

    Attributes:
        key: that the address carries.
    """

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        # Not the key itself: a browser shows cookies to other servers of this machine.
        self._session = secrets.token_urlsafe(24)

    def admits(self, connection: HTTPConnection) -> bool:
        """Whether a request comes from a window that was let in, or bears the key."""
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.knows(given.strip()):
            return True
        return _same(connection.cookies.get(_cookie(connection), ""), self._session)

    def knows(self, key: str) -> bool:
        """Whether it is the key."""
        return _same(key, self.key)

    def let_in(self, request: Request, response: Response) -> None:
        """Gives a window its cookie."""
        response.set_cookie(_cookie(request), self._session, httponly=True, samesite="strict", path="/")


class AccessRequired:
    """Lets only those requests pass that are admitted."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application behind it."""
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
    """Adds the security headers of the page's files."""

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
    """Returns the routes of the page and its files, which hold nothing of the user's."""

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
            routes.append(Route(f"/{entry.name}", _Policed(_File(entry)), methods=["GET"]))
    return routes


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await FileResponse(self._path)(scope, receive, send)


def _cookie(connection: HTTPConnection) -> str:
    """Returns the cookie's name: a host's ports share cookies, and several apps may run."""
    return f"edgeinfer_{connection.url.port or 80}"


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode("ascii"))
