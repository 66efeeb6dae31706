"""Loads the models that requests name, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import edgeinfer
from edgeinfer.apps.server.host import HostState, ModelHost, NotReadyError
from edgeinfer.core.errors import BudgetError, EdgeInferError
from edgeinfer.core.options import parse_size
from edgeinfer.openai.errors import RequestError

# Load options of the served model that also apply to others.
_OF_ANY_MODEL = (
    "context", "memory", "threads", "exact", "prefill_chunk", "speculation", "remember", "overflow", "counted",
    "prefix_cache", "inter_token_latency", "idle_unload", "device",
)  # fmt: skip


_USUAL_CONTEXT = 8192  # the most tokens if none are given

_log = logging.getLogger("edgeinfer.server")


@dataclass(eq=False)
class _Request:
    """A request that waits for its model."""

    source: str | None
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ModelSwitch:
    """Loads the model that a request names once no request uses the present one.

    Requests for the loaded model are admitted at once, unless one for another model is waiting: then they queue behind
    it, so that every model gets its turn. Loading a model admits all requests that wait for it; at most `queue` may
    wait. `source` is the served model, for requests that name none; others get those of its options that fit any model.
    """

    def __init__(self, host: ModelHost, source: str | None, options: Mapping[str, Any], *, queue: int = 64) -> None:
        self.source = source
        self._host = host
        self._options = dict(options)
        self._others = {name: options[name] for name in _OF_ANY_MODEL if name in options}
        self._queue = queue
        self._waiting: deque[_Request] = deque()
        self._users = 0
        self._loading: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._keep_s: float | None = None
        self._closed = False
        self.opened = False  # whether requests may name models; false until the first is loaded
        # Tokens of the largest context a model may be loaded with.
        self.most_context = options.get("context") or _USUAL_CONTEXT

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def memory(self) -> int | None:
        """The budget in bytes, where there is one."""
        return None if self._options.get("memory") is None else parse_size(self._options["memory"])

    def is_loaded(self, source: str | None) -> bool:
        state = self._host.state
        return state.status == "ready" and state.model == source and self._host.model is not None

    async def enter(self, source: str | None) -> None:
        """Wait until a model is loaded; it stays until `leave`."""
        if self._closed:
            raise _stopping()
        self._stop_timer()
        if self._loading is None and not self._waiting and self.is_loaded(source):
            self._users += 1
            return
        if len(self._waiting) >= self._queue:
            message = f"{len(self._waiting)} requests are already waiting for a model."
            raise RequestError(message, "Try again in a moment.", status=429, code="queue_full")
        request = _Request(source)
        self._waiting.append(request)
        self._advance()
        try:
            await request.granted
        except asyncio.CancelledError:
            if request in self._waiting:
                self._waiting.remove(request)
                self._go_on()
            elif request.granted.done() and not request.granted.cancelled() and request.granted.exception() is None:
                self.leave()
            raise

    def leave(self) -> None:
        self._users -= 1
        self._go_on()

    def _go_on(self) -> None:
        """Continue after a request, or start the idle timer."""
        self._advance()
        if self._closed or self._loading is not None:
            return
        if not self._users and not self._waiting and self._keep_s is not None:
            self._stop_timer()
            self._idle = asyncio.get_running_loop().call_later(self._keep_s, self._unload_idle)

    def keep(self, seconds: float | None) -> None:
        """Set how long an unused model stays in memory; None sets no limit."""
        self._keep_s = seconds

    def expires_in(self) -> float | None:
        """Seconds until the model is unloaded for being idle; None without a limit."""
        if self._idle is None:
            return self._keep_s
        return max(0.0, self._idle.when() - asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Cancel loading and the timer, and refuse all waiting requests."""
        self._closed = True
        self._stop_timer()
        if self._loading is not None:
            self._host.cancel_load()
            with contextlib.suppress(EdgeInferError):
                await self._loading
        while self._waiting:
            self._refuse(self._waiting.popleft(), _stopping())

    def _advance(self) -> None:
        """Admit the next requests, or start to load their model."""
        while self._waiting and self._waiting[0].granted.done():  # its client has given up
            self._waiting.popleft()
        if self._loading is not None or self._closed or not self._waiting:
            return
        source = self._waiting[0].source
        if self.is_loaded(source):
            self._grant(source)
        elif not self._users:
            self._loading = asyncio.get_running_loop().create_task(self._load(source))

    async def _load(self, source: str | None) -> None:
        error: Exception | None = None
        try:
            # Keep-alive set for the previous model does not apply.
            self._keep_s = None
            options = self._options if source == self.source else await asyncio.to_thread(self._fitting, source)
            await self._host.load(source, options)
        except EdgeInferError as caught:
            error = _stopping() if self._closed else load_refusal(caught)
        except Exception as caught:  # of any kind: the waiting requests must learn of it
            error = caught
        finally:
            self._loading = None
        if error is None:
            self._grant(source)
        else:
            for request in [request for request in self._waiting if request.source == source]:
                self._waiting.remove(request)
                self._refuse(request, error)
        self._advance()

    def _fitting(self, source: str | None) -> dict[str, Any]:
        """Options for a model other than the served one, whose context may be smaller."""
        context = self._others.get("context")
        if context is None:
            return self._others
        return {**self._others, "context": min(context, edgeinfer.describe(source).context)}

    def _grant(self, source: str | None) -> None:
        for request in [request for request in self._waiting if request.source == source]:
            self._waiting.remove(request)
            if not request.granted.done():
                request.granted.set_result(None)
                self._users += 1

    def _refuse(self, request: _Request, error: Exception) -> None:
        if not request.granted.done():
            request.granted.set_exception(error)

    def _stop_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _unload_idle(self) -> None:
        self._idle = self._keep_s = None
        if not self._users and self._loading is None:
            unloading = asyncio.get_running_loop().create_task(self._unload())
            self._loading = unloading

    async def _unload(self) -> None:
        try:
            # It loads again with its next request.
            with contextlib.suppress(EdgeInferError):
                await self._host.ask(lambda model: model.unload())
        finally:
            self._loading = None
            self._advance()


def _stopping() -> NotReadyError:
    return NotReadyError(HostState("closed"))


def load_refusal(error: EdgeInferError) -> RequestError:
    """The error for requests whose model could not be loaded; also logged."""
    _log.warning("The model of a request could not be loaded. %s", error)
    code = "insufficient_memory" if isinstance(error, BudgetError) else "model_failed"
    return RequestError(f"The model could not be loaded: {error.message}", error.hint, status=503, code=code)
