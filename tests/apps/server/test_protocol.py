"""Connections that are slow or speak no HTTP: they are closed or refused, and the server goes on. Without a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence

import httpx
import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("uvicorn", reason="the server extra is not installed")

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from edgeinfer.apps.server.app import make_app
from edgeinfer.apps.server.host import ModelHost
from edgeinfer.apps.server.protocol import ServerProtocol
from edgeinfer.apps.server.security import Security
from edgeinfer.apps.server.serving import Server

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@contextlib.contextmanager
def running(security: Security | None = None, routes: Sequence[BaseRoute] = ()) -> Iterator[int]:
    """A server without a model in a thread of its own; its port."""
    ready: queue.Queue[str] = queue.Queue()
    server = Server(make_app(ModelHost(), security or Security(), extra_routes=routes), "localhost", 0, ready=ready.put)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield int(ready.get(timeout=30).rpartition(":")[2])
    finally:
        server.stop()
        thread.join(timeout=30)
        assert not thread.is_alive()


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(30)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerProtocol, "head_seconds", 0.1)
    monkeypatch.setattr(ServerProtocol, "rest_seconds", 0.1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, HEAD + b"X: y"])
def test_heads_that_do_not_come_to_an_end(sent: bytes) -> None:
    with running() as port, connect(port) as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""
        assert httpx.get(f"http://localhost:{port}/health").status_code == 503


@pytest.mark.usefixtures("impatient")
def test_the_second_head_on_a_connection_has_a_limit_too() -> None:
    with running() as port, connect(port) as connection:
        connection.sendall(HEAD + b"\r\n" + HEAD)
        assert read_all(connection).count(b"HTTP/1.1 503") == 1


@pytest.mark.usefixtures("impatient")
def test_a_body_that_does_not_come_is_not_waited_for_after_the_answer() -> None:
    with running() as port, connect(port) as connection:
        head = b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head)
        assert read_all(connection).startswith(b"HTTP/1.1 405")


def test_a_slow_body_is_refused() -> None:
    with running(Security(body_seconds=0.1)) as port, connect(port) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
        connection.sendall(head)
        assert read_all(connection).startswith(b"HTTP/1.1 408")


def test_a_body_that_was_announced_too_large_is_refused_at_once() -> None:
    with running() as port, connect(port) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"
        connection.sendall(head)
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413")


def test_clients_that_send_it_all_the_same_can_read_the_refusal() -> None:
    with running() as port:
        answer = httpx.post(f"http://localhost:{port}/v1/chat/completions", content=b" " * 100_000_000, timeout=60)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        "GET /ü HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
    ],
)
def test_what_is_not_http(sent: bytes) -> None:
    with running() as port, connect(port) as connection:
        connection.sendall(sent)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert httpx.get(f"http://localhost:{port}/health").status_code == 503


def test_a_chunk_that_is_none() -> None:
    with running() as port, connect(port) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        connection.sendall(head)
        assert read_all(connection).startswith(b"HTTP/1.1 400")
        assert httpx.get(f"http://localhost:{port}/health").status_code == 503


def test_websockets_are_not_spoken() -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "eA==",
        "Sec-WebSocket-Version": "13",
    }
    with running() as port:
        assert httpx.get(f"http://localhost:{port}/v1/models", headers=upgrade).status_code == 200


def test_a_client_that_takes_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerProtocol, "take_seconds", 0.1)
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
        assert ended.wait(timeout=30)
