"""Streamed answers: events and their framing, the stream of a request, and a feed that many clients follow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgeinfer.apps.server.errors import ClientGoneError

Work = Coroutine[Any, Any, None]

_HEAD = (
    (b"cache-control", b"no-cache"),
    # Otherwise nginx buffers events.
    (b"x-accel-buffering", b"no"),
)
# JSON does not escape these, and some clients take them for line ends.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


@dataclass(frozen=True)
class Event:
    """A JSON object with the name of its kind, which may be empty."""

    data: Mapping[str, Any]
    kind: str = ""

    def encoded(self) -> bytes:
        """The event in the format of server-sent events."""
        name = f"event: {self.kind}\n" if self.kind else ""
        return f"{name}data: {_written(self.data)}\n\n".encode()


def _written(data: Mapping[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)


@dataclass(frozen=True)
class Framing:
    """How the objects of a streamed answer are written."""

    media_type: str
    encode: Callable[[Mapping[str, Any]], bytes]
    comment: bytes = b""  # sent while there is nothing else to send; empty where clients could not skip it
    last: bytes = b""  # sent after the last object


# OpenAI's end mark of completions; streams of named events have none.
SERVER_SENT = Framing(
    "text/event-stream; charset=utf-8", lambda data: Event(data).encoded(), b": still here\n\n", b"data: [DONE]\n\n"
)
JSON_LINES = Framing("application/x-ndjson", lambda data: f"{_written(data)}\n".encode())


class EventStream:
    """Write events to a client. The head goes out with the first, so that earlier errors still become a status. After
    `comment_seconds` of silence `comment` sends a comment."""

    def __init__(
        self,
        send: Send,
        comment_seconds: float,
        *,
        opening: Sequence[Mapping[str, Any]] = (),
        framing: Framing = SERVER_SENT,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._send = send
        self._comment_seconds = comment_seconds
        self._framing = framing
        self._opening = b"".join(map(framing.encode, opening))
        fields = {"content-type": framing.media_type, **(headers or {})}
        self._head = [*_HEAD, *((name.encode("ascii"), value.encode("ascii")) for name, value in fields.items())]
        self._writing = asyncio.Lock()
        self._time = asyncio.get_running_loop().time
        self._written = self._time()
        self.started = False  # whether the head was sent

    async def start(self) -> None:
        """Send the head before there is an event."""
        await self._write(b"")

    async def events(self, events: Iterable[Event]) -> None:
        await self._write_some(event.encoded() for event in events)

    async def objects(self, objects: Iterable[Mapping[str, Any]]) -> None:
        await self._write_some(map(self._framing.encode, objects))

    async def write(self, encoded: bytes) -> None:
        await self._write(encoded)

    async def end(self, last: bytes = b"") -> None:
        """Send some bytes and end the answer."""
        await self._write(last, more=False)

    async def comment(self) -> None:
        """Send a comment after each period of silence, until cancelled."""
        while True:
            rest = self._comment_seconds - (self._time() - self._written)
            if rest > 0:
                await asyncio.sleep(rest)
            elif self._framing.comment:
                await self._write(self._framing.comment)
            else:
                return

    async def _write_some(self, parts: Iterable[bytes]) -> None:
        data = b"".join(parts)
        if data:
            await self._write(data)

    async def _write(self, data: bytes, more: bool = True) -> None:
        # One at a time: replies and comments write from tasks of their own.
        async with self._writing:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._head})
                data = self._opening + data
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._written = self._time()
        # Sending need not suspend, but the loop must learn of a client that hung up before more is sent.
        await asyncio.sleep(0)


class EventFeed:
    """Pass events to all readers. A slow reader gets the latest event of each subject, and none that it replaced."""

    def __init__(self) -> None:
        self._latest: dict[str, Event] = {}
        self._readers: list[tuple[dict[str, Event], asyncio.Event]] = []
        self._closed = False

    def publish(self, kind: str, data: Mapping[str, Any], subject: str = "") -> None:
        for waiting in (self._latest, *(waiting for waiting, _ in self._readers)):
            waiting[f"{kind} {subject}"] = Event(data, kind)
        self._wake()

    def close(self) -> None:
        """End all readers."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        for _, ready in self._readers:
            ready.set()

    async def read(self) -> AsyncGenerator[Event, None]:
        """Yield the latest event of every subject, then new ones."""
        reader = waiting, ready = dict(self._latest), asyncio.Event()
        ready.set()
        self._readers.append(reader)
        try:
            while not self._closed:
                await ready.wait()
                ready.clear()
                taken = list(waiting.values())
                waiting.clear()
                for event in taken:
                    yield event
        finally:
            self._readers.remove(reader)


class StreamedResponse(Response):
    """An answer that writes itself as it is generated."""

    def __init__(self, write: Callable[[Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._write(receive, send)


async def while_connected(receive: Receive, work: Work, *also: Work) -> None:
    """Run `work` to its end, or until the client hangs up."""
    try:
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(other) for other in (_watch(receive), *also)]
            await group.create_task(work)
            for other in others:
                other.cancel()
    except ExceptionGroup as errors:
        raise first_error(errors) from None


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError


def first_error(errors: ExceptionGroup[Exception]) -> Exception:
    """Return the error that came first; the others followed from it."""
    error: Exception = errors
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
