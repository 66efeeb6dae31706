"""What speculation takes in memory and keeps on disk: planned before, measured after, survived when damaged; tuning."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.bundle import open_bundle
from edgeinfer.config import drafters_in
from edgeinfer.errors import BudgetError, CapabilityError, StorageError, UsageError
from edgeinfer.export import ExportConfig, export_checkpoint
from edgeinfer.runtime.speculation import device, profile, tune
from edgeinfer.runtime.speculation.memory import drafting_bytes
from tests.cli import contents
from tests.speculation import (
    BUILTIN,
    DENSE,
    PROMPT,
    check_figures,
    load_eager,
    make_eager,
    needs_builtin,
    plain,
    random_bundle,
    same,
)

ROOT = Path(__file__).resolve().parents[2]

# Memory.


def test_the_plan_has_terms_for_drafting(small_bundle: Path, short_drafter: Path) -> None:
    off, auto, one, both = (
        edgeinfer.plan(small_bundle, **options)
        for options in (
            {"speculation": "off"},
            {},
            {"draft_max": 1},
            {"draft_model": short_drafter},
        )
    )
    assert (off.draft_max, auto.draft_max, one.draft_max, both.draft_max) == (0, 15, 1, 15)
    assert not {"drafting", "draft_model"} & set(off.terms)
    rows = 14 * (320 + 2 * 64) * 4
    assert auto.terms["drafting"] - one.terms["drafting"] == rows
    assert auto.terms["drafting"] == both.terms["drafting"] and "draft_model" not in auto.terms
    weights = open_bundle(short_drafter).manifest.weight_bytes
    kv = 2 * 2 * 2 * 16 * 4 * 33
    assert both.terms["draft_model"] > weights + kv
    assert both.to_dict()["choice"]["draft_max"] == 15


@pytest.mark.parametrize("who", ["auto", *DENSE])
def test_drafters_hold_no_more_than_planned(small_bundle: Path, tmp_path: Path, short_drafter: Path, who: str) -> None:
    geometry = open_bundle(small_bundle).manifest.geometry
    if who == "bits":
        small_bundle = export_checkpoint(
            small_bundle.parent / "checkpoint", tmp_path / "elastic", ExportConfig(bits=8, keep_small=False)
        )
    with load_eager(small_bundle, speculation=who, draft_model=short_drafter, remember=False) as model:
        if who == "bits" and model.plan.layout != "native":
            pytest.skip("planes need the native kernel")
        model.generate([5 + i % 300 for i in range(400)], speculation=who, ignore_eos=True)
        drafters = model._parts.speculator._drafters
        planned = drafting_bytes(drafters_in(who), geometry, model.context, model.plan.draft_max)
        small = model._parts.speculator._parts.model
        assert small is not None
        # The draft model has a term of its own.
        held = sum(
            d.nbytes() - (sum(small.nbytes().values()) if d.name in ("model", "hierarchical") else 0)
            for d in drafters.values()
        )
        assert held <= planned


def test_drafts_that_were_asked_for_are_not_shortened(small_bundle: Path) -> None:
    options: list[dict[str, Any]] = [{"speculation": "copy,ngram"}, {"draft_max": 15}, {"draft_max": 3}]
    for option in options:
        with pytest.raises(BudgetError) as caught:
            edgeinfer.load(small_bundle, memory=1_000_000, **option)
        assert caught.value.terms["drafting"] > 0 and caught.value.minimum_bytes > 1_000_000


def test_a_model_in_a_tight_budget_drafts_less(small_bundle: Path) -> None:
    size = edgeinfer.plan(small_bundle, draft_max=1).planned_bytes
    with load_eager(small_bundle, memory=size + 4_000_000, draft_max=1) as model:
        found = same(model, "auto", max_tokens=40, ignore_eos=True)
        assert 0 < found.drafted <= found.rounds
        same(model, "recycle", max_tokens=40, ignore_eos=True, draft_width=4)


RUN = """
import json, sys
import edgeinfer
from edgeinfer.errors import BudgetError
options = json.loads(sys.argv[1])
who = options["speculation"]
if options.pop("tight"):
    try:
        edgeinfer.load(memory=1, context=1024, **options)
    except BudgetError as error:
        options |= {"memory": error.minimum_bytes, "context": 1024}
with edgeinfer.load(**options) as model:
    chat = model.chat()
    for message in ("Tell me of a dog.", "Again, please.", "Once more, with a cat."):
        for width in (1, 4):
            reply = chat.send(message, max_tokens=90, speculation=who, draft_width=width)
    found = reply.to_dict()
    print(json.dumps([found["memory"], found["speculation"], model.plan.draft_max]))
