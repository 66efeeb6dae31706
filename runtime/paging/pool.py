"""Shared blocks of memory, such as the pages of a model: their holders and their size."""

from __future__ import annotations

import heapq
import mmap
import sys
import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import BackendError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.paging.layout import PageLayout, PageRows
from edgeinfer.runtime.system.memory import refused

# Bytes of pages that stay in memory when they are free, but one page at least: one that is given back costs its
# zeroing when it is taken again, and a search over several texts lets go of a page and takes one in every step.
_SPARE_BYTES = 2 << 20
# Addresses without memory behind them are not counted as promised; Linux on x86 and ARM, not in Python's mmap.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
# What makes the system take pages back: at once on Linux; when it is short of memory on macOS, which until then counts
# them as the process's. Windows keeps them until the pool goes; untouched ones take no memory there either.
_ADVICE = getattr(mmap, "MADV_FREE" if sys.platform == "darwin" else "MADV_DONTNEED", None)


class BlockPool:
    """Blocks of one size that sequences, snapshots and kept prefixes take, share and release; safe from any thread. The
    memory of all is one range of addresses, which the system fills as blocks are touched. It never moves, so a graph
    can be bound to it once. Of free blocks `spare` stay in memory."""

    def __init__(self, pages: int, page_bytes: int, spare: int) -> None:
        self.pages = pages
        self._page_bytes = page_bytes
        self._most_spare = spare
        size = pages * page_bytes
        flags = 0 if sys.platform == "win32" else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, size, **({"flags": flags} if flags else {}))
        except (OSError, OverflowError) as error:
            raise refused("The KV cache", MemoryError(f"of size {size}")) from error
        # The bytes of all blocks. (pages * page_bytes,).
        self.memory: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._holders = [0] * pages
        # Low ones first, so that the pages in use lie together.
        self._untouched = list(range(pages))
        self._spare: list[int] = []
        # Reentrant: collecting garbage, which may happen anywhere in here, releases what snapshots held.
        self._lock = threading.RLock()

    @property
    def used(self) -> int:
        return self.pages - self.free

    @property
    def free(self) -> int:
        return len(self._untouched) + len(self._spare)

    @property
    def nbytes(self) -> int:
        """Bytes of pages in use, and of free pages that stay in memory for the next use."""
        return (self.pages - len(self._untouched)) * self._page_bytes

    def take(self, count: int) -> list[int]:
        """Pages for one holder, whatever is in them."""
        with self._lock:
            if count > self.free:
                message = f"The KV cache has no {count} pages of {self._page_bytes} bytes left of {self.pages}."
                raise BackendError(message, "End other conversations, or load the model with a larger context.")
            taken = [self._spare.pop() if self._spare else heapq.heappop(self._untouched) for _ in range(count)]
            for page in taken:
                self._holders[page] = 1
            return taken

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that have one."""
        with self._lock:
            for page in pages:
                assert self._holders[page] > 0, "a free page cannot be shared"
                self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a holder from pages; pages without any go back to the system, but for a few."""
        with self._lock:
            for page in pages:
                assert self._holders[page] > 0, "a free page cannot be released"
                self._holders[page] -= 1
                if self._holders[page] == 0:
                    self._drop(page)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def own(self, page: int) -> int:
        """For one holder of a page that others may hold too: this page, or a copy of it in its place."""
        with self._lock:
            if self._holders[page] == 1:
                return page
            (copy,) = self.take(1)
            size = self._page_bytes
            pages = self.memory.reshape(-1, size)
            pages[copy] = pages[page]
            self.release([page])
            return copy

    def trim(self) -> None:
        with self._lock:
            while self._spare:
                self._give_back(self._spare.pop())

    def _drop(self, page: int) -> None:
        if len(self._spare) < self._most_spare:
            self._spare.append(page)
        else:
            self._give_back(page)

    def _give_back(self, page: int) -> None:
        # Whole pages of the system, which are of up to 64 KB.
        start = -(-page * self._page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (page + 1) * self._page_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if _ADVICE is not None and start < stop:
            self._map.madvise(_ADVICE, start, stop - start)
        heapq.heappush(self._untouched, page)


class PagePool(BlockPool):
    """The pages of a model's keys and values; `centres` are those of `PageRows`."""

    def __init__(self, layout: PageLayout, pages: int, centres: Mapping[int, Floats] = MappingProxyType({})) -> None:
        super().__init__(pages, layout.page_bytes, max(1, _SPARE_BYTES // layout.page_bytes))
        self.layout = layout
        self.rows = PageRows(layout, self.memory, centres)
