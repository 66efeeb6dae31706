"""Preparing a GGUF file for the native kernel, killed, without room, while the file changes, and twice at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from edgeinfer import hub
from edgeinfer.apps.desktop.documents import _READ_PDF
from edgeinfer.core.errors import BundleError, StorageError
from edgeinfer.hub.conversion import _PROGRAM, FetchJob
from edgeinfer.tools import conversion
from tests.cli import TIME_LIMIT, command, environment
from tests.gguf_damage import whole_model
from tests.kernel import require_kernel
from tests.tables import each_row

CONVERT = "import sys; from edgeinfer.tools import conversion; sys.exit(conversion.main(sys.argv[1]))"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a user who has no models."""
    require_kernel()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return whole_model().write(tmp_path / "model.gguf")


def written() -> set[str]:
    """What is in the user's folder of models, by the beginnings of names."""
    found = (path for path in hub.models_folder().glob("*/*") if path.parent.name != ".locks")
    return {path.name.partition("-")[0] for path in found}


def converting(path: Path, prelude: str = "") -> subprocess.Popen[str]:
    """The program that prepares a file, after some code that changes the world it is in."""
    line = [sys.executable, "-c", f"{prelude}\n{CONVERT}", json.dumps(asdict(FetchJob(path=str(path))))]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, env=environment() | os.environ, stdin=pipe, stdout=pipe, text=True)


def run(path: Path) -> subprocess.CompletedProcess[str]:
    line = command("run", "-m", str(path), "-p", "a", "-n", "2", "--context", "32")
    return subprocess.run(line, env=environment() | os.environ, capture_output=True, text=True, timeout=TIME_LIMIT)


def prepare(path: Path, at: Any) -> Path:
    """Prepares a file in this process; `at` is called with how far it is."""
    run = conversion._Run(FetchJob(path=str(path)), at, conversion._Scratch(), SimpleQueue())
    return conversion._work(run)


@each_row("size", [1000, 900_000])
def test_a_file_that_is_cut_while_it_is_read(path: Path, size: int) -> None:
    whole_model().write(path)

    def cut(_: str, done: int, total: int) -> None:
        if done:
            os.truncate(path, size)

    with pytest.raises(BundleError, match="changed while it was"):
        prepare(path, cut)
    assert not written()


def test_a_file_that_is_replaced_while_it_is_read(path: Path) -> None:
    other = path.with_name("other.gguf")

    def replace(_: str, done: int, total: int) -> None:
        if done and not other.exists():
            whole_model().write(other)
            os.utime(other, (1, 1))
            other.replace(path)

    with pytest.raises(BundleError, match="changed while it was prepared"):
        prepare(path, replace)
    assert not written()


def test_a_folder_that_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(path))
    with pytest.raises(StorageError, match=r"Cannot write .*set XDG_DATA_HOME to a folder that can be written\."):
        prepare(path, lambda *_: None)


# Where the program waits to be killed: with half of the weights written, with all of them, and before the last name.
STOPS = {
    "half": "export.gguf.reading as module; name = 'write_plain'; half = True",
    "weights": "export.gguf.reading as module; name = 'seal'; half = False",
    "name": "tools.conversion as module; name = 'sync_tree'; half = False",
}
STOP = """
import threading
import edgeinfer.{}
real = getattr(module, name)
def stop(*given, **named):
    def wait(*_):
        print("stopped", flush=True)
        threading.Event().wait()
    if half:
        return real(*given[:-1], lambda stage, done, total: wait() if 2 * done > total else None)
    wait()
setattr(module, name, stop)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_one_that_was_killed_begins_again_and_leaves_nothing(path: Path, stop: str) -> None:
    process = converting(path, STOP.format(stop))
    with process:
        assert process.stdout is not None
        assert any(line == "stopped\n" for line in process.stdout)
        assert written() == {"source.json", ".work"}
        process.kill()
    done = run(path)
    assert done.returncode == 0 and done.stdout, done.stderr
    assert done.stderr.count("Preparing model.gguf") == 1 and written() == {"source.json", "gguf"}


@pytest.mark.slow
@pytest.mark.parametrize("room", [1000, 400_000])
def test_a_disk_that_fills_up_leaves_nothing(path: Path, room: int) -> None:
    process = converting(path, f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))")
    with process:
        assert process.stdout is not None
        said = [json.loads(line) for line in process.stdout]
    assert said[-1]["error"]["kind"] == "StorageError" and not written(), said
    assert run(path).returncode == 0


@pytest.mark.slow
def test_two_at_once_prepare_once(path: Path) -> None:
    line = command("run", "-m", str(path), "-p", "a", "-n", "2", "--context", "32")
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(line, env=environment() | os.environ, stdout=pipe, stderr=pipe, text=True) for _ in range(2)
    ]
    done = [process.communicate(timeout=TIME_LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], done
    assert done[0][0] == done[1][0]
    assert sum("Preparing model.gguf" in errors for _, errors in done) == 1
    assert written() == {"source.json", "gguf"}


@pytest.mark.parametrize("program", [_PROGRAM, _READ_PDF], ids=["conversion", "documents"])
def test_processes_import_nothing_of_the_folder_that_they_start_in(program: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("edgeinfer.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('not ours')")
    done = subprocess.run(program, cwd=tmp_path, input=b"", capture_output=True, timeout=TIME_LIMIT)
    assert b"not ours" not in done.stderr
