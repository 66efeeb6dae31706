"""Passes that are cut into windows of layers: streamed weights, and experts that are loaded on demand.

So a model larger than the memory runs, slowly: the hidden states of one window enter the next, and the pages of its
weights are dropped when it has run. Embedding and LM head are windows of their own, whose pages the kernel's operators
drop while they run. Where all layers are in memory together only those two are streamed, in a pass that is not cut;
where they stay, some of the layers do, too, and windows are streamed between those. Data that the system's file cache
has no room for is dropped from there as well, always the same. Every row of the result has the same bits as without.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import CapabilityError, Setting, StorageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.contract import Pass, PassCancelledError, PassResult
from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend
from edgeinfer.runtime.native.library import dropping_behind
from edgeinfer.runtime.system.memory import MappedFile
from edgeinfer.runtime.weights.disk_rate import DiskMeter
from edgeinfer.runtime.weights.experts import ExpertCache, RouterGuess
from edgeinfer.runtime.weights.streaming import (
    PIECE_BYTES,
    WORTH_DROPPING,
    LayerWindow,
    Run,
    dropped_windows,
    layer_windows,
)
from edgeinfer.runtime.weights.weight_pages import WeightPart

_LIBC = ctypes.CDLL(None if sys.platform != "win32" else "msvcrt")  # Windows never comes here
_MADV_POPULATE_READ = 22  # since Linux 5.14

_log = logging.getLogger("edgeinfer")


class ReadAhead:
    """Reads runs of a file into the system's cache, one after the other, on a thread of its own.

    It touches them in a mapping of its own, a piece at a time, which it drops at once. So they come in large pages
    where the system has these for files, unlike what it reads on advice: 1.8 GB/s instead of 1.0, for 0.4 of the
    processor's time (docs/log/2026-11-27.md).
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
        """Gives up reading the rest of a window that has run, as it would only come back to be dropped again."""
        done = tuple(runs)
        self._wanted = tuple(each for each in self._wanted if each != done)

    def close(self) -> None:
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


_NO_ROWS = np.zeros(0, np.int64)


def _nothing(output: PassResult | None = None) -> None:
    """Before and after a window that is the whole pass."""


@dataclass(frozen=True)
class Window:
    """Layers of a pass that run together."""

    layers: NDArray[np.bool_]  # attention and MLP of each layer, true where they are in the window. (2 L,)
    before: Callable[[], None]
    after: Callable[[PassResult], None]
    within: Callable[[], AbstractContextManager[None]] = nullcontext


class LayerWindows(ABC):
    """Cuts passes into windows of consecutive layers: the hidden states of one enter the next. Every row of the result
    has the same bits."""

    def __init__(self, meter: DiskMeter | None) -> None:
        self._watching = nullcontext if meter is None else meter.watching
        self.cancelled = False  # another thread ends the running pass, between two windows or in one

    @abstractmethod
    def windows(self, batch: Pass) -> Sequence[Window]:
        """The windows of a pass, at least one, which together run its layers in order."""

    def close(self) -> None:  # noqa: B027
        """Frees what it holds."""

    def run(self, batch: Pass, evaluate: Callable[[Pass], PassResult]) -> PassResult:
        """Runs a pass. Each window writes the same rows of the cache, in its own layers."""
        self.cancelled = False
        windows, hidden = self.windows(batch), batch.hidden
        used: Ints | None = None  # (L, S, k)
        with self._watching():
            for window in windows:
                if self.cancelled:
                    raise PassCancelledError("The pass was cancelled.")
                window.before()
                mask = window.layers if batch.layer_mask is None else window.layers & batch.layer_mask
                wanted = batch.rows if window is windows[-1] else _NO_ROWS
                with window.within():
                    output = evaluate(replace(batch, rows=wanted, layer_mask=mask, hidden=hidden))
                used = _merged(used, output.experts)
                window.after(output)
                hidden = output.hidden
        return output._replace(experts=used, tapped=None)


def _merged(before: Ints | None, window: Ints | None) -> Ints | None:  # (L, S, k) each
    """The experts that the windows of a pass used so far: -1 but in the layers that ran in one of them."""
    if before is None or window is None:
        return None if window is None else window.copy()
    merged: Ints = np.maximum(before, window, out=before)
    return merged


