"""Bodies that never end, or are many or large, are dropped in favour of those that arrive. Without a model."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("uvicorn", reason="the server extra is not installed")

from edgeinfer.apps.server.bodies import Upload, Uploads
from edgeinfer.apps.server.security import ApiKey, Security
from edgeinfer.apps.server.serving import ServerProtocol
from edgeinfer.openai.errors import RequestError
from tests.apps.server.test_protocol import SOON, connect, goes_on, read_all, read_some, running

KEY = "a-key-of-some-length"
# Of an attacker and of somebody else.
THERE, ELSEWHERE = "10.0.0.1", "10.0.0.2"


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
    with running(Security(refusal_seconds=SOON)) as port, unfinished(port, 290, head(1000) + b"{"):
        for _ in range(3):
            answer = ask(port)
            # There is no model, which is found out after the body has been read.
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_model")
        assert goes_on(port)


def test_bodies_of_those_without_the_key_are_not_waited_for() -> None:
    with (
        running(Security(api_keys=(ApiKey(KEY),), max_uploads=1)) as port,
        unfinished(port, 1, head(1000, KEY) + b"{") as first,
    ):
        with unfinished(port, 5, head(1000) + b"{") as others:
            for connection in others:
                assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        # The client with the key kept its place.
        first[0].sendall(b" " * 998 + b"}")
        assert b"no_model" in read_some(first[0], b"}}")


def test_those_that_were_given_up_are_told() -> None:
    security = Security(max_uploads=2, refusal_seconds=SOON)
    with (
        running(security) as port,
        unfinished(port, 1, head(1000) + b"{") as first,
        unfinished(port, 2, head(9) + b"{"),
    ):
        assert read_all(first[0]).startswith(b"HTTP/1.1 408")


def test_a_body_must_come_at_some_rate() -> None:
    """A byte now and then does not extend the deadline."""

    async def run() -> None:
        uploads = Uploads(Security(body_seconds=10, body_rate=1000))
        slow, fast = uploads.begin(THERE), uploads.begin(THERE)
        begun = slow.deadline
        for _ in range(10):
            slow.add(1, last=False)
            fast.add(1000, last=False)
        assert slow.deadline == pytest.approx(begun + 0.01)
        assert fast.deadline >= begun + 10

    asyncio.run(run())


async def given_up(upload: Upload) -> bool:
    try:
        async with asyncio.timeout(SOON), upload.waiting():
            await asyncio.get_running_loop().create_future()
    except TimeoutError:
        return upload.deadline == 0.0
    raise AssertionError("unreachable")


def test_whoever_has_the_most_gives_way() -> None:
    async def run() -> None:
        uploads = Uploads(Security(max_uploads=6, max_uploads_each=4))
        honest = uploads.begin(ELSEWHERE)
        hostile = [uploads.begin(THERE) for _ in range(4)]
        hostile[0].add(100_000, last=False)
        # A fifth of one address: the one that came on worst goes, not that which came first.
        hostile.append(uploads.begin(THERE))
        assert [await given_up(upload) for upload in hostile] == [False, True, False, False, False]
        others = [uploads.begin(ELSEWHERE) for _ in range(2)]
        # The seventh in all.
        assert [await given_up(upload) for upload in hostile] == [False, True, True, False, False]
        assert not any([await given_up(upload) for upload in (honest, *others)])

    asyncio.run(run())


def test_many_large_bodies_at_once_are_refused_by_their_sum() -> None:
    async def run() -> None:
        uploads = Uploads(Security(max_bodies=1000, max_body=500))
        large, complete, small = uploads.begin(THERE), uploads.begin(THERE), uploads.begin(ELSEWHERE)
        complete.add(500, last=True)
        large.add(450, last=False)
        # What is complete is kept, what is small as well.
        small.add(100, last=True)
        assert await given_up(large)
        another = uploads.begin(THERE)
        with pytest.raises(RequestError) as refused:
            another.add(450, last=False)
        assert (refused.value.status, refused.value.code) == (503, "server_busy")
        complete.end()
        uploads.begin(THERE).add(450, last=True)

    asyncio.run(run())


def test_of_large_bodies_one_is_read_at_a_time() -> None:
    async def run() -> None:
        uploads, order = Uploads(Security()), list[str]()
        large, next_large, small = (uploads.begin(THERE) for _ in range(3))
        for upload, size in ((large, 10**6), (next_large, 10**6), (small, 100)):
            upload.add(size, last=True)

        async def read(upload: Upload, name: str) -> None:
            async with upload.read():
                order.append(name)

        async with large.read():
            order.append("large")
            second = asyncio.create_task(read(next_large, "next large"))
            await read(small, "small")
        await second
        assert order == ["large", "small", "next large"]

    asyncio.run(run())


def test_of_too_many_connections_the_idle_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerProtocol, "most_connections", 8)
    with running() as port, unfinished(port, 1, head(1000) + b"{") as asking:
        assert goes_on(port)
        with unfinished(port, 20, b"") as idle:
            assert goes_on(port)
            with contextlib.suppress(ConnectionError):
                assert read_all(idle[0]) == b""
        # One that has a request is kept.
        asking[0].sendall(b" " * 998 + b"}")
        assert b"no_model" in read_some(asking[0], b"}}")
