"""Settings: what they may be, and that they are kept whole."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.desktop.requests import whole_number
from edgeinfer.apps.desktop.settings import AppSettings, SettingsFile
from edgeinfer.core.errors import StorageError, UsageError
from tests.tables import each_row


def test_what_was_set_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    file = SettingsFile(path)
    assert file.now == AppSettings()
    file.change({"theme": "dark", "memory": "600MB", "options": {"temperature": 0.5, "seed": 3}})
    file.change({"options": {"temperature": None, "top_k": 40}})
    now = SettingsFile(path).now
    assert (now.theme, now.memory, dict(now.options)) == ("dark", 600_000_000, {"seed": 3, "top_k": 40})
    assert [p.name for p in tmp_path.iterdir()] == ["settings.json"]
    if os.name != "nt":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_settings_of_a_run_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    file = SettingsFile(path, {"memory": 5_000_000, "options": {"temperature": 0.0}})
    file.change({"theme": "light"})
    assert (file.now.memory, dict(file.now.options)) == (5_000_000, {"temperature": 0.0})
    kept = SettingsFile(path).now
    assert (kept.memory, dict(kept.options), kept.theme) == (None, {}, "light")


def test_models_used_lately(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path / "settings.json")
    for model in ("/a", "/b", None, "/a"):
        file.used(model)
    assert (file.now.model, file.now.recent) == ("/a", ("/a", "/b"))
    file.used(None)
    assert SettingsFile(tmp_path / "settings.json").now.model is None


@each_row(
    "changes",
    [
        {"colour": "red"},
        {"theme": "blue"},
        {"memory": "much"},
        {"memory": -1},
        {"memory": True},
        {"context": 1},
        {"context": True},
        {"context": "many"},
        {"model": ""},
        {"model": 3},
        {"system": None},
        {"system": "x" * 100_001},
        {"options": []},
        {"options": {"memory": 1}},
        {"options": {"temperature": -1}},
        {"options": {"temperature": "hot"}},
        {"options": {"seed": 1.5}},
        {"recent": "a"},
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = SettingsFile(tmp_path / "settings.json")
    with pytest.raises(UsageError):
        file.change(changes)
    assert file.now == AppSettings()
    assert list(tmp_path.iterdir()) == []


@each_row(
    "text", ["", "{", "[]", '{"colour": 1}', '{"theme": 3}', "\x00", '{"model": "\\u0000"}', '{"system": "\\ud800"}']
)
def test_a_damaged_file_is_put_aside(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    file = SettingsFile(path)
    assert file.now == AppSettings()
    assert file.put_aside is not None
    assert file.put_aside.read_text() == text


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.json"
    file = SettingsFile(path)
    file.change({"theme": "dark"})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        file.change({"theme": "light"})
    assert file.now.theme == "dark"
    assert json.loads(path.read_text())["theme"] == "dark"
    assert [p.name for p in tmp_path.iterdir()] == ["settings.json"]


def test_whole_numbers_begin_with_one() -> None:
    assert [whole_number(body, "n") for body in ({"n": 1}, {"n": None}, {})] == [1, None, None]
    for wrong in (0, True, 1.0, "1"):
        with pytest.raises(UsageError, match="n is out of range"):
            whole_number({"n": wrong}, "n")
