"""Threads and event loops that use one model: each does its work, waits in turn, or is refused with advice."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.core.errors import EdgeInferError, PromptError, UsageError
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.native.library import LIBRARY
from tests.speculation import known_costs
from tests.waiting import TIME_LIMIT, wait_until

PROMPT = "Tell me about the little dog"
OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}

Use = Callable[[edgeinfer.Model, Path], object]
# Those that run the model, and those that only look at it or free it.
RUNS: dict[str, Use] = {
    "stream": lambda model, _: [chunk.text for chunk in model.stream(PROMPT, **OPTIONS)],
    "generate": lambda model, _: model.generate(PROMPT, temperature=1.0, seed=3, **OPTIONS),
    "send": lambda model, _: model.chat().send(PROMPT, **OPTIONS),
    "schema": lambda model, _: model.generate(PROMPT, json_schema={"enum": [1, 2]}, max_tokens=8),
    "tune": lambda model, _: edgeinfer.tools.tune_drafting(model, [PROMPT]),
    "score": lambda model, _: model.score([5, 6, 7]),
    "logits": lambda model, _: [len(rows) for rows in model.logits([5, 6, 7])],
}
LOOKS: dict[str, Use] = {
    "close": lambda model, _: model.close(),
    "unload": lambda model, _: model.unload(),
    "save": lambda model, folder: model.save_session(folder / "talk.session"),
    "chat": lambda model, folder: model.chat().save(folder / "chat.session"),
    "load": lambda model, folder: model.load_session(folder / "kept.session"),
    "tokenize": lambda model, _: model.detokenize(model.tokenize(PROMPT)),
    "plan": lambda model, _: (model.plan.terms, model.info, model.threads, model.load_costs),
    "experts": lambda model, _: model.experts,
    "drafting": lambda model, _: edgeinfer.tools.restore_drafting(model, edgeinfer.tools.drafting_state(model)),
}
USES = RUNS | LOOKS


@pytest.fixture(autouse=True)
def costs() -> Iterator[None]:
    with known_costs():
        yield


@pytest.fixture
def folder(loaded: edgeinfer.Model, tmp_path: Path) -> Path:
    loaded.generate(PROMPT, **OPTIONS)
    loaded.save_session(tmp_path / "kept.session")
    return tmp_path


class Models:
    """A model that is loaded again once it was closed."""

    def __init__(self, bundle: Path) -> None:
        self._bundle = bundle
        self._model: edgeinfer.Model | None = None

    def open(self) -> edgeinfer.Model:
        if self._model is None or self._model._lifecycle._closed:
            self._model = edgeinfer.load(self._bundle, threads=1)
        return self._model

    def close(self) -> None:
        if self._model is not None:
            self._model.close()


@pytest.fixture
def models(small_bundle: Path) -> Iterator[Models]:
    found = Models(small_bundle)
    yield found
    found.close()


def outcome(use: Use, model: edgeinfer.Model, folder: Path, said: list[object]) -> None:
    try:
        use(model, folder)
        said.append(None)
    except BaseException as error:
        said.append(error)


def check(said: list[object], what: str) -> None:
    assert len(said) == 1, f"{what}: it never ended"
    error = said[0]
    assert error is None or (isinstance(error, EdgeInferError) and error.hint), f"{what}: {error!r}"


def expected(model: edgeinfer.Model) -> str:
    return model.generate(PROMPT, **OPTIONS).text


def _waits_or_is_done(thread: threading.Thread, model: edgeinfer.Model) -> bool:
    return not thread.is_alive() or model._lifecycle._closed


class Held:
    """A pass of a model that waits for `go_on`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *batch: Any, **how: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(TIME_LIMIT)
        return self._forward(*batch, **how)


def started(use: Use, model: edgeinfer.Model, folder: Path) -> tuple[threading.Thread, list[object]]:
    said: list[object] = []
    thread = threading.Thread(target=outcome, args=(use, model, folder, said), daemon=True)
    thread.start()
    return thread, said


