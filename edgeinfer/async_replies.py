"""Replies for asynchronous programs: made on a thread of the model's own, read chunk by chunk from an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from edgeinfer.errors import UsageError
from edgeinfer.generation import TokenStream
from edgeinfer.reply_thread import Production, ReplyThread
from edgeinfer.results import Chunk, Result


class AsyncTokenStream:
    """Iterates over the chunks of one reply with `async for`; afterwards `result` has the whole.

    The reply begins when its first chunk is awaited, and is made on the model's own thread, so that the event loop is
    never blocked. `cancel`, `aclose`, the end of an `async with` block, a cancelled task that awaits it and dropping it
    end it within the current pass.

    Args:
        thread: of the model's replies.
        start: begins the reply.
        conversation: whose replies are made one after the other; None is one of its own.
    """

    def __init__(
        self, thread: ReplyThread, start: Callable[[], TokenStream], conversation: object | None = None
    ) -> None:
        self._thread = thread
        self._start = start
        self._conversation = conversation
        self._production: Production | None = None
        self._cancelled = self._ended = False

    @property
    def result(self) -> Result:
        """The finished reply.

        Raises:
            UsageError: the stream is not finished yet, or was cancelled before the reply began.
        """
        stream = None if self._production is None else self._production.stream
        if stream is None or not self._ended:
            raise UsageError("The reply is not finished.", "Iterate to the end, or close the stream first.")
        return stream.result

    async def complete(self) -> Result:
        """Iterates to the end and returns the whole reply."""
        async for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """Ends the reply within the current pass; the next chunk is the last. Safe from any thread."""
        self._cancelled = True
        if self._production is not None:
            self._production.cancel()

    async def aclose(self) -> None:
        """Ends the reply and waits until it is over; an unfinished one counts as cancelled.

        Raises:
            EdgeInferError: the reply failed, and this was not raised yet.
        """
        self.cancel()
        if self._production is None:
            self._ended = True
        async for _ in self:
            pass

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        import asyncio

        if self._ended:
            raise StopAsyncIteration
        if self._production is None:
            self._production = Production(self._start, asyncio.get_running_loop(), self._conversation)
            if self._cancelled:
                self._production.cancel()
            self._thread.run(self._production)
        try:
            item = await self._production.queue.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, Chunk):
            return item
        self._ended = True
        if item is not None:
            raise item
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._production is not None and not self._ended:
            self._production.cancel()
