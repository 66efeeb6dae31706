"""Serves an application on a port with uvicorn, and closes connections whose clients are too slow or too many."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgeinfer.core.errors import Setting, UsageError

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
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_Uvicorn.most_connections,
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


# What a connection waits for, and what changes when that comes on.
_Wait = tuple[str, object]


def _wait_of(connection: H11Protocol) -> _Wait | None:
    """What a connection waits for from its client; None while the server is at work."""
    conn, transport = connection.conn, connection.transport
    if connection.flow.write_paused or transport.is_closing():
        return "take", transport.get_write_buffer_size()
    if conn.their_state is h11.SEND_BODY:
        return "rest" if conn.our_state is h11.DONE else "body", connection.cycle
    return ("head", connection.cycle) if conn.their_state is h11.IDLE else None


class _Uvicorn(uvicorn.Server):
    """uvicorn with callbacks for start and stop, signals as a normal way to end, and limits where it has none.

    A connection waits for a head, a body, the rest of a body whose request was answered, or for its client to read. Of
    too many, those that have waited longest are closed, first those without a request.
    """

    head_seconds: float = 10.0  # for the head of a request, from connecting or from the answer before
    rest_seconds: float = 10.0  # for the rest of a body; a client that is cut off may never read the answer
    take_seconds: float = 60.0  # for a client to read once buffers are full, or before the connection closes
    most_connections: int = 512  # beyond, uvicorn answers 503

    def __init__(
        self, config: uvicorn.Config, begin: Callable[[], None], stopping: Callable[[], Awaitable[object]] | None
    ) -> None:
        super().__init__(config)
        self._begin = begin
        self._stopping = stopping
        self._waits: dict[H11Protocol, tuple[_Wait, float]] = {}  # what each connection waits for, and since when

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        if self._stopping is not None:
            await self._stopping()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        self._close_slow()
        return await super().on_tick(counter)

    def _close_slow(self) -> None:
        now = asyncio.get_running_loop().time()
        connections = [each for each in self.server_state.connections if isinstance(each, H11Protocol)]
        waits = {each: (wait, now) for each in connections if (wait := _wait_of(each)) is not None}
        for connection, before in self._waits.items():
            if connection in waits and waits[connection][0] == before[0]:
                waits[connection] = before
        self._waits = waits
        excess = len(connections) + 1 - min(self.most_connections, _most_files())
        longest = sorted(waits, key=lambda each: (waits[each][0][0] == "body", waits[each][1]))
        for connection in longest[: max(excess, 0)]:
            connection.transport.abort()
        limits = {"head": self.head_seconds, "rest": self.rest_seconds, "take": self.take_seconds}
        for connection, ((kind, _), since) in waits.items():
            if now - since > limits.get(kind, math.inf):
                # What is written already may still be read.
                connection.transport.abort() if kind == "take" else connection.transport.close()

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


def _most_files() -> int:
    """Connections that leave the process half of its open files."""
    try:
        import resource  # absent on Windows, which sets no such limit
    except ImportError:
        return sys.maxsize
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else max(most // 2, 16)
