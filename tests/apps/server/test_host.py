"""The host of a model: turns of replies, questions in between, loading, cancelling."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

import edgeinfer
from edgeinfer.apps.server.completions import _drop, make_replies
from edgeinfer.apps.server.host import BusyError, HostReply, LoadCancelledError, ModelHost, NotReadyError, with_room
from edgeinfer.apps.server.security import Security
from edgeinfer.apps.server.service import Service
from edgeinfer.core.errors import BudgetError, ModelError, PromptError, UsageError
from edgeinfer.model_thread import ReplyQueue
from tests.apps.server.served import held, measured_turns
from tests.factories import make_bigram_bundle
from tests.speculation import needs_builtin
from tests.waiting import TIME_LIMIT, wait_until

PROMPTS = [f"Once upon a time there was a {who}." for who in ("dog", "cat", "girl", "boy", "frog")]
OPTIONS: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 3}


def hosted(
    work: Callable[[ModelHost], Awaitable[None]], model: str | None = None, parallel: int = 8, **options: Any
) -> None:
    async def run() -> None:
        host = ModelHost(parallel=parallel, queue=16)
        try:
            await host.load(model, {"context": 256, "threads": 1, "speculation": "off"} | options)
            await work(host)
        finally:
            await host.close()
            await host.close()

    asyncio.run(asyncio.wait_for(run(), TIME_LIMIT))


def ask_for(host: ModelHost, prompt: str, owner: str = "somebody", **options: Any) -> HostReply:
    return host.submit(lambda model: model.stream(prompt, **OPTIONS | options), owner)


async def text_of(reply: HostReply) -> str:
    return "".join([chunk.text async for chunk in reply])


@needs_builtin
@pytest.mark.parametrize(("parallel", "speculation"), [(1, "off"), (2, "auto"), (8, "off")])
def test_replies_have_the_texts_they_would_have_alone(parallel: int, speculation: str) -> None:
    async def work(host: ModelHost) -> None:
        alone = await host.ask(lambda model: [model.generate(prompt, **OPTIONS).text for prompt in PROMPTS])
        with held(host):
            replies = [ask_for(host, prompt, prompt) for prompt in PROMPTS]
            assert (host.running, host.waiting) == (min(parallel, 5), max(0, 5 - parallel))
        assert await asyncio.gather(*map(text_of, replies)) == alone
        assert [reply.result.text for reply in replies if reply.result] == alone
        assert host.running == host.waiting == 0

    hosted(work, parallel=parallel, speculation=speculation)


@needs_builtin
def test_replies_take_turns_where_the_model_cannot_have_them_share_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: edgeinfer.Model, parallel: int) -> edgeinfer.ReplyBatch:
        raise BudgetError("There is no room.", "Free memory.")

    async def work(host: ModelHost) -> None:
        with held(host):
            replies = [ask_for(host, prompt, prompt) for prompt in PROMPTS[:3]]
        assert all(await asyncio.gather(*map(text_of, replies)))

    monkeypatch.setattr(edgeinfer.Model, "reply_batch", fails)
    hosted(work)


@needs_builtin
def test_a_short_reply_does_not_wait_for_a_long_one() -> None:
    async def work(host: ModelHost) -> None:
        with held(host):
            long = ask_for(host, "Once upon a time. " * 20, "long", max_tokens=80)
            short = ask_for(host, PROMPTS[0], "short", max_tokens=3)
        await asyncio.gather(text_of(long), text_of(short))
        assert turns.of(long)[-1] - turns.of(short)[-1] > 60

    with measured_turns() as turns:
        hosted(work)


@needs_builtin
def test_leaving_a_reply_frees_its_place() -> None:
    async def work(host: ModelHost) -> None:
        async with ask_for(host, PROMPTS[0], max_tokens=200) as reply:
            async for _ in reply:
                break
        async with ask_for(host, PROMPTS[1]), ask_for(host, PROMPTS[2]):
            pass
        assert await text_of(ask_for(host, PROMPTS[3], max_tokens=3))
        assert host.running + host.waiting == 0

    hosted(work, parallel=1)


@needs_builtin
def test_errors_are_the_reply_s_own() -> None:
    async def work(host: ModelHost) -> None:
        good, bad = ask_for(host, PROMPTS[0]), ask_for(host, "")
        with pytest.raises(PromptError):
            await text_of(bad)
        assert await text_of(good)
        assert bad.result is None
        with pytest.raises(ZeroDivisionError):
            await host.ask(lambda model: 1 // 0)

    hosted(work)


@needs_builtin
def test_a_full_queue_is_busy() -> None:
    async def work(host: ModelHost) -> None:
        with held(host):
            replies = [ask_for(host, PROMPTS[0], max_tokens=200) for _ in range(17)]
            with pytest.raises(BusyError):
                ask_for(host, PROMPTS[0], max_tokens=200)
            for reply in replies:
                reply.cancel()
        await asyncio.gather(*map(text_of, replies))
        assert await text_of(ask_for(host, PROMPTS[0], max_tokens=2))

    hosted(work, parallel=1)


@needs_builtin
def test_another_model_takes_the_place_and_ends_replies(tmp_path: Path) -> None:
    other = make_bigram_bundle(tmp_path / "other")

    async def work(host: ModelHost) -> None:
        builtin = host.model
        reply, waiting = ask_for(host, PROMPTS[0], max_tokens=200), ask_for(host, PROMPTS[1], max_tokens=200)
        await host.load(str(other), {"context": 64, "threads": 1})
        assert host.model is not None and host.model is not builtin
        await asyncio.gather(text_of(reply), text_of(waiting))
        assert await host.ask(lambda model: model.context) == 64
        await host.unload()
        assert host.model is None and host.state.status == "empty"
        for use in (lambda: ask_for(host, PROMPTS[0]), lambda: host.ask(lambda model: model.context)):
            with pytest.raises(NotReadyError, match="No model is loaded"):
                found = use()
                if not isinstance(found, HostReply):
                    await found

    hosted(work, parallel=1)


def test_what_goes_wrong_when_loading_is_the_state(tmp_path: Path) -> None:
    bundle = str(make_bigram_bundle(tmp_path / "bigrams"))

    async def work(host: ModelHost) -> None:
        with pytest.raises(ModelError):
            await host.load(str(tmp_path / "nothing"), {})
        assert host.state.status == "failed" and isinstance(host.state.error, ModelError) and host.model is None
        with pytest.raises(BudgetError):
            await host.load(bundle, {"memory": 1_000_000})
        assert isinstance(host.state.error, BudgetError) and host.state.error.minimum_bytes > 1_000_000
        await host.load(bundle, {"context": 64, "threads": 1})
        state = await host.changed(0)
        assert (state.status, state.error) == ("ready", None)

    hosted(work, bundle, context=64)


@needs_builtin
def test_loading_is_watched_and_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(host: ModelHost) -> None:
        cancelled = threading.Event()

        # The built-in model is loaded in a moment and has nothing to pack; so slow ones are played.
        def slow(model: Any = None, *, progress: Any, **options: Any) -> edgeinfer.Model:
            progress("Packing", 1, 100_000)
            cancelled.wait(timeout=TIME_LIMIT)
            progress("Packing", 2, 100_000)
            raise AssertionError("loading went on")

        monkeypatch.setattr(edgeinfer, "load", slow)
        loading = asyncio.create_task(host.load(None, {"context": 64}))
        state = host.state
        while not (state.status == "loading" and state.stage == "Packing"):
            state = await host.changed(state.number)
        assert 0 <= state.done <= state.total == 100_000
        host.cancel_load()
        cancelled.set()
        with pytest.raises(LoadCancelledError):
            await loading
        assert host.state.status == "empty" and host.model is None

    hosted(work)


def test_chunks_that_are_not_streamed_wake_the_loop_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeinfer.apps.server import host as hosting

    bundle, wakes, wake = make_bigram_bundle(tmp_path / "bigrams"), 0, hosting._on

    def counted(*given: Any) -> None:
        nonlocal wakes
        wakes += 1
        wake(*given)

    async def work(host: ModelHost) -> None:
        nonlocal wakes
        told = {}
        monkeypatch.setattr(hosting, "_on", counted)
        for streams in (True, False):
            wakes = 0
            reply = host.submit(
                lambda model: model.stream([3, 5, 6], max_tokens=30, ignore_eos=True), "somebody", streams=streams
            )
            told[streams] = [chunk.token_ids async for chunk in reply], wakes
            assert reply.result is not None and len(reply.result.token_ids) == 30
        monkeypatch.undo()
        # One for each chunk, the last of which has no token, and the end.
        assert told[True][0] == told[False][0] and told[True][1] == 32
        assert told[False][1] == 2

    hosted(work, str(bundle), context=64)


def test_models_whose_cache_cannot_be_copied_answer_one_after_the_other(tmp_path: Path) -> None:
    bundle = make_bigram_bundle(tmp_path / "bigrams")

    async def work(host: ModelHost) -> None:
        options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
        alone = await host.ask(lambda model: [model.generate([n + 3, 5, 6], **options).token_ids for n in range(3)])
        starts = [lambda model, n=n: model.stream([n + 3, 5, 6], **options) for n in range(3)]
        replies = [host.submit(start, str(n)) for n, start in enumerate(starts)]
        await asyncio.gather(*map(text_of, replies))
        assert [reply.result.token_ids for reply in replies if reply.result] == alone

    hosted(work, str(bundle), context=64)


class Reading:
    """A request whose reply reads contexts until it is cancelled."""

    n, stream = 1, True

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def start(self, model: edgeinfer.Model, index: int, ended: Callable[[], bool]) -> edgeinfer.TokenStream:
        self.begun.set()
        wait_until(ended, "the end of the reply")
        self.over.set()
        raise UsageError("It was cut short.")


@pytest.mark.parametrize("leaves", [True, False])
def test_a_reply_that_reads_learns_that_its_client_has_left_or_its_model_goes(tmp_path: Path, leaves: bool) -> None:
    bundle = make_bigram_bundle(tmp_path / "bigrams")

    async def work(host: ModelHost) -> None:
        asked: Any = Reading()
        service = Service(host, Security())
        answer = asyncio.create_task(make_replies(service, asked, _drop, Request({"type": "http"})))
        assert await asyncio.to_thread(asked.begun.wait, TIME_LIMIT)
        if leaves:
            answer.cancel()
        else:
            await host.unload()
        await asyncio.wait([answer])
        assert answer.cancelled() if leaves else isinstance(answer.exception(), UsageError)
        assert await asyncio.to_thread(asked.over.wait, TIME_LIMIT)

    hosted(work, str(bundle), context=64)


@needs_builtin
def test_room_for_turns_keeps_to_the_budget() -> None:
    async def work(host: ModelHost) -> None:
        assert host.model is not None
        plan = host.model.plan
        assert plan.fits and plan.prefix_cache > 0

    for_one = edgeinfer.plan(None, context=256, threads=1)
    hosted(work, memory=for_one.planned_bytes + 3 * for_one.terms["kv"])


@needs_builtin
@pytest.mark.slow
def test_a_budget_keeps_room_for_replies_by_a_schema_where_there_is_some() -> None:
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {"context": 256, "kv": "int8", "threads": 1, "speculation": "off", "remember": False}
    options["counted"] = "anonymous"
    least = edgeinfer.plan(None, **options).minimum_bytes
    ample, tight = (with_room(None, options | {"memory": least + spare}, 2) for spare in (60_000_000, 5_000_000))
    assert ample["structured"] and edgeinfer.plan(None, **ample).terms["grammars"] > 0
    assert not tight.get("structured")
    assert "structured" not in with_room(None, options, 2)


def test_owners_take_turns_and_so_do_their_replies() -> None:
    scheduler = ReplyQueue[str](parallel=10)
    for reply in ("a1", "a2", "a3", "b1", "c1"):
        scheduler.add(reply[0], reply)
    turns = [scheduler.next() for _ in range(18)]
    assert Counter(str(turn)[0] for turn in turns) == {"a": 6, "b": 6, "c": 6}
    assert Counter(turns)["a1"] == Counter(turns)["a2"] == Counter(turns)["a3"] == 2


def test_whoever_has_fewest_begins_next() -> None:
    scheduler = ReplyQueue[str](parallel=2)
    for reply in ("a1", "a2", "a3", "b1", "a4", "c1"):
        scheduler.add(reply[0], reply)
    assert (scheduler.running, scheduler.waiting) == (2, 4)
    scheduler.remove("a1")
    assert {scheduler.next() for _ in range(4)} == {"a2", "b1"}
    scheduler.remove("a2")
    # Of a and c, who have none now, a came first.
    assert {scheduler.next() for _ in range(4)} == {"b1", "a3"}
    scheduler.remove("b1")
    assert {scheduler.next() for _ in range(4)} == {"a3", "c1"}


def test_nothing_to_run() -> None:
    scheduler = ReplyQueue[str](parallel=1)
    assert scheduler.next() is None
    scheduler.add("a", "a1")
    scheduler.add("a", "a2")
    scheduler.remove("a2")
    assert scheduler.waiting == 0
    assert scheduler.clear() == ["a1"]
    assert scheduler.next() is None


@given(
    parallel=st.integers(1, 5),
    steps=st.lists(
        st.one_of(st.tuples(st.just("add"), st.integers(0, 3)), st.tuples(st.just("end"), st.integers(0, 9)))
    ),
)
def test_every_reply_gets_its_turn(parallel: int, steps: list[tuple[str, int]]) -> None:
    scheduler, alive = ReplyQueue[tuple[int, int]](parallel), []
    for number, (kind, value) in enumerate(steps):
        if kind == "add":
            alive.append((value, number))
            scheduler.add(str(value), (value, number))
        elif alive:
            gone = alive.pop(value % len(alive))
            scheduler.remove(gone)
        assert scheduler.running == min(parallel, len(alive))
        assert scheduler.running + scheduler.waiting == len(alive)
        # As many turns as owners times the replies of the one with most of them reach everybody.
        seen = {scheduler.next() for _ in range(4 * max(1, len(alive)))}
        assert len(seen - {None}) == scheduler.running
        assert seen - {None} <= set(alive)
