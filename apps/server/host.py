"""The loaded model for programs with an event loop: loading, replies as async iterators, state to watch."""

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
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import edgeinfer
from edgeinfer.core.errors import CapabilityError, EdgeInferError, InternalError, Setting, UsageError, UserError
from edgeinfer.model_thread import Item, Job, ModelThread, ReplyEnd

if TYPE_CHECKING:
    from edgeinfer import Chunk, Model, Result, TokenStream
    from edgeinfer.core.results import Progress


T = TypeVar("T")

# Seconds between two reports of progress.
_PROGRESS_S = 0.05


class BusyError(UserError):
    """The queue is full."""

    status, code = 429, "queue_full"


class NotReadyError(UserError):
    """No model can answer now."""

    status = 503

    def __init__(self, state: HostState) -> None:
        message, hint, self.code = _REFUSALS.get(state.status, _REFUSALS["loading"])
        super().__init__(message, hint)


class LoadCancelledError(UserError):
    """Loading was cancelled."""


Status = Literal["empty", "loading", "ready", "failed", "closed"]


@dataclass(frozen=True)
class HostState:
    """What the host is doing: it takes requests while "ready", and refuses them with `NotReadyError` otherwise. A
    "ready" model may have been unloaded for being idle; the next request loads it again. "closed" is final."""

    status: Status = "empty"
    model: str | None = None  # path or hub id as given; None is the built-in model
    # `stage`, `done`, `total`: progress of loading.
    stage: str = ""
    done: int = 0
    total: int = 0
    error: EdgeInferError | None = None  # why loading failed
    number: int = 0  # grows with every change


_REFUSALS: Mapping[Status, tuple[str, str, str]] = {
    "empty": ("No model is loaded.", "Load one first.", "no_model"),
    "loading": ("The model is loading.", "Try again in a moment; GET /health shows the progress.", "model_loading"),
    "failed": ("The model could not be loaded.", "GET /health shows why.", "model_failed"),
    "closed": ("The server is stopping.", "Ask another, or this one in a moment.", "stopping"),
}

# Chunks passed on together to a client that waits for the whole reply: few enough not to block the event loop.
_TOGETHER = 16


