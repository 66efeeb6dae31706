"""What memory and cores this machine has, which of them a process may use, and where threads are pinned."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "free_memory",
    "load_average",
    "machine_memory",
    "physical_cores",
    "pinning",
    "processor_name",
    "usable_processors",
]

# Where control groups are, by the controllers that /proc/self/cgroup names, and the file of a group's limit: of
# cgroup 2, which names none, and of cgroup 1. Containers see their own group as the mount itself.
_GROUPS = Path("/proc/self/cgroup")
_MOUNTS = {"": (Path("/sys/fs/cgroup"), "memory.max")}
_MOUNTS |= {"memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes")}
# What the group's processes have of their own, and have mapped of files, by the file beside the limit: of cgroup 2, and
# of cgroup 1.
_USED = re.compile(r"^(?:anon|total_rss) (\d+)$", re.MULTILINE)
_MAPPED = re.compile(r"^(?:file_mapped|total_mapped_file) (\d+)$", re.MULTILINE)
_AVAILABLE = re.compile(r"^MemAvailable: +(\d+) kB$", re.MULTILINE)
_MEMINFO = Path("/proc/meminfo")
_CPUS = Path("/sys/devices/system/cpu")
# What tells processors of different speed apart: relative capacity (Arm), else the highest frequency.
_SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")


def machine_memory() -> int:
    """Bytes: what is built in, or what the container or another control group allows."""
    return min([_built_in(), *(limit for path in _limit_files() if (limit := _limit(path)))])


def free_memory(mapped: int = 0) -> int:
    """Bytes that programs can still have, those included that only pages of files take: of what `machine_memory` is.

    Args:
        mapped: bytes of files that this process has in memory. A control group does not count those of them that a
            program outside it read first, so that it has so much more.
    """
    limits = ((path.with_name("memory.stat"), limit) for path in _limit_files() if (limit := _limit(path)))
    groups = (limit - _number(_USED, stat) + max(0, mapped - _number(_MAPPED, stat)) for stat, limit in limits)
    return max(0, min([_available(), *groups]))


def physical_cores() -> int:
    """Cores of the processor, each once however many threads it runs."""
    if sys.platform == "linux":
        # Threads of one core name each other.
        cores = {path.read_text("ascii") for path in _CPUS.glob("cpu[0-9]*/topology/thread_siblings_list")}
        if cores:
            return len(cores)
    import psutil  # a megabyte of modules that Linux mostly does without

    return psutil.cpu_count(logical=False) or 1


def usable_processors() -> tuple[int, ...]:
    """Numbers of the processors that the system lets this process run on, ascending."""
    if sys.platform == "linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def load_average() -> float | None:
    """Threads of all programs that ran or wanted to in the last minute, on average; None where they are not counted."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def processor_name() -> str:
    """Name of the processor, as well as the system tells it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                field, _, name = line.partition(":")
                if field.strip() in ("model name", "Hardware"):
                    return name.strip()
    return platform.processor() or platform.machine()


def _built_in() -> int:
    if sys.platform == "linux":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import psutil

    return int(psutil.virtual_memory().total)


def _available() -> int:
    if sys.platform == "linux" and (kilobytes := _number(_AVAILABLE, _MEMINFO)):
        return 1024 * kilobytes
    import psutil

    return int(psutil.virtual_memory().available)


def _number(pattern: re.Pattern[str], path: Path) -> int:
    """The number in a file; 0 where there is none."""
    with contextlib.suppress(OSError):
        found = pattern.search(path.read_text("ascii"))
        return int(found[1]) if found else 0
    return 0


def _limit_files() -> Iterator[Path]:
    """Where limits of this process's control groups and of all around them stand, if there are any."""
    try:
        lines = _GROUPS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        lines = []
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for controllers, (mount, name) in _MOUNTS.items():
        group = mount / own.get(controllers, "").lstrip("/")
        yield from (folder / name for folder in (group, *group.parents) if folder.is_relative_to(mount))


def _limit(path: Path) -> int | None:
    """The limit a file names; None where there is no such file or no limit."""
    try:
        text = path.read_text("ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def pinning(threads: int) -> str:
    """Processors for all threads but the calling one, as onnxruntime takes them; "" where nothing can be pinned.

    Linux says in sysfs which processors share a core and how fast each is; elsewhere nothing is pinned. The calling
    thread is the program's own and stays free; the fastest core is left for it.
    """
    if sys.platform != "linux" or threads < 2:
        return ""
    cores = _cores()
    return ";".join(str(processor + 1) for processor in cores[1:threads]) if len(cores) >= threads else ""


def _cores() -> list[int]:
    """One processor of each core that this process may use, the fastest first."""
    first: dict[str, int] = {}
    for processor in usable_processors():
        siblings = _read(processor, "topology/thread_siblings_list")
        if siblings is None:
            return []
        first.setdefault(siblings, processor)
    return sorted(first.values(), key=lambda processor: (-_speed(processor), processor))


def _speed(processor: int) -> int:
    for name in _SPEEDS:
        text = _read(processor, name)
        if text is not None and text.isdecimal():
            return int(text)
    return 0


def _read(processor: int, name: str) -> str | None:
    try:
        return (_CPUS / f"cpu{processor}" / name).read_text("ascii").strip()
    except (OSError, ValueError):
        return None
