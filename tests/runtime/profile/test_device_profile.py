"""Profiles of devices: what is kept, where, and what damage does."""

from __future__ import annotations

import json
import logging
import os
import pickle
import stat
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import UsageError
from edgeinfer.hub import resolve
from edgeinfer.runtime.profile import device_profile as module
from edgeinfer.runtime.profile.costs import DraftCosts, PassCosts
from edgeinfer.runtime.profile.device_profile import DeviceProfile, forget, profile_folder, stamped

pytestmark = pytest.mark.usefixtures("log")

COSTS = stamped(PassCosts(((1, 2.0), (2, 2.5)), 2), DraftCosts({"copy": 0.01}, 0.05))
TABLES: dict[str, NDArray[Any]] = {
    "counts": np.arange(12, dtype=np.uint16).reshape(3, 4),
    "file": np.array([0.5, -1.0], np.float32),
    "copy.seen": np.zeros((0, 3)),
    "mask": np.array([True, False]),
    "one": np.array(7),
}
FOUR = np.arange(4, dtype=np.int32)


def assert_same(found: dict[str, NDArray[Any]] | None, wanted: dict[str, NDArray[Any]]) -> None:
    assert found is not None and found.keys() == wanted.keys()
    for key, array in wanted.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape)
        assert np.array_equal(found[key], array, equal_nan=array.dtype.kind == "f")
        assert found[key].flags.writeable


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a profile belongs, in an empty cache of this user."""
    monkeypatch.setattr(module, "user_cache", lambda: tmp_path)
    return tmp_path / "edgeinfer" / "speculation" / ("0" * 64)


@pytest.fixture
def kept(folder: Path) -> Path:
    """A profile with something in it."""
    profile = DeviceProfile.open(folder)
    profile.save_costs(COSTS)
    profile.save_arrays("ngram", TABLES)
    return folder


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "edgeinfer"):
        yield caplog


posix = pytest.mark.skipif(sys.platform == "win32", reason="has no such permissions")


@pytest.mark.slow
def test_saving_takes_no_memory_of_the_heap(tmp_path: Path) -> None:
    """Threads that save while replies keep what is freed would each leave blocks as large as the tables behind."""
    profile, tables = DeviceProfile.open(tmp_path / "kept"), {"a": np.arange(1 << 20), "b": np.ones((3, 1 << 18))}
    for _ in range(2):  # the second finds them there
        tracemalloc.start()
        profile.save_arrays("ngram", tables)
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
        tracemalloc.stop()
    assert_same(profile.arrays("ngram"), tables)


def test_what_is_saved_comes_back_in_another_session(kept: Path, log: pytest.LogCaptureFixture) -> None:
    again = DeviceProfile.open(kept)
    assert again.costs() == COSTS
    assert_same(again.arrays("ngram"), TABLES)
    assert again.arrays("recycle") is None
    assert log.messages == []


PLAIN = st.sampled_from([np.bool_, np.int8, np.uint16, np.int64, np.float32, np.float64])
ARRAYS = st.dictionaries(
    st.from_regex(r"[a-z0-9_][a-z0-9_.-]{0,20}", fullmatch=True),
    PLAIN.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0))),
    min_size=1,
    max_size=4,
)


@given(ARRAYS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arrays_of_any_shape_come_back(folder: Path, arrays: dict[str, NDArray[Any]]) -> None:
    arrays |= {name: array.T for name, array in arrays.items() if array.ndim == 2}
    DeviceProfile.open(folder).save_arrays("some", arrays)
    assert_same(DeviceProfile.open(folder).arrays("some"), arrays)


def test_saving_nothing_or_dropping_forgets_an_array(kept: Path) -> None:
    profile = DeviceProfile.open(kept)
    profile.save_arrays("ngram", {})
    assert profile.arrays("ngram") is None
    profile.save_arrays("ngram", TABLES)
    profile.drop("ngram")
    profile.drop("ngram")
    assert profile.arrays("ngram") is None and profile.costs() == COSTS


def test_names_stay_inside_the_folder(kept: Path) -> None:
    for name in ("", "..", "../ngram", "a/b", "Ngram", "a.b", "a" * 65, "a\n"):
        for act in (DeviceProfile.open(kept).arrays, DeviceProfile.open(kept).drop):
            with pytest.raises(UsageError, match="cannot be a name"):
                act(name)
                pytest.fail(f"{name!r} was taken")


def test_only_plain_numbers_are_kept(folder: Path) -> None:
    for array in (np.array([{}]), np.array(["a"]), np.zeros(1, np.complex64), np.zeros(1, ">i4")):
        with pytest.raises(UsageError, match="plain numbers"):
            DeviceProfile.open(folder).save_arrays("some", {"a": array})
            pytest.fail(f"{array!r} was kept")
    assert not folder.exists()


def test_costs_of_another_device_are_not_used(kept: Path) -> None:
    profile = DeviceProfile.open(kept)
    profile.save_costs(replace(COSTS, processor="another"))
    assert profile.costs() is None
    profile.save_costs(COSTS)
    assert profile.costs() == COSTS


@posix
def test_nobody_else_reads_a_profile(kept: Path) -> None:
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept.iterdir()] == [0o600, 0o600]
    kept.chmod(0o755)
    DeviceProfile.open(kept)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700


@posix
def test_another_users_folder_is_refused(
    kept: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    profile = DeviceProfile.open(kept)
    assert profile.costs() is None and profile.arrays("ngram") is None and not profile.keeps
    assert len(log.messages) == 1 and "another user" in log.messages[0]


@posix
def test_links_are_not_followed(kept: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.safetensors"
    (kept / "ngram.safetensors").rename(elsewhere)
    (kept / "ngram.safetensors").symlink_to(elsewhere)
    assert DeviceProfile.open(kept).arrays("ngram") is None
    assert elsewhere.exists() and not (kept / "ngram.safetensors").is_symlink()
    link = kept.with_name("1" * 64)
    link.symlink_to(kept)
    assert not DeviceProfile.open(link).keeps


def test_a_folder_that_cannot_be_made_keeps_nothing_and_says_so_once(
    folder: Path, log: pytest.LogCaptureFixture
) -> None:
    folder.parent.parent.write_text("in the way")
    profile = DeviceProfile.open(folder)
    assert profile.keeps and profile.costs() is None
    profile.save_costs(COSTS)
    profile.save_arrays("ngram", TABLES)
    assert not profile.keeps
    assert profile.costs() is None and profile.arrays("ngram") is None
    assert len(log.messages) == 1 and "will not be kept" in log.messages[0]


def test_without_a_folder_nothing_is_kept(log: pytest.LogCaptureFixture) -> None:
    profile = DeviceProfile.open(None)
    profile.save_costs(COSTS)
    profile.save_arrays("ngram", TABLES)
    profile.drop("ngram")
    assert profile.costs() is None and profile.arrays("ngram") is None and not profile.keeps
    assert log.messages == []


def test_a_crash_while_writing_leaves_the_old_file(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(temporary: Path, path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            DeviceProfile.open(kept).save_arrays("ngram", {"other": FOUR})
    assert_same(DeviceProfile.open(kept).arrays("ngram"), TABLES)
    assert {path.name for path in kept.iterdir()} == {"costs.json", "ngram.safetensors"}


def test_what_is_too_large_is_not_kept(
    kept: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    profile = DeviceProfile.open(kept)
    monkeypatch.setattr(module, "_MOST_ARRAYS_BYTES", 5_000)
    profile.save_arrays("ngram", {"a": np.zeros(5_000, np.uint8)})
    assert_same(profile.arrays("ngram"), TABLES)
    now = sum(path.stat().st_size for path in kept.iterdir())
    monkeypatch.setattr(module, "_MOST_PROFILE_BYTES", now + 2_900)
    profile.save_arrays("a", {"a": np.zeros(2_000, np.uint8)})
    profile.save_arrays("a", {"a": np.zeros(2_500, np.uint8)})
    profile.save_arrays("b", {"a": np.zeros(3_000, np.uint8)})
    found = profile.arrays("a")
    assert found is not None and len(found["a"]) == 2_500 and profile.arrays("b") is None
    assert len(log.messages) == 2 and profile.keeps


def test_profiles_written_longest_ago_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [folder.with_name(str(digit) * 64) for digit in range(4)]
    monkeypatch.setattr(module, "_MOST_BYTES", 3_500)
    for age, each in enumerate(reversed(folders[:3])):
        DeviceProfile.open(each).save_arrays("a", {"a": np.zeros(800, np.uint8)})
        os.utime(each, (age, age))
    stranger = folder.with_name("not a digest")
    stranger.mkdir()
    DeviceProfile.open(folders[3]).save_arrays("a", {"a": np.zeros(800, np.uint8)})
    assert [each.exists() for each in folders] == [True, True, False, True]
    assert stranger.exists()


def test_what_is_kept_already_is_not_written_again(kept: Path) -> None:
    before = {path.name: path.stat().st_ino for path in kept.iterdir()}
    os.utime(kept, (1, 1))
    profile = DeviceProfile.open(kept)
    profile.save_costs(COSTS)
    profile.save_arrays("ngram", TABLES)
    assert {path.name: path.stat().st_ino for path in kept.iterdir()} == before
    assert kept.stat().st_mtime > 1  # it is in use, and others make room first
    profile.save_arrays("ngram", {"other": FOUR})
    assert_same(profile.arrays("ngram"), {"other": FOUR})


def test_forgetting_removes_a_profile_and_no_more(kept: Path) -> None:
    other = kept.with_name("1" * 64)
    DeviceProfile.open(other).save_costs(COSTS)
    (kept / ".ngram.safetensors.ab12_x").write_bytes(b"left by a crash")
    (other / "letter.txt").write_text("someone's")
    forget(kept)
    forget(kept)
    assert not kept.exists() and (other / "costs.json").exists()
    forget()
    assert [path.name for path in other.iterdir()] == ["letter.txt"]


def test_the_folder_depends_on_all_that_costs_and_texts_depend_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "user_cache", lambda: tmp_path)
    bundle = open_bundle(resolve(None))
    name, entry = next(iter(bundle.manifest.files.items()))
    files = bundle.manifest.files | {name: replace(entry, sha256="0" * 64)}
    changed = replace(bundle, manifest=replace(bundle.manifest, files=files))
    folders = [
        profile_folder(bundle, "native", "avx2", 1, True),
        profile_folder(changed, "native", "avx2", 1, True),
        profile_folder(bundle, "portable", "avx2", 1, True),
        profile_folder(bundle, "native", "neon", 1, True),
        profile_folder(bundle, "native", "avx2", 2, True),
        profile_folder(bundle, "native", "avx2", 1, False),
    ]
    folders.append(profile_folder(bundle, "native", "avx2", 1, True, variant="int8"))
    monkeypatch.setattr(module, "VERSION", "9.9")
    folders.append(profile_folder(bundle, "native", "avx2", 1, True))
    assert len(set(folders)) == len(folders)
    assert all(folder.parent == tmp_path / "edgeinfer" / "speculation" for folder in folders)


def a_file(
    dtype: str = "I32", shape: Any = (4,), data: bytes = FOUR.tobytes(), *, names: Sequence[str] = ("a",)
) -> bytes:
    """A file of arrays whose header may say something else."""
    size = len(data)
    entries = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [size * place, size * (place + 1)]}
        for place, name in enumerate(names)
    }
    whole = data * len(names)
    header = json.dumps({"__metadata__": {"crc32": f"{zlib.crc32(whole):08x}"}} | entries).encode()
    return len(header).to_bytes(8, "little") + header + whole


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self._path),)


DAMAGE = {
    "empty": b"",
    "garbage": b"\x00\xff" * 200,
    "json": b"{}",
    "a foreign name": a_file(names=("../a",)),
    "objects": a_file("OBJECT"),
    "a type without numpy's": a_file("BF16", (8,)),
    "wider numbers": a_file("I64"),
    "a fifth number": a_file(shape=(5,)),
    "a number less": a_file(shape=(3,)),
    "a shape beyond memory": a_file(shape=(1 << 40, 1 << 20)),
    "a negative shape": a_file(shape=(-4,)),
    "a shape of texts": a_file(shape=("4",)),
    "an odd byte": a_file() + b"x",
    "another sum": a_file()[:-1] + b"\xff",
    "truths beyond 1": a_file("BOOL", data=b"\x01\x00\x07\x01"),
    "many arrays": a_file(names=[f"a{place}" for place in range(65)]),
}


def test_a_damaged_table_is_dropped_and_made_again(kept: Path, log: pytest.LogCaptureFixture) -> None:
    for damage, data in DAMAGE.items():
        log.clear()
        (kept / "ngram.safetensors").write_bytes(data)
        profile = DeviceProfile.open(kept)
        assert profile.arrays("ngram") is None, damage
        assert len(log.messages) == 1 and "is discarded" in log.messages[0], damage
        assert not (kept / "ngram.safetensors").exists(), damage
        assert profile.costs() == COSTS, damage
        profile.save_arrays("ngram", TABLES)
        assert_same(profile.arrays("ngram"), TABLES)


def test_a_pickle_is_never_loaded(kept: Path, tmp_path: Path) -> None:
    trap = np.array([Trap(tmp_path / "sprung")], object)
    with (kept / "ngram.safetensors").open("wb") as file:
        np.savez(file, a=trap, allow_pickle=True)
    (kept / "bare.safetensors").write_bytes(pickle.dumps(trap))
    assert [DeviceProfile.open(kept).arrays(name) for name in ("ngram", "bare")] == [None, None]
    assert not (tmp_path / "sprung").exists()


def test_a_file_cut_anywhere_is_no_crash(kept: Path) -> None:
    for name in ("costs.json", "ngram.safetensors"):
        whole = (kept / name).read_bytes()
        for length in range(0, len(whole) - 1, max(1, len(whole) // 60)):
            (kept / name).write_bytes(whole[:length])
            profile = DeviceProfile.open(kept)
            assert (profile.costs() if name == "costs.json" else profile.arrays("ngram")) is None


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_byte_is_no_crash(kept: Path, data: st.DataObject) -> None:
    DeviceProfile.open(kept).save_arrays("ngram", TABLES)
    whole = bytearray((kept / "ngram.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (kept / "ngram.safetensors").write_bytes(whole)
    found = DeviceProfile.open(kept).arrays("ngram")
    assert found is None or all(array.dtype.kind in "biuf" for array in found.values())


def test_damaged_costs_are_dropped(kept: Path, log: pytest.LogCaptureFixture) -> None:
    whole = json.loads((kept / "costs.json").read_text("utf-8"))
    less = {name: value for name, value in whole["drafts"].items() if name != "token_ms"}
    texts = [json.dumps(whole | {"more": 1}), json.dumps(whole | {"drafts": less})]
    texts += ["", "null", "[]", '{"format": 2}', '{"passes": 1', '{"format": 2, "a": NaN}']
    texts += ["[" * 100_000, "1" * 10_000, "\ud800", " " * 70_000]
    for text in texts:
        log.clear()
        (kept / "costs.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        assert DeviceProfile.open(kept).costs() is None, text[:20]
        assert len(log.messages) == 1 and not (kept / "costs.json").exists(), text[:20]


def test_a_file_larger_than_any_is_not_read(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ARRAYS_BYTES", 100)
    assert DeviceProfile.open(kept).arrays("ngram") is None
