"""Digests of files, read piece by piece into one buffer, and what tells that a file is still the one that was read."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from edgeinfer.records import dataclass

_PIECE = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileIdentity:
    """What changes when a file is written to or replaced, by the system's own account.

    Attributes:
        changed_ns: of contents, name or rights, which programs cannot set back as they can `modified_ns`; 0 on Windows,
            where there is none.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileIdentity:
        """Of a path, or of an open file's descriptor."""
        status = os.fstat(file) if isinstance(file, int) else file.stat()
        changed = 0 if sys.platform == "win32" else status.st_ctime_ns
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, changed)


def hash_file(path: Path, stopped: Callable[[], bool] = lambda: False) -> tuple[str, FileIdentity] | None:
    """The sha256 of a file and what the file was when it was opened for that; None where it was stopped.

    Takes one buffer of memory, and holds the interpreter neither while it reads nor while it computes.
    """
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
    """The sha256 that a file was published with, where it lies in a hub's cache under that name; None elsewhere."""
    target = path.resolve()
    blob = target.parent.name == "blobs" and _SHA256.fullmatch(target.name)
    return target.name if blob else None


def _read(file: FileIO, buffer: memoryview) -> int:
    return file.readinto(buffer) or 0


def _behind(file: FileIO, size: int) -> Callable[[int, int], None]:
    """What to do behind each piece: nothing, or where a file leaves no room in memory for others, let go of its pages.

    Those of a smaller file stay in the system's cache, where whoever runs the model finds them.
    """
    if sys.platform != "linux":
        return lambda start, count: None
    handle = file.fileno()
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    if size * 2 <= os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
        return lambda start, count: None
    return lambda start, count: os.posix_fadvise(handle, start, count, os.POSIX_FADV_DONTNEED)
