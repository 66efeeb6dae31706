"""Runs the replies of one request on the host and hands their events on; ends them when the client hangs up. Knows
nothing of what the events say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from starlette.types import Receive

from edgeinfer.apps.server.errors import ClientGoneError
from edgeinfer.apps.server.host import BusyError, ModelHost, Reply
from edgeinfer.apps.server.metrics import Metrics
from edgeinfer.errors import UsageError
from edgeinfer.openai import Completion
from edgeinfer.openai.errors import RequestError
from edgeinfer.results import Result

__all__ = ["Emit", "answer", "while_connected"]

Emit = Callable[[list[dict[str, Any]]], Awaitable[None]]
Work = Coroutine[Any, Any, None]


async def answer(host: ModelHost, completion: Completion, owner: str, emit: Emit, metrics: Metrics) -> None:
    """Makes all replies of a request, and calls `emit` with the events of each step.

    Args:
        owner: who the replies are made for, among whom the model's time is shared.

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
            raise _first(errors) from None


async def _follow(reply: Reply, index: int, completion: Completion, emit: Emit, metrics: Metrics) -> None:
    async for chunk in reply:
        await emit(completion.chunk(index, chunk))
    result = _result(reply)
    if result is not None:
        metrics.finished(result)
    if result is None or result.finish_reason == "cancelled":
        message = "The reply was cut short: the server stops, or changes its model."
        raise RequestError(message, "Ask again in a moment.", status=503, code="cancelled")
    await emit(completion.finished(index, result))


def _result(reply: Reply) -> Result | None:
    """Of a reply that is over; None of one that was cancelled before it began."""
    try:
        return reply.result
    except UsageError:
        return None


async def while_connected(receive: Receive, work: Work, *beside: Work) -> None:
    """Runs `work` to its end, or until the client hangs up.

    Args:
        receive: of the request, whose body has been read.
        beside: runs as long.

    Raises:
        ClientGoneError: the client hung up; `work` was cancelled.
    """
    try:
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(other) for other in (_watch(receive), *beside)]
            await group.create_task(work)
            for other in others:
                other.cancel()
    except ExceptionGroup as errors:
        raise _first(errors) from None


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    """What went wrong first; the rest followed from it."""
    error: Exception = errors
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
