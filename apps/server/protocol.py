"""uvicorn's HTTP protocol with limits on how long clients may take to send and to receive, and refusals in OpenAI's
shape; knows nothing of the application."""

from __future__ import annotations

import asyncio
import json

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
        take_seconds: for which a client may leave what it was sent, once that has filled the buffers.
    """

    head_seconds: float = 10.0
    rest_seconds: float = 10.0
    take_seconds: float = 60.0
    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_after(self.head_seconds)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep_open()
        self._let_stall(False)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._let_stall(True)

    def resume_writing(self) -> None:
        self._let_stall(False)
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

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

    def _watch(self) -> None:
        """Sets a limit where something has to come, unless there is one, and lifts it where nothing has."""
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            limit = self.head_seconds
        elif self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
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
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _keep_open(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
