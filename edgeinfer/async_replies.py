"""Replies for asynchronous programs: made on a thread of the model's own, read chunk by chunk from an event loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from edgeinfer.errors import UsageError
from edgeinfer.generation import TokenStream
from edgeinfer.results import Chunk, Result

if TYPE_CHECKING:
    # asyncio takes 4 MB, which a program without an event loop is spared: it is imported where there is one.
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

__all__ = ["AsyncTokenStream", "ReplyThread"]


class ReplyThread:
    """The one thread on which a model makes replies for event loops, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Does the work once what was asked for before is done."""
        from concurrent.futures import ThreadPoolExecutor

        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, "edgeinfer-replies")
            self._executor.submit(work)

    def close(self) -> None:
        """Lets the thread end behind what it still has to do; work that comes later gets a thread of its own."""
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown(wait=False)
                self._executor = None


class _Production:
    """A reply as its thread makes it. It does not know who reads it, so that a reader who is gone is noticed."""

    def __init__(self, start: Callable[[], TokenStream], loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        self.queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
        self.stream: TokenStream | None = None
        self._start = start
        self._loop = loop
        self._lock = threading.RLock()  # a collector of garbage may end a reader while its thread is in here
        self._cancelled = False

    def cancel(self) -> None:
        """Ends the reply within the current pass, or before it begins. Safe from any thread."""
        with self._lock:
            self._cancelled = True
            if self.stream is not None:
                self.stream.cancel()

    def make(self) -> None:
        """Makes the reply to its end."""
        end: BaseException | None = None
        try:
            if not self._cancelled:
                self._make()
        except BaseException as error:
            end = error
        self._tell(end)

    def _make(self) -> None:
        with self._start() as stream:
            with self._lock:
                self.stream = stream
                if self._cancelled:
                    stream.cancel()
            for chunk in stream:
                if not self._tell(chunk):
                    break

    def _tell(self, item: Chunk | BaseException | None) -> bool:
        """Hands something to the loop; False where the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:
            return False
        return True


class AsyncTokenStream:
    """Iterates over the chunks of one reply with `async for`; afterwards `result` has the whole.

    The reply begins when its first chunk is awaited, and is made on the model's own thread, so that the event loop is
    never blocked. `cancel`, `aclose`, the end of an `async with` block, a cancelled task that awaits it and dropping it
    end it within the current pass.

    Args:
        thread: of the model's replies.
        start: begins the reply.
    """

    def __init__(self, thread: ReplyThread, start: Callable[[], TokenStream]) -> None:
        self._thread = thread
        self._start = start
        self._production: _Production | None = None
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
        """Ends the reply and waits until the model is free; an unfinished reply counts as cancelled.

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
            self._production = _Production(self._start, asyncio.get_running_loop())
            if self._cancelled:
                self._production.cancel()
            self._thread.run(self._production.make)
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
