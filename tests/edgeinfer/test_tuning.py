"""Settings tuned for a device: kept and used by the next load, below what the caller sets, and never trusted."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer import tools
from edgeinfer.core.errors import UsageError
from edgeinfer.runtime.profile.settings import TunedSettings
from edgeinfer.runtime.speculation import costs as device_costs
from edgeinfer.runtime.system.machine import usable_processors
from edgeinfer.runtime.tuning.search import Effort
from edgeinfer.runtime.tuning.stopwatch import LOADED, PROMPTS, Stopwatch, Times
from edgeinfer.tools import devices
from tests.edgeinfer.conftest import made_up_stopwatch
from tests.runtime.backends.llamacpp.conftest import Q4_0
from tests.runtime.backends.llamacpp.models import Shape, quantized, write_gguf
from tests.speculation import PROMPT

pytestmark = pytest.mark.usefixtures("told_costs")


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "edgeinfer" / "tuned").glob("*"))


# A device on which prompts run faster in chunks of 128.
LONG_CHUNKS = made_up_stopwatch(lambda way: 0.5 if way.prefill_chunk == 128 else 1.0)


@pytest.fixture
def long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "Stopwatch", LONG_CHUNKS)


@pytest.fixture(scope="module")
def tuned_once(small_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tools.DeviceTuning]:
    """A cache with what was kept of the small model, and what was found."""
    folder = tmp_path_factory.mktemp("tuned") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(devices, "Stopwatch", LONG_CHUNKS)
        return folder, tools.tune_device(small_bundle)


@pytest.fixture
def tuned(tuned_once: tuple[Path, tools.DeviceTuning], cache: Path, long_chunks: None) -> tools.DeviceTuning:
    """The small model, tuned and kept."""
    folder, found = tuned_once
    shutil.copytree(folder, cache)
    assert found.path is not None
    return dataclasses.replace(found, path=cache / found.path.relative_to(folder))


# What is kept is used.


def test_the_next_load_uses_what_was_kept(small_bundle: Path, cache: Path, tuned: tools.DeviceTuning) -> None:
    assert tuned.settings == TunedSettings(prefill_chunk=128) and tuned.rejected is None
    assert [tuned.path] == kept(cache)
    assert tuned.parts["prompt"].ratio == pytest.approx(2.0, rel=0.02) and tuned.parts["decode"].ratio == pytest.approx(
        1.0, rel=0.02
    )
    usual = edgeinfer.plan(small_bundle, profile="off")
    plan = edgeinfer.plan(small_bundle)
    assert (usual.prefill_chunk, usual.tuned) == (64, ()) and (plan.prefill_chunk, plan.tuned) == (
        128,
        ("prefill_chunk",),
    )
    assert plan.given_up == () and plan.fits
    choice = plan.to_dict()["choice"]
    assert choice["tuned"] == ["prefill_chunk"] and choice["threads"] == plan.threads == tuned.threads
    with edgeinfer.load(small_bundle) as model, edgeinfer.load(small_bundle, profile="off") as other:
        assert (model.plan.tuned, other.plan.tuned) == (("prefill_chunk",), ())
        texts = [each.generate(PROMPT * 6, max_tokens=12, ignore_eos=True).text for each in (model, other)]
        assert texts[0] == texts[1]
        model.unload()
        assert model.generate(PROMPT, max_tokens=2).text and model.plan.prefill_chunk == 128


@pytest.mark.usefixtures("tuned")
def test_a_chunk_is_no_longer_than_the_context(small_bundle: Path) -> None:
    cut = edgeinfer.plan(small_bundle, context=100)
    assert cut.prefill_chunk == 100 and cut.tuned == ("prefill_chunk",)


@pytest.mark.skipif(len(usable_processors()) < 2, reason="one processor runs one thread")
def test_threads_are_tuned(
    small_bundle: Path, short_drafter: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = edgeinfer.plan(small_bundle).threads
    best = next(count for count in (1, 2) if count != usual)
    fast = made_up_stopwatch(lambda way: 0.5 if way.threads == best else 1.0)
    monkeypatch.setattr(devices, "Stopwatch", fast)
    found = tools.tune_device(small_bundle)
    assert (found.settings.threads, found.threads) == (best, best)
    with edgeinfer.load(small_bundle, draft_model=short_drafter) as model:
        assert model.threads == best and model.plan.tuned == ("threads",)
    assert edgeinfer.plan(small_bundle, threads=usual).threads == usual
    # What is given is not tuned.
    found = tools.tune_device(small_bundle, threads=usual)
    assert found.settings.threads is None and {each.name for each in found.attempts} <= {"affinity", "prefill_chunk"}


def test_nothing_better_leaves_all_as_usual(
    small_bundle: Path, cache: Path, tuned: tools.DeviceTuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "Stopwatch", made_up_stopwatch(lambda way: 1.0))
    found = tools.tune_device(small_bundle)
    assert found.settings == TunedSettings() and found.path is None
    assert {part.ratio for part in found.parts.values()} == {1.0}
    # What was better once is not any more.
    assert kept(cache) == [] and edgeinfer.plan(small_bundle).tuned == ()


def test_what_cannot_be_proved_is_not_kept(small_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[TunedSettings] = []

    def at_first(way: TunedSettings) -> float:
        calls.append(way)
        return 0.5 if way.prefill_chunk == 128 and calls.count(way) < 15 else 1.0

    monkeypatch.setattr(devices, "Stopwatch", made_up_stopwatch(at_first))
    found = tools.tune_device(small_bundle, threads=1)
    assert found.settings == TunedSettings() and found.rejected == TunedSettings(prefill_chunk=128)
    assert kept(cache) == []


def test_an_interrupted_search_keeps_what_there_was(
    small_bundle: Path, cache: Path, tuned: tools.DeviceTuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = kept(cache)
    before = path.read_bytes()

    def interrupted(way: TunedSettings) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(devices, "Stopwatch", made_up_stopwatch(interrupted))
    with pytest.raises(KeyboardInterrupt):
        tools.tune_device(small_bundle)
    assert kept(cache) == [path] and path.read_bytes() == before


def test_forgetting(small_bundle: Path, cache: Path, tuned: tools.DeviceTuning) -> None:
    assert not tools.forget_tuning(small_bundle, exact=False)
    assert tools.forget_tuning(small_bundle) and kept(cache) == []
    assert not tools.forget_tuning(small_bundle)
    assert edgeinfer.plan(small_bundle).tuned == ()


# Files.


def change(path: Path, part: str, **changes: Any) -> None:
    data = json.loads(path.read_text())
    (data[part] if part else data).update(changes)
    path.write_text(json.dumps(data))


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00 no json \xff")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def many_threads(path: Path) -> None:
    change(path, "", threads=900)
    change(path, "settings", threads=900)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (garbage, "is not an edgeinfer profile"),
    (folder, "is not a file"),
    (lambda path: change(path, "settings", prefill_chunk=-1), "prefill_chunk"),
    (lambda path: change(path, "machine", processor="Another"), "another processor (Another, not"),
    (lambda path: change(path, "", model="ab" * 32, name="others"), "to another model (others)"),
    (many_threads, "for 900 threads"),
]


@pytest.mark.parametrize("given", [True, False], ids=["file", "kept"])
@pytest.mark.parametrize(("damage", "says"), DAMAGES, ids=[says for _, says in DAMAGES])
def test_a_bad_profile_is_warned_of_and_the_model_runs_as_usual(
    small_bundle: Path,
    cache: Path,
    tuned: tools.DeviceTuning,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], object],
    says: str,
    given: bool,
) -> None:
    assert tuned.path is not None
    damage(tuned.path)
    with edgeinfer.load(small_bundle, profile=tuned.path if given else None) as model:
        assert (model.plan.prefill_chunk, model.plan.tuned) == (64, ())
        assert model.generate(PROMPT, max_tokens=3).usage.completion_tokens
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert says in warning and str(tuned.path) in warning and "The default settings are used." in warning
    assert ("or off" if given else "edgeinfer tune --forget") in warning


def test_a_file_for_other_threads_is_said(
    small_bundle: Path, tuned: tools.DeviceTuning, caplog: pytest.LogCaptureFixture
) -> None:
    assert edgeinfer.plan(small_bundle, profile=tuned.path, threads=7).tuned == ()
    assert "do not apply" in caplog.records[0].getMessage()


def test_a_bad_kept_profile_does_not_stop_tuning(
    small_bundle: Path, tuned: tools.DeviceTuning, caplog: pytest.LogCaptureFixture
) -> None:
    assert tuned.path is not None
    garbage(tuned.path)
    assert tools.tune_device(small_bundle).path == tuned.path and not caplog.records
    assert edgeinfer.plan(small_bundle).tuned == ("prefill_chunk",)


# Real measuring.


@pytest.mark.slow
@pytest.mark.usefixtures("brisk", "cache")
def test_a_device_is_measured(small_bundle: Path) -> None:
    told: list[tuple[str, int, int]] = []
    found = tools.tune_device(small_bundle, quick=True, progress=lambda *step: told.append(step))
    assert set(found.parts) == {"prompt", "decode", "verify", "turn"}
    assert all(part.usual_ms > 0 and part.tuned_ms > 0 for part in found.parts.values())
    names = {attempt.name for attempt in found.attempts}
    assert "prefill_chunk" in names and ("threads" in names) == (len(usable_processors()) > 1)
    assert told and all(1 <= done <= total for _, done, total in told)
    with edgeinfer.load(small_bundle) as model:
        assert set(model.plan.tuned) == set(found.settings.names)
        assert model.generate(PROMPT, max_tokens=8).text


@pytest.mark.usefixtures("brisk", "cache")
def test_nothing_is_measured_in_a_context_that_is_too_small(small_bundle: Path) -> None:
    with pytest.raises(UsageError, match="context of 32 tokens, but there are 16"):
        tools.tune_device(small_bundle, context=16)
    assert tools.tune_device(small_bundle, context=32).parts["turn"].usual_ms > 0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many models were loaded at once, each time one was wanted."""
    alive: list[int] = []
    load = Stopwatch._load

    def loading(self: Stopwatch, settings: TunedSettings) -> Any:
        loaded = load(self, settings)
        alive.append(len(self._loaded))
        return loaded

    monkeypatch.setattr(Stopwatch, "_load", loading)
    return alive


