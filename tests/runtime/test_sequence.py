"""One text over a table: what is reused, where it ends, how it is cancelled, how context shifts make room."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.manifest import Capabilities
from edgeinfer.core.errors import BackendError, BudgetError, ContextLengthError, PromptError
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows, Edit
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass, PassCancelledError, PassResult, check_pass
from edgeinfer.runtime.decoding.sequence import Sequence as Text
from edgeinfer.runtime.decoding.sequence import run_alone
from edgeinfer.runtime.kv_cache.context_shift.policy import Lost, Removed
from edgeinfer.runtime.sampling.distributions import Logits
from edgeinfer.runtime.sampling.sampler import Sampler
from tests.runtime.interrupts import within_runs
from tests.runtime.models import bundle_of, make_graph_backend
from tests.tables import each_row
from tests.waiting import TIME_LIMIT

VOCABULARY = 11
CAPACITY = 40


def next_token(context: Sequence[int]) -> int:
    """The table: what follows a context, all of it counting."""
    return (sum((i + 1) * t for i, t in enumerate(context)) + len(context)) % VOCABULARY


def continued(prompt: Sequence[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


class TableCache(KVCache):
    """The tokens of a text in the place of keys and values."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: list[int] = []

    @property
    def length(self) -> int:  # type: ignore[override]
        return len(self.held)

    def trim(self, length: int) -> None:
        assert 0 <= length <= self.length
        del self.held[length:]

    def clear(self) -> None:
        self.held.clear()

    def fork(self) -> TableCache:
        forked = TableCache(self.capacity)
        forked.held = list(self.held)
        return forked

    def _keep(self, start: int, rows: Sequence[int]) -> None:
        self.held[start:] = [self.held[start + row] for row in rows]

    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        rows = np.array(self.held[start:stop], np.float32).reshape(1, -1, 1)
        return CopiedRows(rows.shape[1], (rows,), (rows,))

    def append(self, snapshot: CacheSnapshot) -> None:
        self.held += snapshot.keys[0][0, :, 0].astype(int).tolist()

    def rewrite(self, edit: Edit) -> None:
        rows = np.array(self.held, np.float32).reshape(1, -1, 1)
        self.held = edit(0, rows.copy(), rows.copy())[1][0, :, 0].astype(int).tolist()


class TableBackend(Backend):
    """Implements the contract over `next_token`; `pause` holds a chosen pass until it is cancelled or let go."""

    name = "table"
    kernel = "table"
    geometry = Geometry(VOCABULARY, 1, 1, 1, 1, 1000)
    capabilities = Capabilities(layer_skip=False, hidden=False, tree=False)

    def __init__(self) -> None:
        super().__init__()
        self.cache = TableCache(CAPACITY)
        self.passes: list[int] = []
        self.fails_at: int | None = None
        self.failure: Exception = BackendError("The table broke.")
        self.paused_at: int | None = None
        self.reached = threading.Event()
        self._cancelled = threading.Event()

    @property
    def held(self) -> list[int]:
        return self.cache.held

    def new_sequence(self, capacity: int) -> TableCache:
        return self.cache

    def forward(self, passes: Sequence[tuple[KVCache, Pass]]) -> list[PassResult]:
        return [self._forward(cache, batch) for cache, batch in passes]

    def _forward(self, cache: KVCache, batch: Pass) -> PassResult:
        check_pass(self, cache, batch)
        assert isinstance(cache, TableCache)
        tokens, positions, rows, start = batch.tokens, batch.positions, batch.rows, cache.length
        assert positions.tolist() == list(range(start, start + len(tokens)))
        self._wait()
        cache.held += tokens.tolist()
        self.passes.append(len(tokens))
        logits = np.zeros((len(rows), VOCABULARY), np.float32)
        for i, row in enumerate(rows):
            logits[i, next_token(cache.held[: start + row + 1])] = 1
        return PassResult(logits, None)

    def _wait(self) -> None:
        if len(self.passes) == self.fails_at:
            self.fails_at = None
            raise self.failure
        if len(self.passes) == self.paused_at:
            self._cancelled.clear()
            self.reached.set()
            if self._cancelled.wait(TIME_LIMIT):
                raise PassCancelledError("The pass was cancelled.")

    def cancel(self) -> None:
        self._cancelled.set()

    def nbytes(self) -> dict[str, int]:
        return {"kv": 0, "buffers": 0}

    def close(self) -> None:
        self.held.clear()


