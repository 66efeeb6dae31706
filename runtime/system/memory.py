"""The memory of this process: measured, and returned to the system when freed."""

from __future__ import annotations

import copy
import ctypes
import itertools
import math
import mmap
import os
import platform
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import ClassVar, Self, TypeVar

import numpy as np

from edgeinfer.core.errors import BudgetError, EdgeInferError, Setting
from edgeinfer.core.options import format_size
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.system.forks import RenewedLock

_HINT = "Free memory, or load the model with a smaller " + Setting("context") + " or " + Setting("memory") + " budget."
# How onnxruntime, the C++ library under it and the native kernel put it.
_REPORTS = re.compile(r"bad[ _]alloc|failed to allocate memory|out of memory|cannot allocate memory", re.IGNORECASE)
_REQUESTED = re.compile(r"of size:? (\d+)")


def is_refusal(error: BaseException) -> bool:
    """Whether an exception of any library means that memory was refused."""
    return isinstance(error, MemoryError) or bool(_REPORTS.search(str(error)))


def refused(what: str, error: BaseException) -> BudgetError:
    """Make the error to raise for a refusal of memory."""
    return _refused(what, _requested_bytes(error))


@contextmanager
def allocating(what: str) -> Iterator[None]:
    """Turn refusals of memory in a block or function into errors that name its purpose."""
    try:
        yield
    except Exception as error:
        name_refusal(what, error)
        raise


def name_refusal(what: str, error: Exception) -> None:
    """Raise a budget error if an error is a refusal of memory."""
    if not isinstance(error, EdgeInferError) and is_refusal(error):
        release_freed()
        raise refused(what, error) from error


def require_room(what: str, nbytes: int) -> None:
    """Refuse work without enough memory, before native code that would end the process."""
    if not has_room(nbytes):
        raise _refused(what, nbytes)


def _refused(what: str, nbytes: int | None) -> BudgetError:
    size = "memory" if nbytes is None else format_size(nbytes)
    return BudgetError(f"{what} needs {size} that the system does not grant.", _HINT)


def _requested_bytes(error: BaseException) -> int | None:
    """The bytes requested, if the error of numpy or onnxruntime says so."""
    shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
    if shape is not None and dtype is not None:
        nbytes: int = math.prod(shape) * np.dtype(dtype).itemsize
        return nbytes
    found = _REQUESTED.search(str(error))
    return int(found.group(1)) if found else None


T = TypeVar("T")

