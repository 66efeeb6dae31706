"""Asynchronous replies: the same text beside a running event loop, in turn, and ended when nobody waits for them."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import PromptError, UsageError

PROMPT = "Once upon a time there was a little dog."
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "speculation": "off"}
SHORT: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


def test_texts_are_those_of_the_other_methods_and_the_loop_goes_on(model: edgeinfer.Model) -> None:
    expected = model.generate(PROMPT, **LONG)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def ask() -> list[edgeinfer.Result]:
        ticking = asyncio.create_task(tick())
        replies = await asyncio.gather(*(model.agenerate(PROMPT, **LONG) for _ in range(3)))
        stream = model.astream(PROMPT, **LONG)
        text = "".join([chunk.text async for chunk in stream])
        ticking.cancel()
        assert text == expected.text
        return [*replies, stream.result]

    before = threading.active_count()
    assert {reply.token_ids for reply in asyncio.run(ask())} == {expected.token_ids}
    assert ticks > 100
    assert threading.active_count() <= before + 1, "all replies of a model are made on one thread"
    assert model.generate(PROMPT, **SHORT).token_ids == expected.token_ids[:12]


def test_a_conversation(model: edgeinfer.Model) -> None:
    plain, chat = model.chat("Be brief."), model.chat("Be brief.")
    expected = [plain.send(text, **SHORT).text for text in ("Hello", "And now?")]

    async def talk() -> list[str]:
        first = await chat.asend("Hello", **SHORT)
        async with chat.astream("And now?", **SHORT) as stream:
            return [first.text, "".join([chunk.text async for chunk in stream])]

    assert asyncio.run(talk()) == expected
    assert chat.messages == plain.messages


def test_replies_end_when_nobody_waits_for_them(model: edgeinfer.Model) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(model.agenerate(PROMPT, **LONG))
        waiting = asyncio.create_task(model.agenerate(PROMPT, **LONG))
        while not task.done() and model._turns._running is None:
            await asyncio.sleep(0)
        for one in (waiting, task):
            one.cancel()
        assert [type(one) for one in await asyncio.gather(task, waiting, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 2

    async def closed() -> edgeinfer.Result:
        async with model.astream(PROMPT, **LONG) as stream:
            async for _ in stream:
                break
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return stream.result

    async def dropped() -> int:
        async for _ in model.astream(PROMPT, **LONG):
            break
        gc.collect()
        return (await model.agenerate(PROMPT, **SHORT)).usage.completion_tokens

    async def never_begun() -> None:
        stream = model.astream(PROMPT, **LONG)
        await stream.aclose()
        with pytest.raises(UsageError, match="not finished"):
            _ = stream.result

    asyncio.run(cancelled())
    asyncio.run(never_begun())
    result = asyncio.run(closed())
    assert result.finish_reason == "cancelled" and result.usage.completion_tokens < 400
    assert asyncio.run(dropped()) == 12
    assert model.generate(PROMPT, **SHORT).finish_reason == "length"


def test_errors_come_out_as_they_are(model: edgeinfer.Model) -> None:
    async def ask() -> None:
        with pytest.raises(UsageError, match=r"Unknown generation option 'heat'"):
            await model.agenerate(PROMPT, heat=1)  # type: ignore[call-arg]
        with pytest.raises(PromptError, match="empty"):
            async for _ in model.astream("", **SHORT):
                pass
        with pytest.raises(PromptError, match="empty"):
            await model.chat().asend(" ")
        assert (await model.agenerate(PROMPT, **SHORT)).text

    asyncio.run(ask())


def test_loading(small_bundle: Path) -> None:
    async def ask() -> str:
        with await edgeinfer.aload(small_bundle, threads=1, remember=False) as model:
            reply = await model.agenerate(PROMPT, **SHORT)
        with pytest.raises(UsageError, match="closed"):
            await model.agenerate(PROMPT, **SHORT)
        return reply.text

    assert asyncio.run(ask())
