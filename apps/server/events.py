"""A stream of server-sent events: its head, its events, comments while there are none, its errors; knows nothing of
how events come about."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Send

from edgeinfer.apps.server.errors import error_answer
from edgeinfer.apps.server.security import Security

__all__ = ["EventStream"]

_HEAD = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise hold events back.
    (b"x-accel-buffering", b"no"),
)
# JSON leaves these as they are, and some clients take them for ends of lines.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


class EventStream:
    """Writes events to a client. The head goes out with the first, so that what fails before can still be answered
    with a status.

    Args:
        send: of the request.
        security: says how long a client may take, and when to comment.
        named: whether each event's `type` stands before it, as of OpenAI's responses.
        opening: events that come first.
    """

    def __init__(
        self, send: Send, security: Security, *, named: bool = False, opening: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._send = send
        self._security = security
        self._named = named
        self._opening = opening
        self._writing = asyncio.Lock()
        self._time = asyncio.get_running_loop().time
        self._written = self._time()
        self.begun = False

    async def events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Sends events."""
        if events:
            await self._write(b"".join(map(self._event, events)))

    async def end(self, last: bytes = b"") -> None:
        """Sends some bytes, and that nothing follows."""
        await self._write(last, more=False)

    async def fail(self, error: Exception) -> None:
        """Sends what went wrong, as the stream's end."""
        body = error_answer(error)[1]
        await self.end(self._event({"type": "error"} | body if self._named else body))

    async def comment(self) -> None:
        """Sends a comment whenever nothing else was sent for a while; goes on until it is cancelled."""
        while True:
            rest = self._security.comment_seconds - (self._time() - self._written)
            if rest <= 0:
                await self._write(b": still here\n\n")
            else:
                await asyncio.sleep(rest)

    async def _write(self, data: bytes, more: bool = True) -> None:
        # One at a time: of several replies, and of comments, each calls in its own task.
        async with self._writing:
            if not self.begun:
                self.begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEAD)})
                data = b"".join(map(self._event, self._opening)) + data
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._written = self._time()
        # Sending need not suspend; the loop must get to hear of a client that hung up before more is sent to nobody.
        await asyncio.sleep(0)

    def _event(self, event: Mapping[str, Any]) -> bytes:
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)
        name = f"event: {event['type']}\n" if self._named else ""
        return f"{name}data: {data}\n\n".encode()
