"""Replies in one batch: each is what it is alone, whoever comes, goes or gives way; turns, interrupts, refusals."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgeinfer
from edgeinfer import Model, ReplyBatch, Result, TokenStream
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.core.errors import CapabilityError, ContextLengthError, UnshareableError, UsageError
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import Pass, PassResult, PreemptedError
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.decoding.scheduler import RowRequest, SequenceTask
from edgeinfer.runtime.decoding.shares import PromptShare, draft_rows
from edgeinfer.runtime.native.library import LIBRARY
from edgeinfer.runtime.paging.layout import PageLayout
from edgeinfer.runtime.paging.pool import PagePool
from tests.cache import export_checkpoint, made
from tests.cli import TIME_LIMIT, python
from tests.factories import make_checkpoint
from tests.runtime.test_sequence import TableBackend
from tests.speculation import load_eager
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the native kernel was not built")
STORY = "Once upon a time there was a little dog who lived in a big house by the sea. "
PROMPTS = [STORY * copies + end for copies in (0, 1, 6) for end in ("Tom had a ball.", "One day", "The cat saw")]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "seed": 9, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 3, "regex": "[a-z ,.]{3,40}"},
    {"temperature": 0.9, "seed": 7, "search": "samples", "samples": 3},
    {"search": "beam", "beams": 3, "beam_groups": 3},
    {"temperature": 0.8, "seed": 2, "search": "vote", "samples": 2},
    {"search": "momentum"},
]
TOKENS = 24
COMPANY = ("One day", "The cat saw")
LONG = STORY * 4


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    # Pages for one context and a prefix or two: replies of long prompts have to give way. All that can be is drafted.
    with load_eager(context=192, prefix_cache="1MB", remember=False, speculation="copy,ngram,recycle") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def alone(model: Model) -> Callable[[int, int], Result]:
    """What a prompt with some options gives alone."""
    known: dict[tuple[int, int], Result] = {}

    def reply(prompt: int, options: int) -> Result:
        if (prompt, options) not in known:
            given = OPTIONS[options] | {"max_tokens": TOKENS, "speculation": "off"}
            known[prompt, options] = model.generate(PROMPTS[prompt], **given)
        return known[prompt, options]

    return reply


Work = Generator[TokenStream, None, None]


class Arrivals:
    """Replies that arrive and leave at given steps of a batch."""

    def __init__(self, batch: ReplyBatch, model: Model) -> None:
        self.batch, self.model = batch, model
        self.results: dict[int, Result] = {}
        self.errors: list[Exception] = []
        self.streams: dict[int, TokenStream] = {}

    def add(self, place: int, prompt: int, options: int) -> None:
        def work() -> Work:
            try:
                stream = self.model.stream(PROMPTS[prompt], max_tokens=TOKENS, **OPTIONS[options])
                self.streams[place] = stream
                yield stream
                self.results[place] = stream.complete()
            except Exception as error:
                self.errors.append(error)

        self.batch.add(work())


@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_company_leaves_every_reply_as_it_is_alone(
    model: Model, alone: Callable[[int, int], Result], data: st.DataObject
) -> None:
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    wanted = [(draw.randrange(len(PROMPTS)), draw.randrange(len(OPTIONS))) for _ in range(10)]
    expected = [alone(*each) for each in wanted]
    cancelled = {place for place in range(10) if draw.random() < 0.2}
    with contextlib.closing(model.reply_batch(draw.choice((2, 5)))) as batch:
        arrivals, waiting, left = Arrivals(batch, model), list(enumerate(wanted)), True
        while waiting or left:
            if waiting and batch.has_room and draw.random() < 0.4:
                place, (prompt, options) = waiting.pop(0)
                arrivals.add(place, prompt, options)
            left = batch.step()
            for place in cancelled & arrivals.streams.keys():
                if draw.random() < 0.3:
                    arrivals.streams[place].cancel()
    assert not arrivals.errors
    for place, result in arrivals.results.items():
        if result.finish_reason == "cancelled":
            assert place in cancelled
            assert result.token_ids == expected[place].token_ids[: len(result.token_ids)]
        else:
            assert result.token_ids == expected[place].token_ids
            texts = [None if found.search is None else found.search.texts for found in (result, expected[place])]
            assert texts[0] == texts[1]
    assert len(arrivals.results) == 10
    assert model.generate(PROMPTS[0], max_tokens=TOKENS, temperature=0).token_ids == alone(0, 0).token_ids


@pytest.mark.slow
def test_a_search_that_gives_its_pages_to_others_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages for one context: the older reply takes those of the search, which are evaluated again afterwards."""
    preempted: list[object] = []
    fail = SequenceTask.fail

    def failing(task: SequenceTask, error: BaseException) -> None:
        preempted.append(error)
        fail(task, error)

    monkeypatch.setattr(SequenceTask, "fail", failing)
    with load_eager(context=256, remember=False) as model:

        def plain() -> TokenStream:
            return model.stream(STORY * 6 + "Tom", max_tokens=100, ignore_eos=True)

        for options in OPTIONS[4:]:

            def searched(given: dict[str, Any] = options) -> TokenStream:
                return model.stream("Lily. " + STORY * 4, max_tokens=30, ignore_eos=True, **given)

            expected = [plain().complete(), searched().complete()]
            with contextlib.closing(model.reply_batch(2)) as batch:
                found = batch.run([plain, searched])
            assert [reply.token_ids for reply in found] == [reply.token_ids for reply in expected]
            texts = [reply.search.texts for reply in (found[1], expected[1]) if reply.search is not None]
            assert len(texts) == 2 and texts[0] == texts[1]
    assert sum(isinstance(error, PreemptedError) for error in preempted) >= 4