_STATUS = Path("/proc/self/status")
_SIZES = re.compile(rb"^(VmHWM|VmRSS|RssAnon|RssFile|RssShmem):\s*(\d+)", re.MULTILINE)
_MAPS, _SMAPS, _PAGEMAP = Path("/proc/self/maps"), Path("/proc/self/smaps"), Path("/proc/self/pagemap")
_ROLLUP = Path("/proc/self/smaps_rollup")
_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 4, 14, 15  # Linux, every architecture
# mallopt's parameters in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX, _M_MXFAST = -1, -3, -8, 1
# Activations of a prefill chunk are larger than this, those of a decoding step smaller: only the former pay for a
# mapping of their own. At 256 KB the hidden states of a chunk, 64 rows of 896, stayed below and left 8 MB of holes.
_LARGE_BYTES = 128 * 1024
_TRIM_BYTES = 1024 * 1024
# While freed blocks are kept: glibc takes no larger threshold for mappings (HEAP_MAX_SIZE / 2), and trims no top below.
_KEPT_LARGE_BYTES, _KEPT_TRIM_BYTES = 32 * 1024**2, 1024**3
# Pieces of code smaller than this are kept.
_WORTH_BYTES = 256 * 1024
# Of a new thread, and what starting it takes: addresses only, but limits of a process count them.
_STACK_BYTES = 12 * 1024**2


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of the process now, and its peak; shared memory counts as file pages."""

    rss: int
    peak_rss: int
    anonymous: int
    file: int


def process_memory() -> ProcessMemory:
    """Measures the process. Where the system does not tell anonymous from file pages, all count as anonymous."""
    if sys.platform == "linux":
        return _linux()
    import psutil  # a megabyte of modules that Linux does without

    info = psutil.Process().memory_info()
    # Windows reports the peak itself; macOS through getrusage, in bytes.
    peak = getattr(info, "peak_wset", 0) or _rusage_peak()
    return ProcessMemory(info.rss, max(peak, info.rss), info.rss, 0)


@lru_cache(maxsize=1)
def _proportional(second: int) -> int:
    lines = _ROLLUP.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def proportional_bytes() -> int | None:
    """Bytes in memory, each page divided by the processes that share it; None if unknown. The system looks at every
    page, which took 7 ms at 350 MB, so within a second the answer is the same."""
    try:
        return _proportional(int(time.monotonic()))
    except OSError:
        return None


def _linux() -> ProcessMemory:
    sizes = {name: int(size) * 1024 for name, size in _SIZES.findall(_STATUS.read_bytes())}
    return ProcessMemory(
        rss=sizes[b"VmRSS"],
        peak_rss=sizes[b"VmHWM"],
        anonymous=sizes[b"RssAnon"],
        file=sizes[b"RssFile"] + sizes[b"RssShmem"],
    )


def _rusage_peak() -> int:
    import resource  # absent on Windows, which never comes here

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def return_large_frees() -> None:
    """Make the C library return freed memory to the system for the rest of the process; does nothing without glibc."""
    libc = _glibc()
    if libc is not None:
        _set_thresholds(_LARGE_BYTES, _TRIM_BYTES)
        _FREED.returned = True
        # Small blocks join free neighbours at once; otherwise a thread's heap keeps what was last freed, 16 MB
        # after a tokenizer, whatever is trimmed. No pass got slower.
        libc.mallopt(_M_MXFAST, 0)
        # One heap for all threads: replies side by side have one each, of which one at a time runs, and each heap would
        # keep what its reply freed (docs/log/2026-11-25.md).
        libc.mallopt(_M_ARENA_MAX, 1)


def _set_thresholds(mapped: int, trimmed: int) -> None:
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, mapped)
        libc.mallopt(_M_TRIM_THRESHOLD, trimmed)


class _FreedBlocks:
    """How many want freed blocks kept now, and whether they are returned otherwise."""

    def __init__(self) -> None:
        self._lock = RenewedLock()
        self._keepers = 0
        self.returned = False

    def keep(self) -> None:
        with self._lock:
            self._keepers += 1
            if self._keepers == 1 and self.returned:
                _set_thresholds(_KEPT_LARGE_BYTES, _KEPT_TRIM_BYTES)

    def let_go(self) -> None:
        with self._lock:
            self._keepers -= 1
            if self._keepers == 0 and self.returned:
                _set_thresholds(_LARGE_BYTES, _TRIM_BYTES)
                release_freed()


_FREED = _FreedBlocks()


@contextmanager
def keeping_freed() -> Iterator[None]:
    """Keep freed blocks for the next ones inside this context, in spite of `return_large_frees`; return all afterwards.
    A new mapping costs a page fault for every 4 KB: 15% of evaluating a prompt, 8% of a pass of eight rows
    (docs/log/2026-11-25.md). May be nested and used by any thread."""
    _FREED.keep()
    try:
        yield
    finally:
        _FREED.let_go()


def release_freed() -> None:
    """Returns small blocks that were freed since to the system, where the C library is glibc."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def releases_pages() -> bool:
    """Whether `MappedFile` finds mappings here, whose pages it can drop."""
    return _glibc() is not None


def apart(work: Callable[[], T]) -> T:
    """Run a function in a thread of its own, so that the C library keeps its blocks apart from others. Blocks that stay
    then do not fill the holes that freed ones leave: 7 MB less after a tokenizer of 152,000 tokens was parsed. Without
    room for a thread's stack, it runs in this one."""
    if not has_room(_STACK_BYTES):
        return work()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def has_room(nbytes: int) -> bool:
    """Whether the system would grant this much memory; maps and unmaps it without touching a page."""
    try:
        # Private, as the C library's own mappings are: limits of a process's data count no others.
        kind = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
        mmap.mmap(-1, max(nbytes, 1), **kind).close()
    except OSError:
        return False
    return True


def stack_bytes(threads: int) -> int:
    """Addresses that starting so many threads takes."""
    return threads * _STACK_BYTES


