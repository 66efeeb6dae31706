"""What speculation keeps on disk: what was measured and learnt, survived when damaged; and what tuning finds."""

from __future__ import annotations

import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgeinfer
from edgeinfer.core.errors import CapabilityError, UsageError
from edgeinfer.runtime.backends.contract import Backend, KVCache
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.profile import device_profile
from edgeinfer.runtime.speculation import costs as device_costs
from edgeinfer.runtime.tuning import drafting_search
from tests.cli import contents
from tests.speculation import PROMPT, check_figures, known_costs, load_eager, make_eager, plain, random_bundle, same


@pytest.fixture(autouse=True)
def costs() -> Iterator[None]:
    """Nothing is timed."""
    with known_costs(kept=True):
        yield


# The profile.


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
        monkeypatch.setattr(device_costs, name, counted(name, getattr(device_costs, name)))
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
    assert {
        "costs.json",
        "exact.safetensors",
        "acceptance.safetensors",
        "drafted.safetensors",
        "ngram.safetensors",
        "recycle.safetensors",
    } == names
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
        state = edgeinfer.tools.drafting_state(model)
        assert state["recycle"] and state["ngram"]
        assert state["acceptance"]["recycle"].sum() > 0
    assert folders(cache) == [folder]
    # Another number of threads, another exactness, another draft model cost and draft otherwise.
    for options in ({"threads": 2}, {"exact": False}, {"draft_model": short_drafter}):
        learn(small_bundle, **options)
    assert len(folders(cache)) == 4


@pytest.mark.parametrize("speculation", ["auto", "off"])
def test_what_a_token_takes_besides_its_pass_is_kept(small_bundle: Path, cache: Path, speculation: str) -> None:
    """Also of replies that draft nothing, and without what their reader takes."""
    with edgeinfer.load(small_bundle, threads=1) as model:
        for _ in model.stream(PROMPT, max_tokens=30, ignore_eos=True, speculation=speculation):
            pass
    (folder,) = folders(cache)
    costs = device_profile.DeviceProfile(folder).costs()
    assert costs is not None and costs.drafts.token_ms is not None and costs.drafts.token_ms > 0


def test_nothing_is_kept_unless_it_may(small_bundle: Path, cache: Path) -> None:
    learn(small_bundle, remember=False)
    assert not cache.exists()
    learn(small_bundle)
    before = contents(cache)
    learn(small_bundle, remember=False)
    assert contents(cache) == before


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage")


