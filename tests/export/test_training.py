"""Stories to train on: those that are read, and those that are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeinfer.errors import UsageError
from edgeinfer.export.training.text import SEPARATOR
from tests.tables import each_row
from tests.tools.dialogues import read_stories

STORIES = [f"Once there was a dog number {i}. It ran and ran {i * i} times." for i in range(120)]


def write_stories(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.txt").write_text(f"\n{SEPARATOR}\n".join(STORIES[:70]), "utf-8")
    lines = [json.dumps({"text": story}) for story in STORIES[60:]]
    (folder / "b.jsonl").write_text("\n".join(lines), "utf-8")
    (folder / "notes.md").write_text("not a story", "utf-8")
    return folder


def test_stories_are_read_once_and_excluded_ones_never(tmp_path: Path) -> None:
    folder = write_stories(tmp_path / "stories")
    assert sorted(read_stories(folder)) == sorted(STORIES)
    excluded = tmp_path / "excluded.json"
    excluded.write_text(json.dumps(["Once there was a dog number 7."]), "utf-8")
    assert sorted(read_stories(folder, excluded)) == sorted(s for s in STORIES if "number 7." not in s)


@each_row("content", ["", "[not json", '{"other": 1}'])
def test_folders_without_stories_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content, "utf-8")
    with pytest.raises(UsageError):
        read_stories(tmp_path)