class Greedy(Sampler):
    """Takes the most likely token and notes the positions it is asked for."""

    def __init__(self) -> None:
        self.positions: list[int] = []

    def sample(self, logits: Logits, position: int, path: Sequence[int] = ()) -> int:
        self.positions.append(position)
        return int(logits.argmax())

    def accept(self, token: int, logits: Logits) -> None:
        pass


def stop(text: Text) -> None:
    """Cancels what a text is at, from any thread."""
    text.stopped.set()
    text.backend.cancel()


def generate(
    text: Text, prompt: Sequence[int], count: int | None = 5, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    return [step.token for step in text.generate(prompt, Greedy(), max_tokens=count, stop_ids=stop_ids)]


@pytest.fixture
def table() -> TableBackend:
    return TableBackend()


@pytest.fixture
def text(table: TableBackend) -> Text:
    return Text(table, table.cache, 4)


def test_feeds_the_prompt_in_chunks_and_each_token_once(text: Text, table: TableBackend) -> None:
    generate(text, list(range(10)), 4)
    assert table.passes == [4, 4, 2, 1, 1, 1]


def test_times_every_step(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()
    # On which a millisecond passes between two looks, but for those that time passes.
    clock = SimpleNamespace(perf_counter=lambda: next(looks) / 1000, perf_counter_ns=lambda: 0)
    monkeypatch.setattr("edgeinfer.runtime.decoding.sequence.time", clock)
    steps = list(text.generate([1, 2, 3], Greedy(), max_tokens=4, stop_ids=frozenset()))
    assert text.prefill.ms == pytest.approx(1)
    # A token's time is that from the one before, and the first one's holds the prompt's.
    assert [step.ms for step in steps] == pytest.approx([3, 1, 1, 1])


@given(
    requests=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 6)), max_size=6)
)
@settings(deadline=None)
def test_what_came_before_never_changes_a_reply(requests: list[tuple[list[int], int]]) -> None:
    table = TableBackend()
    text = Text(table, table.cache, 3)
    for prompt, count in requests:
        before = list(table.held)
        assert generate(text, prompt, count) == continued(prompt, count)
        shared = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), None)
        shared = min(len(before), len(prompt)) if shared is None else shared
        assert text.prefill.cached == min(shared, len(prompt) - 1)
        assert text.prefill.cached + text.prefill.evaluated == len(prompt)


def test_a_reply_and_its_continuation_are_reused(text: Text, table: TableBackend) -> None:
    prompt = [3, 1, 4, 1]
    reply = generate(text, prompt, 6)
    table.passes.clear()
    # The last token was chosen but never fed.
    longer = [*prompt, *reply, 5]
    assert generate(text, longer, 1) == continued(longer, 1)
    assert (text.prefill.cached, text.prefill.evaluated, table.passes) == (9, 2, [2])


def test_prompts_that_are_refused(text: Text, table: TableBackend) -> None:
    with pytest.raises(PromptError, match="empty"):
        generate(text, [])
    with pytest.raises(ContextLengthError, match="41 tokens, but the context holds 40") as caught:
        generate(text, [1] * 41)
    assert caught.value.hint and not table.passes


