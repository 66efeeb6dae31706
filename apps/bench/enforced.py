"""Limits that the system enforces on the memory of one child process.

A control group counts every page its processes were the first to touch, of files too, and what the kernel keeps for
them; when that reaches the limit, pages of files are dropped, and if none are left the process is killed. RLIMIT_DATA
counts private writable mappings, touched or not, and makes allocations fail.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Where groups are, by the controllers that /proc/self/cgroup names: cgroup 1, and cgroup 2, which names none.
_MOUNTS = {"memory": Path("/sys/fs/cgroup/memory"), "": Path("/sys/fs/cgroup")}
# Of cgroup 1 and 2: the limit, and the largest that was counted.
_LIMITS = ("memory.limit_in_bytes", "memory.max")
# A group whose last process has just ended is busy for a moment.
_ATTEMPTS, _PAUSE_SECONDS = 50, 0.02
# Joins the group before the program begins, so that all its pages are counted.
_JOIN = 'echo $$ > "$0" && exec "$@"'


@dataclass(frozen=True)
class Enclosure:
    """Where a child is run, and how it limits itself.

    Attributes:
        kind: "cgroup", "rlimit" or "none".
        group: the control group's folder.
    """

    kind: str
    group: Path | None = None

    def command(self, command: Sequence[str]) -> list[str]:
        """The same command, run inside."""
        if self.group is None:
            return list(command)
        return ["/bin/sh", "-c", _JOIN, str(self.group / "cgroup.procs"), *command]

    @property
    def limit(self) -> dict[str, str]:
        """What the child gives to `set_limit`, in JSON's types."""
        file = _existing(self.group, _LIMITS)
        return {"kind": self.kind} | ({} if file is None else {"file": str(file)})

    def times_full(self) -> int:
        """How often the limit was reached, whether or not pages could be dropped."""
        if self.group is None:
            return 0
        plain = self.group / "memory.failcnt"
        return int(plain.read_text()) if plain.exists() else _counter(self.group / "memory.events", "max")

    def killed(self) -> bool:
        """Whether the system killed a process for its memory."""
        if self.group is None:
            return False
        files = [self.group / name for name in ("memory.oom_control", "memory.events")]
        return any(_counter(file, "oom_kill") for file in files if file.exists())


@contextlib.contextmanager
def enclosure(*, wanted: bool = True) -> Iterator[Enclosure]:
    """A place for one child: a control group within this process's own where one can be made, else RLIMIT_DATA.

    Args:
        wanted: False is a place without limits.
    """
    if not wanted:
        yield Enclosure("none")
        return
    group = _make_group()
    if group is None:
        yield Enclosure("rlimit" if sys.platform != "win32" else "none")
        return
    try:
        yield Enclosure("cgroup", group)
    finally:
        _remove(group)


def set_limit(limit: Mapping[str, str], size: int, mapped: int = 0) -> None:
    """Limits this process to so many bytes.

    Args:
        mapped: bytes of files that will be mapped private and writable, which RLIMIT_DATA counts and which the pages
            that count may not: it is raised by them.
    """
    if limit["kind"] == "cgroup":
        Path(limit["file"]).write_text(str(size))
    elif limit["kind"] == "rlimit":
        import resource  # absent on Windows, which never comes here

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size + mapped, most))


def drop_cached(folder: Path) -> None:
    """Has the system forget the contents of a folder's files, so that who reads them next is charged for them.

    Pages that a process has mapped stay.
    """
    forget_files(path for path in folder.iterdir() if path.is_file())


def forget_files(paths: Iterable[Path]) -> None:
    """The same of single files; those that cannot be opened are left alone."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _make_group() -> Path | None:
    """A new control group that limits memory; None where none can be made."""
    for own in _own_groups():
        group = own / f"edgeinfer-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        limit = _existing(group, _LIMITS)
        if limit is not None and os.access(limit, os.W_OK) and os.access(group / "cgroup.procs", os.W_OK):
            return group
        _remove(group)
    return None


def _own_groups() -> Iterator[Path]:
    """The groups this process is in; a child is put below them, so that limits already in force stay so."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in _MOUNTS:
            yield _MOUNTS[controllers] / path.lstrip("/")


def _remove(group: Path) -> None:
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(OSError):
            group.rmdir()
        if not group.exists():
            return
        time.sleep(_PAUSE_SECONDS)


def _existing(group: Path | None, names: Sequence[str]) -> Path | None:
    return next((group / name for name in names if (group / name).exists()), None) if group is not None else None


def _counter(file: Path, name: str) -> int:
    """A number of a file of lines "name number"; 0 where there is none."""
    for line in file.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