class HostReply:
    """The chunks of a reply as they come. Leaving its `async with` block cancels the rest. So many chunks are passed on
    together, as each time wakes the event loop, for which the model waits."""

    def __init__(self, worker: ModelThread, start: Callable[[Model], TokenStream], owner: str, together: int) -> None:
        self._worker = worker
        self._items: asyncio.Queue[list[Item]] = asyncio.Queue()
        # Of the finished reply; None if it is not finished or was cancelled before it started.
        self.result: Result | None = None
        loop, put = asyncio.get_running_loop(), self._items.put_nowait
        waiting: list[Item] = []

        # It has no reference to this object, so that what a request kept is freed as soon as its reply is dropped.
        def tell(item: Item) -> None:
            waiting.append(item)
            if len(waiting) >= together or isinstance(item, ReplyEnd | Exception):
                _on(loop, put, waiting.copy())
                waiting.clear()

        self._job = Job(start, tell)
        worker.add(self._job, owner)

    def cancel(self) -> None:
        """Cancel the reply within the current pass."""
        self._worker.cancel(self._job)

    def answer_now(self) -> None:
        """End the reply's thought with the next token."""
        if self._job.stream is not None:
            self._job.stream.answer_now()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while True:
            for item in await self._items.get():
                if isinstance(item, Exception):
                    try:
                        raise item
                    finally:
                        del item  # its traceback refers to this frame
                if isinstance(item, ReplyEnd):
                    self.result = item.result
                    return
                yield item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class ModelHost:
    """One model at a time, and the thread that runs it. Methods belong to the event loop. The plan of a model may allow
    fewer replies in parallel; at most `queue` more may wait."""

    def __init__(self, *, parallel: int = 8, queue: int = 64) -> None:
        for name, value in (("parallel", parallel), ("queue", queue)):
            if value < 1:
                raise UsageError(Setting(name, value) + " is out of range.", "Give 1 or more.")
        self._most = parallel
        self.state = HostState()
        self._queue = queue
        self._worker = ModelThread(parallel)
        self._changed = asyncio.Event()
        self._loading = asyncio.Lock()
        self._cancelled = threading.Event()

    @property
    def model(self) -> Model | None:
        """The loaded model, for its facts; `submit` runs replies, `ask` anything else."""
        model: Model | None = self._worker.model
        return model

    def require_model(self) -> Model:
        model = self.model
        if self.state.status != "ready" or model is None:
            raise NotReadyError(self.state)
        return model

    @property
    def leaving(self) -> bool:
        """Whether the model is being unloaded. Safe from any thread."""
        return self.state.status != "ready"

    @property
    def parallel(self) -> int:
        """Most replies at once, as planned for the loaded model."""
        return self._most if self.model is None else min(self._most, self.model.plan.parallel)

    @property
    def running(self) -> int:
        """Replies that have started."""
        return self._worker.queue.running

    @property
    def waiting(self) -> int:
        """Replies that wait for others to end."""
        return self._worker.queue.waiting

    async def changed(self, after: int) -> HostState:
        """Wait for a state numbered above `after`."""
        while self.state.number <= after:
            await self._changed.wait()
        return self.state

    async def load(self, model: str | None, options: Mapping[str, Any]) -> Model:
        """Load a model in place of the present one, whose replies are cancelled."""
        async with self._loading:
            if self.state.status == "closed":
                raise NotReadyError(self.state)
            self._cancelled.clear()
            self._set(HostState("loading", model))
            try:
                loaded = await self._do(partial(self._work_to_load, model, options, self._progress(model)))
            except (LoadCancelledError, asyncio.CancelledError):
                # The waiting task may be cancelled: loading then ends at its next step, or its result is dropped.
                self._cancelled.set()
                self._worker.do(self._drop_model)
                self._set(HostState("empty"))
                raise
            except EdgeInferError as error:
                self._set(HostState("failed", model, error=error))
                raise
            except Exception as error:  # of any kind: loading has ended
                self._set(HostState("failed", model, error=InternalError(f"Unexpected {type(error).__name__}.")))
                raise
            self._set(HostState("ready", model))
            return loaded

    def _progress(self, model: str | None) -> Progress:
        """Make the callback for progress; it raises if loading was cancelled."""
        loop, shown = asyncio.get_running_loop(), 0.0

        def progress(stage: str, done: int, total: int) -> None:
            nonlocal shown
            self._require_wanted()
            if time.monotonic() - shown >= _PROGRESS_S or done == total:
                shown = time.monotonic()
                _on(loop, show, HostState("loading", model, stage, done, total))

        def show(state: HostState) -> None:
            if self.state.status == "loading":
                self._set(state)

        return progress

    def _work_to_load(self, model: str | None, options: Mapping[str, Any], progress: Progress) -> Model:
        self._drop_model()
        loaded = load_with_room(model, options, self._most, progress)
        try:
            self._require_wanted()
        except LoadCancelledError:
            loaded.close()
            raise
        self._worker.take(loaded)
        return loaded

    def _require_wanted(self) -> None:
        if self._cancelled.is_set():
            raise LoadCancelledError("Loading was cancelled.", "Choose a model.")

    def cancel_load(self) -> None:
        """Cancel loading at its next step."""
        self._cancelled.set()

    async def unload(self) -> None:
        """Free the model and cancel its replies."""
        async with self._loading:
            if self.state.status == "closed":
                return
            # First, so that no request reaches the model any more.
            self._set(HostState("empty"))
            await self._do(self._drop_model)

    def submit(self, start: Callable[[Model], TokenStream], owner: str, *, streams: bool = True) -> HostReply:
        """Start a reply that takes turns with others."""
        self.require_model()
        if self.waiting >= self._queue:
            raise BusyError(f"{self.waiting} requests are already waiting.", "Try again in a moment.")
        return HostReply(self._worker, start, owner, 1 if streams else _TOGETHER)

    async def ask(self, question: Callable[[Model], T]) -> T:
        """Run a function of the model between two turns."""
        self.require_model()
        # The model may be unloaded while this waits.
        return await self._do(lambda: question(self.require_model()))

    async def tokenize(self, model: Model, question: Callable[[Model], T]) -> T:
        """Run a function that only tokenizes, on another thread if the model allows, so that it waits for no reply."""
        return await asyncio.to_thread(question, model) if model.tokenizes_concurrently else await self.ask(question)

    async def bring_back(self) -> None:
        """Load the model again on its thread if it was unloaded for being idle."""
        if not self.require_model().in_memory:
            await self.ask(lambda model: model.reload())

    async def close(self) -> None:
        """Free the model, cancel its replies and end the thread; may be called repeatedly."""
        if self.state.status == "closed":
            return
        self._set(HostState("closed"))
        self._cancelled.set()
        await self._do(self._drop_model)
        await asyncio.to_thread(self._worker.join)

    def _drop_model(self) -> None:
        self._worker.drop_replies()
        model = self._worker.model
        self._worker.take(None)
        if model is not None:
            model.close()

    def _set(self, state: HostState) -> None:
        if self.state.status == "closed":
            return
        self.state = dataclasses.replace(state, number=self.state.number + 1)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _do(self, work: Callable[[], T]) -> T:
        """Run `work` on the model's thread; return or raise its outcome."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def resolve(set: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                set(value)

        def task() -> None:
            try:
                value = work()
            except Exception as error:  # raised in the caller
                _on(loop, resolve, future.set_exception, error)
            else:
                _on(loop, resolve, future.set_result, value)

        self._worker.do(task)
        return await future


def _on(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: Any) -> None:
    """Call on the loop, unless the program is ending and it is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)