@pytest.mark.parametrize("first", RUNS)
def test_whatever_comes_while_the_model_runs(models: Models, folder: Path, first: str) -> None:
    text = expected(models.open())
    for second in USES:
        model = models.open()
        model._parts.sequence.forget()
        backend = model._parts.backend
        held = Held(backend.forward)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "forward", held)
            running, of_running = started(USES[first], model, folder)
            assert held.begun.wait(TIME_LIMIT), first
            other, of_other = started(USES[second], model, folder)
            # Who closes the model waits for the pass.
            wait_until(partial(_waits_or_is_done, other, model), second)
            held.go_on.set()
            running.join(TIME_LIMIT)
            other.join(TIME_LIMIT)
        check(of_running, f"{first}, with {second}")
        check(of_other, f"{second}, during {first}")
        if second in RUNS:
            assert isinstance(of_other[0], UsageError), (first, second)
        if second == "close":
            assert model._lifecycle._parts is None, first
        else:
            assert of_running[0] is None, (first, second)
            assert expected(model) == text, (first, second)


def test_pairs_at_the_same_time(models: Models, folder: Path) -> None:
    text = expected(models.open())
    draw = random.Random(20)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(40):
            model, pair = models.open(), draw.choices(list(USES), k=2)
            together = [started(USES[name], model, folder) for name in pair]
            for (thread, said), name in zip(together, pair, strict=True):
                thread.join(TIME_LIMIT)
                check(said, f"{name} of {pair}")
            if "close" not in pair:
                assert expected(model) == text, pair
    finally:
        sys.setswitchinterval(interval)


STORY = "Once upon a time there was a little dog."
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "speculation": "off"}
SHORT: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


