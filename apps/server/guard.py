"""ASGI middleware around everything served: admits requests, limits bodies, answers what nobody handled, writes the
access log; knows nothing of what is served."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeinfer.apps.server.errors import ClientGoneError, error_response
from edgeinfer.apps.server.metrics import Metrics
from edgeinfer.apps.server.security import Security
from edgeinfer.openai.errors import RequestError

__all__ = ["Guard", "KeyRequired"]

logger = logging.getLogger("edgeinfer.server")

# nginx's word for a client that hung up before it was answered; only the log sees it.
_CLIENT_GONE = 499


class Guard:
    """Lets through what `security` allows.

    Args:
        app: what is behind it.
        security: who may ask what.
        metrics: counts requests and their outcomes.
    """

    def __init__(self, app: ASGIApp, security: Security, metrics: Metrics) -> None:
        self._app = app
        self._security = security
        self._metrics = metrics
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application behind the guard."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        answer = _Answer(send)
        self._open += 1
        try:
            await self._serve(scope, receive, answer)
        except ClientGoneError:
            answer.status = _CLIENT_GONE
            self._metrics.disconnected()
        finally:
            self._open -= 1
            self._metrics.answered(answer.status)
            ms = (time.perf_counter() - started) * 1e3
            # Neither query nor body, which may hold what was said; the path quoted, as it may hold anything.
            logger.info("%s %r %d %.0f ms", scope["method"], scope["path"], answer.status, ms)

    async def _serve(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        headers = Headers(scope=scope)
        try:
            body = _Body(receive, headers, self._security)
            self._admit(headers)
            origin = headers.get("origin")
            if origin is not None and not self._security.is_same_origin(origin, headers["host"]):
                self._admit_origin(origin, answer)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _preflight(headers)(scope, receive, answer)
            else:
                body.check_announced()
                await self._app(scope, body.receive, answer)
        except ClientGoneError:
            raise
        except Exception as error:  # the last resort: whatever it is, the client gets an answer of the usual shape
            await answer.instead(error_response(error), scope, receive)

    def _admit(self, headers: Headers) -> None:
        if not self._security.knows_host(headers.get("host")):
            message = "The server does not answer to this host name."
            hint = "Address it as localhost or 127.0.0.1, or start it with --allow-host NAME."
            raise RequestError(message, hint, status=403, code="host_not_allowed")
        if self._open > self._security.max_requests:
            raise RequestError("The server is busy.", "Try again in a moment.", status=503, code="server_busy")

    def _admit_origin(self, origin: str, answer: _Answer) -> None:
        if not self._security.allows_origin(origin):
            message = "Pages of this origin may not use the server."
            raise RequestError(message, "Start it with --allow-origin ORIGIN.", status=403, code="origin_not_allowed")
        answer.headers |= {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
            "Vary": "Origin",
        }


class KeyRequired:
    """Lets only those pass who bear the API key, if there is one."""

    def __init__(self, app: ASGIApp, security: Security) -> None:
        self._app = app
        self._security = security

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application behind it."""
        if not self._security.accepts_key(Headers(scope=scope).get("authorization")):
            hint = "Send it as the header Authorization: Bearer KEY."
            raise RequestError("The API key is missing or wrong.", hint, status=401, code="invalid_api_key")
        await self._app(scope, receive, send)


class _Answer:
    """Sends an answer on, with headers that all have, and remembers how far it is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.headers = {"X-Request-Id": f"req_{secrets.token_hex(12)}", "X-Content-Type-Options": "nosniff"}

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in self.headers.items():
                headers[name] = value
        await self._send(message)

    async def instead(self, response: Response, scope: Scope, receive: Receive) -> None:
        """Answers, where that has not begun in another way; the client of one that breaks off sees its end missing."""
        if not self.status:
            await response(scope, receive, self)


class _Body:
    """Receives a request's body and refuses what is too large or takes too long."""

    def __init__(self, receive: Receive, headers: Headers, security: Security) -> None:
        self._receive = receive
        self._security = security
        self._announced = headers.get("content-length", "")
        self._received = 0
        self._complete = False
        self._deadline = asyncio.get_running_loop().time() + security.body_seconds

    def check_announced(self) -> None:
        """Refuses a body by its announced size, before any of it is read."""
        if self._announced.isdecimal() and int(self._announced[:20]) > self._security.max_body:
            raise self._too_large()

    async def receive(self) -> Message:
        """The next message of the request."""
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            text = f"The request's body did not arrive within {self._security.body_seconds:g} s."
            raise RequestError(text, "Send it faster.", status=408, code="request_timeout") from error
        self._received += len(message.get("body", b""))
        if self._received > self._security.max_body:
            raise self._too_large()
        self._complete = not message.get("more_body", False)
        return message

    def _too_large(self) -> RequestError:
        message = f"The request's body is larger than {self._security.max_body} bytes."
        return RequestError(message, "Send less, or serve with --max-body.", status=413, code="body_too_large")


def _preflight(headers: Headers) -> Response:
    """Tells a browser what its page may send; to whom, `Guard` has said."""
    asked: dict[str, Any] = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE, PATCH",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "Authorization, Content-Type"),
        "Access-Control-Max-Age": "600",
    }
    if "access-control-request-private-network" in headers:
        asked["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=asked)