@dataclass(frozen=True)
class _Part:
    layers: NDArray[np.bool_]
    weights: WeightPart  # its streamed weights
    dropped: bool = False  # weights are dropped as soon as an operator has read them, not only when all have run
    # Weights that the system's cache drops, too, after the layers have run; None keeps all there.
    forgotten: WeightPart | None = None

    @property
    def large(self) -> list[tuple[int, int]]:
        """Addresses and lengths of weights that are worth dropping while they are read."""
        return [each for each in self.weights.places if each[1] >= WORTH_DROPPING]

    def within(self) -> AbstractContextManager[None]:
        return dropping_behind(self.large) if self.dropped else nullcontext()

    def release(self) -> None:
        self.weights.release()
        if self.forgotten is not None:
            self.forgotten.forget()


class StreamedLayers(LayerWindows):
    """Streams the weights of a backend that reads them in place, can skip layers and resume from hidden states.
    `kept_layers`, head and embedding stay in memory. The system's cache can keep `room` bytes of weights; None is
    all."""

    def __init__(
        self,
        inner: GraphBackend,
        window_layers: int,
        meter: DiskMeter | None = None,
        *,
        kept_layers: int = 0,
        room: int | None = None,
    ) -> None:
        can = inner.capabilities
        cut = can.layer_skip and can.hidden
        if not cut or inner.pages is None:
            hint = "Load it with the native kernel, or export it natively."
            raise CapabilityError("The weights of this model cannot be streamed.", hint)
        super().__init__(meter)
        self._pages = inner.pages
        layers = self._num_layers = inner.geometry.num_layers
        self._keeps_head = kept_layers > 0
        self._layers = self._cut(layer_windows(layers, window_layers, kept_layers), room)
        nothing = np.zeros(2 * layers, np.bool_)  # (2 L,)
        # Each alone: the whole head is read, and of the table the system may map far more than the rows looked up.
        head = self._pages.head()
        self._head = _Part(nothing, head, True, head if self._forgets_all else None)
        self._embedding = _Part(nothing, self._pages.embedding(), True)
        self._stay = window_layers >= layers
        self._pages.release()
        self._reading: ReadAhead | None = None
        if room is not None and not self._stay:
            try:
                self._reading = ReadAhead(self._pages.path)
            except StorageError:
                inner.close()
                raise

    def _cut(self, windows: Sequence[LayerWindow], room: int | None) -> list[_Part]:
        """The layers of each window, and their streamed weights."""
        pieces = self._pages.streamed(windows)
        weights = pieces if self._keeps_head else [self._pages.layers(each.first, each.stop) for each in windows]
        chosen = () if room is None else dropped_windows([each.nbytes for each in pieces], self._pages.nbytes, room)
        self._forgets_all = chosen is None
        forgotten = range(len(windows)) if chosen is None else chosen
        found = []
        for index, window in enumerate(windows):
            mask = np.zeros(2 * self._num_layers, np.bool_)  # (2 L,)
            mask[2 * window.first : 2 * window.stop] = True
            found.append(_Part(mask, weights[index], forgotten=pieces[index] if index in forgotten else None))
        return found

    def windows(self, batch: Pass) -> Sequence[Window]:
        """The windows in which something runs; at least one, which appends the rows."""
        if self._stay:
            # A tied head is the embedding. Looked up in each pass: when others end mappings of the file, places change.
            places = list({*self._head.large, *self._embedding.large})
            return [Window(self._layers[0].layers, _nothing, _nothing, partial(dropping_behind, places))]
        mask = batch.layer_mask
        needed = [] if batch.hidden is not None or self._keeps_head else [self._embedding]
        needed += [each for each in self._layers if mask is None or (each.layers & mask).any()]
        if not needed or (len(batch.rows) and not self._keeps_head):
            needed.append(self._head)
        ahead = [*needed[1:], self._layers[0]]
        return [
            Window(part.layers, partial(self._read_ahead, part, following), partial(self._used, part), part.within)
            for part, following in zip(needed, ahead, strict=True)
        ]

    def _read_ahead(self, part: _Part, following: _Part) -> None:
        """Nothing where all stays in the system's cache. The head is larger than what there is room for."""
        if self._reading is not None and part is not self._head and following is not self._head:
            self._reading.ask(following.weights.runs, part.weights.runs)

    def _used(self, part: _Part, output: PassResult) -> None:
        if self._reading is not None:
            self._reading.used(part.weights.runs)
        part.release()

    def close(self) -> None:
        if self._reading is not None:
            self._reading.close()