@each_row(("prompt", "limit"), [([1, 2, 3], None), ([1, 2, 3], 1000), ([1, 2] * (CAPACITY // 2), None)])
def test_ends_when_the_context_is_full(text: Text, table: TableBackend, prompt: list[int], limit: int | None) -> None:
    # The last token needs no place: it is never fed.
    assert generate(text, prompt, limit) == continued(prompt, CAPACITY - len(prompt) + 1)
    assert table.cache.length == CAPACITY and not text.cancelled


def test_stop_ids_end_the_reply_and_belong_to_it(text: Text) -> None:
    whole = continued([1, 2, 3], 20)
    stop = whole[6]
    assert generate(text, [1, 2, 3], 20, frozenset({stop})) == whole[: whole.index(stop) + 1]


def test_a_reply_left_early_leaves_the_engine_usable(text: Text) -> None:
    steps = text.generate([1, 2, 3], Greedy(), max_tokens=9, stop_ids=frozenset())
    assert next(steps).token == continued([1, 2, 3], 1)[0]
    steps.close()
    assert generate(text, [1, 2, 3]) == continued([1, 2, 3], 5)


@pytest.mark.parametrize("failure", [BackendError("Broken."), BudgetError("The system refuses."), MemoryError()])
@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_failing_pass_leaves_the_engine_usable_and_one_without_memory_an_empty_cache(
    text: Text, table: TableBackend, fails_at: int, failure: Exception
) -> None:
    prompt = list(range(7))
    table.fails_at, table.failure = fails_at, failure
    with pytest.raises(type(failure)):
        generate(text, prompt)
    if not isinstance(failure, BackendError):
        assert (table.cache.length, text.cached_tokens, text.prefix_bytes) == (0, (), 0)
    assert generate(text, prompt) == continued(prompt, 5)


@contextmanager
def canceller(text: Text, table: TableBackend) -> Iterator[None]:
    """Another thread, which cancels once the pass that is held has started."""

    def cancel() -> None:
        assert table.reached.wait(TIME_LIMIT)
        stop(text)

    thread = threading.Thread(target=cancel)
    thread.start()
    yield
    thread.join(TIME_LIMIT)
    assert not thread.is_alive()


@pytest.mark.parametrize("paused_at", [0, 1, 2, 3, 5], ids=lambda n: f"pass-{n}")
def test_cancelling_from_another_thread(text: Text, table: TableBackend, paused_at: int) -> None:
    """Passes 0 to 2 are the prompt's, the others decode."""
    prompt = list(range(10))
    table.paused_at = paused_at

    with canceller(text, table):
        reply = generate(text, prompt, 20)
    assert reply == continued(prompt, max(0, paused_at - 2))
    assert len(table.passes) == paused_at
    assert text.cancelled
    table.paused_at = None
    assert generate(text, prompt) == continued(prompt, 5)
    assert not text.cancelled


def test_cancelling_between_two_passes(text: Text, table: TableBackend) -> None:
    steps = text.generate([1, 2, 3], Greedy(), max_tokens=20, stop_ids=frozenset())
    next(steps)
    stop(text)
    passes = len(table.passes)
    assert list(steps) == []
    assert len(table.passes) == passes
    assert text.cancelled


SINKS, FREED = 3, 10


class Window:
    """Drops rows after the first few, without a rotation to mind."""

    name = "window"

    def __init__(self, table: TableBackend) -> None:
        self.table = table
        self.texts: list[tuple[int, ...]] = []

    def make_room(self, tokens: Sequence[int]) -> Removed:
        assert self.table.cache.length == CAPACITY
        assert self.table.held[SINKS:] == list(tokens[len(tokens) - CAPACITY + SINKS :])
        self.texts.append(tuple(tokens))
        kept = np.delete(np.arange(CAPACITY), slice(SINKS, SINKS + FREED))
        self.table.cache.rewrite(lambda layer, keys, values: (keys[:, kept], values[:, kept]))
        return Removed(FREED)

    def forget(self) -> None:
        self.texts.clear()


def held_after(text: Sequence[int]) -> list[int]:
    """The cache's rows of a text: a function of the text alone."""
    held: list[int] = []
    for token in text:
        if len(held) == CAPACITY:
            del held[SINKS : SINKS + FREED]
        held.append(token)
    return held


def continued_with_shifts(prompt: Sequence[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(held_after(text)))
    return text[len(prompt) :]


def text_of(table: TableBackend, chunk: int = 4) -> Text:
    return Text(table, table.cache, chunk, Window(table))


@pytest.mark.parametrize("size", [1, 39, 40, 41, 50, 51, 130])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_and_reply_may_be_of_any_length(table: TableBackend, size: int, chunk: int) -> None:
    prompt = [i % 7 for i in range(size)]
    text = text_of(table, chunk)
    assert generate(text, prompt, 60) == continued_with_shifts(prompt, 60)
    fed = size + 59
    assert text.lost == Lost(-(-max(0, fed - CAPACITY) // FREED), fed - table.cache.length, 0, text.lost.since)
    assert max(table.passes) <= chunk


def test_asks_for_absolute_positions(table: TableBackend) -> None:
    sampler = Greedy()
    list(text_of(table).generate([1] * 35, sampler, max_tokens=30, stop_ids=frozenset()))
    assert sampler.positions == list(range(35, 65))


def test_the_reply_without_a_limit_is_as_long_as_the_context(table: TableBackend) -> None:
    assert generate(text_of(table), [1] * 30, None) == continued_with_shifts([1] * 30, CAPACITY)


texts = st.lists(st.integers(0, 1), min_size=1, max_size=75)


@given(requests=st.lists(st.tuples(st.integers(0, 100), texts, st.integers(1, 30)), max_size=6))
@settings(deadline=None)
def test_what_came_before_never_changes_a_reply_with_shifts(requests: list[tuple[int, list[int], int]]) -> None:
    table = TableBackend()
    text = text_of(table, 5)
    before: list[int] = []
    for shared, added, count in requests:
        prompt = [*before[:shared], *added]
        reply = generate(text, prompt, count)
        assert reply == continued_with_shifts(prompt, count)
        before = [*prompt, *reply]
        assert table.held == held_after(before[:-1])
        assert text.prefill.cached + text.prefill.evaluated == len(prompt)


def test_a_text_that_parts_after_the_last_overflow_is_cut(table: TableBackend) -> None:
    text = text_of(table)
    prompt = [i % 5 for i in range(57)]
    generate(text, prompt, 1)
    assert text.lost.since == 50
    for size, cached in ((55, 55), (50, 50), (49, 0)):
        other = [*prompt[:size], 9, 9]
        assert generate(text, other, 5) == continued_with_shifts(other, 5)
        assert text.prefill.cached == cached
        text.forget()
        generate(text, prompt, 1)


@pytest.mark.parametrize("paused_at", [9, 20])
def test_a_broken_pass_leaves_books_and_cache_in_step(table: TableBackend, paused_at: int) -> None:
    text = text_of(table)
    prompt = [i % 5 for i in range(55)]
    table.fails_at = paused_at
    with pytest.raises(Exception, match="broke"):
        generate(text, prompt, 30)
    assert generate(text, prompt, 30) == continued_with_shifts(prompt, 30)


def test_a_stop_inside_the_reply_keeps_the_books(table: TableBackend) -> None:
    text = text_of(table)
    whole = continued_with_shifts([1] * 38, 20)
    longer = [*[1] * 38, *generate(text, [1] * 38, 20, frozenset({whole[5]})), 4]
    assert generate(text, longer, 9) == continued_with_shifts(longer, 9)


def test_a_policy_that_fails_empties_the_cache(table: TableBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(table)

    def fails(tokens: Sequence[int]) -> Removed:
        raise MemoryError

    monkeypatch.setattr(text.context_shift, "make_room", fails)
    with pytest.raises(MemoryError):
        generate(text, [1] * 45, 3)
    assert (table.cache.length, text.lost) == (0, Lost())
    monkeypatch.undo()
    assert generate(text, [1] * 45, 3) == continued_with_shifts([1] * 45, 3)


def test_reading_a_text_longer_than_the_context(table: TableBackend) -> None:
    text = text_of(table)
    tokens = [i % 6 for i in range(97)]
    rows: list[int] = []
    while len(rows) < len(tokens):
        chunk = tokens[len(rows) : len(rows) + min(16, text.room())]
        rows += run_alone(text.feed(chunk, np.arange(len(chunk)))).logits.argmax(axis=1).tolist()
    assert rows == [next_token(held_after(tokens[: i + 1])) for i in range(97)]


@each_row("length", [0, 296, 514])
def test_cancelling_a_real_pass(length: int) -> None:
    """The pass that begins when the cache has this length ends in its midst, and so does the reply."""
    bundle = bundle_of("llama", ExportConfig(bits=32), max_position_embeddings=1024)
    backend = make_graph_backend(bundle, 1024)
    cache = backend.cache
    text = Text(backend.model, cache, 8)
    prompt = [int(t) for t in np.random.default_rng(6).integers(0, 320, 512)]
    expected = generate(text, prompt[:20], 4)
    text.forget()

    def cancel() -> None:
        if cache.length == length:
            stop(text)

    with within_runs(cancel):
        reply = generate(text, prompt, 500)
    assert text.cancelled and cache.length == length
    assert len(reply) == max(0, length - 511)
    assert generate(text, prompt[:20], 4) == expected
    backend.close()
