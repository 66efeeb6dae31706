"""Damaged GGUF files on their way to the native kernel: an error of one line each, and nothing of them on disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from edgeinfer import hub
from edgeinfer.core.errors import EdgeInferError
from edgeinfer.export.gguf.reading import convert_gguf
from edgeinfer.hub.conversion import FetchJob
from edgeinfer.tools import conversion
from tests.cli import edgeinfer, refuses
from tests.gguf_damage import damaged_model, whole_model
from tests.kernel import require_kernel

# 2,000 files in parts, each of which ends in time on a busy machine too.
REST = [pytest.param(range(first, first + 500), marks=pytest.mark.slow) for first in range(100, 2100, 500)]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a user who has no models, prepared in this process."""
    require_kernel()

    def fetch(job: FetchJob, *_: Any) -> Path:
        return conversion._work(conversion._Run(job, lambda *_: None, conversion._Scratch(), SimpleQueue()))

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("edgeinfer.hub.resolving.fetch", fetch)
    monkeypatch.setattr(conversion, "_send", lambda **_: None)
    return whole_model().write(tmp_path / "model.gguf")


def test_the_whole_file_runs(path: Path) -> None:
    done = edgeinfer("run", "-m", path, "-p", "a", "-n", "2", "--context", "32")
    assert (done.returncode, done.stderr.count(b"error")) == (0, 0), done.stderr


@pytest.mark.parametrize("numbers", [range(100), *REST])
def test_damaged_files_are_not_converted(path: Path, numbers: range) -> None:
    out, refused = path.with_name("out"), 0
    out.mkdir()
    for number in numbers:
        path.write_bytes(damaged_model(number))
        try:
            convert_gguf(path, out / "bundle")
            shutil.rmtree(out / "bundle")  # what differs harms nothing
        except EdgeInferError as error:
            said, refused = str(error), refused + 1
            assert said.replace(str(path.parent), "").isprintable() and len(error.message) < 500, number
        assert not list(out.iterdir()), number
    assert refused > 0.9 * len(numbers)


# What a file is refused for is found while it is converted, which is tried with all of them.
@pytest.mark.parametrize("numbers", [range(15), REST[0]])
def test_damaged_files_are_not_run(path: Path, numbers: range) -> None:
    for number in numbers:
        path.write_bytes(damaged_model(number))
        done = edgeinfer("run", "-m", path, "-p", "a", "-n", "2", "--context", "32")
        left = {each.name for each in hub.models_folder().glob("*/*") if each.parent.name != ".locks"}
        try:
            if done.returncode:
                refuses(3, "", done)
                # A word on what is left to llama.cpp, and bundles of what is whole but for its template.
                assert left <= {"source.json", "refused.json"} or b"template" in done.stderr
        except AssertionError as error:
            error.add_note(f"File {number}: {done.stderr.decode()}, {left}")
            raise
        shutil.rmtree(hub.models_folder().parent, ignore_errors=True)
