"""Replies that cannot begin in a pass that others share, as those behind contexts, beside replies that can."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.server.worker import Job, ModelThread, ReplyEnd
from tests.apps.server.served import measured_turns
from tests.speculation import needs_builtin
from tests.waiting import TIME_LIMIT

pytestmark = needs_builtin

TEXT = "{} had a red ball. He took it to the park every day."
OPTIONS: dict[str, Any] = {"ignore_eos": True}


class Worker:
    """A thread with a model; `ended` gets the names of replies in the order in which they end."""

    def __init__(self, model: edgeinfer.Model) -> None:
        self.thread = ModelThread(parallel=8)
        self.ended = queue.Queue[str]()
        self.reading: Callable[[int], None] | None = None  # called after each pass that evaluates a context
        self._then: dict[tuple[str, str], tuple[tuple[str, bool, int], ...]] = {}
        self.thread.start()
        self.thread.do(lambda: self.thread.take(model))

    def when(self, name: str, event: str, *replies: tuple[str, bool, int]) -> None:
        """Adds replies, as `add` takes them, when another has its first chunk or has ended, on the model's thread."""
        self._then[name, event] = replies

    def add(self, name: str, behind: bool, tokens: int) -> None:
        """Adds a reply of so many tokens, behind a context or not."""

        def start(model: edgeinfer.Model) -> edgeinfer.TokenStream:
            if not behind:
                return model.stream(f"One day, {name}", max_tokens=tokens, **OPTIONS)
            messages = [{"role": "user", "content": f"One day, {name}"}]
            source = model.with_contexts([edgeinfer.Context(name, content=TEXT.format(name))])
            stream: edgeinfer.TokenStream = source.stream_chat(
                messages, progress=self.reading, max_tokens=tokens, **OPTIONS
            )
            return stream

        def tell(told: object) -> None:
            event = "first" if isinstance(told, edgeinfer.Chunk) else "end"
            for reply in self._then.pop((name, event), ()):
                self.add(*reply)
            if event == "end":
                self.ended.put(name if isinstance(told, ReplyEnd) else f"{name}: {told}")

        self.thread.add(Job(start, tell), name)

    def order(self, count: int) -> list[str]:
        """Waits until so many replies are over."""
        return [self.ended.get(timeout=TIME_LIMIT) for _ in range(count)]


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(edgeinfer.load(context=256, threads=1, parallel=8, speculation="off")) as model:
        made = Worker(model)
        with measured_turns():
            yield made
        made.thread.do(made.thread.drop_replies)
        made.thread.end()
        made.thread.join(timeout=TIME_LIMIT)
        assert not made.thread.is_alive()


def test_a_reply_that_began_alone_and_those_that_come_later_all_end(worker: Worker) -> None:
    worker.when("Tom", "first", ("Anna", False, 6), ("Ben", True, 6))
    worker.add("Tom", True, 60)
    assert sorted(worker.order(3)) == ["Anna", "Ben", "Tom"]


def test_replies_join_the_passes_of_one_behind_a_context(worker: Worker) -> None:
    worker.when("first", "first", ("long", True, 90), ("short", False, 4))
    worker.when("short", "end", ("late", False, 4))
    worker.add("first", False, 40)
    assert worker.order(4) == ["short", "late", "first", "long"]


def test_one_that_is_dropped_while_it_reads_a_context_has_not_failed(worker: Worker) -> None:
    reading = threading.Event()

    def read(tokens: int) -> None:
        if not reading.is_set():
            reading.set()
            worker.thread.do(worker.thread.drop_replies)

    worker.reading = read
    worker.when("first", "first", ("dropped", True, 4))
    worker.add("first", False, 200)
    assert sorted(worker.order(2)) == ["dropped", "first"]
    assert reading.is_set()
