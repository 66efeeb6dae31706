"""What memory and processors this machine has, how much of both a process may use, and where threads are pinned."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# The control groups of this process, and where they are: those of cgroup 1 under the names of their controllers. In
# containers their own group may be the mount itself.
_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
# Anonymous and file bytes of the group's processes, in the file in the limit's folder: of cgroup 2, and of cgroup 1.
_USED = re.compile(r"^(?:anon|total_rss) (\d+)$", re.MULTILINE)
_MAPPED = re.compile(r"^(?:file_mapped|total_mapped_file) (\d+)$", re.MULTILINE)
_AVAILABLE = re.compile(r"^MemAvailable: +(\d+) kB$", re.MULTILINE)
_MEMINFO = Path("/proc/meminfo")
_CPUS = Path("/sys/devices/system/cpu")
# What tells processors of different speed apart, and the share of the fastest below which one is of a slow kind, for
# which the others would wait in every operator: relative capacity, of which Arm's middle cores have two thirds and more
# and small ones less than half, else the highest frequency, in which cores of one kind differ by less than a tenth.
_SPEEDS = {"cpu_capacity": 0.5, "cpufreq/cpuinfo_max_freq": 0.8}
# Where Intel's hybrid processors name those of their performance cores.
_PERFORMANCE = Path("/sys/devices/cpu_core/cpus")


def machine_memory() -> int:
    """Bytes of memory built in, or allowed by a control group."""
    if sys.platform == "linux":
        built_in = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        import psutil

        built_in = int(psutil.virtual_memory().total)
    return min([built_in, *(limit for path in _limit_files() if (limit := _limit(path)))])


def free_memory(mapped: int = 0) -> int:
    """Bytes of `machine_memory` that programs can still have, including the page cache. A control group does not count
    those of the process's `mapped` file bytes that a program outside read first."""
    limits = ((path.with_name("memory.stat"), limit) for path in _limit_files() if (limit := _limit(path)))
    groups = (limit - _number(_USED, stat) + max(0, mapped - _number(_MAPPED, stat)) for stat, limit in limits)
    return max(0, min([_available(), *groups]))


def usable_cores() -> int:
    """Cores that this process can keep busy, at least one: fast ones it may run on, within its control groups'
    quotas."""
    cores = len(_fast(_cores())) if sys.platform == "linux" else 0
    if not cores:
        import psutil  # a megabyte of modules that Linux mostly does without

        cores = min(psutil.cpu_count(logical=False) or 1, len(usable_processors()))
    return max(1, int(min([cores, *_quotas()])))


def usable_processors() -> tuple[int, ...]:
    """Numbers of the processors that the system lets this process run on, ascending."""
    if sys.platform == "linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    if sys.platform == "win32":
        import psutil

        return tuple(sorted(psutil.Process().cpu_affinity()))
    return tuple(range(os.cpu_count() or 1))


def load_average() -> float | None:
    """The system's load average of the last minute; None if unknown."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def processor_name() -> str:
    if sys.platform == "linux":
        with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                field, _, name = line.partition(":")
                if field.strip() in ("model name", "Hardware"):
                    return name.strip()
    return platform.processor() or platform.machine()


def _available() -> int:
    if sys.platform == "linux" and (kilobytes := _number(_AVAILABLE, _MEMINFO)):
        return 1024 * kilobytes
    import psutil

    return int(psutil.virtual_memory().available)


def _number(pattern: re.Pattern[str], path: Path) -> int:
    with contextlib.suppress(OSError):
        found = pattern.search(path.read_text("ascii"))
        return int(found[1]) if found else 0
    return 0


def _limit_files() -> Iterator[Path]:
    """Files with the memory limits of this process's control groups and their parents."""
    for folder, names in _groups("memory"):
        yield folder / ("memory.limit_in_bytes" if names else "memory.max")


def _quotas() -> Iterator[float]:
    """CPU quotas of the process's control groups and their parents, in processors."""
    for folder, names in _groups("cpu"):
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if names else ("cpu.max",)
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((folder / file).read_text("ascii") for file in files).split()
            if quota.isdecimal() and period.isdecimal() and int(period):  # else "max", or -1
                yield int(quota) / int(period)


def _groups(controller: str) -> Iterator[tuple[Path, str]]:
    """Folders that may be control groups of this process, and the controllers of their hierarchy: "" in cgroup 2."""
    try:
        lines = _GROUPS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        lines = []
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    mounts = [path for path in _MOUNT.glob(f"*{controller}*") if controller in path.name.split(",")]
    for mount in (_MOUNT, *mounts):
        names = "" if mount == _MOUNT else mount.name
        path = next((path for each, path in own.items() if (controller in each.split(",") if names else not each)), "")
        group = mount / path.lstrip("/")
        yield from ((folder, names) for folder in (group, *group.parents) if folder.is_relative_to(mount))


def _limit(path: Path) -> int | None:
    """The limit a file names; None where there is no such file or no limit."""
    try:
        text = path.read_text("ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def pinning(threads: int) -> str:
    """Processors for all threads but the calling one, as onnxruntime takes them; "" where nothing can be pinned. Linux
    says in sysfs which processors share a core and how fast each is. The fastest core is left for the caller."""
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


def _fast(cores: list[int]) -> list[int]:
    """The cores that are of no slow kind."""
    with contextlib.suppress(OSError, ValueError):
        named = _numbers(_PERFORMANCE.read_text("ascii"))
        return [core for core in cores if core in named] or cores
    for name, share in _SPEEDS.items():
        speeds = [_speed_by(name, core) for core in cores]
        if len(set(speeds)) > 1:
            return [core for core, speed in zip(cores, speeds, strict=True) if speed >= share * max(speeds)]
    return cores


def _numbers(text: str) -> set[int]:
    """The numbers of a list such as 0-3,8."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)}


def _speed(processor: int) -> int:
    return next((speed for name in _SPEEDS if (speed := _speed_by(name, processor))), 0)


def _speed_by(name: str, processor: int) -> int:
    text = _read(processor, name)
    return int(text) if text is not None and text.isdecimal() else 0


def _read(processor: int, name: str) -> str | None:
    try:
        return (_CPUS / f"cpu{processor}" / name).read_text("ascii").strip()
    except (OSError, ValueError):
        return None
