"""Streams on the wire: format, clients that leave, fair turns, queue and shutdown."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from edgeinfer.apps.server.security import Security
from tests.apps.server.served import Client, Local, chat_body, served, served_process
from tests.cli import handling
from tests.speculation import needs_builtin
from tests.waiting import TIME_LIMIT

pytestmark = needs_builtin

LONG = chat_body(stream=True, ignore_eos=True, max_tokens=10_000_000)
SHORT = chat_body("Hello", max_tokens=4)


def events(text: str) -> list[Any]:
    """The events of a stream as JSON, or as text."""
    datas = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(data) if data.startswith("{") else data for data in datas]


def text_of(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c != "[DONE]" and c["choices"])


def post_stream(client: httpx.Client | httpx.AsyncClient, server: Client, body: Any) -> Any:
    return client.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=TIME_LIMIT)


def idle(server: Client) -> None:
    for name in ("requests_processing", "requests_deferred"):
        server.wait_for(name, 0)


def test_the_form_of_a_stream(server: Local) -> None:
    answer = server.post("/v1/chat/completions", chat_body(stream=True, max_tokens=5))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert all(part.startswith("data: ") for part in answer.text.strip().split("\n\n"))
    chunks = events(answer.text)
    assert chunks[-1] == "[DONE]"
    assert {chunk["object"] for chunk in chunks[:-1]} == {"chat.completion.chunk"}


def test_a_client_that_leaves_makes_room(endless: Local) -> None:
    before = endless.metric("disconnects_total")
    for _ in range(3):
        with httpx.Client() as client, post_stream(client, endless, LONG) as answer:
            next(answer.iter_text())
        # One reply at a time: this one would wait forever behind one that goes on.
        assert endless.post("/v1/chat/completions", SHORT).status_code == 200
    assert endless.metric("disconnects_total") == before + 3
    idle(endless)


def test_a_client_that_leaves_without_a_stream_makes_room(endless: Local) -> None:
    body = json.dumps(LONG | {"stream": False}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", endless.port)) as connection:
        connection.sendall(head.encode() + body)
        endless.wait_for("requests_processing", 1)
    assert endless.post("/v1/chat/completions", SHORT).status_code == 200
    idle(endless)


def test_a_client_that_leaves_while_it_waits(endless: Local) -> None:
    with httpx.Client() as first, post_stream(first, endless, LONG) as running:
        parts = running.iter_text()  # collected, it would end the stream
        next(parts)
        with socket.create_connection(("127.0.0.1", endless.port)) as second:
            body = json.dumps(SHORT).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            second.sendall(head.encode() + body)
            endless.wait_for("requests_deferred", 1)
        endless.wait_for("requests_deferred", 0)
    idle(endless)


def test_a_full_queue_refuses(endless: Local) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(timeout=TIME_LIMIT) as client, post_stream(client, endless, LONG) as running:
            parts = running.aiter_text()  # collected, it would end the stream
            await anext(parts)
            url = f"{endless.url}/v1/chat/completions"
            waiting = [asyncio.create_task(client.post(url, json=SHORT)) for _ in range(2)]
            await asyncio.to_thread(endless.wait_for, "requests_deferred", 2)
            for body in (SHORT, SHORT | {"stream": True}, SHORT | {"n": 2}):
                refused = await client.post(url, json=body)
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "queue_full"
                assert refused.headers["retry-after"]
            # Of several replies, all are made or none.
            assert await asyncio.to_thread(endless.metric, "requests_deferred") == 2
            await running.aclose()
            assert [(await task).status_code for task in waiting] == [200, 200]

    asyncio.run(run())
    idle(endless)


def test_a_stream_that_waits_is_kept_alive() -> None:
    async def run(server: Local) -> str:
        async with httpx.AsyncClient() as client, post_stream(client, server, LONG) as running:
            running_parts = running.aiter_text()  # collected, it would end the stream
            await anext(running_parts)
            async with post_stream(client, server, SHORT | {"stream": True}) as waiting:
                parts = waiting.aiter_text()
                first: str = await anext(parts)
                assert waiting.status_code == 200
                while ": " not in first.replace("data: ", ""):
                    first += await anext(parts)
                await running.aclose()
                return first + "".join([part async for part in parts])

    security = Security(comment_seconds=0.05)
    with served(security=security, overflow="window", context=128, parallel=1, speculation="off") as server:
        text = asyncio.run(run(server))
    # The head and events that need no model are out at once, then comments, then the reply.
    assert "\n: " in text
    assert events(text)[-1] == "[DONE]"


async def until_cancelled(server: Client, stop: Callable[[], object]) -> str:
    """The text of a stream while the server stops and another request waits."""
    async with httpx.AsyncClient(timeout=TIME_LIMIT) as client, post_stream(client, server, LONG) as answer:
        parts: AsyncIterator[str] = answer.aiter_text()
        texts = [await anext(parts)]
        waiting = asyncio.create_task(client.post(f"{server.url}/v1/chat/completions", json=SHORT))
        await asyncio.to_thread(server.wait_for, "requests_deferred", 1)
        stop()
        texts += [part async for part in parts]
        refused = await waiting
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "cancelled"
        return "".join(texts)


def is_cut_short(text: str) -> bool:
    """Whether the client can tell that the reply is incomplete."""
    return events(text)[-1]["error"]["code"] == "cancelled" and "[DONE]" not in text


def test_the_server_ends_well_with_open_streams() -> None:
    with served(overflow="window", context=128, parallel=1, speculation="off") as server:
        assert is_cut_short(asyncio.run(until_cancelled(server, server.stop)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_with_open_streams(number: int) -> None:
    with handling(signal.SIGHUP), served_process("--overflow", "window", "--parallel", "1") as server:
        text = asyncio.run(until_cancelled(server, lambda: server.process.send_signal(number)))
        assert server.process.wait(timeout=TIME_LIMIT) == 0
        assert server.logged().count("Traceback") == 0
    assert is_cut_short(text)
