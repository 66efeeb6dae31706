"""Unloading: on request and by a timer, and what goes on with the same text afterwards."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.core.errors import StorageError, UsageError
from tests.cli import TIME_LIMIT, python
from tests.speculation import BUILTIN, known_costs, needs_builtin
from tests.timers import Timers
from tests.waiting import in_thread, wait_until

OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
PROMPT = "Tell me about the little dog and the cat that is not here"


@pytest.fixture
def aside(own_cache: Path) -> Callable[[], list[Path]]:
    """What was put aside since the test began and lies there now."""
    folder = own_cache / "edgeinfer" / "aside"

    def found() -> set[Path]:
        return set(folder.iterdir()) if folder.is_dir() else set()

    before = found()
    return lambda: sorted(found() - before)


@pytest.fixture(autouse=True)
def costs() -> Iterator[None]:
    """Loading times nothing, the first time and again."""
    with known_costs():
        yield


@pytest.fixture(scope="module")
def kept(small_bundle: Path) -> Iterator[edgeinfer.Model]:
    with known_costs(), edgeinfer.load(small_bundle, threads=1) as model:
        yield model


@pytest.fixture
def fresh(kept: edgeinfer.Model) -> edgeinfer.Model:
    """A model in memory, with an empty cache."""
    kept.score([5, 6])
    return kept


def is_loaded(model: edgeinfer.Model) -> bool:
    return model._lifecycle._parts is not None


def test_text_goes_on_as_if_nothing_had_happened(fresh: edgeinfer.Model, aside: Callable[[], list[Path]]) -> None:
    chat = fresh.chat()
    chat.send(PROMPT, **OPTIONS)
    text = [*fresh.tokenize_chat(chat.messages), 9]
    plain = fresh.generate(text, temperature=1.0, seed=4, **OPTIONS)
    assert plain.timings.cached_prompt_tokens > 10
    fresh.unload()
    assert not is_loaded(fresh)
    (put,) = aside()
    assert sys.platform == "win32" or stat.S_IMODE(put.stat().st_mode) == 0o600
    again = fresh.generate(text, temperature=1.0, seed=4, **OPTIONS)
    assert again.token_ids == plain.token_ids
    # Nothing was evaluated again but the last token.
    assert again.timings.cached_prompt_tokens == len(text) - 1
    assert aside() == []


def test_what_is_known_of_a_model_does_not_load_it(fresh: edgeinfer.Model) -> None:
    def known() -> tuple[Any, ...]:
        return (
            fresh.plan,
            fresh.info,
            fresh.context,
            fresh.load_costs,
            fresh.begin_ids,
            edgeinfer.tools.pass_work(fresh, 4, 1),
        )

    before = known()
    fresh.unload()
    assert known() == before
    assert not is_loaded(fresh)
    fresh.generate(PROMPT, **OPTIONS)
    assert (fresh.plan, fresh.info, fresh.context) == before[:3]


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.tokenize("Hello"),
        lambda model: model.score([5, 6, 7]).logprobs.tolist(),
        lambda model: [rows.tolist() for rows in model.logits([5, 6, 7])],
        lambda model: model.chat().send("Hello", **OPTIONS).text,
        lambda model: model.create_chat_completion([{"role": "user", "content": "Hi"}], max_tokens=4)["choices"],
    ],
)
def test_whatever_is_asked_loads_it(fresh: edgeinfer.Model, ask: Callable[[edgeinfer.Model], Any]) -> None:
    expected = ask(fresh)
    fresh.unload()
    fresh.unload()
    assert ask(fresh) == expected
    assert is_loaded(fresh)


@needs_builtin
def test_memory_comes_back() -> None:
    code = """
import edgeinfer, sys
from edgeinfer.runtime.system.memory import process_memory
from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend
model = edgeinfer.load(sys.argv[1], threads=1, speculation="off")
# What loading it again leaves the first time stays.
for _ in range(2):
    model.generate("Once upon a time", max_tokens=40)
    model.unload()