def changed(path: Path, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Keeps other arrays in a file of them."""
    profile = device_profile.DeviceProfile.open(path.parent)
    kept = profile.arrays(path.stem)
    assert kept is not None
    profile.save_arrays(path.stem, {name: change(array) for name, array in kept.items()})


def strange(path: Path) -> None:
    """A valid file of arrays that nothing expects, or of numbers that cannot be."""
    if path.suffix == ".json":
        path.write_text(path.read_text().replace("0.", "NaN", 1))
    else:
        changed(path, lambda array: np.full_like(array, 200))


def swapped(path: Path) -> None:
    """What belongs to another name."""
    if path.suffix == ".safetensors":
        path.write_bytes(
            (path.parent / ("recycle.safetensors" if path.stem != "recycle" else "acceptance.safetensors")).read_bytes()
        )
    else:
        path.write_text('{"passes": 1}')


@pytest.fixture(scope="module")
def kept(small_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, edgeinfer.Result]:
    """A cache with a profile in it, and the reply that taught it."""
    place = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch, known_costs():
        patch.setenv("XDG_CACHE_HOME", str(place))
        return place, learn(small_bundle)


@pytest.mark.parametrize("damage", [garbage, strange, swapped])
@pytest.mark.parametrize("names", ["*", "exact.safetensors", "ngram.safetensors"])
def test_a_damaged_profile_is_survived(
    small_bundle: Path,
    kept: tuple[Path, edgeinfer.Result],
    cache: Path,
    names: str,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    place, first = kept
    shutil.copytree(place, cache)
    (folder,) = folders(cache)
    for path in sorted(folder.glob(names)):
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
    for path in theirs.glob("*.safetensors"):
        if path.stem in ("ngram", "recycle"):
            changed(path, lambda array: np.full_like(array, 1999) if array.dtype == np.int32 else array)
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

    def full(path: Path, data: bytes, *, durable: bool) -> None:
        raise OSError(28, "No space left on device", str(path))

    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(device_profile, "write_file", full)
        assert learn(small_bundle).text == expected
    assert len(caplog.records) == 1 and "will not be kept" in caplog.text
    learn(small_bundle)
    (folder,) = folders(tmp_path / "full")
    before = contents(folder)
    with monkeypatch.context() as patch:
        patch.setattr(device_profile, "write_file", full)
        assert learn(small_bundle).text == expected
    assert contents(folder) == before


# Tuning.


@pytest.fixture
def even_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning takes all blocks to cost the same."""

    def costs(backend: Backend, _: KVCache) -> BlockCosts:
        blocks = 2 * backend.geometry.num_layers
        return BlockCosts(1.0, (1.0,) * blocks, (1.0 + blocks, 1.1 + blocks))

    monkeypatch.setattr(drafting_search, "measure_costs", costs)


@pytest.mark.usefixtures("even_blocks")
@pytest.mark.parametrize("pays", [True, False])
def test_what_tuning_finds_is_drafted_with(
    small_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    monkeypatch.setattr(drafting_search, "_PAYS", 0.0 if pays else 1e9)
    steps: list[tuple[int, int]] = []
    with load_eager(small_bundle) as model:
        before = plain(model, max_tokens=30, ignore_eos=True).text
        found = edgeinfer.tools.tune_drafting(model, ["Once upon a time"], progress=lambda *step: steps.append(step))
        assert steps == [(1, 2), (2, 2)]
        assert (found.tuning.exit_layer is not None) == pays
        for who in ("auto", "exit"):
            found_now = same(model, who, max_tokens=30, ignore_eos=True)
        assert "exit" in edgeinfer.tools.drafting_state(model)
        # What is found again takes the place of drafters that are open.
        edgeinfer.tools.tune_drafting(model, ["Once upon a time"])
        assert same(model, "auto", max_tokens=30, ignore_eos=True)
        assert plain(model, max_tokens=30, ignore_eos=True).text == before
    with load_eager(small_bundle) as model:
        assert ("exit" in edgeinfer.tools.drafting_state(model)) == pays
        found_now = same(model, "auto", max_tokens=30, ignore_eos=True)
        assert ("exit" in found_now.per_drafter) == pays
    (folder,) = folders(cache)
    assert (folder / "tuning.safetensors").exists() == pays


@pytest.mark.usefixtures("even_blocks")
@pytest.mark.parametrize("damage", [garbage, strange])
def test_damage_to_what_tuning_found_is_survived(
    small_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(drafting_search, "_PAYS", 0.0)
    with load_eager(small_bundle) as model:
        edgeinfer.tools.tune_drafting(model, ["Once upon a time"])
    (folder,) = folders(cache)
    damage(folder / "tuning.safetensors")
    with load_eager(small_bundle) as model:
        assert "exit" not in edgeinfer.tools.drafting_state(model)


def test_tuning_that_cannot_be(small_bundle: Path, bigrams: Path) -> None:
    with edgeinfer.load(bigrams, threads=1) as model, pytest.raises(CapabilityError, match="cannot skip layers"):
        edgeinfer.tools.tune_drafting(model, ["Once"])
    once: dict[str, Any] = {"prompts": ["Once"]}
    with edgeinfer.load(small_bundle, threads=1) as model:
        options: list[dict[str, Any]] = [
            {"granularity": 0},
            {"granularity": 3},
            {"prompts": [""]},
            {"prompts": []},
        ]
        for option in options:
            with pytest.raises(UsageError):
                edgeinfer.tools.tune_drafting(model, **once | option)
        assert same(make_eager(model), "auto", max_tokens=10, ignore_eos=True).exact
    with edgeinfer.load(small_bundle, threads=1, context=8) as model, pytest.raises(UsageError):
        edgeinfer.tools.tune_drafting(model, ["Once upon a time there was a dog."])