def test_replies_are_given_in_the_order_of_their_prompts_and_share_beginnings() -> None:
    prompts = [STORY * 8 + name for name in ("Tom", "Lily", "A frog", "Sam", "Ben", "A bird")]
    with edgeinfer.load(context=512, threads=1, remember=False) as model:
        plain = [model.generate(prompt, max_tokens=12) for prompt in prompts]
        model.generate("Hello", max_tokens=1)
        together = model.generate_batch(prompts, parallel=3, max_tokens=12)
        assert [r.text for r in together] == [r.text for r in plain]
        # What they have in common is evaluated once, for those that come at once too.
        shared = len(model.tokenize(STORY * 8)) - 1
        once = sum(r.usage.prompt_tokens for r in together) - 5 * shared
        assert sum(r.usage.prompt_tokens - r.timings.cached_prompt_tokens for r in together) <= once
        assert model.generate_batch([], max_tokens=12) == []
        talks = [[{"role": "user", "content": f"Tell me about {name}."}] for name in ("Tom", "Lily", "a frog")]
        replies = [model.chat().send(talk[0]["content"], max_tokens=8).text for talk in talks]
        assert [result.text for result in model.chat_batch(talks, parallel=2, max_tokens=8)] == replies
        passes = model.reply_batch(1)
        with contextlib.closing(passes), pytest.raises(UsageError, match="Another thread is working"):
            run_elsewhere(lambda: model.generate("Hello", max_tokens=1))