low = process_memory()
model.generate("Once upon a time", max_tokens=40)
high = process_memory()
model.unload()
again = process_memory()
print(low.anonymous, high.anonymous, again.anonymous, low.file, high.file)
"""
    low, high, again, low_file, high_file = map(int, python(code, BUILTIN).split())
    with edgeinfer.load(BUILTIN, threads=1) as model:
        weights = sum(tensor.nbytes for tensor in model._lifecycle.facts.tensors)
    assert high + high_file - low - low_file > 0.5 * weights
    assert again - low < 2_000_000


def test_a_model_that_nobody_holds_is_not_kept_by_its_timer(
    small_bundle: Path, aside: Callable[[], list[Path]]
) -> None:
    model = edgeinfer.load(small_bundle, threads=1, idle_unload=600)
    model.generate(PROMPT, **OPTIONS)
    model.unload()
    assert aside()
    lifecycle = model._lifecycle
    model.tokenize("Hello")
    model.unload()
    del model, lifecycle
    gc.collect()
    assert aside() == []


def test_closing_removes_what_was_put_aside_and_ends_the_model(
    small_bundle: Path, aside: Callable[[], list[Path]]
) -> None:
    with edgeinfer.load(small_bundle, threads=1) as model:
        model.generate(PROMPT, **OPTIONS)
        model.unload()
        assert aside()
    assert aside() == []
    for _ in range(2):
        with pytest.raises(UsageError, match="closed"):
            model.generate(PROMPT)
        model.close()
    model.unload()


def test_a_program_that_ends_leaves_nothing(small_bundle: Path, tmp_path: Path) -> None:
    code = """
import sys, edgeinfer
from pathlib import Path
model = edgeinfer.load(sys.argv[1], threads=1)
model.generate("Hello", max_tokens=2)
model.unload()
print(len(list(Path(sys.argv[2], "edgeinfer", "aside").iterdir())))
"""
    assert int(python(code, small_bundle, tmp_path, XDG_CACHE_HOME=str(tmp_path))) == 1
    assert list((tmp_path / "edgeinfer" / "aside").iterdir()) == []


def test_what_a_killed_program_left_is_removed(
    fresh: edgeinfer.Model, own_cache: Path, aside: Callable[[], list[Path]]
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=TIME_LIMIT)
    folder = own_cache / "edgeinfer" / "aside"
    folder.mkdir(parents=True, exist_ok=True)
    left = [folder / f"aside-{dead.pid}-1.session", folder / f".aside-{dead.pid}-2.session.abc"]
    others = [folder / f"aside-{os.getppid()}-1.session", folder / "something else"]
    for path in (*left, *others):
        path.touch()
    fresh.generate(PROMPT, **OPTIONS)
    fresh.unload()
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)
    assert len(aside()) == 3
    for path in others:
        path.unlink()


def test_nothing_is_put_aside_where_nothing_may_be_remembered(
    small_bundle: Path, aside: Callable[[], list[Path]]
) -> None:
    with edgeinfer.load(small_bundle, threads=1, remember=False) as model:
        first = model.generate(PROMPT, **OPTIONS)
        model.unload()
        assert aside() == []
        again = model.generate(PROMPT, **OPTIONS)
    assert (again.token_ids, again.timings.cached_prompt_tokens) == (first.token_ids, 0)


@pytest.mark.parametrize("kind", ["full", "damaged", "gone"])
def test_text_is_the_same_without_what_was_put_aside(
    fresh: edgeinfer.Model, monkeypatch: pytest.MonkeyPatch, aside: Callable[[], list[Path]], kind: str
) -> None:
    def full(*_: Any) -> None:
        raise StorageError("The disk is full.")

    first = fresh.generate(PROMPT, **OPTIONS)
    if kind == "full":
        monkeypatch.setattr("edgeinfer.lifecycle.write_session", full)
    fresh.unload()
    if kind == "full":
        assert aside() == []
    elif kind == "damaged":
        aside()[0].write_bytes(aside()[0].read_bytes()[:-3])
    else:
        aside()[0].unlink()
    again = fresh.generate(PROMPT, **OPTIONS)
    assert (again.token_ids, again.timings.cached_prompt_tokens) == (first.token_ids, 0)
    assert aside() == []


def test_a_bundle_that_is_gone_is_told_and_may_come_back(
    fresh: edgeinfer.Model, small_bundle: Path, tmp_path: Path
) -> None:
    first = fresh.generate(PROMPT, **OPTIONS)
    fresh.unload()
    small_bundle.rename(tmp_path / "away")
    try:
        with pytest.raises(edgeinfer.core.errors.ModelError):
            fresh.generate(PROMPT, **OPTIONS)
    finally:
        (tmp_path / "away").rename(small_bundle)
    assert fresh.generate(PROMPT, **OPTIONS).token_ids == first.token_ids


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


def test_nothing_is_unloaded_under_a_running_reply(left: edgeinfer.Model, timers: Timers) -> None:
    stream = left.stream(PROMPT, max_tokens=8, ignore_eos=True)
    ids = list(next(stream).token_ids)
    assert timers.waiting == []
    for timer in timers:
        timer.elapse()
    assert is_loaded(left)
    (refused,) = in_thread(left.unload)
    assert isinstance(refused, UsageError)
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
    backend, goings_off = left._parts.backend, []
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
