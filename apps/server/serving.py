"""Serves an application on a port with uvicorn, limits how slowly clients may send and receive, and refuses in OpenAI's
format."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.openai.errors import RequestError, error_body

# Seconds for open streams to end by themselves once the server stops.
_GRACE = 5
# SIGHUP is sent when the terminal closes; Windows has none.
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Server:
    """An application on a port, any free one for 0; UsageError if it is in use, or the interface cannot be bound.

    `ready` is called with the server's URL once it takes connections. `alongside` runs next to the server; if it fails,
    the server stops and `run` raises its error. `stopping` is called before the server waits for open requests, to end
    what they wait for.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        ready: Callable[[str], None],
        alongside: Callable[[], Awaitable[object]] | None = None,
        stopping: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._socket = _bind(host, port)
        # Fixed choices: other installed packages must not change how the server behaves.
        config = uvicorn.Config(
            app,
            http=ServerProtocol,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE,
        )
        self._ready = ready
        self._alongside = alongside
        self._uvicorn = _Uvicorn(config, self._begin, stopping)
        self._task: asyncio.Task[object] | None = None
        self._error: BaseException | None = None
        self._host = host

    @property
    def url(self) -> str:
        """The address for programs on this machine."""
        port = self._socket.getsockname()[1]
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._host, self._host)
        return f"http://{f'[{name}]' if ':' in name and not name.startswith('[') else name}:{port}"

    def run(self) -> None:
        """Serve until stopped."""
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._socket.close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop the server; safe from any thread."""
        self._uvicorn.should_exit = True

    def _begin(self) -> None:
        self._ready(self.url)
        if self._alongside is not None:
            self._task = asyncio.ensure_future(self._alongside())
            self._task.add_done_callback(self._check)

    def _check(self, task: asyncio.Task[object]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._uvicorn.should_exit:
            self._error = error
            self.stop()


class _Uvicorn(uvicorn.Server):
    """uvicorn with callbacks for start and stop, and with signals as a normal way to end."""

    def __init__(
        self, config: uvicorn.Config, begin: Callable[[], None], stopping: Callable[[], Awaitable[object]] | None
    ) -> None:
        super().__init__(config)
        self._begin = begin
        self._stopping = stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        if self._stopping is not None:
            await self._stopping()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(signum: int, frame: FrameType | None) -> None:
            # The second does not wait for open requests.
            self.force_exit = self.should_exit
            self.should_exit = True

        # A server started by nohup stays when the terminal closes.
        heard = [number for number in _SIGNALS if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, stop) for number in heard}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UsageError(Setting("port", port) + " is out of range.", "Ports are 0 (a free one) to 65535.")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        # IPv4 first: every client tries it.
        found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"{host} is not an address of this machine.", "Give an address or a name of this machine."
        ) from error
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    try:
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows, where SO_REUSEADDR would share the port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()  # otherwise two could bind to one port until the first listens
    except OSError as error:
        bound.close()
        raise _refused(host, port, error) from error
    return bound


def _refused(host: str, port: int, error: OSError) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(f"Port {port} of {host} is in use.", "Stop what uses it, or give another with --port.")
    if error.errno == errno.EACCES:
        return UsageError(f"Port {port} is not yours to use.", "Give one above 1023 with --port.")
    return UsageError(f"Cannot bind to {host}: {error.strerror}.", "Use one of its addresses, such as 127.0.0.1.")


_INVALID = error_body(RequestError("This is not a valid HTTP request.", code="invalid_http"))[1]


class _Connection(h11.Connection):
    """HTTP/1.1 by h11, with the head of an answer sent together with its first body part: separately, clients wake up
    twice."""

    _head = b""

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        data = super().send(event)
        if isinstance(event, h11.Response):
            self._head = data or b""
            return b""
        head, self._head = self._head, b""
        return head + data if head and data is not None else data


class ServerProtocol(H11Protocol):
    """One connection."""

    head_seconds: float = 10.0  # for the head of a request, from its first byte or from connecting
    # For discarding the rest of a body after its request was answered; a client that is cut off while it sends may
    # never read the answer.
    rest_seconds: float = 10.0
    rest_pause: float = 0.05  # seconds between two reads of such a rest, so that it costs others little
    take_seconds: float = 60.0  # for a client to read once buffers are full, or before the connection closes
    most_connections: int = 512  # open at once; beyond, the one that has waited longest for a request is closed
    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _active = 0.0  # when it began to wait for a request, by the loop's clock

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Connection(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._active = self.loop.time()
        self._close_after(self.head_seconds)
        if len(self.connections) > min(self.most_connections, _most_files()):
            waiting = (c for c in self.connections if isinstance(c, ServerProtocol) and c.waits)
            min(waiting, key=lambda connection: connection._active, default=self).transport.abort()

    @property
    def waits(self) -> bool:
        """Whether no request is being answered on this connection."""
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
        """Answer invalid HTTP, unless an answer has started."""
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
        """Whether incoming data is the rest of a body whose request was answered."""
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _watch(self) -> None:
        """Set a deadline if something has to come and none is set; clear it if nothing has to."""
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
    """Connections that leave the process half of its open files."""
    try:
        import resource  # absent on Windows, which sets no such limit
    except ImportError:
        return sys.maxsize
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else max(most // 2, 16)
