"""The folders of packed weights in the user's cache: how much they may take, and for which processor they are.

Any of them may be removed at any time, also while it is used: on Linux and macOS the
files stay until the last process that has them open ends, on Windows those in use stay altogether.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import stat
import sys
import time
from pathlib import Path

from edgeinfer.config import format_size
from edgeinfer.errors import Setting, StorageError
from edgeinfer.user_files import written

# Of all folders together; and of what the disk has free, counting what they take already.
_MOST_BYTES = 8 << 30
_MOST_SHARE = 0.5
# What a process that was killed left half made. Making a folder takes seconds to minutes.
_ABANDONED_SECONDS = 3600.0
_TEMPORARY = (".new-", ".old-")
_PROCESSOR = Path("/proc/cpuinfo")
# Lines of it that name the processor and its instructions, on x86 and on ARM.
_FIELDS = ("model name", "flags", "features", "cpu implementer", "cpu part")


def processor_key() -> list[str]:
    """What tells processors apart that pack weights differently."""
    key = [sys.platform, platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), _PROCESSOR.open(encoding="utf-8", errors="replace") as file:
        lines = (line.partition(":") for line in file)
        key += sorted({value.strip() for name, _, value in lines if name.strip().lower() in _FIELDS})
    return key


def private_folder(folder: Path) -> bool:
    """Whether the folder is there and this user's own; nothing that others could put there is run."""
    with contextlib.suppress(FileNotFoundError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and (sys.platform == "win32" or status.st_uid == os.getuid())
    return False


def used(folder: Path) -> None:
    """Notes that a folder is used, so that others go first."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def make_room(folder: Path, size: int) -> None:
    """Removes folders beside this one, least recently used first, until `size` bytes more may be written."""
    others = [f for f in _children(folder.parent) if f != folder and not f.name.startswith(_TEMPORARY)]
    for left in _children(folder.parent):
        if left.name.startswith(_TEMPORARY) and time.time() - written(left) > _ABANDONED_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    taken = {other: _bytes(other) for other in others}
    free = shutil.disk_usage(folder.parent).free
    most = min(_MOST_BYTES, int(_MOST_SHARE * (free + sum(taken.values()))))
    if size > most:
        message = f"Packed weights need {format_size(size)} in {folder.parent}, which may take {format_size(most)}."
        raise StorageError(
            message, "Free some space, or pack the weights in memory with " + Setting("weights", "packed") + "."
        )
    for other in sorted(others, key=written):
        if sum(taken.values()) + size <= most:
            return
        shutil.rmtree(other, ignore_errors=True)
        del taken[other]


def _children(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]


def _bytes(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            total += path.lstat().st_size
    return total
