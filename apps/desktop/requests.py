"""What endpoints share: checked bodies, errors as JSON, server-sent events."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Send

from edgeinfer.apps.desktop.checks import LONGEST_SEARCH, check_name, check_values, error_view
from edgeinfer.apps.desktop.services import Services
from edgeinfer.apps.server.bodies import read_json
from edgeinfer.apps.server.errors import ClientGoneError
from edgeinfer.apps.server.events import Event, EventStream, StreamedResponse, while_connected
from edgeinfer.apps.server.security import Security
from edgeinfer.core.errors import BudgetError, EdgeInferError, HubError, ModelError, StorageError, UsageError, UserError
from edgeinfer.openai.errors import Kinds, status_and_code

_log = logging.getLogger("edgeinfer.desktop")

Endpoint = Callable[[Request], Awaitable[Response]]
# Method, path and endpoint of each route.
Table = tuple[tuple[str, str, Endpoint], ...]

# Like the kinds of `edgeinfer.openai.errors`, but finer.
_KINDS: Kinds = (
    (UsageError, 400, "invalid"),
    (BudgetError, 409, "memory_short"),
    (HubError, 409, "hub"),
    (ModelError, 409, "model"),
    (StorageError, 500, "storage"),
    (UserError, 409, "refused"),
    (EdgeInferError, 500, "internal"),
)
# Fields with text of many lines; all others are names.
_TEXTS = ("content", "system")


class Endpoints:
    """Endpoints on the app's services; subclasses list them as method, path and endpoint."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._security = services.security

    def table(self) -> Table:
        raise NotImplementedError

    def routes(self) -> list[BaseRoute]:
        return [Route(path, _answered(endpoint), methods=[method]) for method, path, endpoint in self.table()]


def _answered(endpoint: Endpoint) -> Endpoint:
    """Wrap an endpoint so that errors become answers."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            for name, value in request.path_params.items():
                check_name(value, name)
            return await endpoint(request)
        except EdgeInferError as error:
            status, code = status_and_code(error, _KINDS)
            if status == 500 and not isinstance(error, UserError):
                _log.error("%s", error, exc_info=error)
            return JSONResponse({"error": error_view(error) | {"code": code}}, status_code=status)

    return answer


async def fields(request: Request, security: Security, **kinds: Any) -> dict[str, Any]:
    """Read and check the fields of a request's body; `kinds` gives their types. A request without a body has none."""
    body = await read_json(request, security, optional=True)
    for name, value in body.items():
        if name not in kinds:
            raise UsageError(f"Unknown field {name!r}.", f"Known fields: {', '.join(kinds) or 'none'}.")
        if not isinstance(value, kinds[name]) or (isinstance(value, bool) and kinds[name] is not bool):
            raise UsageError(f"{name} has a wrong type.", f"Known fields: {', '.join(kinds)}.")
        if isinstance(value, str) and name not in _TEXTS:
            check_name(value, name)
        check_values(value, name)
    return body


def search_text(request: Request, name: str = "search") -> str:
    """Return the query parameter with the search text; it may be empty."""
    return check_name(request.query_params.get(name, ""), name, LONGEST_SEARCH)


def optional(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: body[name] for name in names if name in body}


def attachment_ids(body: Mapping[str, Any]) -> list[str]:
    """Read the ids of attached files."""
    values = body.get("attachments", [])
    for value in values:
        if not isinstance(value, str):
            raise UsageError("attachments has a wrong type.", "attachments must be a list of ids.")
        check_name(value, "attachments")
    return list(values)


def whole_number(body: Mapping[str, Any], name: str) -> int | None:
    """Read a positive whole number, or None."""
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UsageError(f"{name} is out of range.", f"{name} must be a positive whole number, or null.")
    return value


def event_stream(events: AsyncGenerator[Event, None], security: Security) -> Response:
    """Stream events until they end or the window is closed."""

    async def write(receive: Receive, send: Send) -> None:
        stream = EventStream(send, security.comment_seconds)

        async def forward() -> None:
            await stream.start()
            async with contextlib.aclosing(events):
                async for event in events:
                    await stream.events([event])

        # Closing a window is not an error.
        with contextlib.suppress(ClientGoneError):
            await while_connected(receive, forward(), stream.comment())
            await stream.end()

    return StreamedResponse(write)
