"""Endpoints that generate text: chat completions, completions, responses. Their fields are `edgeinfer.openai`'s."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Send

from edgeinfer import Model
from edgeinfer.apps.server.bodies import compiles, json_body
from edgeinfer.apps.server.errors import ClientGoneError, error_answer
from edgeinfer.apps.server.events import Event, EventStream, StreamedResponse, first_error, while_connected
from edgeinfer.apps.server.host import BusyError, HostReply, ModelHost
from edgeinfer.apps.server.metrics import Metrics
from edgeinfer.apps.server.service import Service
from edgeinfer.errors import UsageError
from edgeinfer.openai import Completion, make_completion
from edgeinfer.openai.errors import RequestError
from edgeinfer.results import Result

__all__ = ["completion_paths"]

# By path after /v1.
_KINDS = {"/chat/completions": "chat.completion", "/completions": "text_completion", "/responses": "response"}
_RESPONSE = "response"

Emit = Callable[[list[dict[str, Any]]], Awaitable[None]]


def completion_paths(service: Service) -> list[tuple[str, Callable[[Request], Awaitable[Response]]]]:
    """Returns paths, without /v1, and the endpoints that answer a POST there."""
    return [(path, partial(_complete, service, kind)) for path, kind in _KINDS.items()]


async def _complete(service: Service, kind: str, request: Request) -> Response:
    completion = await _read(service, kind, request)
    if completion.stream:
        return StreamedResponse(partial(_stream, service, kind, completion))
    await while_connected(request.receive, _answer(service, completion, _drop))
    return JSONResponse(completion.whole())


async def _read(service: Service, kind: str, request: Request) -> Completion:
    """Reads and checks a request and tokenizes its prompt; the rest of the body is not kept."""
    async with json_body(request, service.security, most=service.most_body()) as body:
        model = service.model_of(body)
        # Not on the model's thread: a hostile schema takes seconds, in which no reply would go on.
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

    def event(data: dict[str, Any]) -> Event:
        return Event(data, data["type"] if named else "")

    async def emit(datas: list[dict[str, Any]]) -> None:
        await stream.events(map(event, datas))

    stream = EventStream(send, service.security.comment_seconds, opening=list(map(event, completion.opening())))
    try:
        await while_connected(receive, _answer(service, completion, emit), stream.comment())
        await emit(completion.closing())
    except ClientGoneError:
        raise
    except Exception as error:
        if not stream.started:
            raise
        body = error_answer(error)[1]
        await stream.end(event({"type": "error"} | body if named else body).encoded())
    else:
        await stream.end(b"" if named else b"data: [DONE]\n\n")


def _answer(service: Service, completion: Completion, emit: Emit) -> Coroutine[Any, Any, None]:
    # Fair shares are between requests: one that wants several replies gets no more than one that wants one.
    return _make_replies(service.host, completion, secrets.token_hex(8), emit, service.metrics)


async def _drop(events: list[dict[str, Any]]) -> None:
    """Drops the events of an answer that is sent whole."""


async def _make_replies(host: ModelHost, completion: Completion, owner: str, emit: Emit, metrics: Metrics) -> None:
    """Makes all replies of a request, and calls `emit` with the events of each step.

    Args:
        owner: who the replies are made for; owners share the model's time.

    Raises:
        EdgeInferError: what ended the first reply that failed, or there is no room in the queue; the others are
            cancelled.
    """
    async with contextlib.AsyncExitStack() as stack:
        replies = []
        for index in range(completion.n):
            try:
                reply = host.submit(partial(completion.start, index=index), owner)
            except BusyError as error:
                raise RequestError(error.message, error.hint, status=429, code="queue_full") from error
            replies.append(await stack.enter_async_context(reply))
        try:
            async with asyncio.TaskGroup() as group:
                for index, reply in enumerate(replies):
                    group.create_task(_follow(reply, index, completion, emit, metrics))
        except ExceptionGroup as errors:
            metrics.failed()
            raise first_error(errors) from None


async def _follow(reply: HostReply, index: int, completion: Completion, emit: Emit, metrics: Metrics) -> None:
    async for chunk in reply:
        await emit(completion.chunk(index, chunk))
    result = _result(reply)
    if result is not None:
        metrics.finished(result)
    if result is None or result.finish_reason == "cancelled":
        message = "The reply was cut short: the server is stopping or changing its model."
        raise RequestError(message, "Ask again in a moment.", status=503, code="cancelled")
    await emit(completion.finished(index, result))


def _result(reply: HostReply) -> Result | None:
    """Returns the result of a reply that is over; None if it was cancelled before it started."""
    try:
        return reply.result
    except UsageError:
        return None