def test_texts_are_those_of_the_other_methods_and_the_loop_goes_on(model: edgeinfer.Model) -> None:
    expected = model.generate(STORY, **LONG)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def ask() -> list[edgeinfer.Result]:
        ticking = asyncio.create_task(tick())
        replies = await asyncio.gather(*(model.agenerate(STORY, **LONG) for _ in range(3)))
        stream = model.astream(STORY, **LONG)
        text = "".join([chunk.text async for chunk in stream])
        ticking.cancel()
        assert text == expected.text
        return [*replies, stream.result]

    before = threading.active_count()
    assert {reply.token_ids for reply in asyncio.run(ask())} == {expected.token_ids}
    assert ticks > 100
    assert threading.active_count() <= before + 1, "all replies of a model are made on one thread"
    assert model.generate(STORY, **SHORT).token_ids == expected.token_ids[:12]


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
        task = asyncio.create_task(model.agenerate(STORY, **LONG))
        waiting = asyncio.create_task(model.agenerate(STORY, **LONG))
        while not task.done() and model._replies.turns._running is None:
            await asyncio.sleep(0)
        for one in (waiting, task):
            one.cancel()
        assert [type(one) for one in await asyncio.gather(task, waiting, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 2

    async def closed() -> edgeinfer.Result:
        async with model.astream(STORY, **LONG) as stream:
            async for _ in stream:
                break
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return stream.result

    async def dropped() -> int:
        async for _ in model.astream(STORY, **LONG):
            break
        gc.collect()
        return (await model.agenerate(STORY, **SHORT)).usage.completion_tokens

    async def never_begun() -> None:
        stream = model.astream(STORY, **LONG)
        await stream.aclose()
        with pytest.raises(UsageError, match="not finished"):
            _ = stream.result

    asyncio.run(cancelled())
    asyncio.run(never_begun())
    result = asyncio.run(closed())
    assert result.finish_reason == "cancelled" and result.usage.completion_tokens < 400
    assert asyncio.run(dropped()) == 12
    assert model.generate(STORY, **SHORT).finish_reason == "length"


def test_errors_come_out_as_they_are(model: edgeinfer.Model) -> None:
    async def ask() -> None:
        with pytest.raises(UsageError, match=r"Unknown generation option 'heat'"):
            await model.agenerate(STORY, heat=1)  # type: ignore[call-arg]
        with pytest.raises(PromptError, match="empty"):
            async for _ in model.astream("", **SHORT):
                pass
        with pytest.raises(PromptError, match="empty"):
            await model.chat().asend(" ")
        assert (await model.agenerate(STORY, **SHORT)).text

    asyncio.run(ask())


def test_loading(small_bundle: Path) -> None:
    async def ask() -> str:
        with await edgeinfer.aload(small_bundle, threads=1, remember=False) as model:
            reply = await model.agenerate(STORY, **SHORT)
        with pytest.raises(UsageError, match="closed"):
            await model.agenerate(STORY, **SHORT)
        return reply.text

    assert asyncio.run(ask())


@pytest.mark.slow
@pytest.mark.skipif(not LIBRARY.is_file(), reason="the native kernel was not built")
def test_replies_side_by_side_share_passes_and_are_what_they_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [STORY * copies + end for copies in (0, 1, 4) for end in ("Tom had", "One day", "The cat")]
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.8, "seed": 1}
    sequences: list[int] = []  # of each pass
    held, free, evaluate = threading.Event(), threading.Event(), PagedBackend.forward
    free.set()

    def counted(self: PagedBackend, inputs: Any) -> Any:
        sequences.append(len(inputs))
        if sequences.count(5) >= 30:
            held.set()
            assert free.wait(60)
        return evaluate(self, inputs)

    with edgeinfer.load(context=256, threads=1, parallel=8, remember=False) as model:
        alone = [model.generate(prompt, **options).token_ids for prompt in prompts]
        chats = [model.chat(), model.chat()]
        talks = [[chat.send(text, **SHORT).text for text in ("Hello", "And now?")] for chat in chats]
        monkeypatch.setattr(PagedBackend, "forward", counted)

        async def together() -> list[Any]:
            return await asyncio.gather(
                *(model.agenerate(prompt, **options) for prompt in prompts),
                model.agenerate(prompts[0], search="beam", **SHORT),
                model.agenerate("", **SHORT),
                *(chat.asend(text, **SHORT) for chat in (model.chat(), model.chat()) for text in ("Hello", "And now?")),
                return_exceptions=True,
            )

        for _ in range(2):
            *found, searched, refused = (every := asyncio.run(together()))[:-4]
            assert [reply.token_ids for reply in found] == alone
            assert searched.search is not None and searched.usage.completion_tokens == 12
            assert isinstance(refused, PromptError)
            assert [reply.text for reply in every[-4:]] == [*talks[0], *talks[1]]
        assert max(sequences) == 8 and sum(size > 2 for size in sequences) > 40
        assert model.generate(prompts[0], **options).token_ids == alone[0]

        async def left() -> list[Any]:
            """Leave two of five replies, in different ways, while all share passes."""
            sequences.clear()
            free.clear()
            held.clear()
            streams = [model.astream(prompt, **options | {"max_tokens": 150}) for prompt in prompts[:5]]
            tasks = [asyncio.create_task(stream.complete()) for stream in streams[3:]]
            firsts = await asyncio.gather(*(anext(stream) for stream in streams[:3]))
            assert await asyncio.to_thread(held.wait, 60)
            tasks[0].cancel()
            streams[0].cancel()
            await asyncio.sleep(0)
            free.set()
            await streams[0].aclose()
            kept = await asyncio.gather(*(stream.complete() for stream in streams[1:3]), *tasks, return_exceptions=True)
            return [firsts, streams[0].result, *kept]

        firsts, closed, *kept, cancelled, other = asyncio.run(left())
        assert closed.finish_reason == "cancelled" and 0 < closed.usage.completion_tokens < 150
        assert isinstance(cancelled, asyncio.CancelledError)
        assert [first.token_ids for first in firsts] == [tokens[:1] for tokens in alone[:3]]
        for reply, tokens in zip((*kept, other), (*alone[1:3], alone[4]), strict=True):
            assert reply.token_ids[:40] == tokens and reply.usage.completion_tokens == 150


@pytest.mark.slow
@pytest.mark.skipif(not LIBRARY.is_file(), reason="the native kernel was not built")
def test_a_model_that_is_closed_ends_replies_that_share_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, closed, evaluate = threading.Event(), threading.Event(), PagedBackend.forward

    def held(self: PagedBackend, inputs: Any) -> Any:
        if len(inputs) == 3:
            shared.set()
            assert closed.wait(60)
        return evaluate(self, inputs)

    monkeypatch.setattr(PagedBackend, "forward", held)
    model = edgeinfer.load(context=512, threads=1, parallel=4, remember=False)

    async def ask() -> list[edgeinfer.Result]:
        streams = [model.astream(STORY + end, **LONG) for end in ("", " Tom", " A cat")]
        replies = asyncio.gather(*(stream.complete() for stream in streams))
        assert await asyncio.to_thread(shared.wait, 60)
        model.close()
        closed.set()
        return await replies

    assert {reply.finish_reason for reply in asyncio.run(ask())} == {"cancelled"}