def run_elsewhere(work: Callable[[], object]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(timeout=60)


def test_a_reply_moves_into_company_and_stays_what_it_is(model: Model) -> None:
    expected = model.generate(PROMPTS[3], max_tokens=TOKENS).token_ids
    stream = model.stream(PROMPTS[3], max_tokens=TOKENS, speculation="ngram")
    said = [token for _ in range(5) for token in next(stream).token_ids]
    stream.pause()
    with contextlib.closing(model.reply_batch(2)) as batch:
        other = Arrivals(batch, model)

        def go_on() -> Work:
            yield batch.join(stream)
            said.extend(token for chunk in stream for token in chunk.token_ids)

        batch.add(go_on())
        other.add(0, 1, 0)
        while batch.step():
            pass
    assert tuple(said) == expected and stream.result.token_ids == expected
    assert stream.result.speculation.rounds > 0 and not other.errors


def test_what_cannot_be_made_side_by_side_is_refused(model: Model) -> None:
    with pytest.raises(UnshareableError, match="Replies side by side cannot take less"):
        model.generate_batch(["Once"], compute="unified")
    with pytest.raises(UsageError, match="parallel=0 is out of range"):
        model.generate_batch(["Once"], parallel=0)
    with pytest.raises(ContextLengthError):
        model.generate_batch(["Once", STORY * 50], max_tokens=4)
    assert model.generate("Once", max_tokens=1).token_ids
    with (
        edgeinfer.load(context=64, native=False, remember=False) as portable,
        pytest.raises(CapabilityError, match="cannot share passes"),
    ):
        portable.generate_batch(["Once"], max_tokens=1)


def test_a_batch_of_one_reply_hears_who_wants_to_join(model: Model) -> None:
    with contextlib.closing(model.reply_batch(2)) as batch:
        arrivals = Arrivals(batch, model)
        arrivals.add(0, 0, 0)
        # Before the step that would make all of the only reply, as another thread may.
        batch.interrupt()
        assert batch.step() and not arrivals.results
        arrivals.add(1, 1, 0)
        while batch.step():
            pass
        assert len(arrivals.results) == 2 and not arrivals.errors


def test_an_interrupt_ends_all_replies_and_leaves_the_model_usable(model: Model) -> None:
    streams, seen = list[TokenStream](), 0

    def tell() -> Work:
        streams.append(model.stream(PROMPTS[0], max_tokens=TOKENS))
        yield streams[-1]

    batch = model.reply_batch(4)
    for _ in range(3):
        batch.add(tell())
    while seen < 6:
        batch.step()
        seen += sum(len(stream.take()) for stream in streams)
    batch.close()
    assert batch.running == 0
    assert model.generate(PROMPTS[0], max_tokens=4).usage.completion_tokens == 4


def make_wide(folder: Path) -> None:
    """A small checkpoint with the vocabulary of a large one."""
    make_checkpoint(folder / "wide", "Llama", vocab_size=150_000, max_position_embeddings=256, eos_token_id=None)


def test_tokens_of_replies_side_by_side_get_what_the_budget_leaves() -> None:
    options: dict[str, Any] = {"context": 1024, "threads": 1, "parallel": 8}
    edgeinfer.plan(**options)  # what planning imports is counted from now on
    ample = edgeinfer.plan(**options)
    kv = ample.terms["kv"]
    assert ample.prefix_cache == 7 * kv
    short = edgeinfer.plan(memory=ample.planned_bytes - 3 * kv, **options)
    assert short.fits and 2 * kv < short.prefix_cache < 5 * kv and not short.given_up
    assert edgeinfer.plan(prefix_cache=kv, **options).prefix_cache == kv


@pytest.mark.slow
def test_replies_side_by_side_stay_within_what_was_planned_for_them(tmp_path: Path) -> None:
    bundle = export_checkpoint(
        made(make_wide) / "wide", tmp_path / "wide", ExportConfig(bits=4, group_size=32, calibration="none")
    )
    most, planned, sequences, rows = json.loads(python(_EIGHT, bundle))
    assert sequences > 7 * 4 * 150_000 and rows > 0
    # A plan without them would be exceeded.
    assert planned - sequences - rows < most < planned


# Bytes of anonymous memory: the most that there were, those that were planned, and of these the terms of replies.
_EIGHT = """
import json, sys
import edgeinfer
from edgeinfer.runtime.system.memory import process_memory

prompts, most = [[place + 1, *range(3, 99)] for place in range(8)], 0
options = {"temperature": 1.0, "repetition_penalty": 1.1, "max_tokens": 24}
with edgeinfer.load(sys.argv[1], parallel=8, context=256, threads=1, speculation="off", remember=False) as model:
    batch = model.reply_batch(8)
    for prompt in prompts:
        batch.add(model.stream(given, seed=given[0], **options) for given in [prompt])
    while batch.step():
        most = max(most, process_memory().anonymous)
    batch.close()
    planned = model.plan.footprint.anonymous
    print(json.dumps([most, sum(planned.values()), planned["sequences"], planned["prefix_cache"]]))
"""


def test_drafts_beside_others_leave_every_reply_as_it_is_alone() -> None:
    """Whatever part of each draft fits into a pass; with more replies, fewer tokens are drafted."""
    prompts = [STORY * 3 + STORY[:cut] for cut in (5, 12, 20, 33)]
    drafted = []
    with load_eager(context=512, speculation="copy,ngram,recycle", draft_max=6) as model:
        ways: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 3})
        for options in ways:
            for parallel in (2, 4):
                given = model.generate_batch(prompts, parallel=parallel, max_tokens=32, ignore_eos=True, **options)
                for prompt, reply in zip(prompts, given, strict=True):
                    alone = model.generate(prompt, max_tokens=32, ignore_eos=True, speculation="off", **options)
                    assert reply.token_ids == alone.token_ids
                drafted.append(sum(reply.speculation.drafted for reply in given))
                assert sum(reply.speculation.accepted for reply in given) > 0
    assert min(drafted) > 0


