"""Read rates of disks: measured while passes read weights, and kept for this user's next plans, by disk. A rate is that
of passes, through the system's cache, not what the disk could give a program that does nothing else. Only Linux tells
how many of a process's bytes came from a disk."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeinfer.bundle.writing import write_file
from edgeinfer.core.errors import StorageError
from edgeinfer.core.user_files import make_private, user_cache

_log = logging.getLogger("edgeinfer")

_IO = Path("/proc/self/io")
# A pass tells of a disk if it read so much of it, but for the first, which waits for pages of libraries too; so many
# are enough, of so many that are looked at.
_PASS_BYTES, _ENOUGH, _MOST_PASSES = 8_000_000, 4, 64
# Between a worn card and memory.
_LEAST_RATE, _MOST_RATE = 1e5, 1e12
_MOST_FILE_BYTES = 256


class DiskMeter:
    """Measures the disk of a weights file by the first passes that read it, where it `keeps` what it finds."""

    def __init__(self, path: Path, *, keeps: bool) -> None:
        self._path = path
        self._passes = _MOST_PASSES if keeps and _IO.exists() else 0
        self._seen: list[tuple[int, float]] = []  # bytes and seconds of passes that read

    @contextmanager
    def watching(self) -> Iterator[None]:
        if not self._passes:
            yield
            return
        self._passes -= 1
        read, busy, started = _read_bytes(), _busy_seconds(), time.perf_counter()
        yield
        seconds, read = time.perf_counter() - started - (_busy_seconds() - busy), _read_bytes() - read
        if read < _PASS_BYTES or seconds <= 0:
            return
        self._seen.append((read, seconds))
        if len(self._seen) > _ENOUGH:
            self._passes = 0
            sizes, waits = zip(*self._seen[1:], strict=True)
            keep_rate(self._path, sum(sizes) / sum(waits))


def kept_rate(path: Path) -> float | None:
    """Bytes a second that the disk of a file, there or still to be made, gave passes; None where none read from it."""
    try:
        data = json.loads(_place(path).read_bytes()[:_MOST_FILE_BYTES])
        rate = float(data["bytes_per_second"])
    # What damage makes json raise, or brings out of it, is many things, and none of it may keep a model from loading.
    except (StorageError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return rate if _LEAST_RATE <= rate <= _MOST_RATE else None


def keep_rate(path: Path, rate: float) -> None:
    """Keeps the rate of a file's disk, in bytes a second, in place of an earlier one."""
    try:
        place = _place(path)
        make_private(place.parent)
        write_file(place, json.dumps({"bytes_per_second": round(rate)}).encode() + b"\n", durable=False)
    except (StorageError, OSError) as error:
        _log.info("The rate of the disk is not kept: %s", error)


def _place(path: Path) -> Path:
    # A file that is still to be made will lie on the disk of the nearest folder that is there.
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), path)
    return user_cache() / "edgeinfer" / "disks" / f"{there.stat().st_dev}.json"


def _read_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in _IO.read_bytes().splitlines():
            if line.startswith(b"read_bytes:"):
                return int(line.split()[1])
    return 0


def _busy_seconds() -> float:
    import resource  # absent on Windows, which never comes here

    return resource.getrusage(resource.RUSAGE_THREAD).ru_utime
