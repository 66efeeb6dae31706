"""What this process uses: resident memory, its peak, anonymous and file-backed parts; knows nothing of plans."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["ProcessMemory", "process_memory"]

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of the process now, and its peak.

    Attributes:
        rss: resident now.
        peak_rss: most that was ever resident.
        anonymous: resident memory without a file behind it.
        file: resident pages of mapped files, shared memory included.
    """

    rss: int
    peak_rss: int
    anonymous: int
    file: int


def process_memory() -> ProcessMemory:
    """Measures the process. Where the system does not tell anonymous from file pages, all count as anonymous."""
    if sys.platform == "linux":
        return _linux()
    info = psutil.Process().memory_info()
    # Windows reports the peak itself; macOS through getrusage, in bytes.
    peak = getattr(info, "peak_wset", 0) or _rusage_peak()
    return ProcessMemory(info.rss, max(peak, info.rss), info.rss, 0)


def _linux() -> ProcessMemory:
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    sizes = {name: int(fields[name].split()[0]) * 1024 for name in fields if name.startswith(("Vm", "Rss"))}
    return ProcessMemory(
        rss=sizes["VmRSS"],
        peak_rss=sizes["VmHWM"],
        anonymous=sizes["RssAnon"],
        file=sizes["RssFile"] + sizes["RssShmem"],
    )


def _rusage_peak() -> int:
    import resource  # absent on Windows, which never comes here

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
