"""Pipes, devices and folders where files are expected: refused with advice or read, never waited for."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

import edgeinfer as package
from edgeinfer import chat
from edgeinfer.apps.cli.inputs import read_text
from edgeinfer.errors import StorageError, UsageError
from edgeinfer.user_files import user_cache
from tests.cli import TIME_LIMIT, edgeinfer, refuses
from tests.tables import each_row

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes and devices of POSIX systems")


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@each_row("wanted", ["model", "text"])
def test_what_is_no_file(pipe: Path, tmp_path: Path, wanted: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "edgeinfer.json").symlink_to(pipe)
    odd = [pipe, Path("/dev/zero"), Path("/dev/null"), folder, tmp_path / ("\udcff" * 10), Path("x" * 5_000)]
    for path in odd:
        if wanted == "model":
            for command in (("run", "-p", "x", "-m", path), ("inspect", path), ("plan", "--memory", "1GB", "-m", path)):
                refuses(3, "", edgeinfer(*command))
            refuses(3, "", edgeinfer("export", path, tmp_path / "out"))
        else:
            # Before, a pipe was waited for without end.
            refuses(2, "", edgeinfer("run", "-f", path))
            refuses(2, "", edgeinfer("serve", "--api-key-file", path))


def test_a_pipe_that_somebody_writes_into_is_read(pipe: Path) -> None:
    read, write = os.pipe()

    def tell() -> None:
        os.write(write, b"Once\n")
        os.close(write)

    writing = threading.Thread(target=tell)
    writing.start()
    # As a shell's <(command) names it.
    assert read_text(Path(f"/dev/fd/{read}")) == "Once"
    writing.join(TIME_LIMIT)
    os.close(read)


def test_conversations_that_cannot_be_read(
    loaded: package.Model, pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_MOST_BYTES", 1_000)
    (tmp_path / "long.json").write_bytes(b"[" * 2_000)
    for path in (pipe, Path("/dev/zero"), tmp_path, tmp_path / "long.json", Path("a\0b"), Path("x" * 5_000)):
        with pytest.raises(UsageError) as caught:
            loaded.load_chat(path)
        assert caught.value.hint
    with pytest.raises(UsageError, match="larger than"):
        loaded.load_chat(tmp_path / "long.json")


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the cache lies elsewhere")
def test_the_variable_of_the_desktop_counts_before_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache() == Path("/somewhere/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache() == Path("/elsewhere")


def test_a_user_without_a_home_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(StorageError, match="no home folder"):
        user_cache()
