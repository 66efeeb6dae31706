"""The model that is loaded, for programs with an event loop: loading, replies as async iterators, state to watch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import edgeinfer
from edgeinfer.apps.server.worker import Job, ModelThread, ReplyEnd
from edgeinfer.errors import CapabilityError, EdgeInferError, UsageError, UserError
from edgeinfer.wording import Setting

if TYPE_CHECKING:
    from edgeinfer import Chunk, Model, Result, TokenStream
    from edgeinfer.results import Progress

__all__ = ["BusyError", "HostReply", "HostState", "LoadCancelledError", "ModelHost", "load_with_room", "with_room"]

T = TypeVar("T")

# Between two signs of progress.
_PROGRESS_S = 0.05


class BusyError(UserError):
    """More requests than the queue holds."""


class LoadCancelledError(UserError):
    """Loading was cancelled."""


@dataclass(frozen=True)
class HostState:
    """What the host is doing.

    Attributes:
        model: as it was asked for: a path or a hub id; None is the built-in one.
        stage, done, total: progress of loading.
        error: why loading failed.
        number: grows with every change.
    """

    status: Literal["empty", "loading", "ready", "failed"] = "empty"
    model: str | None = None
    stage: str = ""
    done: int = 0
    total: int = 0
    error: EdgeInferError | None = None
    number: int = 0


# Chunks that are passed on together where a client waits for the whole reply: few enough that the event loop does not
# stand still for them.
_TOGETHER = 16


class HostReply:
    """The chunks of a reply, as they come. Leaving its `async with` block cancels what is left of it.

    Args:
        worker: runs the model.
        start: as `ModelHost.submit` takes it.
        owner: who asks.
        together: chunks that may be passed on at once.
    """

    def __init__(self, worker: ModelThread, start: Callable[[Model], TokenStream], owner: str, together: int) -> None:
        self._worker = worker
        self._items: asyncio.Queue[list[Chunk | ReplyEnd | Exception]] = asyncio.Queue()
        self._result: Result | None = None
        # Nothing of it leads back here, so that what a request kept is free when its reply is left.
        put = partial(_on, asyncio.get_running_loop(), self._items.put_nowait)
        self._job = Job(start, _Bundles(put, together).add)
        worker.add(self._job, owner)

    @property
    def result(self) -> Result:
        """The finished reply.

        Raises:
            UsageError: it is not finished, or was cancelled before it began.
        """
        if self._result is None:
            raise UsageError("The reply is not finished, or was never started.", "Iterate to the end first.")
        return self._result

    def cancel(self) -> None:
        """Ends it within the current pass; the iteration then ends."""
        self._worker.cancel(self._job)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        while True:
            for item in await self._items.get():
                if isinstance(item, Exception):
                    try:
                        raise item
                    finally:
                        del item  # whose traceback leads here
                if isinstance(item, ReplyEnd):
                    self._result = item.result
                    return
                yield item


class _Bundles:
    """Passes chunks on in bundles, the last with the end: each wakes the event loop, for which the model then waits.

    Args:
        put: takes a bundle.
        most: chunks of one.
    """

    def __init__(self, put: Callable[[list[Chunk | ReplyEnd | Exception]], None], most: int) -> None:
        self._put, self._most = put, most
        self._waiting: list[Chunk | ReplyEnd | Exception] = []

    def add(self, item: Chunk | ReplyEnd | Exception) -> None:
        """Takes a chunk or the end."""
        self._waiting.append(item)
        if len(self._waiting) >= self._most or isinstance(item, ReplyEnd | Exception):
            bundle, self._waiting = self._waiting, []
            self._put(bundle)


class ModelHost:
    """One model at a time, and the thread that runs it. All methods are the event loop's.

    Args:
        parallel: replies side by side at most; of a model whose budget has memory for fewer there are fewer.
        queue: replies that wait at most.
    """

    def __init__(self, *, parallel: int = 8, queue: int = 64) -> None:
        for name, value in (("parallel", parallel), ("queue", queue)):
            if value < 1:
                raise UsageError(Setting(name, value) + " is out of range.", "Give 1 or more.")
        self._most = parallel
        self.state = HostState()
        self._queue = queue
        self._worker = ModelThread(parallel)
        self._worker.start()
        self._changed = asyncio.Event()
        self._loading = asyncio.Lock()
        self._cancelled, self._leaving = threading.Event(), False

    @property
    def model(self) -> Model | None:
        """The loaded model, for what is known of it; replies are run by `submit`, questions by `ask`."""
        return self._worker.model

    @property
    def leaving(self) -> bool:
        """Whether the model is to go, or has gone: nothing more is to be read for its replies. Safe from any thread."""
        return self._leaving or self.state.status != "ready"

    @property
    def parallel(self) -> int:
        """Replies side by side, for which the loaded model's plan has memory."""
        return self._most if self.model is None else min(self._most, self.model.plan.parallel)

    @property
    def running(self) -> int:
        """Replies that have started."""
        return self._worker.running

    @property
    def waiting(self) -> int:
        """Replies that wait for others to end."""
        return self._worker.waiting

    async def changed(self, after: int) -> HostState:
        """Waits until the state's number is larger than `after`, and returns the state."""
        while self.state.number <= after:
            await self._changed.wait()
        return self.state

    async def load(self, model: str | None, options: Mapping[str, Any]) -> Model:
        """Loads a model in place of the one that is loaded, whose replies are cancelled.

        Args:
            options: fields of LoadConfig. Without a `prefix_cache` there is one as large as replies that take turns
                need and memory allows.

        Raises:
            EdgeInferError: as `edgeinfer.load`; no model is loaded then.
            LoadCancelledError: `cancel_load` came in between.
        """
        async with self._loading:
            self._cancelled.clear()
            self._leaving = False
            self._set(HostState("loading", model))
            loop, told = asyncio.get_running_loop(), 0.0

            def progress(stage: str, done: int, total: int) -> None:
                nonlocal told
                if self._cancelled.is_set():
                    raise LoadCancelledError("Loading was cancelled.", "Choose a model.")
                if time.monotonic() - told >= _PROGRESS_S or done == total:
                    told = time.monotonic()
                    _on(loop, self._set, HostState("loading", model, stage, done, total))

            def work() -> Model:
                self._drop_model()
                loaded = load_with_room(model, options, self._most, progress)
                if self._cancelled.is_set():
                    loaded.close()
                    raise LoadCancelledError("Loading was cancelled.", "Choose a model.")
                self._worker.take(loaded)
                return loaded

            try:
                loaded = await self._do(work)
            except LoadCancelledError:
                self._set(HostState("empty"))
                raise
            except EdgeInferError as error:
                self._set(HostState("failed", model, error=error))
                raise
            self._set(HostState("ready", model))
            return loaded

    def cancel_load(self) -> None:
        """Ends loading at its next step, if a model is being loaded."""
        self._cancelled.set()

    async def unload(self) -> None:
        """Frees the model and cancels its replies."""
        async with self._loading:
            self._leaving = True
            await self._do(self._drop_model)
            self._set(HostState("empty"))

    def submit(self, start: Callable[[Model], TokenStream], owner: str, *, streams: bool = True) -> HostReply:
        """Starts a reply that takes turns with the others.

        Args:
            start: makes its stream, on the model's thread; what it raises comes out of the iteration.
            owner: who asks; each owner has the same share.
            streams: whether chunks are wanted as they come; otherwise several are passed on together.

        Raises:
            UsageError: no model is loaded.
            BusyError: too many requests wait.
        """
        if self.state.status != "ready":
            raise UsageError("No model is loaded.", "Load one, or wait until it is loaded.")
        if self.waiting >= self._queue:
            raise BusyError(f"{self.waiting} requests are already waiting.", "Try again in a moment.")
        return HostReply(self._worker, start, owner, 1 if streams else _TOGETHER)

    async def ask(self, question: Callable[[Model], T]) -> T:
        """Asks something of the model between two turns.

        Raises:
            UsageError: no model is loaded.
        """

        def work() -> T:
            if self._worker.model is None:
                raise UsageError("No model is loaded.", "Load one, or wait until it is loaded.")
            return question(self._worker.model)

        return await self._do(work)

    async def close(self) -> None:
        """Frees the model, cancels its replies and ends the thread; once is enough."""
        if not self._worker.is_alive():
            return
        self._cancelled.set()
        self._leaving = True
        await self._do(self._drop_model)
        self._worker.end()
        await asyncio.to_thread(self._worker.join)
        self._set(HostState("empty"))

    def _drop_model(self) -> None:
        self._worker.drop_replies()
        model, self._worker.model = self._worker.model, None
        if model is not None:
            model.close()

    def _set(self, state: HostState) -> None:
        self.state = dataclasses.replace(state, number=self.state.number + 1)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _do(self, work: Callable[[], T]) -> T:
        """Runs `work` on the model's thread; returns or raises what it does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def resolve(set: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                set(value)

        def task() -> None:
            try:
                value = work()
            except Exception as error:  # the caller's, on its own thread
                _on(loop, resolve, future.set_exception, error)
            else:
                _on(loop, resolve, future.set_result, value)

        self._worker.do(task)
        return await future


def _on(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: Any) -> None:
    """Calls on the loop, unless the program is ending and it is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)


