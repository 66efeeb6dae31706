"""Slow connections and invalid HTTP are closed or refused, and the server goes on. Without a model."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence

import httpx
import pytest

from tests.tables import each_row

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("uvicorn", reason="the server extra is not installed")

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from edgeinfer.apps.server.app import make_app
from edgeinfer.apps.server.host import ModelHost
from edgeinfer.apps.server.security import Security
from edgeinfer.apps.server.serving import Server, _Uvicorn
from tests.waiting import TIME_LIMIT

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@contextlib.contextmanager
def running(security: Security | None = None, routes: Sequence[BaseRoute] = ()) -> Iterator[int]:
    """A server without a model in a thread; its port."""
    ready: queue.Queue[str] = queue.Queue()
    server = Server(make_app(ModelHost(), security or Security(), extra_routes=routes), "localhost", 0, ready=ready.put)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield int(ready.get(timeout=TIME_LIMIT).rpartition(":")[2])
    finally:
        server.stop()
        thread.join(timeout=TIME_LIMIT)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server with the usual limits."""
    with running() as port:
        yield port


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(TIME_LIMIT)
    return connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def read_some(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


def goes_on(port: int) -> bool:
    """Whether the server answers."""
    return httpx.get(f"http://localhost:{port}/health", timeout=TIME_LIMIT).status_code == 503


# Of what a client may take its time for, in seconds: it takes for ever here.
SOON = 0.05


@each_row("sent", [b"", b"GET", HEAD, HEAD + b"X: y"])
def test_heads_that_do_not_come_to_an_end(port: int, sent: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Uvicorn, "head_seconds", SOON)
        with connect(port) as connection:
            # However late this comes, no head is whole.
            with contextlib.suppress(ConnectionError):
                connection.sendall(sent)
            with contextlib.suppress(ConnectionError):
                assert read_all(connection) == b""
    assert goes_on(port)


def test_the_second_head_on_a_connection_has_a_limit_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(port) as connection:
        connection.sendall(HEAD + b"\r\n")
        assert read_some(connection, b"}}").startswith(b"HTTP/1.1 503")
        monkeypatch.setattr(_Uvicorn, "head_seconds", SOON)
        connection.sendall(HEAD)
        assert read_all(connection) == b""


def test_a_body_that_does_not_come_is_not_waited_for_after_the_answer(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Uvicorn, "rest_seconds", SOON)
    with connect(port) as connection:
        head = b"POST /v1/health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head)
        assert read_all(connection).startswith(b"HTTP/1.1 405")


def test_clients_that_send_it_all_the_same_can_read_the_refusal(port: int) -> None:
    # More than the buffers of a connection hold.
    content = b" " * 20_000_000
    answer = httpx.post(f"http://localhost:{port}/v1/chat/completions", content=content, timeout=TIME_LIMIT)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


@each_row(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        "GET /ü HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http(port: int, sent: bytes) -> None:
    with connect(port) as connection:
        connection.sendall(sent)
        assert read_all(connection).startswith(b"HTTP/1.1 400")
    assert goes_on(port)


def test_websockets_are_not_spoken(port: int) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "eA==",
        "Sec-WebSocket-Version": "13",
    }
    assert httpx.get(f"http://localhost:{port}/v1/models", headers=upgrade).status_code == 200


def test_a_client_that_takes_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Uvicorn, "take_seconds", SOON)
    ended = threading.Event()

    async def much() -> AsyncIterator[bytes]:
        try:
            while True:
                await asyncio.sleep(0)
                yield b"x" * 100_000
        finally:
            ended.set()

    async def endpoint(_: Request) -> Response:
        return StreamingResponse(much())

    with running(routes=[Route("/much", endpoint)]) as port, connect(port) as connection:
        connection.sendall(b"GET /much HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ended.wait(timeout=TIME_LIMIT)
