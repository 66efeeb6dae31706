"""The memory of this process: measured, and returned to the system when freed; knows nothing of plans."""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["ProcessMemory", "process_memory", "release_freed", "release_mapped", "return_large_frees"]

_STATUS = Path("/proc/self/status")
_SMAPS = Path("/proc/self/smaps")
_MADV_DONTNEED = 4  # Linux, every architecture
# mallopt's parameters in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Activations of a prefill chunk are larger than this, those of a decoding step smaller: only the former pay for a
# mapping of their own (docs/LOG.md, 2026-11-21: 23 to 36 MB less, no slower).
_LARGE_BYTES = 256 * 1024
_TRIM_BYTES = 1024 * 1024


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


def return_large_frees() -> None:
    """Makes the C library give large blocks back to the system when they are freed, instead of keeping them.

    Process-wide and lasting. Does nothing where the C library is not glibc; others return large blocks anyway.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def release_freed() -> None:
    """Returns small blocks that were freed since to the system, where the C library is glibc."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def release_mapped(path: Path) -> None:
    """Drops the resident pages of a file that is mapped and unchanged; who touches them again gets them from the file.

    Does nothing where the system is not Linux.
    """
    libc = _glibc()
    if libc is None:
        return
    suffix, span = f" {path.resolve()}", ""
    for line in _SMAPS.read_text("utf-8", "surrogateescape").splitlines():
        if line[0] in "0123456789abcdef":
            span = line.split()[0] if line.endswith(suffix) else ""
        # A page that was written to, in a private mapping, exists nowhere else.
        elif span and line.startswith("Anonymous:") and line.split()[1] == "0":
            start, end = (int(address, 16) for address in span.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" and platform.libc_ver()[0] == "glibc" else None
