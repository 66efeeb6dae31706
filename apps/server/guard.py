"""ASGI middleware: admits requests, limits bodies, answers unhandled errors, and writes the access log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeinfer.apps.server.bodies import BODY, LARGE
from edgeinfer.apps.server.errors import ClientGoneError, error_response, let_go
from edgeinfer.apps.server.metrics import Metrics
from edgeinfer.apps.server.security import KeyUse, Security
from edgeinfer.openai.errors import RequestError

logger = logging.getLogger("edgeinfer.server")

# nginx's status for a client that hung up; only the log shows it.
_CLIENT_GONE = 499


class Guard:
    """Let through what `security` allows, and count requests in `metrics`."""

    def __init__(self, app: ASGIApp, security: Security, metrics: Metrics) -> None:
        self._app = app
        self.security = security
        self._metrics = metrics
        self.bytes_in_hand = 0  # of bodies being received or parsed
        self.parsing = asyncio.Lock()  # held while a large body is parsed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        answer = _Answer(send)
        body = _Body(receive, scope, self)
        try:
            await self._serve(scope, body, answer)
        except ClientGoneError as error:
            let_go(error)
            answer.status = _CLIENT_GONE
            self._metrics.disconnected()
        finally:
            body.end()
            scope.pop(BODY, None)
            self._metrics.answered(answer.status)
            ms = (time.perf_counter() - started) * 1e3
            # Neither query nor body, which may quote a prompt; the path is quoted, as it may contain anything.
            logger.info("%s %r %d %.0f ms", scope["method"], scope["path"], answer.status, ms)

    async def _serve(self, scope: Scope, body: _Body, answer: _Answer) -> None:
        headers = Headers(scope=scope)
        try:
            if not self.security.knows_host(headers.get("host")):
                message = "The server does not answer to this host name."
                hint = "Address it as localhost or 127.0.0.1, or start it with --allow-host NAME."
                raise RequestError(message, hint, status=403, code="host_not_allowed")
            origin = headers.get("origin")
            if origin is not None and not self.security.is_same_origin(origin, headers["host"]):
                self._admit_origin(origin, answer)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _preflight(headers)(scope, body.receive, answer)
            else:
                body.check_announced()
                await self._app(scope, body.receive, answer)
        except ClientGoneError:
            raise
        except Exception as error:  # the last resort: the client gets an answer of the usual shape
            await answer.instead(error_response(error, scope["path"]), scope, body.receive)

    def _admit_origin(self, origin: str, answer: _Answer) -> None:
        if not self.security.allows_origin(origin):
            message = "Pages of this origin may not use the server."
            raise RequestError(message, "Start it with --allow-origin ORIGIN.", status=403, code="origin_not_allowed")
        answer.headers |= {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "X-Request-Id, Retry-After, Warning",
            "Vary": "Origin",
        }


# Key of a scope: the use of the request's API key.
KEY_USE = "edgeinfer.key_use"


class KeyRequired:
    """Require an API key within its limits."""

    def __init__(self, app: ASGIApp, uses: Sequence[KeyUse]) -> None:
        self._app = app
        self._uses = uses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        # Anthropic's clients send the bare key in this header.
        own = headers.get("x-api-key")
        given = f"Bearer {own}" if own is not None else headers.get("authorization")
        # Every key is compared, so that timing does not tell which one matches.
        found = [use for use in self._uses if use.key.is_given(given)]
        if not found:
            hint = "Send it as the header Authorization: Bearer KEY."
            raise RequestError("The API key is missing or wrong.", hint, status=401, code="invalid_api_key")
        if scope["method"] == "POST":
            found[0].admit()
        scope[KEY_USE] = found[0]
        await self._app(scope, receive, send)


class _Answer:
    """Send an answer with the headers that all answers have, and remember its status."""

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
        """Send this answer unless another has started; that one breaks off."""
        if not self.status:
            await response(scope, receive, self)


class _Body:
    """Receive a request's body, or refuse it: one too large or too slow, or for which there is no room. Without the
    required key, it is not even awaited."""

    def __init__(self, receive: Receive, scope: Scope, guard: Guard) -> None:
        self._receive = receive
        self._guard = guard
        self._security = guard.security
        self._announced = Headers(scope=scope).get("content-length", "")
        self._whole = False
        self._deadline: float | None = None  # for the next part, by the event loop's clock
        self._size = 0
        self._kept = 0  # bytes that count among those in hand
        scope[BODY] = self.read

    def check_announced(self) -> None:
        """Refuse a body by its announced size before reading any of it."""
        if self._announced.isdecimal() and int(self._announced[:20]) > self._security.max_body:
            raise self._too_large()

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._security.body_seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            text = "The request's body did not arrive in time."
            raise RequestError(text, "Send it faster.", status=408, code="request_timeout") from error
        self._whole = not message.get("more_body", False)
        self._add(len(message.get("body", b"")))
        return message

    def _add(self, nbytes: int) -> None:
        """Count a part; each byte extends the deadline."""
        assert self._deadline is not None, "set before anything is received"
        self._deadline += nbytes / self._security.body_rate
        self._size += nbytes
        self._kept += nbytes
        self._guard.bytes_in_hand += nbytes
        if self._size > self._security.max_body:
            raise self._too_large()
        # Small bodies find room whatever large ones take.
        room = max(self._security.max_bodies, self._security.max_body)
        if self._size > LARGE and self._guard.bytes_in_hand > room:
            message = "The server is receiving as much as it can."
            raise RequestError(message, "Try again in a moment.", status=503, code="server_busy")

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        """Hold the parser's turn, which large bodies take one at a time, while the body is used, then free it."""
        async with self._guard.parsing if self._size > LARGE else contextlib.nullcontext():
            try:
                yield
            finally:
                self.end()

    def end(self) -> None:
        """Free its bytes; may be called repeatedly."""
        self._guard.bytes_in_hand -= self._kept
        self._kept = 0

    def _too_large(self) -> RequestError:
        message = f"The request's body is larger than {self._security.max_body} bytes."
        return RequestError(message, "Send less, or serve with --max-body.", status=413, code="body_too_large")


def _preflight(headers: Headers) -> Response:
    """Tell a browser what its page may send."""
    asked: dict[str, Any] = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE, PATCH",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "Authorization, Content-Type"),
        "Access-Control-Max-Age": "600",
    }
    if "access-control-request-private-network" in headers:
        asked["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=asked)
