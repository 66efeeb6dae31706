"""Replies for asynchronous programs: made on a thread of the model's own, read chunk by chunk from an event loop."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from edgeinfer.batching import ReplyBatch, Slot
from edgeinfer.core.errors import EdgeInferError, UnshareableError, UsageError
from edgeinfer.core.results import Chunk, Result
from edgeinfer.generation import TokenStream
from edgeinfer.runtime.system.forks import renewed_in_children

if TYPE_CHECKING:
    # asyncio takes 4 MB, which a program without an event loop is spared: it is imported where there is one.
    import asyncio
    from concurrent.futures import ThreadPoolExecutor


class Production:
    """A reply as the thread makes it. It holds no reference to its reader, so that a reader that is gone is noticed."""

    def __init__(
        self, start: Callable[[], TokenStream], loop: asyncio.AbstractEventLoop, conversation: object | None
    ) -> None:
        import asyncio

        # Chunks, then None or the error that ended the reply; read by the event loop.
        self.queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
        self.stream: TokenStream | None = None  # the reply's, once it has started
        # Replies of one conversation are made one after the other; None is a conversation of its own.
        self.conversation = conversation
        self.alone = False  # the reply needs resources that only one reply at a time can have
        self._start = start
        self._loop = loop
        self._lock = threading.RLock()  # a collector of garbage may end a reader while its thread is in here
        self._cancelled = False
        self._error: BaseException | None = None

    def cancel(self) -> None:
        """End the reply within the current pass, or before it starts. Safe from any thread."""
        with self._lock:
            self._cancelled = True
            if self.stream is not None:
                self.stream.cancel()

    def make(self, gives_way: Callable[[], bool]) -> bool:
        """Make the reply to its end, or until it pauses to make room for others; return whether it paused."""
        try:
            if self.stream is None and not self._cancelled:
                self._begin()
            stream = self.stream
            while stream is not None and (chunk := next(stream, None)) is not None:
                if not self._tell(chunk):
                    break
                if chunk.finish_reason is None and self.shareable and gives_way() and stream.pause():
                    return True
        except BaseException as error:
            self._error = error
        if self.stream is not None:
            self.stream.close()
        return False

    def share(self, slot: Slot) -> None:
        """Make the reply, or the rest of it, side by side with others; set `alone` where that is impossible."""
        try:
            if self.stream is not None:
                self.stream.move(slot.parts, slot.turns)
        except BaseException as error:
            self.fail(error)
            return
        self.make(lambda: False)
        if isinstance(self._error, UnshareableError) and self.stream is None:
            self._error, self.alone = None, True

    def fail(self, error: BaseException) -> None:
        self._error = error
        if self.stream is not None:
            self.stream.close()

    def tell_end(self) -> None:
        self._tell(self._error)

    @property
    def shareable(self) -> bool:
        """Whether the reply has started and can continue side by side with others."""
        return self.stream is not None and self.stream.shareable

    def _begin(self) -> None:
        stream = self._start()
        with self._lock:
            self.stream = stream
            if self._cancelled:
                stream.cancel()

    def _tell(self, item: Chunk | BaseException | None) -> bool:
        """Hand an item to the loop; return False where the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:
            return False
        return True


class ReplyThread:
    """The one thread on which a model starts replies for event loops, in the order of the requests. A single reply has
    the model to itself. When others come, they share passes if the model supports that and was loaded for several;
    replies that cannot share, such as searches, are made before or after these."""

    def __init__(self, open_batch: Callable[[], ReplyBatch | None]) -> None:
        self._open_batch = weakref.WeakMethod(open_batch)  # returns None where replies cannot share passes
        self.renew()
        renewed_in_children(self)

    def renew(self) -> None:
        """Start without a thread and without replies: in the child of a fork they belong to the parent."""
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._waiting: deque[Production] = deque()
        self._sharing: list[Production] = []
        self._batch: ReplyBatch | None = None

    def run(self, production: Production) -> None:
        """Make the reply after those before it, or side by side with them."""
        with self._lock:
            self._waiting.append(production)
            self._wake()

    def close(self) -> None:
        """Cancel replies that share passes; the thread ends after its remaining work, and later work gets a new one."""
        with self._lock:
            for production in self._sharing:
                production.cancel()
            if self._executor is not None:
                self._executor.shutdown(wait=False)
                self._executor = None

    def _wake(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        if self._batch is not None:
            self._batch.interrupt()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "edgeinfer-replies")
        self._executor.submit(self._work)

    def _work(self) -> None:
        """Make the reply that waits longest, and those that come meanwhile side by side with it."""
        with self._lock:
            first = self._waiting.popleft() if self._waiting else None
        if first is None:  # it was made together with an earlier one
            return
        if self._others_wait() or first.make(self._others_wait):
            batch = None if first.alone else self._opened()
            if batch is not None:
                self._share(batch, first)
                return
            first.make(lambda: False)
        first.tell_end()

    def _others_wait(self) -> bool:
        return bool(self._waiting)

    def _opened(self) -> ReplyBatch | None:
        """A batch to share passes in; None where replies cannot share, or the model fails, which each then raises."""
        open_batch = self._open_batch()
        try:
            return None if open_batch is None else open_batch()
        except EdgeInferError:
            return None

    def _share(self, batch: ReplyBatch, first: Production) -> None:
        """Make replies side by side until none is left."""
        last: list[Production] = []  # whose readers may expect the model to be free
        with self._lock:
            self._batch = batch
        try:
            self._add(batch, first, last)
            while batch.running:
                # Before the step, which makes the whole of a single reply unless another one comes.
                while batch.has_room and (production := self._joining()) is not None:
                    self._add(batch, production, last)
                batch.step()
        finally:
            with self._lock:
                self._batch = None
            batch.close()
            for production in last:
                production.tell_end()

    def _add(self, batch: ReplyBatch, production: Production, last: list[Production]) -> None:
        def work(slot: Slot) -> None:
            production.share(slot)
            with self._lock:
                self._sharing.remove(production)
            if production.alone:
                with self._lock:
                    self._waiting.appendleft(production)
                    self._wake()
            elif batch.running > 1:
                production.tell_end()
            else:
                last.append(production)

        with self._lock:
            self._sharing.append(production)
        batch.add(work)

    def _joining(self) -> Production | None:
        """Take the next reply that can join; none overtakes a reply that cannot."""
        with self._lock:
            talking = [id(one.conversation) for one in self._sharing if one.conversation is not None]
            for production in self._waiting:
                if production.alone:
                    return None
                if id(production.conversation) not in talking:
                    self._waiting.remove(production)
                    return production
        return None


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
        self, thread: ReplyThread, start: Callable[[], TokenStream], conversation: object | None = None
    ) -> None:
        self._thread = thread
        self._start = start
        self._conversation = conversation
        self._production: Production | None = None
        self._cancelled = self._ended = False

    @property
    def result(self) -> Result:
        """The finished reply; UsageError before it is, and where the stream was cancelled before the reply started."""
        stream = None if self._production is None else self._production.stream
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
        if self._production is not None:
            self._production.cancel()

    async def aclose(self) -> None:
        """End the reply and wait until it is over; an unfinished one counts as cancelled.

        Raises:
            EdgeInferError: the reply failed, and the error was not raised yet.
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