# Share of the limit that a window may fetch where its pass needs several: what is made room for is lost to experts that
# could have stayed, but every further window costs a run of the graph.
_WINDOW_SHARE = 0.25


class CachedExperts(LayerWindows):
    """Keeps only `limit` bytes of a model's experts in memory; others are read when chosen, or when `guess` predicts
    them for the next window.

    What belongs to no expert stays in memory. A pass that could fetch more than there is room for is cut into windows
    of layers, and room is made before each of them, so that never more than the limit is in memory.
    """

    def __init__(
        self,
        inner: GraphBackend,
        decoder: DecoderSpec,
        limit: int,
        meter: DiskMeter | None = None,
        guess: RouterGuess | None = None,
    ) -> None:
        can = inner.capabilities
        parts = None if inner.pages is None else inner.pages.experts()
        if not parts or not (can.layer_skip and can.hidden):
            hint = "Export it in the native layout with quantized experts, or load it with other weights."
            raise CapabilityError("The experts of this model cannot be loaded on demand.", hint)
        super().__init__(meter)
        assert decoder.moe is not None and inner.pages is not None, "there are experts"
        self._pages = inner.pages
        sizes = np.zeros((decoder.num_layers, decoder.moe.experts), np.int64)
        for (layer, expert), part in parts.items():
            sizes[layer, expert] = part.nbytes
        self.expert_cache = ExpertCache(parts, sizes, limit)
        self._moe, self._guess, self._num_layers = decoder.moe, guess, decoder.num_layers
        least = max(self.expert_cache.need(layer, decoder.moe.experts) for layer in range(decoder.num_layers))
        if limit < least:
            message = f"The experts of one layer take {least} bytes, only {limit} may be in memory."
            raise CapabilityError(
                message, "Stream the weights with " + Setting("weights", "streamed") + ", or use more memory."
            )
        self._pages.small_pages()
        self._pages.release()

    def windows(self, batch: Pass) -> Sequence[Window]:
        """As many layers at a time as surely fit."""
        layers = self._num_layers
        count = self._moe.top_k if batch.experts is None else batch.experts.count
        # Padding is a copy of a real row, and chooses the same but for rounding.
        most = len(batch.tokens) * count
        runs = np.ones(2 * layers, np.bool_) if batch.layer_mask is None else batch.layer_mask
        needs = [self.expert_cache.need(layer, most) if runs[2 * layer + 1] else 0 for layer in range(layers)]
        starts, size = [0], 0
        for layer, need in enumerate(needs):
            if layer > starts[-1] and size + need > _WINDOW_SHARE * self.expert_cache.limit:
                starts.append(layer)
                size = 0
            size += need
        bounds = [*starts, layers, layers]
        # A prompt's tokens need nearly all experts; those of a few tokens can be guessed from what enters their layers.
        ahead = most >= self._moe.experts
        found = []
        for first, stop, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
            mask = np.zeros(2 * layers, np.bool_)  # (2 L,)
            mask[2 * first : 2 * stop] = True
            prepare = partial(self._prepare, range(first, stop), most, range(stop, after) if ahead else ())
            found.append(Window(mask, prepare, partial(self._ran, () if ahead else range(stop, after))))
        return found

    def _prepare(self, layers: range, most: int, ahead: Iterable[int]) -> None:
        self.expert_cache.make_room(layers, most)
        for layer in ahead:
            self.expert_cache.fetch(layer)

    def _ran(self, following: Iterable[int], output: PassResult) -> None:
        assert output.experts is not None, "a model with experts tells which it used"
        self.expert_cache.used(output.experts)
        if self._guess is not None and output.hidden is not None:
            for layer in following:
                self.expert_cache.fetch(layer, self._guess.experts(layer, output.hidden))
