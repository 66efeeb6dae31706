"""The memory of this process: measured, and returned to the system when freed; knows nothing of plans."""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["MappedFile", "ProcessMemory", "process_memory", "release_freed", "return_large_frees"]

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


class MappedFile:
    """The places where this process has a file mapped and unchanged, found once.

    Finds none where the system is not Linux.
    """

    def __init__(self, path: Path) -> None:
        self._libc = _glibc()
        self._spans = _unchanged_spans(path) if self._libc is not None else []

    def release(self) -> None:
        """Drops the file's resident pages; who touches them again gets them from the system's cache of the file."""
        for start, length in self._spans:
            assert self._libc is not None
            self._libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED)


def _unchanged_spans(path: Path) -> list[tuple[int, int]]:
    """Address and length of each mapping of the file that holds no page written to, which would exist nowhere else."""
    spans, span, suffix = [], "", f" {path.resolve()}"
    for line in _SMAPS.read_text("utf-8", "surrogateescape").splitlines():
        if line[0] in "0123456789abcdef":
            span = line.split()[0] if line.endswith(suffix) else ""
        elif span and line.startswith("Anonymous:") and line.split()[1] == "0":
            start, end = (int(address, 16) for address in span.split("-"))
            spans.append((start, end - start))
    return spans


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" and platform.libc_ver()[0] == "glibc" else None
