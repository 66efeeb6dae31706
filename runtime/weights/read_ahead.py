"""A thread that has the system read parts of a weights file before passes need them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from edgeinfer.errors import StorageError
from edgeinfer.runtime.system.memory import MappedFile
from edgeinfer.runtime.weights.windows import PIECE_BYTES, Run

_LIBC = ctypes.CDLL(None if sys.platform != "win32" else "msvcrt")  # Windows never comes here
_MADV_POPULATE_READ = 22  # since Linux 5.14

_log = logging.getLogger("edgeinfer")


class ReadAhead:
    """Reads runs of a file into the system's cache, one after the other, on a thread of its own.

    It touches them in a mapping of its own, a piece at a time, which it drops at once. So they come in large pages
    where the system has these for files, unlike what it reads on advice: 1.8 GB/s instead of 1.0, for 0.4 of the
    processor's time (docs/log/2026-11-27.md).

    Raises:
        StorageError: the file cannot be mapped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
                self._file = os.dup(file.fileno())
        except (OSError, ValueError) as error:  # ValueError: it is empty
            raise StorageError(f"{path} cannot be mapped: {error}.", "Load the model again.") from error
        with contextlib.suppress(OSError, AttributeError):  # a system without large pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._start = np.frombuffer(self._map, np.uint8).ctypes.data
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgeinfer-read-ahead")
        self._wanted: tuple[tuple[Run, ...], ...] = ()
        self._failed = False

    def ask(self, runs: Iterable[Run], running: Iterable[Run] = ()) -> None:
        """Asks for the runs of a window; returns at once."""
        asked = tuple(runs)
        self._wanted = (tuple(running), asked)
        self._thread.submit(self._read_asked, asked)

    def used(self, runs: Iterable[Run]) -> None:
        """Gives up what is not read yet of a window that has run, as it would only come back to be dropped again."""
        done = tuple(runs)
        self._wanted = tuple(each for each in self._wanted if each != done)

    def close(self) -> None:
        """Ends thread and mapping."""
        self._wanted = ()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._map.close()
        os.close(self._file)
        # Others find every mapping of a file, and drop its pages.
        MappedFile.forget(self._path)

    def _read_asked(self, asked: tuple[Run, ...]) -> None:
        try:
            self.read(asked, lambda: asked in self._wanted)
        except OSError as error:
            # Passes then read what they need themselves, slowly.
            if not self._failed:
                _log.warning("%s cannot be read ahead: %s. Replies may be slower.", self._path, error.strerror)
            self._failed = True

    def read(self, runs: Sequence[Run], wanted: Callable[[], bool] = lambda: True) -> None:
        """Reads them on the thread that asks, for as long as they are wanted."""
        for offset, length in runs:
            for begin in range(offset // PIECE_BYTES * PIECE_BYTES, offset + length, PIECE_BYTES):
                if not wanted():
                    return
                first = max(begin, offset) // mmap.PAGESIZE * mmap.PAGESIZE
                size = min(begin + PIECE_BYTES, offset + length) - first
                if self._advise(first, size, _MADV_POPULATE_READ):
                    os.posix_fadvise(self._file, first, size, os.POSIX_FADV_WILLNEED)
                # The system maps what lies around a page as well, where it has that.
                self._advise(begin, min(PIECE_BYTES, len(self._map) - begin), mmap.MADV_DONTNEED)

    def _advise(self, offset: int, length: int, advice: int) -> int:
        """Zero where the system takes the advice."""
        # Unlike mmap.madvise, ctypes lets other threads run meanwhile.
        return int(_LIBC.madvise(ctypes.c_void_p(self._start + offset), ctypes.c_size_t(length), advice))