_log = logging.getLogger("edgeinfer")

# The share, and the tokens, of the contexts of replies at once that the cache must have room for.
_LEAST_SHARE, _LEAST_TOKENS = 0.25, 512


def with_room(
    model: str | None, options: Mapping[str, Any], parallel: int, alone: edgeinfer.MemoryPlan | None = None
) -> dict[str, Any]:
    """Return load options with memory for up to `parallel` replies at once; half as many, and so on, if the budget is
    short; the given options if it has none to spare. `alone` is the plan for these, if it was made already."""
    given = dict(options)
    alone = alone or edgeinfer.plan(model, **given)
    mine = alone.configuration
    fixed = given | {"context": mine.context, "kv": mine.kv, "weights": mine.weights}
    if alone.budget_bytes is not None and importlib.util.find_spec("llguidance") is not None:
        # The cache takes all memory that is left, so grammars must be planned for.
        fixed["structured"] = edgeinfer.plan(model, **(fixed | {"structured": True})).fits
    sized = given.get("prefix_cache") is None and given.get("overflow", "stop") == "stop"
    while parallel >= 1:
        roomy = fixed | {"parallel": parallel}
        if parallel == 1 and sized:  # room for the previous reply next to the running one
            roomy["prefix_cache"] = alone.terms.get("kv", 0)
        plan = edgeinfer.plan(model, **roomy)
        share = min(_LEAST_SHARE, _LEAST_TOKENS / plan.context) if sized else 0
        least = share * (parallel - 1) * plan.terms.get("kv", 0)
        if plan.fits and plan.prefix_cache >= least:
            return roomy
        parallel //= 2
    return given


def load_with_room(
    model: str | None, options: Mapping[str, Any], parallel: int, progress: Progress | None
) -> edgeinfer.Model:
    """Load a model with `with_room`; without it if its cache cannot be copied, so that replies run one at a time."""
    roomy = with_room(model, options, parallel)
    try:
        return edgeinfer.load(model, progress=progress, **roomy)
    except CapabilityError as error:
        if roomy == dict(options):
            raise
        _log.warning("Replies run one after the other. %s", error.message)
    return edgeinfer.load(model, progress=progress, **options)
