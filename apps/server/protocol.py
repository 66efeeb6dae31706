"""uvicorn's HTTP protocol with limits on how long clients may take to send and to receive, and refusals in OpenAI's
shape; knows nothing of the application."""

from __future__ import annotations

import asyncio
import json
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgeinfer.openai.errors import RequestError, error_body

__all__ = ["ServerProtocol"]

_INVALID = error_body(RequestError("This is no valid HTTP request.", code="invalid_http"))[1]


class ServerProtocol(H11Protocol):
    """One connection.

    Attributes:
        head_seconds: within which the head of a request must be there, once it has begun or the connection is new.
        rest_seconds: for which what is left of a body is still taken, and dropped, after its request was answered; a
            client that is cut off while it sends may never read the answer.
        rest_pause: seconds between two parts of such a rest; taking it as fast as it comes would cost others.
        take_seconds: for which a client may leave what it was sent, once that has filled the buffers, or the connection
            is to be closed.
        most_connections: that are open at once. Of more, the one is cut off that waited longest for a request.
    """

    head_seconds: float = 10.0
    rest_seconds: float = 10.0
    rest_pause: float = 0.05
    take_seconds: float = 60.0
    most_connections: int = 512
    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _active = 0.0  # by the loop's clock: since when it waits for a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._active = self.loop.time()
        self._close_after(self.head_seconds)
        if len(self.connections) > min(self.most_connections, _most_files()):
            waiting = (c for c in self.connections if isinstance(c, ServerProtocol) and c.waits)
            min(waiting, key=lambda connection: connection._active, default=self).transport.abort()

    @property
    def waits(self) -> bool:
        """Whether no request is being answered here."""
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()
        if self._drops:
            self.transport.pause_reading()
            self.loop.call_later(self.rest_pause, self._go_on)

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep_open()
        self._let_stall(False)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._let_stall(True)

    def resume_writing(self) -> None:
        self._let_stall(self.transport.is_closing())
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._active = self.loop.time()
        if self.transport.is_closing():
            self._let_stall(True)
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.is_closing():
            self._let_stall(True)

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, where no answer has begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = json.dumps(_INVALID).encode("ascii")
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        events = [h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()]
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _drops(self) -> bool:
        """Whether what comes is the rest of a body whose request was answered."""
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _watch(self) -> None:
        """Sets a limit where something has to come, unless there is one, and lifts it where nothing has."""
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            limit = self.head_seconds
        elif self._drops:
            limit = self.rest_seconds
        else:
            self._keep_open()
            return
        if self._deadline is None:
            self._close_after(limit)

    def _let_stall(self, stalls: bool) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        self._stalled = self.loop.call_later(self.take_seconds, self.transport.abort) if stalls else None

    def _close_after(self, seconds: float) -> None:
        self._keep_open()
        self._deadline = self.loop.call_later(seconds, self._close)

    def _close(self) -> None:
        self.transport.close()
        self._let_stall(True)

    def _keep_open(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _most_files() -> int:
    """Connections that leave the process half of the files that it may open."""
    try:
        import resource  # absent on Windows, which sets no such limit
    except ImportError:
        return sys.maxsize
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else max(most // 2, 16)
