"""Answers requests for text, whole or streamed, in every protocol; each protocol's own file reads its requests."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Send

from edgeinfer import Model
from edgeinfer.apps.server.bodies import compiles, ignored_header, json_body
from edgeinfer.apps.server.errors import ClientGoneError, error_answer, shape_of
from edgeinfer.apps.server.events import (
    SERVER_SENT,
    Event,
    EventStream,
    Framing,
    StreamedResponse,
    first_error,
    while_connected,
)
from edgeinfer.apps.server.guard import KEY_USE
from edgeinfer.apps.server.host import HostReply
from edgeinfer.apps.server.service import Service
from edgeinfer.core.results import Result
from edgeinfer.openai import make_completion
from edgeinfer.openai.contract import Completion
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.prompt import PromptReplies

Emit = Callable[[list[dict[str, Any]]], Awaitable[None]]
# Streams whose events are named by their type and have no end mark.
NAMED_EVENTS = Framing(SERVER_SENT.media_type, lambda data: Event(data, data["type"]).encoded(), SERVER_SENT.comment)


class NoFrame:
    """The part of `contract.Completion` for streams without events before or after the replies."""

    def opening(self) -> list[dict[str, Any]]:
        return []

    def closing(self) -> list[dict[str, Any]]:
        return []


@dataclass(frozen=True)
class CompletionKind:
    """A kind of request for text."""

    make: Callable[[Mapping[str, Any], Model], Completion]  # reads and checks a request
    framing: Framing = SERVER_SENT
    # Writes an error inside a stream, from its status and OpenAI's body; None uses the format of the path.
    error: Callable[[int, dict[str, Any]], dict[str, Any]] | None = None
    # Handles side effects of a request; returns the answer if it asks for no text.
    aside: Callable[[Service, str, Mapping[str, Any]], Response | None] | None = None
    # Called once all replies have ended, before the client learns of it.
    ended: Callable[[Completion], Awaitable[None]] = lambda _: asyncio.sleep(0)
    # Takes a request over, with what it uses, to go on without its client; returns the answer if it did.
    detach: Callable[[Completion, contextlib.AsyncExitStack], Response | None] | None = None
    # Whether checking a request takes less time than handing it to another thread.
    is_brief: Callable[[Mapping[str, Any]], bool] = lambda _: False


OPENAI_KINDS: Mapping[str, CompletionKind] = {
    "/chat/completions": CompletionKind(partial(make_completion, "chat.completion")),
    "/completions": CompletionKind(partial(make_completion, "text_completion")),
}


def completion_endpoint(service: Service, kind: CompletionKind) -> Callable[[Request], Awaitable[Response]]:
    return partial(complete, service, kind)


async def complete(service: Service, kind: CompletionKind, request: Request) -> Response:
    async with contextlib.AsyncExitStack() as using:
        completion = await _read(service, kind, request, using)
        if isinstance(completion, Response):
            return completion
        taken = None if kind.detach is None else kind.detach(completion, using)
        if taken is not None:
            return taken
        if isinstance(completion, PromptReplies) and completion.id:
            service.answering[completion.id] = completion
        headers = ignored_header(completion.ignored)
        if completion.stream:
            write = partial(_stream, service, kind, completion, headers, request)
            return StreamedResponse(partial(_while_using, using.pop_all(), write))
        await while_connected(request.receive, make_replies(service, completion, _drop, request))
        await kind.ended(completion)
        return JSONResponse(completion.whole(), headers=headers)


async def _while_using(
    using: contextlib.AsyncExitStack, write: Callable[[Receive, Send], Awaitable[None]], receive: Receive, send: Send
) -> None:
    async with using:
        await write(receive, send)


async def _read(
    service: Service, kind: CompletionKind, request: Request, using: contextlib.AsyncExitStack
) -> Completion | Response:
    """Read and check a request and tokenize its prompt; drop the rest of the body. Return the answer to one that asks
    for no text."""
    async with json_body(request, service.security, most=service.most_body()) as body:
        model = await using.enter_async_context(service.use(body.get("model"), request.receive))
        if body.get("model") is not None and body["model"] in model.adapters:
            body.setdefault("adapter", body["model"])  # as vLLM selects adapters
        service.name_contexts(body)
        answer = None if kind.aside is None else kind.aside(service, request.url.path, body)
        if answer is not None:
            return answer
        if kind.is_brief(body):
            return _made(kind, body, model)
        # Not on the model's thread: a hostile schema takes seconds, during which no reply would advance.
        async with service.compiling if compiles(body) else contextlib.nullcontext():
            reading = asyncio.get_running_loop().run_in_executor(service.readers, _made, kind, body, model)
            completion = await reading
        del body
        if not model.tokenizes_concurrently:
            await service.host.ask(completion.prepare)
    return completion


def _made(kind: CompletionKind, body: dict[str, Any], model: Model) -> Completion:
    completion = kind.make(body, model)
    completion.check(model)
    if model.tokenizes_concurrently:
        completion.prepare(model)
    return completion


async def _stream(
    service: Service,
    kind: CompletionKind,
    completion: Completion,
    headers: Mapping[str, str],
    request: Request,
    receive: Receive,
    send: Send,
) -> None:
    seconds, framing = service.security.comment_seconds, kind.framing
    stream = EventStream(send, seconds, opening=completion.opening(), framing=framing, headers=headers)
    try:
        await while_connected(receive, make_replies(service, completion, stream.objects, request), stream.comment())
        await kind.ended(completion)
        await stream.objects(completion.closing())
    except ClientGoneError:
        raise
    except Exception as error:
        if not stream.started:
            raise
        answer = (kind.error or shape_of(request.url.path))(*error_answer(error))
        await stream.end(framing.encode(answer))
    else:
        await stream.end(framing.last)


async def make_replies(service: Service, completion: Completion, emit: Emit, request: Request) -> None:
    """Generate all replies of a request; `emit` is called with the events of each step."""
    host, use = service.host, request.scope.get(KEY_USE)
    left = threading.Event()
    # Turns are shared between requests, whatever the number of their replies.
    owner = secrets.token_hex(8)

    def finished(result: Result) -> None:
        service.metrics.finished(result)
        if use is not None:
            use.add(result)

    def ended() -> bool:
        return left.is_set() or host.leaving

    async with contextlib.AsyncExitStack() as stack:
        stack.callback(left.set)
        replies = []
        for index in range(completion.n):
            start = partial(completion.start, index=index, ended=ended)
            reply = host.submit(start, owner, streams=completion.stream)
            replies.append(await stack.enter_async_context(reply))
        try:
            async with asyncio.TaskGroup() as group:
                for index, reply in enumerate(replies):
                    group.create_task(_follow(reply, index, completion, emit, finished))
        except ExceptionGroup as errors:
            service.metrics.failed()
            raise first_error(errors) from None


async def _drop(events: list[dict[str, Any]]) -> None:
    """Ignore events of an answer that is sent whole."""


async def _follow(
    reply: HostReply, index: int, completion: Completion, emit: Emit, finished: Callable[[Result], None]
) -> None:
    async for chunk in reply:
        await emit(completion.chunk(index, chunk))
    result = reply.result
    if result is not None:
        finished(result)
    if result is None or result.finish_reason == "cancelled":
        message = "The reply was cut short: the server is stopping or changing its model."
        raise RequestError(message, "Ask again in a moment.", status=503, code="cancelled")
    await emit(completion.finished(index, result))
