"""The pages of a weights file that a running model reads, layer by layer. A page that is dropped comes back from the
system's cache of the file, or from the disk, when it is touched again."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.tables import PER_LAYER_TABLE, is_looked_up
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.system.memory import MappedFile
from edgeinfer.runtime.weights.streaming import LayerWindow, Run, streamed_runs

# Tokens looked up in the embedding between two releases of its pages: at most 4 MB of them stay in memory.
_LOOKUPS = 64


class WeightPart:
    """Some of the weights: pages that can be dropped, and fetched into the system's cache before they are needed."""

    def __init__(self, file: MappedFile, runs: list[Run], handle: int) -> None:
        self.runs = runs
        self._pages = file.part(runs)
        self._handle = handle

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that hold any of it."""
        page = mmap.PAGESIZE
        return sum(-(-(offset + length) // page) * page - offset // page * page for offset, length in self.runs)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Addresses and lengths of their pages in this process."""
        return self._pages.places

    def release(self) -> None:
        self._pages.release()

    def large_pages(self) -> None:
        self._pages.large_pages()

    def forget(self) -> None:
        """Ask the system to drop released pages from its file cache; pages that another process maps stay."""
        if self._handle >= 0:
            for offset, length in self.runs:
                os.posix_fadvise(self._handle, offset, length, os.POSIX_FADV_DONTNEED)

    def prefetch(self) -> None:
        """Asks the system to read the missing ones of these bytes; returns at once."""
        if self._handle >= 0:
            for offset, length in self.runs:
                os.posix_fadvise(self._handle, offset, length, os.POSIX_FADV_WILLNEED)


class WeightPages:
    """The weights file of a running model that is read in place; it must already be mapped."""

    def __init__(self, path: Path, tensors: Iterable[TensorEntry]) -> None:
        self._runs = {each.name: tuple((blob.offset, blob.nbytes) for blob in each.blobs) for each in tensors}
        self.path = path
        self._file = MappedFile(path)
        self._handle = os.open(path, os.O_RDONLY) if hasattr(os, "posix_fadvise") else -1
        self._close = weakref.finalize(self, os.close, self._handle) if self._handle >= 0 else None

    def layers(self, first: int, stop: int) -> WeightPart:
        return self._part(*(f"layers.{layer}" for layer in range(first, stop)))

    def streamed(self, windows: Sequence[LayerWindow]) -> list[WeightPart]:
        """The weights to drop behind each window (`streamed_runs`)."""
        spans = [self.layers(layer, layer + 1).runs for layer in range(windows[-1].stop)]
        layers = [(own[0][0], sum(own[-1]) - own[0][0]) for own in spans]
        return [WeightPart(self._file, [run] if run[1] else [], self._handle) for run in streamed_runs(layers, windows)]

    @property
    def nbytes(self) -> int:
        """Bytes that every pass reads, all experts included."""
        return sum(length for name, runs in self._runs.items() if not is_looked_up(name) for _, length in runs)

    def embedding(self) -> WeightPart:
        return self._part("embed")

    def per_layer(self) -> WeightPart:
        """The table that the layers' own embeddings are looked up in."""
        return self._part(PER_LAYER_TABLE)

    def head(self) -> WeightPart:
        """The weights behind the last layer."""
        return self._part("final_norm", "head")

    def experts(self) -> dict[tuple[int, int], WeightPart]:
        """The weights of each expert by layer and expert, in the order of the file."""
        runs: dict[tuple[int, int], list[Run]] = {}
        for name, own in self._runs.items():
            expert = find_expert(name)
            if expert is not None:
                runs.setdefault((expert.layer, expert.expert), []).extend(own)
        ordered = sorted(runs, key=lambda each: min(runs[each]))
        return {each: WeightPart(self._file, _merged(runs[each]), self._handle) for each in ordered}

    def floats(self, name: str) -> Floats:
        """A copy of a weight that is stored as one array of floats."""
        ((offset, length),) = self._runs[name]
        return np.fromfile(self.path, np.float32, length // 4, offset=offset)

    def large_pages(self) -> None:
        """Has the system read what every pass reads in pieces of 2 MB and map them at once, where it can: passes take a
        sixth less, and pages that were dropped come back in a third of the time (docs/log/2026-11-26.md, fourth). Not
        tables of which rows are looked up, around each of which so much would be read."""
        self._part("layers", "final_norm", "head").large_pages()

    def small_pages(self) -> None:
        """Ask the system to map pages one by one instead of pieces of 2 MB, which hold more than is touched."""
        self._file.small_pages()

    def release(self) -> None:
        self._file.release()

    def close(self) -> None:
        """Closes the file; none of its parts may be used afterwards."""
        if self._close is not None:
            self._close()

    def _part(self, *names: str) -> WeightPart:
        ours = [runs for name, runs in self._runs.items() if any(name == n or name.startswith(f"{n}.") for n in names)]
        return WeightPart(self._file, _merged(run for runs in ours for run in runs), self._handle)


def _merged(runs: Iterable[Run]) -> list[Run]:
    """Join runs into as few as possible, in order, including what lies between two in one page."""
    found: list[Run] = []
    for offset, length in sorted(runs):
        if found and offset <= sum(found[-1]) + mmap.PAGESIZE:
            begin, size = found.pop()
            found.append((begin, max(size, offset + length - begin)))
        else:
            found.append((offset, length))
    return found


class LookedUp:
    """Drops the pages of an embedding table whenever many of its rows were looked up. The system maps 64 KB around each
    row; fetching a page again costs about a microsecond."""

    def __init__(self, table: MappedFile | WeightPart) -> None:
        self._table = table
        self._count = 0

    def rows(self, count: int) -> None:
        """Counts rows, and drops their pages before they become the whole table."""
        self._count += count
        if self._count >= _LOOKUPS:
            self._table.release()
            self._count = 0
