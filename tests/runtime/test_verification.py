"""Large files are read once for what they are, and again when anything about them or the note on them has changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest

from edgeinfer.bundle import writing
from edgeinfer.bundle.writing import FileIdentity, hash_file
from edgeinfer.core.errors import BundleError
from edgeinfer.core.user_files import written
from edgeinfer.runtime.weights import verification
from edgeinfer.runtime.weights.verification import FileCheck, VerifiedFiles, accept_file, check_file

SIZE = 3 * 2**20 + 17
Reads = Callable[[Callable[[], object]], int]


@pytest.fixture(autouse=True)
def notes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in which files count as large and settled however new they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verification, "SMALL_BYTES", 0)
    monkeypatch.setattr(verification, "_COARSE_NS", -(10**18))
    return tmp_path / "cache" / "edgeinfer" / "verified"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Bytes of files that were read while something is done."""
    total, read = 0, writing._read

    def counted(file: FileIO, buffer: memoryview) -> int:
        nonlocal total
        count = read(file, buffer)
        total += count
        return count

    def during(act: Callable[[], object]) -> int:
        before = total
        act()
        return total - before

    monkeypatch.setattr(writing, "_read", counted)
    return during


@pytest.fixture
def check(tmp_path: Path) -> FileCheck:
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(SIZE))
    hashed = hash_file(path)
    assert hashed is not None
    return FileCheck(path, path.name, SIZE, hashed[0])


def only(folder: Path) -> Path:
    (note,) = folder.iterdir()
    return note


def test_a_file_is_read_once(check: FileCheck, reads: Reads, notes_folder: Path) -> None:
    assert reads(lambda: check_file(check, VerifiedFiles())) == SIZE
    assert check_file(check, VerifiedFiles()) == "before"
    assert reads(lambda: check_file(check, VerifiedFiles())) == 0
    assert reads(lambda: check_file(check, VerifiedFiles(), again=True)) == SIZE
    assert only(notes_folder).stat().st_size < 1000
    assert notes_folder.stat().st_mode & 0o777 == 0o700


def test_a_small_file_is_read_every_time(check: FileCheck, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "SMALL_BYTES", SIZE)
    assert [reads(lambda: check_file(check, VerifiedFiles())) for _ in range(2)] == [SIZE, SIZE]


def test_what_changes_is_read_again(check: FileCheck, reads: Reads, tmp_path: Path) -> None:
    """By time, by place, or by another digest that is asked for; also where the time was set back."""
    path, data = check.path, check.path.read_bytes()

    def rewrite() -> None:
        path.write_bytes(data)

    def replace() -> None:
        (tmp_path / "new").write_bytes(data)
        (tmp_path / "new").rename(path)

    def set_back() -> None:
        status = path.stat()
        path.write_bytes(data)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    for change in (rewrite, replace, set_back):
        check_file(check, VerifiedFiles())
        change()
        assert reads(lambda: check_file(check, VerifiedFiles())) == SIZE, change.__name__
    other = FileCheck(path, path.name, SIZE, "0" * 64)
    with pytest.raises(BundleError, match="does not match"):
        check_file(other, VerifiedFiles())


def test_what_was_written_a_moment_ago_is_read_again(
    check: FileCheck, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another change might leave the same time behind."""
    monkeypatch.setattr(verification, "_COARSE_NS", 10**18)
    check_file(check, VerifiedFiles())
    assert reads(lambda: check_file(check, VerifiedFiles())) == SIZE


def test_a_bad_note_counts_as_none(check: FileCheck, reads: Reads, notes_folder: Path) -> None:
    check_file(check, VerifiedFiles())
    good = only(notes_folder).read_text()
    foreign = json.dumps(json.loads(good) | {"path": "/elsewhere"})
    bad = ("", "{", "[]", "null", "{}", "[" * 10_000, good[:-20], good.replace("sha256", "sha255"), foreign, "\udcff\0")
    for text in bad:
        only(notes_folder).write_text(text, "utf-8", "surrogatepass")
        assert reads(lambda: check_file(check, VerifiedFiles())) == SIZE, text
        # It was replaced by a good one.
        assert reads(lambda: check_file(check, VerifiedFiles())) == 0
    for position in range(0, len(good) - 1, 7):
        only(notes_folder).write_text(good[:position] + chr(ord(good[position]) ^ 1) + good[position + 1 :])
        assert check_file(check, VerifiedFiles()) == "now", position


def test_a_folder_that_cannot_be_written(check: FileCheck, reads: Reads, notes_folder: Path) -> None:
    """It is verified each time."""
    notes_folder.parent.mkdir(parents=True)
    notes_folder.write_text("not a folder")
    assert [reads(lambda: check_file(check, VerifiedFiles())) for _ in range(2)] == [SIZE, SIZE]
    notes_folder.unlink()
    (notes_folder.parent / "elsewhere").mkdir()
    notes_folder.symlink_to(notes_folder.parent / "elsewhere")
    assert [reads(lambda: check_file(check, VerifiedFiles())) for _ in range(2)] == [SIZE, SIZE]
    notes_folder.unlink()
    assert [reads(lambda: check_file(check, VerifiedFiles(keeps=False))) for _ in range(2)] == [SIZE, SIZE]
    assert not notes_folder.exists()


def test_notes_take_little_room(notes_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go, with what killed processes left."""
    monkeypatch.setattr(verification, "_MOST_NOTES", 5)
    (tmp_path / "file").write_bytes(b"x")
    identity = FileIdentity.of(tmp_path / "file")
    for index in range(12):
        VerifiedFiles().keep(tmp_path / str(index), "0" * 64, identity)
        if index == 0:
            (notes_folder / ".left.json").write_text("half")
        for age, path in enumerate(sorted(notes_folder.iterdir(), key=written)):
            os.utime(path, ns=(age, age))
    assert len(list(notes_folder.iterdir())) == 5
    assert [VerifiedFiles().find(tmp_path / str(index)) is not None for index in range(12)] == [False] * 7 + [True] * 5


def test_a_file_without_a_digest(check: FileCheck, reads: Reads) -> None:
    path, data = check.path, check.path.read_bytes()
    plain = FileCheck(path, path.name, SIZE, None, plain=True)
    assert check_file(plain, VerifiedFiles()) == "first"
    assert reads(lambda: check_file(plain, VerifiedFiles())) == 0
    path.write_bytes(data)
    assert check_file(plain, VerifiedFiles()) == "now"
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(BundleError, match=f"edgeinfer inspect {path} --accept"):
            check_file(plain, VerifiedFiles())
    accept_file(plain, VerifiedFiles())
    assert check_file(plain, VerifiedFiles()) == "before"
    path.write_bytes(data + data)
    larger = FileCheck(path, path.name, 2 * SIZE, None, plain=True)
    with pytest.raises(BundleError, match="first used"):
        check_file(FileCheck(path, path.name, 2 * SIZE, None, plain=True, tail=SIZE), VerifiedFiles())
    assert check_file(larger, VerifiedFiles()) == "first"


def test_a_file_of_another_size_is_not_read(check: FileCheck, reads: Reads) -> None:
    check.path.write_bytes(b"short")

    def refused() -> None:
        with pytest.raises(BundleError, match=r"weights\.bin has 5 bytes"):
            check_file(check, VerifiedFiles())

    assert reads(refused) == 0