class MappedFile:
    """The places where this process has a file mapped and unchanged, found once, when they are first needed. Finds none
    where the system is not Linux. Others' mappings of the file are found, too. So whoever ends one says so by `forget`:
    dropping the pages of something else that lies at its addresses by then would destroy that."""

    _living: ClassVar[weakref.WeakSet[MappedFile]] = weakref.WeakSet()
    _lock: ClassVar[RenewedLock] = RenewedLock()

    def __init__(self, path: Path) -> None:
        self._path = path
        self._libc = _glibc()
        self._whole: MappedFile | None = None
        self._ranges: list[tuple[int, int]] = []
        self._register()

    def _register(self) -> None:
        with self._lock:
            self._living.add(self)

    @classmethod
    def forget(cls, path: Path) -> None:
        """Make all instances look up a file's mappings again."""
        with cls._lock:
            for each in cls._living:
                if each._path == path:
                    each.__dict__.pop("_spans", None)

    def part(self, ranges: Iterable[tuple[int, int]]) -> Self:
        """The places of these runs of bytes of the file, each an offset and a length, in whole pages."""
        part = copy.copy(self)
        part.__dict__.pop("_spans", None)
        part._whole, part._ranges = self, list(ranges)
        part._register()
        return part

    @cached_property
    def _spans(self) -> list[_Mapping]:
        if self._libc is None:
            return []
        if self._whole is None:
            # A page that was written to would exist nowhere else.
            path = str(self._path.resolve())
            return [m for m in _mappings() if m.path == path and m.unchanged]
        page = mmap.PAGESIZE
        wanted = [(offset // page * page, -(-(offset + length) // page) * page) for offset, length in self._ranges]
        return [
            replace(span, start=span.start + at - span.offset, length=size, offset=at)
            for span in self._whole._spans
            for begin, end in wanted
            if (size := min(end, span.offset + span.length) - (at := max(begin, span.offset))) > 0
        ]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Addresses and lengths, in whole pages."""
        return [(span.start, span.length) for span in self._spans]

    def release(self) -> None:
        """Drops the pages in memory; touching them again reads them from the system's cache of the file."""
        self._advise(_MADV_DONTNEED)

    def large_pages(self) -> None:
        """Reads the file in pieces of 2 MB and maps those at once, where the system and the file's disk can."""
        self._advise(_MADV_HUGEPAGE)

    def small_pages(self) -> None:
        """Never maps a piece of 2 MB at once, as the system may where one page of it is touched."""
        self._advise(_MADV_NOHUGEPAGE)

    def _advise(self, advice: int) -> None:
        for span in self._spans:
            assert self._libc is not None
            self._libc.madvise(ctypes.c_void_p(span.start), ctypes.c_size_t(span.length), advice)


def release_code() -> None:
    """Drop pages of programs and libraries that only loading needed, on Linux; takes some milliseconds. What still runs
    comes back from the system's cache of the file, 64 KB at a touch."""
    libc = _glibc()
    if libc is None:
        return
    mappings = [_placed(*found) for found in _MAP.findall(_MAPS.read_bytes())]
    code = {m.path for m in mappings if m.path and "x" in m.permissions}
    # Not what can be written to, even if it was not yet: another thread may do so in this moment. Hundreds of small
    # pieces are not worth the looking.
    worth = [m for m in mappings if m.path in code and "w" not in m.permissions and m.length >= _WORTH_BYTES]
    for mapping in _unwritten(worth):
        libc.madvise(ctypes.c_void_p(mapping.start), ctypes.c_size_t(mapping.length), _MADV_DONTNEED)


def _unwritten(mappings: list[_Mapping]) -> list[_Mapping]:
    """Mappings without a page that was written to."""
    try:
        with _PAGEMAP.open("rb", buffering=0) as pages:
            return [m for m in mappings if not _written(os.pread(pages.fileno(), *_entries(m)))]
    except OSError:  # not every container may read it
        unchanged = {m.start for m in _mappings() if m.unchanged}
        return [m for m in mappings if m.start in unchanged]


def _entries(mapping: _Mapping) -> tuple[int, int]:
    """Bytes of pagemap that tell of a mapping, and where they begin: eight for a page."""
    page = mmap.PAGESIZE
    return mapping.length // page * 8, mapping.start // page * 8


def _written(entries: bytes) -> bool:
    """Whether a page is in memory without being the file's, or was swapped out."""
    flags = entries[7::8]  # the highest byte: present, swapped, of a file or shared
    return any(flag & 0x40 or flag & 0xA0 == 0x80 for flag in set(flags))


@dataclass(frozen=True)
class _Mapping:
    """A range of addresses, the file behind it if any, its offset there, and whether no page was surely written to."""

    start: int
    length: int
    offset: int
    permissions: str
    path: str
    unchanged: bool


# A mapping: address, permissions, offset, device, inode and, after spaces, the path; in smaps then fields by name.
_MAPPED = rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ \d+ *(.*)\n"
_MAP = re.compile(_MAPPED, re.MULTILINE)
_SMAP = re.compile(_MAPPED + rb"(?:[A-Z].*\n)*?Anonymous: +(\d+) kB", re.MULTILINE)


def _mappings() -> Iterator[_Mapping]:
    # Searched as a whole: there are ten thousand lines.
    return itertools.starmap(_placed, _SMAP.findall(_SMAPS.read_bytes()))


def _placed(
    start: bytes, end: bytes, permissions: bytes, offset: bytes, path: bytes, anonymous: bytes = b""
) -> _Mapping:
    begin, name = int(start, 16), os.fsdecode(path) if path.startswith(b"/") else ""
    return _Mapping(begin, int(end, 16) - begin, int(offset, 16), permissions.decode(), name, anonymous == b"0")


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" and platform.libc_ver()[0] == "glibc" else None