@pytest.mark.usefixtures("brisk", "cache")
@pytest.mark.parametrize(("share", "most"), [pytest.param(1.2, 1, marks=pytest.mark.slow), (100.0, 2)])
def test_a_budget_is_kept_while_tuning(small_bundle: Path, watched: list[int], share: float, most: int) -> None:
    plan = edgeinfer.plan(small_bundle)
    found = tools.tune_device(small_bundle, memory=min(round(plan.planned_bytes * share), 10**10), threads=1)
    assert max(watched) == most and found.parts["turn"].usual_ms > 0


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.gguf
def test_loading_is_timed_where_weights_may_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp maps weights or packs them."""
    pytest.importorskip("llama_cpp")
    path = quantized(
        write_gguf(tmp_path / "model.gguf", Shape(head_dim=64, ffn=512, vocab=2048), tokenizer="gpt2"), Q4_0
    )
    usual = edgeinfer.plan(path, backend="llamacpp", threads=1).configuration.weights
    other = {"mapped": "packed", "packed": "mapped"}[usual]
    made: list[str] = []

    class Fast(Stopwatch):
        def __call__(self, settings: TunedSettings, task: str) -> Times:
            times = super().__call__(settings, task)
            assert ("load" in times) == (task == LOADED) and ("decode" in times) == (task != PROMPTS)
            made.append(task)
            return dict.fromkeys(times, 1.0 if settings.weights is None else 0.5)

    monkeypatch.setattr(devices, "Stopwatch", Fast)
    monkeypatch.setattr(devices, "FULL", Effort((7, 8), 600.0))
    found = tools.tune_device(path, backend="llamacpp", threads=1, prefill_chunk=64)
    assert found.settings.weights == other and "load" in found.parts and LOADED in made
    plan = edgeinfer.plan(path, backend="llamacpp", threads=1)
    assert plan.configuration.weights == other and "weights" in plan.tuned
    asked = edgeinfer.plan(path, backend="llamacpp", threads=1, weights="mapped" if usual == "mapped" else "packed")
    assert asked.configuration.weights == usual and "weights" not in asked.tuned


# What drafting costs is known afterwards.


@pytest.mark.usefixtures("long_chunks", "cache")
def test_the_first_reply_after_tuning_measures_nothing(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.runtime.tuning.drafting_search._PAYS", 0.0)
    tools.tune_device(small_bundle, threads=1)
    with edgeinfer.load(small_bundle, threads=1) as model:
        tools.tune_drafting(model, ["Once upon a time"])

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("something was measured")

    for name in ("measure_passes", "measure_guesses", "check_exact"):
        monkeypatch.setattr(device_costs, name, measured)
    with edgeinfer.load(small_bundle, threads=1) as model:
        assert model.plan.tuned == ("prefill_chunk",) and "exit" in tools.drafting_state(model)
        assert model.generate(PROMPT, max_tokens=8).text