_log = logging.getLogger("edgeinfer")

# Of the contexts of replies side by side, for what there must be room; where it is short, some are evaluated again.
_LEAST_SHARE = 0.25


def with_room(
    model: str | None, options: Mapping[str, Any], parallel: int, alone: edgeinfer.MemoryPlan | None = None
) -> dict[str, Any]:
    """Returns options by which up to `parallel` replies have room side by side.

    Where the budget has no room for that many, there is room for half as many, and so on; without any the options are
    those given.

    Args:
        options: fields of LoadConfig; a `prefix_cache` among them is kept to.
        alone: the plan by these options, where it was made already.

    Raises:
        EdgeInferError: as `edgeinfer.plan`.
    """
    given = dict(options)
    alone = alone or edgeinfer.plan(model, **given)
    mine = alone.configuration
    fixed = given | {"context": mine.context, "kv": mine.kv, "weights": mine.weights}
    if alone.budget_bytes is not None and _follows_grammars():
        # Once the cache has what is left, there is no room for them.
        fixed["structured"] = edgeinfer.plan(model, **(fixed | {"structured": True})).fits
    sized = given.get("prefix_cache") is None and given.get("overflow", "stop") == "stop"
    while parallel >= 1:
        roomy = fixed | {"parallel": parallel}
        if parallel == 1 and sized:  # beside the reply that runs, the one before is kept
            roomy["prefix_cache"] = alone.terms.get("kv", 0)
        plan = edgeinfer.plan(model, **roomy)
        least = _LEAST_SHARE * (parallel - 1) * plan.terms.get("kv", 0) if sized else 0
        if plan.fits and plan.prefix_cache >= least:
            return roomy
        parallel //= 2
    return given


def _follows_grammars() -> bool:
    """Whether replies by a schema, an expression or a grammar can be made here."""
    return importlib.util.find_spec("llguidance") is not None


def load_with_room(
    model: str | None, options: Mapping[str, Any], parallel: int, progress: Progress | None
) -> edgeinfer.Model:
    """Loads a model by `with_room`, or without it if its cache cannot be copied: replies then run one after the other.

    Args:
        progress: as `edgeinfer.load` takes it.

    Raises:
        EdgeInferError: as `edgeinfer.load`.
    """
    roomy = with_room(model, options, parallel)
    try:
        return edgeinfer.load(model, progress=progress, **roomy)
    except CapabilityError as error:
        if roomy == dict(options):
            raise
        _log.warning("Replies run one after the other. %s", error.message)
    return edgeinfer.load(model, progress=progress, **options)
