"""Models that are left alone are unloaded by a timer, and nothing that runs is disturbed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import UsageError
from tests.cli import TIME_LIMIT
from tests.speculation import known_costs
from tests.timers import Timers
from tests.waiting import wait_until

OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
PROMPT = "Tell me about the little dog and the cat that is not here"


@pytest.fixture(autouse=True)
def costs() -> Iterator[None]:
    """Loading times nothing, the first time and again."""
    with known_costs():
        yield


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    """The timers of models, none of which goes off by itself."""
    found = Timers()
    monkeypatch.setattr("edgeinfer.lifecycle.threading.Timer", found.make)
    return found


@pytest.fixture
def left(small_bundle: Path, timers: Timers) -> Iterator[edgeinfer.Model]:
    """A model that is unloaded when it was left alone for half a minute."""
    with edgeinfer.load(small_bundle, threads=1, idle_unload=30) as model:
        yield model


def is_loaded(model: edgeinfer.Model) -> bool:
    return model._lifecycle._parts is not None


def test_nothing_is_unloaded_under_a_running_reply(left: edgeinfer.Model, timers: Timers) -> None:
    stream = left.stream(PROMPT, max_tokens=8, ignore_eos=True)
    ids = list(next(stream).token_ids)
    assert timers.waiting == []
    for timer in timers:
        timer.elapse()
    assert is_loaded(left)
    refused: list[BaseException] = []

    def attempt() -> None:
        try:
            left.unload()
        except UsageError as error:
            refused.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(timeout=TIME_LIMIT)
    assert refused
    ids += [token for chunk in stream for token in chunk.token_ids]
    (timer,) = timers.waiting
    assert (timer.interval, timer.daemon) == (30, True)
    timer.elapse()
    assert not is_loaded(left)
    assert left.generate(PROMPT, max_tokens=8, ignore_eos=True).token_ids == tuple(ids)


def test_long_work_is_not_idleness(left: edgeinfer.Model, timers: Timers) -> None:
    left.generate(PROMPT, **OPTIONS)
    assert timers.waiting
    rows = left.logits(list(range(2, 60)))
    next(rows)
    assert timers.waiting == []
    list(rows)
    (timer,) = timers.waiting
    timer.elapse()
    assert not is_loaded(left)


def test_a_request_starts_the_waiting_over(left: edgeinfer.Model, timers: Timers) -> None:
    for _ in range(3):
        left.generate("Hello", max_tokens=2)
    *earlier, last = timers
    assert timers.waiting == [last]
    # One may go off while a request stops it.
    for timer in earlier:
        timer.elapse()
    assert is_loaded(left)
    last.elapse()
    assert not is_loaded(left)
    assert timers.waiting == []


def test_a_timer_that_goes_off_within_a_pass_changes_nothing(
    left: edgeinfer.Model, timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = left.generate(PROMPT, **OPTIONS).token_ids
    backend, goings_off = left._parts.engine.backend, []
    forward = backend.forward

    def interrupted(*arguments: Any) -> Any:
        for timer in timers[-2:]:
            thread = threading.Thread(target=timer.elapse)
            thread.start()
            goings_off.append(thread)
        return forward(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "forward", interrupted)
        left.score([5, 6])
        assert left.generate(PROMPT, **OPTIONS).token_ids == expected
    for thread in goings_off:
        thread.join(timeout=TIME_LIMIT)
    assert goings_off and is_loaded(left)


def test_requests_and_unloading_may_meet_at_any_time(small_bundle: Path) -> None:
    """With timers of the system's, which go off before, between and after requests."""
    with edgeinfer.load(small_bundle, threads=1, idle_unload=0.002) as model:
        expected = model.generate(PROMPT, **OPTIONS).token_ids
        for turn in range(6):
            if turn % 3 == 2:
                wait_until(lambda: not is_loaded(model), "unloading")
            assert model.generate(PROMPT, **OPTIONS).token_ids == expected


def test_a_model_that_is_not_asked_for_unloads_only_if_told(small_bundle: Path, timers: Timers) -> None:
    with edgeinfer.load(small_bundle, threads=1) as model:
        model.generate("Hello", max_tokens=2)
        assert timers == []


def test_a_model_stays_until_the_last_who_holds_it_leaves(left: edgeinfer.Model, timers: Timers) -> None:
    lifecycle = left._lifecycle
    for holders in (1, 2, 3):
        for _ in range(holders):
            lifecycle.take()
        for _ in range(holders):
            lifecycle.unload()
            assert is_loaded(left) and timers.waiting == []
            lifecycle.leave()
        assert len(timers.waiting) == 1
        lifecycle.unload()
        assert not is_loaded(left) and timers.waiting == []
    for _ in range(2):
        lifecycle.take()
    lifecycle.close()
    lifecycle.leave()
    assert is_loaded(left)
    lifecycle.leave()
    assert not is_loaded(left) and timers.waiting == []