"""


@needs_builtin
@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "auto", "tight": False},
        {"speculation": "auto", "tight": True},
        {"speculation": "copy,ngram,recycle,hierarchical,exit,skip,bits", "draft_model": str(BUILTIN), "tight": True},
    ],
    ids=["auto", "tight", "all"],
)
def test_a_process_that_drafts_stays_within_its_plan(options: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", RUN, json.dumps(options)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    memory, found, draft_max = json.loads(done.stdout)
    assert memory["peak_rss_bytes"] <= memory["planned_bytes"] == sum(memory["terms"].values())
    if "memory" in options:
        assert memory["planned_bytes"] <= memory["budget_bytes"]
    # On a model so small "auto" may find that asking costs more than it gains; it must not draft beyond its plan.
    assert draft_max > 0 or found["rounds"] == 0
    assert found["rounds"] > 0 or options["speculation"] == "auto"


# The profile.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test alone, on a device whose pace never changes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(device.DeviceCosts, "_same_pace", lambda costs, passes: True)
    return tmp_path / "cache"


def learn(bundle: Path, **options: Any) -> edgeinfer.Result:
    """One load with a reply."""
    with make_eager(edgeinfer.load(bundle, **{"threads": 1} | options)) as model:
        return model.generate(PROMPT, max_tokens=30, ignore_eos=True, speculation="auto")


def folders(cache: Path) -> list[Path]:
    place = cache / "edgeinfer" / "speculation"
    return sorted(place.iterdir()) if place.is_dir() else []


def count_measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is measured from here on."""
    calls: list[str] = []

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def measure(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return run(*arguments, **options)

        return measure

    for name in ("measure_passes", "measure_guesses", "check_exact"):
        monkeypatch.setattr(device, name, counted(name, getattr(device, name)))
    return calls


def test_what_was_measured_and_learnt_is_kept(
    small_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, short_drafter: Path
) -> None:
    calls = count_measurements(monkeypatch)
    first = learn(small_bundle)
    assert calls.count("measure_passes") == calls.count("check_exact") == 1
    assert calls.count("measure_guesses") == len({"forced", "copy", "ngram", "recycle"})
    (folder,) = folders(cache)
    names = {path.name for path in folder.iterdir()}
    assert {"costs.json", "exact.npz", "acceptance.npz", "reach.npz", "ngram.npz", "recycle.npz"} == names
    if sys.platform != "win32":
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    calls.clear()
    second = learn(small_bundle)
    assert calls == []
    assert second.text == first.text
    assert second.speculation.exact == first.speculation.exact
    # What the first learnt is there before the second has decoded anything.
    with edgeinfer.load(small_bundle, threads=1) as model:
        state = model.drafting_state()
        assert state["recycle"] and state["ngram"]
        assert state["acceptance"]["recycle_seen"].sum() > 0
    assert folders(cache) == [folder]
    # Another number of threads, another exactness, another draft model cost and draft otherwise.
    for options in ({"threads": 2}, {"exact": False}, {"draft_model": short_drafter}):
        learn(small_bundle, **options)
    assert len(folders(cache)) == 4


def test_nothing_is_kept_unless_it_may(small_bundle: Path, cache: Path) -> None:
    learn(small_bundle, remember=False)
    assert not cache.exists()
    learn(small_bundle)
    before = contents(cache)
    learn(small_bundle, remember=False)
    assert contents(cache) == before


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def strange(path: Path) -> None:
    """A sound file of arrays that nobody expects, or of numbers that cannot be."""
    if path.suffix == ".json":
        path.write_text(path.read_text().replace("0.", "NaN", 1))
    else:
        with np.load(path) as kept:
            arrays = {name: np.full_like(kept[name], 200) for name in kept}
        np.savez(path, **arrays)


def swapped(path: Path) -> None:
    """What belongs to another name."""
    if path.suffix == ".npz":
        path.write_bytes((path.parent / ("recycle.npz" if path.stem != "recycle" else "acceptance.npz")).read_bytes())
    else:
        path.write_text('{"passes": 1}')


@pytest.mark.parametrize("damage", [garbage, cut, emptied, strange, swapped])
def test_a_damaged_profile_is_survived(
    small_bundle: Path, cache: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    first = learn(small_bundle)
    (folder,) = folders(cache)
    for path in sorted(folder.iterdir()):
        damage(path)
        again = learn(small_bundle)
        assert (again.text, again.speculation.exact) == (first.text, first.speculation.exact)
        check_figures(again.speculation)
    caplog.clear()
    assert learn(small_bundle).text == first.text
    assert caplog.records == []


def test_a_profile_of_another_vocabulary_is_survived(small_bundle: Path, cache: Path, tmp_path: Path) -> None:
    """As after a forged or wrongly copied folder: ids that the model does not have."""
    wide = random_bundle(tmp_path / "wide", vocab_size=2000)
    learn(wide)
    (theirs,) = folders(cache)
    for path in theirs.glob("*.npz"):
        if path.stem in ("ngram", "recycle"):
            with np.load(path) as kept:
                arrays = {k: np.full_like(kept[k], 1999) if kept[k].dtype == np.int32 else kept[k] for k in kept}
            np.savez(path, **arrays)
    first = learn(small_bundle)
    (ours,) = (folder for folder in folders(cache) if folder != theirs)
    for path in theirs.iterdir():
        shutil.copy(path, ours)
    assert learn(small_bundle).text == first.text


def test_a_cache_that_cannot_be_written(
    small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = learn(small_bundle, remember=False).text
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert learn(small_bundle).text == expected
    assert (tmp_path / "file").read_text() == "not a folder"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(profile, "write_file", full)
        assert learn(small_bundle).text == expected
    assert len(caplog.records) == 1 and "is not kept" in caplog.text
    learn(small_bundle)
    (folder,) = folders(tmp_path / "full")
    before = contents(folder)
    with monkeypatch.context() as patch:
        patch.setattr(profile, "write_file", full)
        assert learn(small_bundle).text == expected
    assert contents(folder) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache(small_bundle: Path, cache: Path) -> None:
    expected = learn(small_bundle, remember=False).text
    cache.mkdir(mode=0o500)
    assert learn(small_bundle).text == expected
    assert not list(cache.iterdir())


def test_no_home_for_a_profile(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise StorageError("This user has no home folder.", "Set HOME.")

    monkeypatch.setattr(profile, "user_cache", homeless)
    assert learn(small_bundle).speculation.rounds > 0


# Tuning.


@pytest.mark.parametrize("kept", [True, False])
def test_what_tuning_finds_is_drafted_with(
    small_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr(tune, "_PAYS", 0.0 if kept else 1e9)
    steps: list[tuple[int, int]] = []
    with load_eager(small_bundle, threads=1) as model:
        before = plain(model, max_tokens=30, ignore_eos=True).text
        found = model.tune(["Once upon a time"], evaluations=6, progress=lambda *step: steps.append(step))
        assert steps == [(n, 6) for n in range(1, 7)]
        assert (found.tuning.exit_layer is not None) == (found.tuning.layer_mask is not None) == kept
        for who in ("auto", "exit", "skip"):
            found_now = same(model, who, max_tokens=30, ignore_eos=True)
        assert {"exit", "skip"} <= set(model.drafting_state())
        assert plain(model, max_tokens=30, ignore_eos=True).text == before
    with load_eager(small_bundle, threads=1) as model:
        assert {"exit", "skip"} & set(model.drafting_state()) == ({"exit", "skip"} if kept else set())
        found_now = same(model, "auto", max_tokens=30, ignore_eos=True)
        assert bool({"exit", "skip"} & set(found_now.per_drafter)) == kept
    (folder,) = folders(cache)
    assert (folder / "tuning.npz").exists() == kept
    if kept:
        for damage in (garbage, strange):
            with load_eager(small_bundle, threads=1) as model:
                model.tune(["Once upon a time"], evaluations=3)
            damage(folder / "tuning.npz")
            with load_eager(small_bundle, threads=1) as model:
                assert not {"exit", "skip"} & set(model.drafting_state())


def test_tuning_that_cannot_be(small_bundle: Path, bigrams: Path) -> None:
    with edgeinfer.load(bigrams, threads=1) as model, pytest.raises(CapabilityError, match="cannot skip layers"):
        model.tune(["Once"], evaluations=2)
    once: dict[str, Any] = {"prompts": ["Once"], "evaluations": 1}
    with edgeinfer.load(small_bundle, threads=1) as model:
        options: list[dict[str, Any]] = [
            {"evaluations": 0},
            {"granularity": 0},
            {"granularity": 3},
            {"prompts": [""]},
            {"prompts": []},
        ]
        for option in options:
            with pytest.raises(UsageError):
                model.tune(**once | option)
        assert same(make_eager(model), "auto", max_tokens=10, ignore_eos=True).exact
    with edgeinfer.load(small_bundle, threads=1, context=8) as model, pytest.raises(UsageError):
        model.tune(["Once upon a time there was a dog."])
