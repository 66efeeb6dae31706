"""Streams as they come over the wire: their form, their end when a client leaves, fair turns, queue and shutdown."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.apps.server.served import Served, chat_body, served
from tests.speculation import needs_builtin

pytestmark = needs_builtin

LONG = chat_body(stream=True, ignore_eos=True, max_tokens=10_000_000)
SHORT = chat_body("Hello", max_tokens=4)


def events(text: str) -> list[Any]:
    """The events of a stream: JSON, or what is none as it is."""
    datas = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(data) if data.startswith("{") else data for data in datas]


def text_of(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c != "[DONE]" and c["choices"])


def post_stream(client: httpx.Client | httpx.AsyncClient, server: Served, body: Any) -> Any:
    return client.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60)


def idle(server: Served) -> None:
    """Waits until the server runs no reply; the caller's test runs out of time if that never comes."""
    while server.metric("requests_processing") or server.metric("requests_deferred"):
        pass


def test_the_form_of_a_stream(server: Served) -> None:
    answer = server.post("/v1/chat/completions", chat_body(stream=True, max_tokens=5))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert all(part.startswith("data: ") for part in answer.text.strip().split("\n\n"))
    chunks = events(answer.text)
    assert chunks[-1] == "[DONE]"
    assert {chunk["object"] for chunk in chunks[:-1]} == {"chat.completion.chunk"}


def test_a_client_that_leaves_makes_room(endless: Served) -> None:
    before = endless.metric("disconnects_total")
    for _ in range(3):
        with httpx.Client() as client, post_stream(client, endless, LONG) as answer:
            next(answer.iter_text())
        # One reply at a time: this one would wait forever behind one that goes on.
        assert endless.post("/v1/chat/completions", SHORT).status_code == 200
    assert endless.metric("disconnects_total") == before + 3
    idle(endless)


def test_a_client_that_leaves_without_a_stream_makes_room(endless: Served) -> None:
    host, port = endless.url.removeprefix("http://").split(":")
    body = json.dumps(LONG | {"stream": False}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        while not endless.metric("requests_processing"):
            pass
    assert endless.post("/v1/chat/completions", SHORT).status_code == 200
    idle(endless)


def test_a_client_that_leaves_while_it_waits(endless: Served) -> None:
    with httpx.Client() as first, post_stream(first, endless, LONG) as running:
        parts = running.iter_text()  # collected, it would end the stream
        next(parts)
        with socket.create_connection(("127.0.0.1", int(endless.url.rpartition(":")[2]))) as second:
            body = json.dumps(SHORT).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            second.sendall(head.encode() + body)
            while endless.metric("requests_deferred") != 1:
                pass
        while endless.metric("requests_deferred"):
            pass
    idle(endless)


def test_a_full_queue_refuses(endless: Served) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(timeout=60) as client, post_stream(client, endless, LONG) as running:
            parts = running.aiter_text()  # collected, it would end the stream
            await anext(parts)
            url = f"{endless.url}/v1/chat/completions"
            waiting = [asyncio.create_task(client.post(url, json=SHORT)) for _ in range(2)]
            while await asyncio.to_thread(endless.metric, "requests_deferred") != 2:
                pass
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
    async def run(server: Served) -> str:
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

    with served("--overflow", "window", "-c", "128", "--parallel", "1", "--sse-ping-interval", "0.05") as server:
        text = asyncio.run(run(server))
    # The head and events that need no model are out at once, then comments, then the reply.
    assert "\n: " in text
    assert events(text)[-1] == "[DONE]"


async def lines(answer: httpx.Response, name: str, into: list[str]) -> None:
    async for line in answer.aiter_lines():
        if line:
            into.append(name)


def test_a_short_reply_need_not_wait_for_a_long_one(server: Served) -> None:
    ended: list[str] = []

    async def one(client: httpx.AsyncClient, name: str, body: Any, begun: asyncio.Event | None = None) -> str:
        async with post_stream(client, server, body) as answer:
            text = ""
            async for part in answer.aiter_text():
                text += part
                if begun is not None:
                    begun.set()
        ended.append(name)
        return text_of(events(text))

    async def run() -> tuple[str, str]:
        begun = asyncio.Event()
        long = chat_body("A long story.", stream=True, ignore_eos=True, max_tokens=900)
        async with httpx.AsyncClient(timeout=60) as client:
            task = asyncio.create_task(one(client, "long", long, begun))
            await begun.wait()
            short = await one(client, "short", SHORT | {"stream": True})
            return await task, short

    long, short = asyncio.run(run())
    assert ended == ["short", "long"]
    alone = [chat_body("A long story.", stream=True, ignore_eos=True, max_tokens=900), SHORT | {"stream": True}]
    expected = [text_of(events(server.post("/v1/chat/completions", body).text)) for body in alone]
    assert [long, short] == expected


def test_streams_take_turns(server: Served) -> None:
    order: list[str] = []

    async def one(client: httpx.AsyncClient, name: str) -> None:
        body = chat_body(f"Story {name}.", stream=True, ignore_eos=True, max_tokens=400)
        async with post_stream(client, server, body) as answer:
            await lines(answer, name, order)

    async def run() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await asyncio.gather(*(one(client, name) for name in "abcd"))

    asyncio.run(run())
    # Nobody is through before everybody has begun.
    first_end = min(len(order) - 1 - order[::-1].index(name) for name in "abcd")
    assert {order.index(name) < first_end for name in "abcd"} == {True}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_well_with_open_streams(number: int) -> None:
    async def run(server: Served) -> list[str]:
        async with httpx.AsyncClient(timeout=60) as client, post_stream(client, server, LONG) as answer:
            parts: AsyncIterator[str] = answer.aiter_text()
            texts = [await anext(parts)]
            waiting = asyncio.create_task(client.post(f"{server.url}/v1/chat/completions", json=SHORT))
            while await asyncio.to_thread(server.metric, "requests_deferred") != 1:
                pass
            server.process.send_signal(number)
            texts += [part async for part in parts]
            refused = await waiting
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "cancelled"
            return texts

    with served("--overflow", "window", "-c", "128", "--parallel", "1") as server:
        text = "".join(asyncio.run(run(server)))
        assert server.process.wait(timeout=30) == 0
        assert server.logged().count("Traceback") == 0
    # The client can tell that the reply is not whole.
    assert events(text)[-1]["error"]["code"] == "cancelled"
    assert "[DONE]" not in text
