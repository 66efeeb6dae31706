"""A simulated network link between two programs of this machine, with a round-trip time, a rate and losses."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Self

_READ = 65_536
_PATIENCE_S = 60


class Link:
    """Forwards connections to a port of this machine on a thread of its own, late (`rtt_ms` for a round trip) and
    slowly (`mbits` million bits per second each way), and cuts each connection after so many bytes of answers, one cut
    after the other; later ones are not cut.

    `url` is of the server through the link; `sent` and `received` are bytes to and from the server.
    """

    def __init__(
        self, port: int, *, rtt_ms: float = 0.0, mbits: float | None = None, cuts: Iterator[int] | None = None
    ) -> None:
        self._port, self._delay_s = port, rtt_ms / 2e3
        self._rate = None if mbits is None else mbits * 1e6 / 8
        self._cuts = cuts or iter(())
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._open: set[asyncio.WriteTransport] = set()
        self.url = ""
        self.sent = self.received = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait(timeout=_PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cut all connections and accept no more."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended.set_result, None)
            self._thread.join(timeout=_PATIENCE_S)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._ended: asyncio.Future[None] = self._loop.create_future()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._ended
        server.close()
        for transport in tuple(self._open):
            transport.abort()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either side ends it, or it is cut."""
        cut = next(self._cuts, None)
        there_reader, there = await asyncio.open_connection("127.0.0.1", self._port)
        ends = {writer.transport, there.transport}
        self._open |= ends
        ways = [asyncio.ensure_future(self._pass_on(reader, there, None))]
        ways.append(asyncio.ensure_future(self._pass_on(there_reader, writer, cut)))
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in ends:
                end.abort()
            self._open -= ends

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: int | None) -> None:
        """Forward data as the link allows, at most `cut` bytes."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivering = asyncio.ensure_future(self._deliver(waiting, writer))
        free = 0.0
        try:
            while data := await reader.read(_READ):
                if cut is not None:
                    data, cut = data[:cut], cut - len(data)
                free = max(self._loop.time(), free) + (0.0 if self._rate is None else len(data) / self._rate)
                waiting.put_nowait((free + self._delay_s, data))
                if cut is not None and cut <= 0:
                    break
            waiting.put_nowait((free, b""))
            await delivering
        finally:
            delivering.cancel()

    async def _deliver(self, waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await waiting.get()
            if not data:
                return
            if (left := due - self._loop.time()) > 0:
                await asyncio.wait({self._ended}, timeout=left)
            writer.write(data)
            await writer.drain()
            if writer.get_extra_info("peername")[1] == self._port:
                self.sent += len(data)
            else:
                self.received += len(data)
