"""Tuned settings and the file they are kept in: what is taken back, what is refused, and what the caller's own wins."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.runtime.profile import kept
from edgeinfer.runtime.profile.settings import (
    KEPT_SETTINGS,
    UNTUNED,
    Fingerprint,
    TunedProfile,
    TunedSettings,
)
from edgeinfer.runtime.system.machine import usable_cores
from tests.tables import each_row

MODEL = "ab" * 32
MACHINE = Fingerprint("A processor", 4, 8, "Linux x86_64", "1.0", "engine 2", "avx2")
SETTINGS = TunedSettings(threads=3, affinity="2;3,4", prefill_chunk=128, weights="mapped")
PROFILE = TunedProfile(MODEL, "tales", MACHINE, 3, SETTINGS, "2026-11-22T10:00:00+00:00")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept, "user_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@each_row(
    "bad",
    [
        *({"threads": wrong} for wrong in (0, True, 2.0)),
        *({"weights": wrong} for wrong in ("streamed", 3)),
        *({"affinity": wrong} for wrong in ("0", "1;;2", "1;2\n", None, "1," * 20_000 + "1")),
    ],
)
def test_impossible_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        TunedSettings(**bad)


def test_the_callers_own_are_never_overridden() -> None:
    cores = usable_cores()
    settings = dataclasses.replace(SETTINGS, threads=cores, affinity="")
    assert settings.left_open_by(LoadOptions(), cores) == settings
    assert settings.left_open_by(LoadOptions(prefill_chunk=16), cores) == dataclasses.replace(
        settings, prefill_chunk=None
    )
    assert settings.left_open_by(LoadOptions(weights="streamed"), cores) == dataclasses.replace(settings, weights=None)
    assert settings.left_open_by(LoadOptions(expert_memory=10**6), cores) == dataclasses.replace(settings, weights=None)
    # The other settings were not measured with another number of threads.
    assert settings.left_open_by(LoadOptions(threads=cores + 1), cores) == UNTUNED
    assert settings.left_open_by(LoadOptions(threads=cores), cores) == dataclasses.replace(settings, threads=None)
    chunk = TunedSettings(prefill_chunk=128)
    assert chunk.left_open_by(LoadOptions(), cores) == chunk and chunk.left_open_by(LoadOptions(), cores + 1) == UNTUNED


def test_a_profile_comes_back(cache: Path, tmp_path: Path) -> None:
    path = KEPT_SETTINGS.keep(MODEL, PROFILE)
    assert path == KEPT_SETTINGS.path(MODEL) and path.is_relative_to(cache)
    assert KEPT_SETTINGS.read(path) == PROFILE
    KEPT_SETTINGS.write(PROFILE, tmp_path / "out.json")
    assert KEPT_SETTINGS.read(tmp_path / "out.json") == PROFILE
    newer = dataclasses.replace(PROFILE, settings=UNTUNED)
    assert KEPT_SETTINGS.read(KEPT_SETTINGS.keep(MODEL, newer)) == newer
    assert KEPT_SETTINGS.forget(MODEL) and not KEPT_SETTINGS.forget(MODEL) and not path.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")
def test_profiles_are_this_users_own(cache: Path) -> None:
    folder = KEPT_SETTINGS.keep(MODEL, PROFILE).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    KEPT_SETTINGS.keep(MODEL, PROFILE)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_is_a_file_is_said(cache: Path) -> None:
    KEPT_SETTINGS.path(MODEL).parent.parent.mkdir(parents=True)
    KEPT_SETTINGS.path(MODEL).parent.write_text("")
    with pytest.raises(StorageError):
        KEPT_SETTINGS.keep(MODEL, PROFILE)


def test_only_so_many_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST_KEPT", 3)
    for number in range(5):
        path = KEPT_SETTINGS.keep(f"{number:064x}", PROFILE)
        os.utime(path, (number, number))
    assert sorted(path.name[63] for path in path.parent.iterdir()) == ["2", "3", "4"]


def damaged(**changes: Any) -> str:
    return json.dumps({"format": 1} | dataclasses.asdict(PROFILE) | changes)


MACHINES: tuple[dict[str, Any], ...] = ({"cores": 0}, {"engine": 4}, {"engine": "e" * 1000})
FIELDS: tuple[dict[str, Any], ...] = ({"format": 2}, {"extra": 1}, {"name": "n" * 1000}, {"settings": {}})
DAMAGED: tuple[dict[str, Any], ...] = ({"threads": -1}, {"affinity": "2"}, {"unknown": 1})


@each_row(
    "text",
    [
        *("", "{", "null", "[1]", '"text"', "[" * 20_000, "\x00\xff"),
        *(damaged(**change) for change in FIELDS),
        *(damaged(model=wrong) for wrong in ("x", None)),
        *(damaged(threads=wrong) for wrong in (2, None, "3", 10**30)),
        *(damaged(machine={}), damaged(machine=None)),
        *(damaged(machine=dataclasses.asdict(MACHINE) | wrong) for wrong in MACHINES),
        *(damaged(settings=dataclasses.asdict(SETTINGS) | wrong) for wrong in DAMAGED),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="is not an edgeinfer profile") as raised:
        KEPT_SETTINGS.read(path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500 + len(str(path))


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "is not a file"), (tmp_path / "missing", "is not a file")):
        with pytest.raises(UsageError, match=words):
            KEPT_SETTINGS.read(path)
    (tmp_path / "huge").write_bytes(b" " * (1 << 17))
    with pytest.raises(UsageError, match="too large"):
        KEPT_SETTINGS.read(tmp_path / "huge")


def test_machines_and_versions_are_told_apart() -> None:
    assert MACHINE.difference(MACHINE) == ""
    changes: tuple[tuple[str, Any, str], ...] = (
        ("processor", "Another", "processor"),
        ("cores", 2, "number of cores"),
        ("processors", 3, "number of processors"),
        ("system", "Darwin arm64", "system"),
        ("edgeinfer", "2.0", "version of edgeinfer"),
        ("engine", "engine 3", "version of the engine"),
        ("kernel", "neon", "kernel"),
    )
    for name, value, words in changes:
        other = dataclasses.replace(MACHINE, **{name: value})
        assert words in MACHINE.difference(other) and str(value) in MACHINE.difference(other)
