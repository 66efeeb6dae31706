"""Bodies that never end, or are many or large, keep no others out. Without a model."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("uvicorn", reason="the server extra is not installed")

from starlette.responses import PlainTextResponse
from starlette.types import Message

from edgeinfer.apps.server.guard import Guard, _Body
from edgeinfer.apps.server.metrics import Metrics
from edgeinfer.apps.server.security import ApiKey, Security
from edgeinfer.apps.server.serving import _Uvicorn
from edgeinfer.openai.errors import RequestError
from tests.apps.server.test_protocol import connect, goes_on, read_some, running
from tests.waiting import TIME_LIMIT

KEY = "a-key-of-some-length"


def head(length: int, key: str | None = None) -> bytes:
    authorization = "" if key is None else f"Authorization: Bearer {key}\r\n"
    line = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{authorization}Content-Length: {length}\r\n\r\n"
    return line.encode()


@contextlib.contextmanager
def unfinished(port: int, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Connections that sent a part of a body."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(port)) for _ in range(count)]
        for connection in connections:
            connection.sendall(sent)
        yield connections


def ask(port: int, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(f"http://localhost:{port}/v1/completions", json={"prompt": "Hello"}, headers=headers, timeout=30)


def test_bodies_that_never_end_keep_nobody_out() -> None:
    with running() as port, unfinished(port, 290, head(1000) + b"{"):
        for _ in range(3):
            answer = ask(port)
            # There is no model, which is found out after the body has been read.
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_model")
        assert goes_on(port)


def test_bodies_of_those_without_the_key_are_not_waited_for() -> None:
    with (
        running(Security(api_keys=(ApiKey(KEY),))) as port,
        unfinished(port, 1, head(1000, KEY) + b"{") as first,
    ):
        with unfinished(port, 5, head(1000) + b"{") as others:
            for connection in others:
                assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        # The client with the key kept its place.
        first[0].sendall(b" " * 998 + b"}")
        assert b"no_model" in read_some(first[0], b"}}")


def test_a_body_must_come_at_some_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not extend the deadline, and a body at the right rate has all the time that it takes."""

    async def run(parts: int, nbytes: int) -> str | None:
        loop, now, deadlines = asyncio.get_running_loop(), 0.0, list[float]()

        async def receive() -> Message:
            nonlocal parts, now
            parts, now = parts - 1, now + 1.0
            if now >= deadlines[-1]:
                raise TimeoutError
            return {"type": "http.request", "body": b"x" * nbytes, "more_body": parts > 0}

        @contextlib.asynccontextmanager
        async def timeout_at(deadline: float) -> AsyncIterator[None]:
            deadlines.append(deadline)
            yield

        monkeypatch.setattr(loop, "time", lambda: 0.0)
        monkeypatch.setattr(asyncio, "timeout_at", timeout_at)
        guard = Guard(PlainTextResponse("unused"), Security(body_seconds=10, body_rate=1000), Metrics())
        body = _Body(receive, {"type": "http", "headers": []}, guard)
        try:
            while (await body.receive())["more_body"]:
                pass
        except RequestError as error:
            return error.code
        return "whole"

    assert [asyncio.run(run(100, nbytes)) for nbytes in (1, 1000)] == ["request_timeout", "whole"]


def test_many_large_bodies_at_once_are_refused_by_their_sum() -> None:
    async def run() -> None:
        guard = Guard(PlainTextResponse("unused"), Security(max_bodies=200_000, max_body=100_000), Metrics())
        bodies: list[_Body] = []

        async def receive(nbytes: int) -> None:
            async def part() -> Message:
                return {"type": "http.request", "body": b"x" * nbytes, "more_body": False}

            bodies.append(_Body(part, {"type": "http", "headers": []}, guard))
            await bodies[-1].receive()

        await receive(100_000)
        await receive(100_000)
        with pytest.raises(RequestError) as refused:
            await receive(70_000)
        assert (refused.value.status, refused.value.code) == (503, "server_busy")
        # Small ones always find room, and large ones once others have been read.
        await receive(1000)
        async with bodies[0].read():
            pass
        bodies[2].end()
        await receive(70_000)
        for body in bodies:
            body.end()
        assert guard.bytes_in_hand == 0

    asyncio.run(run())


def test_of_too_many_connections_the_idle_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Uvicorn, "most_connections", 8)
    with running() as port, unfinished(port, 1, head(1000) + b"{") as asking:
        assert goes_on(port)
        with unfinished(port, 20, b"") as idle:
            assert goes_on(port)
            assert select.select(idle, [], [], TIME_LIMIT)[0]
        # One that has a request is kept.
        asking[0].sendall(b" " * 998 + b"}")
        assert b"no_model" in read_some(asking[0], b"}}")
