"""The engine's books when a text outgrows its context, over a table whose next token depends on all that is held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.kv_cache.context_shift.policy import Lost, Removed
from tests.runtime.test_engine import CAPACITY, Greedy, TableBackend, next_token

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
    """What the cache holds of a text: a function of the text alone."""
    held: list[int] = []
    for token in text:
        if len(held) == CAPACITY:
            del held[SINKS : SINKS + FREED]
        held.append(token)
    return held


def continued(prompt: Sequence[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(held_after(text)))
    return text[len(prompt) :]


def write(engine: Engine, prompt: Sequence[int], count: int | None, **options: Any) -> list[int]:
    steps = engine.generate(prompt, Greedy(), max_tokens=count, stop_ids=frozenset(), **options)
    return [step.token for step in steps]


@pytest.fixture
def table() -> TableBackend:
    return TableBackend()


def engine_of(table: TableBackend, chunk: int = 4) -> Engine:
    return Engine(table, chunk, Window(table))


@pytest.mark.parametrize("size", [1, 39, 40, 41, 50, 51, 130])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_and_reply_may_be_of_any_length(table: TableBackend, size: int, chunk: int) -> None:
    prompt = [i % 7 for i in range(size)]
    engine = engine_of(table, chunk)
    assert write(engine, prompt, 60) == continued(prompt, 60)
    fed = size + 59
    assert engine.lost == Lost(-(-max(0, fed - CAPACITY) // FREED), fed - table.cache.length, 0, engine.lost.since)
    assert max(table.passes) <= chunk


def test_makes_room_only_when_one_more_token_is_fed(table: TableBackend) -> None:
    engine = engine_of(table)
    write(engine, [1] * CAPACITY, 1)
    assert engine.lost == Lost()
    write(engine, [1] * CAPACITY, 2)
    assert engine.lost == Lost(1, FREED, 0, CAPACITY)


def test_asks_for_absolute_positions(table: TableBackend) -> None:
    sampler = Greedy()
    list(engine_of(table).generate([1] * 35, sampler, max_tokens=30, stop_ids=frozenset()))
    assert sampler.positions == list(range(35, 65))


def test_the_reply_without_a_limit_is_as_long_as_the_context(table: TableBackend) -> None:
    assert write(engine_of(table), [1] * 30, None) == continued([1] * 30, CAPACITY)


texts = st.lists(st.integers(0, 1), min_size=1, max_size=75)


@given(requests=st.lists(st.tuples(st.integers(0, 100), texts, st.integers(1, 30)), max_size=6))
@settings(deadline=None)
def test_what_came_before_never_changes_a_reply(requests: list[tuple[int, list[int], int]]) -> None:
    table = TableBackend()
    engine = engine_of(table, 5)
    text: list[int] = []
    for shared, added, count in requests:
        prompt = [*text[:shared], *added]
        reply = write(engine, prompt, count)
        assert reply == continued(prompt, count)
        text = [*prompt, *reply]
        assert table.held == held_after(text[:-1])
        assert engine.prefill.cached + engine.prefill.evaluated == len(prompt)


def test_a_text_that_parts_after_the_last_overflow_is_cut(table: TableBackend) -> None:
    engine = engine_of(table)
    prompt = [i % 5 for i in range(57)]
    write(engine, prompt, 1)
    assert engine.lost.since == 50
    for size, cached in ((55, 55), (50, 50), (49, 0)):
        other = [*prompt[:size], 9, 9]
        assert write(engine, other, 5) == continued(other, 5)
        assert engine.prefill.cached == cached
        engine.forget()
        write(engine, prompt, 1)


@pytest.mark.parametrize("paused_at", [9, 20])
def test_a_broken_pass_leaves_books_and_cache_in_step(table: TableBackend, paused_at: int) -> None:
    engine = engine_of(table)
    prompt = [i % 5 for i in range(55)]
    table.fails_at = paused_at
    with pytest.raises(Exception, match="broke"):
        write(engine, prompt, 30)
    assert write(engine, prompt, 30) == continued(prompt, 30)


def test_a_stop_inside_the_reply_keeps_the_books(table: TableBackend) -> None:
    engine = engine_of(table)
    whole = continued([1] * 38, 20)
    steps = engine.generate([1] * 38, Greedy(), max_tokens=20, stop_ids=frozenset({whole[5]}))
    reply = [step.token for step in steps]
    longer = [*[1] * 38, *reply, 4]
    assert write(engine, longer, 9) == continued(longer, 9)


def test_a_policy_that_fails_empties_the_cache(table: TableBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(table)

    def fails(tokens: Sequence[int]) -> Removed:
        raise MemoryError

    monkeypatch.setattr(engine.context_shift, "make_room", fails)
    with pytest.raises(MemoryError):
        write(engine, [1] * 45, 3)
    assert (table.cache.length, engine.lost) == (0, Lost())
    monkeypatch.undo()
    assert write(engine, [1] * 45, 3) == continued([1] * 45, 3)


def test_reading_a_text_longer_than_the_context(table: TableBackend) -> None:
    engine = engine_of(table)
    text = [i % 6 for i in range(97)]
    rows: list[int] = []
    while len(rows) < len(text):
        chunk = text[len(rows) : len(rows) + min(16, engine.room())]
        rows += engine.feed(chunk, np.arange(len(chunk))).argmax(axis=1).tolist()
    assert rows == [next_token(held_after(text[: i + 1])) for i in range(97)]
