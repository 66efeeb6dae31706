"""Replies for asynchronous programs: made on a thread of the model's own, read chunk by chunk from an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from edgeinfer.core.errors import UsageError
from edgeinfer.core.results import Chunk, Result
from edgeinfer.generation import TokenStream
from edgeinfer.model_thread import Item, Job, ModelThread

if TYPE_CHECKING:
    # asyncio takes 4 MB, which a program without an event loop is spared: it is imported where there is one.
    import asyncio


class AsyncTokenStream:
    """Iterates over the chunks of one reply with `async for`; afterwards `result` has the whole.

    The reply starts when its first chunk is awaited, and is made on the model's own thread, so that the event loop is
    never blocked. `cancel`, `aclose`, the end of an `async with` block, a cancelled task that awaits it and dropping it
    end it within the current pass.

    Args:
        thread: the thread that makes the model's replies.
        start: starts the reply.
        conversation: replies of one conversation are made one after the other; None is a conversation of its own.
    """

    def __init__(
        self, thread: ModelThread, start: Callable[[], TokenStream], conversation: object | None = None
    ) -> None:
        self._thread = thread
        self._start = start
        self._conversation = conversation
        self._job: Job | None = None
        self._cancelled = self._ended = False

    @property
    def result(self) -> Result:
        """The finished reply; UsageError before it is, and where the stream was cancelled before the reply started."""
        stream = None if self._job is None else self._job.stream
        if stream is None or not self._ended:
            raise UsageError("The reply is not finished.", "Iterate to the end, or close the stream first.")
        return stream.result

    async def complete(self) -> Result:
        """Iterate to the end and return the whole reply."""
        async for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """End the reply within the current pass; the next chunk is the last. Safe from any thread."""
        self._cancelled = True
        if self._job is not None:
            self._thread.cancel(self._job)

    def answer_now(self) -> bool:
        """As `TokenStream.answer_now`; False before the reply has started."""
        stream = None if self._job is None else self._job.stream
        return stream is not None and stream.answer_now()

    async def aclose(self) -> None:
        """End the reply and wait until it is over; an unfinished one counts as cancelled.

        Raises:
            EdgeInferError: the reply failed, and the error was not raised yet.
        """
        self.cancel()
        if self._job is None:
            self._ended = True
        async for _ in self:
            pass

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        import asyncio

        if self._ended:
            raise StopAsyncIteration
        if self._job is None:
            self._job = self._asked_for(asyncio.get_running_loop())
        try:
            item = await self._items.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, Chunk):
            return item
        self._ended = True
        if isinstance(item, Exception):
            raise item
        raise StopAsyncIteration

    def _asked_for(self, loop: asyncio.AbstractEventLoop) -> Job:
        """Have the model's thread make the reply. What it is given has no reference to this object, so that a reader
        who is gone is noticed."""
        import asyncio

        self._items: asyncio.Queue[Item] = asyncio.Queue()
        start, put = self._start, self._items.put_nowait

        def tell(item: Item) -> bool:
            try:
                loop.call_soon_threadsafe(put, item)
            except RuntimeError:  # the loop has ended
                return False
            return True

        job = Job(lambda _: start(), tell, cancelled=self._cancelled)
        self._thread.add(job, conversation=self._conversation)
        return job

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._job is not None and not self._ended:
            self._thread.cancel(self._job)
