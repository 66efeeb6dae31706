"""Endpoints that generate text: chat completions, completions, responses; knows nothing of their fields."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from edgeinfer import Model
from edgeinfer.apps.server.answering import answer, while_connected
from edgeinfer.apps.server.body import compiles, json_body
from edgeinfer.apps.server.errors import ClientGoneError
from edgeinfer.apps.server.events import EventStream
from edgeinfer.apps.server.service import Service
from edgeinfer.openai import Completion, make_completion

__all__ = ["completion_paths"]

# By path after /v1.
_KINDS = {"/chat/completions": "chat.completion", "/completions": "text_completion", "/responses": "response"}
_RESPONSE = "response"


def completion_paths(service: Service) -> list[tuple[str, Callable[[Request], Awaitable[Response]]]]:
    """Paths, without /v1, and what answers a POST there."""
    return [(path, partial(_complete, service, kind)) for path, kind in _KINDS.items()]


async def _complete(service: Service, kind: str, request: Request) -> Response:
    completion = await _read(service, kind, request)
    if completion.stream:
        return _Streamed(partial(_stream, service, kind, completion))
    await while_connected(request.receive, _answer(service, completion, _drop))
    return JSONResponse(completion.whole())


async def _read(service: Service, kind: str, request: Request) -> Completion:
    """The request, checked, with its prompt made tokens of; what else it said is not kept."""
    async with json_body(request, service.security, most=service.most_body()) as body:
        model = service.model_of(body)
        # Not on the model's thread: a hostile schema takes seconds, in which nobody's reply would go on.
        async with service.compiling if compiles(body) else contextlib.nullcontext():
            completion = await asyncio.to_thread(_made, kind, body, model)
        del body
        if not model.tokenizes_beside:
            await service.host.ask(completion.prepare)
    return completion


def _made(kind: str, body: dict[str, Any], model: Model) -> Completion:
    completion = make_completion(kind, body, model)
    completion.check(model)
    if model.tokenizes_beside:
        completion.prepare(model)
    return completion


async def _stream(service: Service, kind: str, completion: Completion, receive: Receive, send: Send) -> None:
    named = kind == _RESPONSE
    stream = EventStream(send, service.security, named=named, opening=completion.opening())
    try:
        await while_connected(receive, _answer(service, completion, stream.events), stream.comment())
        await stream.events(completion.closing())
    except ClientGoneError:
        raise
    except Exception as error:
        if not stream.begun:
            raise
        await stream.fail(error)
    else:
        await stream.end(b"" if named else b"data: [DONE]\n\n")


def _answer(service: Service, completion: Completion, emit: Callable[[list[dict[str, Any]]], Awaitable[None]]) -> Any:
    # Fair shares are between requests: one that wants several replies gets no more than one that wants one.
    return answer(service.host, completion, secrets.token_hex(8), emit, service.metrics)


async def _drop(events: list[dict[str, Any]]) -> None:
    """Of an answer that is sent whole, the events are not."""


class _Streamed(Response):
    """An answer that is written while it is made."""

    def __init__(self, write: Callable[[Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes it."""
        await self._write(receive, send)
