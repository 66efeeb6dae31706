"""Serves an application on a port with uvicorn until it is told to stop; knows nothing of what is served."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from edgeinfer.apps.server.protocol import ServerProtocol
from edgeinfer.errors import UsageError

__all__ = ["Server", "serve"]

# Seconds for open streams to end by themselves once the server stops.
_GRACE = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(app: ASGIApp, host: str, port: int, *, ready: Callable[[str], None]) -> None:
    """Serves until SIGINT, SIGTERM, or a call of `Server.stop`; arguments and errors as of `Server`."""
    Server(app, host, port, ready=ready).run()


class Server:
    """An application on a port.

    Args:
        host: interface: an address or a name.
        port: 0 picks a free one.
        ready: called with the server's URL once it takes connections.
        alongside: runs beside the server; if it fails, the server stops and `run` raises its error.
        stopping: called when the server is told to stop, before it waits for open requests: what they wait for should
            come to its end.

    Raises:
        UsageError: the port is in use, or the interface cannot be bound.
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
        # One protocol for all: what else is installed must not change how the server behaves.
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
        """Where the server is, as people on this machine address it."""
        port = self._socket.getsockname()[1]
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._host, self._host)
        return f"http://{f'[{name}]' if ':' in name and not name.startswith('[') else name}:{port}"

    def run(self) -> None:
        """Serves until it is told to stop.

        Raises:
            Exception: what `alongside` raised.
        """
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._socket.close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Tells the server to stop; any thread may."""
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
    """uvicorn, which tells when it takes connections and when it stops, and takes signals for the normal way to end."""

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

        previous = {number: signal.signal(number, stop) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UsageError(f"port={port} is out of range.", "Ports are 0 (a free one) to 65535.")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        # Where a name has addresses of both kinds, the older: every client tries it.
        found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"There is no interface {host}.", "Give an address or a name of this machine.") from error
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    try:
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows, where SO_REUSEADDR would share the port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()  # or two could be bound to one port until the first listens
    except OSError as error:
        bound.close()
        raise _refused(host, port, error) from error
    return bound


def _refused(host: str, port: int, error: OSError) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(f"Port {port} of {host} is in use.", "Stop what uses it, or give another with --port.")
    if error.errno == errno.EACCES:
        return UsageError(f"Port {port} is not yours to use.", "Give one above 1023 with --port.")
    return UsageError(f"Cannot bind to {host}: {error.strerror}.", "Give an address of this machine, as 127.0.0.1.")
