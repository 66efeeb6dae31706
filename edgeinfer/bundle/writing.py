"""Files and bundles written whole or not at all, their digests, and the errors of a full disk or a wrong place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from edgeinfer.bundle.manifest import FileEntry, Manifest
from edgeinfer.core.errors import StorageError
from edgeinfer.core.records import dataclass

_PIECE = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileIdentity:
    """Properties of a file that change when it is written to or replaced."""

    device: int
    inode: int
    size: int
    modified_ns: int
    # Time of the last change of contents, name or rights, which programs cannot set as they can `modified_ns`; 0 on
    # Windows, which has none.
    changed_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileIdentity:
        """The identity of a path, or of an open file's descriptor."""
        status = os.fstat(file) if isinstance(file, int) else file.stat()
        changed = 0 if sys.platform == "win32" else status.st_ctime_ns
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, changed)


def hash_file(path: Path, stopped: Callable[[], bool] = lambda: False) -> tuple[str, FileIdentity] | None:
    """The sha256 of a file, read through one buffer, and its identity when it was opened; None if stopped."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file, mmap.mmap(-1, _PIECE) as room, memoryview(room) as buffer:
        identity, done = FileIdentity.of(file.fileno()), 0
        behind = _behind(file, identity.size)
        while count := _read(file, buffer):
            if stopped():
                return None
            digest.update(buffer[:count])
            behind(done, count)
            done += count
    return digest.hexdigest(), identity


def published_digest(path: Path) -> str | None:
    """The sha256 under which a file lies in a hub's cache; None for other files."""
    target = path.resolve()
    blob = target.parent.name == "blobs" and _SHA256.fullmatch(target.name)
    return target.name if blob else None


def _read(file: FileIO, buffer: memoryview) -> int:
    return file.readinto(buffer) or 0


def _behind(file: FileIO, size: int) -> Callable[[int, int], None]:
    """What to do after each piece: let go of its pages, where the file leaves no room in memory for others."""
    if sys.platform != "linux":
        return lambda start, count: None
    handle = file.fileno()
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    if size * 2 <= os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
        return lambda start, count: None
    return lambda start, count: os.posix_fadvise(handle, start, count, os.POSIX_FADV_DONTNEED)


MANIFEST = "edgeinfer.json"


@contextlib.contextmanager
def storage_errors(path: Path, hint: str = "Choose another place.") -> Iterator[None]:
    """Turns a full disk or an unwritable path into a StorageError; nothing in the block may read other files."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"The disk is full: {path}.", "Free some space or choose another place.") from error
        raise StorageError(f"Cannot write {path}: {error.strerror}.", hint) from error


def write_file(path: Path, data: bytes | memoryview, *, durable: bool = True) -> None:
    """Writes a file whole or not at all: to a temporary file, synced, renamed."""
    with new_file(path, durable=durable) as file:
        file.write(data)


@contextlib.contextmanager
def new_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yields a temporary sibling to write; on success it becomes `path`, on any failure it is removed.

    A device or a pipe is written to itself, as it would be lost if a file took its place. A link keeps leading where it
    did: the file at its end is replaced.

    Args:
        durable: wait until the disk has it. Without, a machine that fails may leave a damaged file, but no other reader
            ever sees one; for what is made again when it cannot be read.
    """
    with storage_errors(path):
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        path = path.resolve()
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def write_bundle(path: Path, *, replace_existing: bool = False) -> Iterator[Path]:
    """Yields a temporary sibling directory to fill; on success it becomes `path`, on failure it is removed."""
    with storage_errors(path):
        if path.exists() and not replace_existing:
            raise StorageError(f"{path} already exists.", "Choose another name, or add --force to replace it.")
        if path.exists() and not (path / MANIFEST).is_file():
            raise StorageError(f"{path} exists and is not a bundle, so it is not replaced.", "Choose another name.")
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            work = scratch / "new"
            work.mkdir()
            yield work
            sync_tree(work)
            if path.exists():
                path.rename(scratch / "old")
            work.rename(path)
        finally:
            # The old bundle stays until the new one is there, also when Ctrl-C comes between the two renames.
            if (scratch / "old").exists() and not path.exists():
                (scratch / "old").rename(path)
            shutil.rmtree(scratch, ignore_errors=True)


def sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            handle = os.open(Path(folder) / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def seal(root: Path, manifest: Manifest, digests: Mapping[str, str] | None = None) -> Manifest:
    """Lists every file under `root` with size and digest in the manifest and writes `edgeinfer.json`.

    Args:
        digests: of files whose digest is known, by name.
    """
    files, known = {}, digests or {}
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p != root / MANIFEST):
        name = path.relative_to(root).as_posix()
        files[name] = FileEntry(path.stat().st_size, known.get(name) or digest_of(path))
    sealed = replace(manifest, files=files)
    (root / MANIFEST).write_text(sealed.to_json(), "utf-8")
    return sealed


def digest_of(path: Path) -> str:
    hashed = hash_file(path)
    assert hashed is not None, "nothing stops it"
    return hashed[0]