@pytest.mark.slow
def test_what_drafts_for_replies_side_by_side_is_planned() -> None:
    draw, most = random.Random(1), 0
    prompts = [[draw.randrange(300, 1000) for _ in range(1000)] for _ in range(8)]
    options: dict[str, Any] = {"context": 1024, "speculation": "copy,ngram,recycle"}
    with load_eager(**options, parallel=8, remember=False) as model, contextlib.closing(model.reply_batch(8)) as batch:

        def reply() -> Work:
            yield model.stream(prompts.pop(), max_tokens=8, ignore_eos=True)

        for _ in range(8):
            batch.add(reply())
        while batch.step():
            most = max(most, model._parts.speculator.nbytes)
        planned = model.plan.terms["drafting"]
    # What one text needs would not be enough.
    assert edgeinfer.plan(**options, threads=1).terms["drafting"] < most < planned


def test_a_pass_that_is_cut_reads_and_gives_all_that_a_whole_one_does() -> None:
    cache = PagedCache(PagePool(PageLayout.of(Geometry(6, 3, 1, 1, 4, 8), "float32"), 1), 8)
    states = np.eye(6, 3)
    given: dict[str, Any] = {"hidden": states.astype(np.float32), "tapped": 2 * states.astype(np.float32)}
    request = RowRequest(TableBackend(), cache, Pass(np.arange(6), np.arange(6), np.array([1, 5]), **given))
    read, buffers = list[Pass](), np.zeros((3, 2, 2), np.float32)
    for start in (0, 2, 4):
        request.keep()
        read.append(request.next_rows(2))
        buffers += 1 + start  # what the passes before gave in views
        experts = np.full((1, 2, 1), start)
        request.take(PassResult(buffers[0][: len(read[-1].rows)], buffers[1], experts, buffers[2]), 2)
    for name, whole in given.items():
        assert np.array_equal(np.concatenate([getattr(part, name) for part in read]), whole)
    output = request.output()
    assert output.hidden is not None and output.tapped is not None and output.experts is not None
    assert output.logits[:, 0].tolist() == [1, 9]
    assert output.hidden[:, 0].tolist() == output.tapped[:, 0].tolist() == [1, 1, 4, 4, 9, 9]
    assert output.experts[0, :, 0].tolist() == [0, 0, 2, 2, 4, 4]


@settings(max_examples=200, deadline=None)
@given(
    drafts=st.lists(st.lists(st.floats(0.01, 1), max_size=3), min_size=1, max_size=3),
    steps=st.lists(st.floats(0, 2), min_size=13, max_size=13),
    most=st.integers(0, 6),
)
def test_a_pass_has_the_rows_of_drafts_that_are_worth_most(
    drafts: list[list[float]], steps: list[float], most: int
) -> None:
    gains = [[1.0, *sorted(draft, reverse=True)] for draft in drafts]
    costs = list(itertools.accumulate(steps, initial=1.0))

    def worth(rows: Sequence[int]) -> float:
        return sum(sum(draft[:count]) for draft, count in zip(gains, rows, strict=True)) / costs[sum(rows)]

    ways = itertools.product(*(range(1, len(draft) + 1) for draft in gains))
    best = max(worth(rows) for rows in ways if sum(rows) - len(rows) <= most)
    chosen = draft_rows(gains, costs.__getitem__, most)
    assert sum(chosen) - len(chosen) <= most
    assert worth(chosen) == pytest.approx(best)


def reply(model: Model, results: dict[str, Result], prompt: str, tokens: int) -> Work:
    """What makes a reply and notes it by its prompt."""
    stream = model.stream(prompt, max_tokens=tokens, ignore_eos=True)
    yield stream
    results[prompt] = stream.result


@pytest.mark.slow
def test_an_interrupt_at_any_moment_ends_all_replies(model: Model) -> None:
    """Before each of the instructions by which replies are let go on and ended."""
    before, results = threading.active_count(), dict[str, Result]()
    for place in itertools.count(1, 13):
        batch = model.reply_batch(2)
        for prompt in COMPANY:
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
    assert model.generate(COMPANY[0], max_tokens=4).usage.completion_tokens == 4


class Interrupt:
    """Raises KeyboardInterrupt before one of the instructions by which a scheduler lets its tasks go on."""

    WATCHED = frozenset({"step", "close", "_run_together", "_resume", "_wait", "advance", "collect"})

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
        for prompt in COMPANY:
            batch.add(reply(model, results, prompt, 150))
        for _ in range(3):
            batch.step()
        batch.add(reply(model, results, LONG, 1))
        while LONG not in results and batch.step():
            steps += 1
        while batch.step():
            pass
    return steps, results
