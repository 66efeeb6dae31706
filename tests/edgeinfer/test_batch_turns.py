"""How replies side by side take turns: parts of prompts between their tokens, and interrupts at any moment."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import edgeinfer
from edgeinfer import Model, ReplyBatch, Result, Slot
from edgeinfer.runtime.decoding.shares import PromptShare
from edgeinfer.runtime.native.library import LIBRARY
from tests.cli import TIME_LIMIT
from tests.speculation import load_eager
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the native kernel was not built")
PROMPTS = ("One day", "The cat saw")
LONG = "Once upon a time there was a little dog who lived in a big house by the sea. " * 4


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load_eager(context=192, remember=False, speculation="copy,ngram,recycle") as loaded:
        yield loaded


def reply(model: Model, results: dict[str, Result], prompt: str, tokens: int) -> Callable[[Slot], None]:
    """What makes a reply and notes it by its prompt."""

    def work(slot: Slot) -> None:
        results[prompt] = model.generate(prompt, max_tokens=tokens, ignore_eos=True)

    return work


@pytest.mark.slow
def test_an_interrupt_at_any_moment_ends_all_replies(model: Model) -> None:
    """Before each of the instructions by which replies are let go on and ended."""
    before, results = threading.active_count(), dict[str, Result]()
    for place in itertools.count(1, 5):
        batch = model.reply_batch(2)
        for prompt in PROMPTS:
            batch.add(reply(model, results, prompt, 24))
        interrupt = Interrupt(place)
        work = threading.Thread(target=interrupt.run, args=(batch,), daemon=True)
        work.start()
        work.join(timeout=TIME_LIMIT)
        assert not work.is_alive(), f"an interrupt before instruction {place} was lost"
        assert batch.running == 0
        if not interrupt.came:
            break
    wait_until(lambda: threading.active_count() == before, "the replies' threads ended")
    assert place > 300
    assert model.generate(PROMPTS[0], max_tokens=4).usage.completion_tokens == 4


class Interrupt:
    """Raises KeyboardInterrupt before one of the instructions by which a scheduler and its tasks take turns."""

    WATCHED = frozenset({"step", "close", "_resume", "_go_on", "resume", "finish_turn", "_wake"})

    def __init__(self, place: int) -> None:
        self.place, self.seen, self.came = place, 0, False

    def run(self, batch: ReplyBatch) -> None:
        """Begins the replies of a batch, and closes it, once more where the interrupt has come."""
        sys.settrace(self._call)
        with contextlib.suppress(KeyboardInterrupt):
            for _ in range(3):
                batch.step()
            batch.scheduler.close()
        sys.settrace(None)
        batch.close()

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_name not in self.WATCHED or "decoding" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, argument: object) -> Any:
        self.seen += event == "opcode"
        if self.seen == self.place and not self.came:
            self.came = True
            raise KeyboardInterrupt
        return self._instruction


def test_prompts_take_what_the_gap_leaves() -> None:
    share = PromptShare(512)
    for rows in (1, 4):
        share.observe(rows, 0, 8.0 + 0.5 * rows)
    for rows, least, most in ((4, 15, 25), (5, 15, 25), (1, 12, 20)):  # what the nearest of these takes twice
        for _ in range(20):
            share.observe(rows, share.rows, 8.0 + 0.5 * (rows + share.rows))
        assert least <= share.rows <= most
    for _ in range(20):
        share.observe(4, share.rows, 100.0)
    assert share.rows == 1
    stated = PromptShare(512, inter_token_latency=20.0)
    for _ in range(20):
        stated.observe(4, stated.rows, 8.0 + 0.5 * (4 + stated.rows))
    assert 15 <= stated.rows <= 25
    unwatched = PromptShare(512, inter_token_latency=math.inf)
    unwatched.observe(4, 512, 1000.0)
    assert unwatched.rows == 512


def test_what_prompts_take_grows_while_some_always_wait() -> None:
    share, parts = PromptShare(512), list[int]()
    for step in range(100):
        rows = 1 + step // 20  # of replies, one more every 20 passes
        parts.append(share.prompt_rows(rows))
        share.observe(rows, parts[-1], 8.0 + 0.5 * (rows + parts[-1]))
    # A few passes go without, to tell what one takes then.
    assert parts[0] == 0 and 3 <= parts.count(0) <= 8
    # By the end a pass takes twice what it takes without.
    assert all(15 <= part <= 25 for part in parts[80:] if part)
    stated = PromptShare(512, inter_token_latency=20.0)
    assert stated.prompt_rows(4) == 8


@pytest.mark.slow
def test_a_prompt_is_evaluated_in_parts_that_the_latency_asked_for_leaves() -> None:
    # Milliseconds that every step takes longer than, and that none takes.
    (slow, given), (quick, others) = (in_company(latency) for latency in (1e-3, 1e6))
    assert given[LONG].usage.prompt_tokens > 60
    # One token of it with each pass, but for the first few passes; and half as many again with each.
    assert slow > 50 and quick < 10
    assert {name: reply.token_ids for name, reply in given.items()} == {
        name: reply.token_ids for name, reply in others.items()
    }


def in_company(latency: float) -> tuple[int, dict[str, Result]]:
    """Steps until a long prompt is evaluated while two replies are decoded, and all three replies."""
    results, steps = dict[str, Result](), 0
    options: dict[str, Any] = {"threads": 1, "speculation": "off", "remember": False}
    with (
        edgeinfer.load(inter_token_latency=latency, **options) as model,
        contextlib.closing(model.reply_batch(3)) as batch,
    ):
        for prompt in PROMPTS:
            batch.add(reply(model, results, prompt, 150))
        for _ in range(3):
            batch.step()
        batch.add(reply(model, results, LONG, 1))
        while LONG not in results and batch.step():
            steps += 1
        while batch.step():
            pass
    return steps, results
