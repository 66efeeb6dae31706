"""The backend of graphs that attend through pages of a pool: our own operator, edgeinfer.Attention.

A row's result depends on its own path alone, to the last bit: not on the other rows of its pass, not on other
sequences, not on where its pages lie. So draft trees and texts side by side are as exact as chains, and nothing is
padded. Where nothing is quantized, or experts are not, ONNX Runtime multiplies those floats, and one row of them
differs in bits from several: such passes have two rows at least, the second of which is the last one again.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import graph
from edgeinfer.bundle.geometry import FLOAT32
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.manifest import Manifest
from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import is_looked_up
from edgeinfer.core.errors import BackendError
from edgeinfer.nn.key_centres import key_centres
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult, check_pass, runs_apart
from edgeinfer.runtime.backends.onnx.adapters import PackedAdapters
from edgeinfer.runtime.backends.onnx.graph_backend import BoundPass, Buffers, GraphBackend, bind_input
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.paging.layout import SPARE_ROWS, PageLayout, pages_of
from edgeinfer.runtime.paging.pool import PagePool
from edgeinfer.runtime.paging.states import StatePool
from edgeinfer.runtime.weights.layouts import Progress

if TYPE_CHECKING:
    from edgeinfer.runtime.backends.onnx.windowed import LayerWindows

# Addresses of further pages for snapshots, forks and searches while the context is full; untouched they take no memory.
_FURTHER_PAGES = 64

_NO_ADAPTER = -1
_MOST_SEQUENCES = 1 << 16  # pages end sooner


# Columns of the number of first slots, and of a row's own where it names that.
_PREFIX, _OWN = 1, 2
_NAMES_ITS_SLOT = -1

# Slots of a row: how many of the first, and the further ones.
Path = tuple[int, Sequence[int]]


class PathTables:
    """Memory for the paths of passes of up to `size` rows, which paged attention reads. A path is the first slots of
    its sequence and then some further ones, the last of all the row's own (edgeinfer.bundle.graph)."""

    def __init__(self, size: int, capacity: int, slots: int = 1) -> None:
        # For each row its sequence, the number of first slots it sees, where its further slots begin in `slots`, and
        # their number. (S, 4).
        self.rows: NDArray[np.int32] = np.zeros((size, 4), np.int32)
        self.slots: NDArray[np.int32] = np.zeros(slots, np.int32)  # further slots. (X,)
        self._counting: NDArray[np.int32] = np.arange(capacity + 1, dtype=np.int32)
        self._plain = True  # nothing but the second column is in use

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.slots.nbytes + self._counting.nbytes

    def tell_chain(self, start: int, size: int) -> None:
        """Set the paths of rows that follow `start` ones of the first sequence, each seeing all before it."""
        if not self._plain:
            self.rows[:] = 0
            self._plain = True
        self.rows[:size, _PREFIX] = self._counting[start + 1 : start + 1 + size]

    def tell_block(self, start: int, size: int, block: int) -> None:
        """Set the paths of rows that follow `start` ones of the first sequence: the last see all, the others nothing. A
        row sees something, be it the first slot. Who reads keys and values alone does not mind."""
        rows = self.rows[:size]
        rows[:] = 0, 1, 0, _NAMES_ITS_SLOT
        rows[:, _OWN] = self._counting[start : start + size]
        rows[size - block :, _PREFIX] = start + size
        self._plain = False

    def tell(self, sequences: Sequence[Sequence[Path]]) -> None:
        """Set the paths of the rows of each sequence, for whose further slots there must be room."""
        row = first = 0
        for sequence, paths in enumerate(sequences):
            for prefix, further in paths:
                self.rows[row] = sequence, prefix, first, len(further)
                self.slots[first : first + len(further)] = further
                first += len(further)
                row += 1
        self._plain = False


def paths_of(start: int, size: int, tree: Ints | None) -> list[Path]:
    """The paths of `size` rows behind `start` ones: of a chain, where there is no tree."""
    if tree is None:
        return [(start + row + 1, ()) for row in range(size)]
    paths: list[Path] = []
    for slot, parent in enumerate(tree.tolist(), start):
        prefix, further = paths[parent] if parent >= 0 else (start, ())
        paths.append((slot + 1, ()) if prefix == slot else (prefix, (*further, slot)))
    return paths


def repeated(path: Path, slot: int) -> Path:
    """The path of a row that is another one again, in a slot behind all others."""
    prefix, further = path
    return (prefix, (*further[:-1], slot)) if further else (prefix - 1, (slot,))


class PagedBackend(GraphBackend):
    """Implements `contract.Backend`. `exact` pads passes where ONNX Runtime's float matrices make a single row differ.
    The pool has pages for one sequence of `capacity`, which are left to the first one, and further `pages` for others
    and for kept prefixes; rows have weights where `weighed`, for those that stand for several tokens."""

    max_sequences = _MOST_SEQUENCES
    shows_states = True
    _paths: PathTables

    def __init__(
        self,
        bundle: Bundle,
        capacity: int,
        *,
        threads: int = 1,
        exact: bool = True,
        kv: str = FLOAT32,
        pages: int = 0,
        weighed: bool = False,
        progress: Progress | None = None,
        affinity: str = "",
        adapters: PackedAdapters | None = None,
    ) -> None:
        self._capacity = capacity
        self._adapters = adapters
        self._slots = 1  # room for further slots of paths
        layout = PageLayout.of(bundle.manifest.geometry, kv, weighed=weighed)
        self.pool = PagePool(layout, pages_of(capacity) + pages + _FURTHER_PAGES, key_centres(bundle))
        self._layout = self.pool.layout.array
        self._states = StatePool(bundle.manifest.geometry) if bundle.manifest.geometry.states else None
        self._first: weakref.ref[PagedCache] | None = None
        self._least, self._least_logits = _least_rows(bundle.manifest) if exact else (1, 0)
        super().__init__(
            bundle,
            capacity,
            places=capacity,
            threads=threads,
            layout=NATIVE,
            progress=progress,
            affinity=affinity,
            adapters=adapters,
        )
        self.head_apart = runs_apart(bundle.manifest, NATIVE)
        self._no_layers = np.zeros(2 * self.geometry.num_layers, np.bool_)  # (2 L,)
        if adapters is not None:
            self.adapters = adapters.digests
        # The number of each adapter in passes.
        self._adapter_numbers = {None: _NO_ADAPTER} | {name: place for place, name in enumerate(self.adapters)}
        self._windows: LayerWindows | None = None

    def new_sequence(self, capacity: int) -> PagedCache:
        if capacity > self._capacity:
            raise BackendError(f"A sequence of {capacity} tokens is longer than a context of {self._capacity}.")
        first = self._first is None or self._first() is None
        cache = PagedCache(self.pool, capacity, SPARE_ROWS, self._states, reserves=first)
        cache.observers = self.observers
        if first:
            self._first = weakref.ref(cache)
            cache.observe_clear = self._unbind
        return cache

    @property
    def free_pages(self) -> int:
        return self.pool.free - _FURTHER_PAGES

    def cut_into(self, windows: LayerWindows) -> None:
        """Has passes run window by window, between which others read or drop weights."""
        self._windows, self.head_apart, self.shows_states = windows, False, False

    def forward(self, passes: Sequence[tuple[KVCache, Pass]]) -> list[PassResult]:
        if len(passes) == 1:
            return [self._forward_alone(*passes[0])]
        own = [(self._own(cache), batch) for cache, batch in passes]
        for cache, batch in own:
            check_pass(self, cache, batch)
        if len({id(cache) for cache, _ in own}) != len(own):
            raise BackendError("A sequence can be in a pass only once.")
        whole = self._evaluate(own, _joined([_placed(cache, batch) for cache, batch in own]))
        outputs, row, logit = list[PassResult](), 0, 0
        for cache, batch in own:
            size, wanted = len(batch.tokens), len(batch.rows)
            hidden = None if whole.hidden is None else whole.hidden[row : row + size]
            experts = None if whole.experts is None else whole.experts[:, row : row + size]
            tapped = None if whole.tapped is None else whole.tapped[row : row + size]
            outputs.append(PassResult(whole.logits[logit : logit + wanted], hidden, experts, tapped))
            cache.advance(size)
            row, logit = row + size, logit + wanted
        for (cache, batch), output in zip(own, outputs, strict=True):
            self._show(cache, batch, output)
        return outputs

    def _forward_alone(self, cache: KVCache, batch: Pass) -> PassResult:
        cache, size = self._own(cache), len(batch.tokens)
        check_pass(self, cache, batch)
        placed = _placed(cache, batch) if cache.shift else batch
        if batch.tree is None and size >= self._least and self._windows is None:
            cache.prepare(size)
            if cache.state is not None:
                cache.state.prepare(cache.length, size, size, chain=True, whole=_whole(batch))
            output = self._run((cache,), placed, 0, None)
        else:
            output = self._evaluate([(cache, placed)], placed)
        cache.advance(size)
        if self.observers:
            self._show(cache, batch, output)
        return output

    def _own(self, cache: KVCache) -> PagedCache:
        if not isinstance(cache, PagedCache) or cache.pool is not self.pool:
            raise BackendError("A sequence of another model cannot be in this pass.")
        return cache

    def _show(self, cache: PagedCache, batch: Pass, output: PassResult) -> None:
        for observer in self.observers:
            observer.passed(cache, cache.length - len(batch.tokens), batch, output)

    def head(self, cache: KVCache, hidden: Floats) -> Floats:  # (R, D) -> (R, V)
        """A pass in which no layer runs, so that only the states are read; see `contract.Backend.head`."""
        own, size = self._own(cache), len(hidden)
        nothing = np.zeros(size, np.int64)
        batch = Pass(nothing, nothing, np.arange(size), layer_mask=self._no_layers, hidden=hidden)
        step = self._prepared(batch, size, self._logit_rows(size), apart=False)
        self._adapter_rows[:size] = self._adapter_numbers[own.adapter]
        self._bind_sequences(step, [own])
        self._session.run(step.binding)
        return step.logits[:size]

    def _evaluate(self, passes: Sequence[tuple[PagedCache, Pass]], whole: Pass) -> PassResult:
        """Runs a pass of any rows; `whole` has them all. The caches are not advanced yet."""
        total = len(whole.tokens)
        chain = len(passes) == 1 and whole.tree is None and (total >= self._least or whole.block is not None)
        padding = 0 if chain else max(0, self._least - total)
        for cache, batch in passes:
            size = len(batch.tokens)
            rows = size + (padding if cache is passes[-1][0] else 0)
            cache.prepare(rows)
            if cache.state is not None:
                cache.state.prepare(cache.length, size, rows, chain=batch.tree is None, whole=_whole(batch))
        paths: list[list[Path]] | None = None
        if not chain:
            paths = [paths_of(cache.length, len(batch.tokens), batch.tree) for cache, batch in passes]
            last, behind = paths[-1], passes[-1][0].length + len(passes[-1][1].tokens)
            last += [repeated(last[-1], behind + row) for row in range(padding)]
        caches = [cache for cache, _ in passes]
        if self._windows is None:
            return self._run(caches, whole, padding, paths)
        return self._windows.run(whole, lambda window: self._run(caches, window, padding, paths))

    def _run(
        self, caches: Sequence[PagedCache], batch: Pass, padding: int, paths: Sequence[Sequence[Path]] | None
    ) -> PassResult:
        """Runs a pass over rows that the caches are prepared for; without `paths` they follow each other."""
        size, first = len(batch.tokens), caches[0]
        if paths is not None:
            self._reserve(paths)
        step = self._prepared(batch, size + padding, self._logit_rows(len(batch.rows)), apart=False)
        if paths is not None:
            self._paths.tell(paths)
        elif batch.block is not None:
            self._paths.tell_block(first.length, size, batch.block)
        else:
            self._paths.tell_chain(first.length, size)
        if self._adapters is not None:
            self._tell_adapters(caches, [len(each) for each in paths] if paths is not None else [size])
        if len(caches) > 1 or step.bound is not first.table:
            self._bind_sequences(step, caches)
        self._session.run(step.binding)
        return self._output(step, size, len(batch.rows))

    def _tell_adapters(self, caches: Sequence[PagedCache], rows: Sequence[int]) -> None:
        numbers = [self._adapter_numbers[cache.adapter] for cache in caches]
        self._adapter_rows[: sum(rows)] = np.repeat(np.array(numbers, np.int32), rows)

    def _bind_sequences(self, step: BoundPass, caches: Sequence[PagedCache]) -> None:
        first = caches[0]
        # Of a single sequence they are read where they lie.
        tables = first.table[None] if len(caches) == 1 else _tables_of(caches)
        bind_input(step.binding, graph.KV_PAGES, tables)
        rows = [cache.state.row for cache in caches if cache.state is not None]
        states = None if not rows else rows[0][None] if len(rows) == 1 else np.stack(rows)
        if states is not None:
            bind_input(step.binding, graph.STATE_ROWS, states)
        step.bound = first.table if len(caches) == 1 else (tables, states)

    def _logit_rows(self, wanted: int) -> int:
        return max(wanted, self._least_logits) if wanted else 0

    def _reserve(self, paths: Sequence[Sequence[Path]]) -> None:
        """Makes room for the further slots of these paths."""
        wanted = sum(len(further) for each in paths for _, further in each)
        if wanted > len(self._paths.slots):
            self._slots = 2 * wanted
            self._paths = self._new_paths(len(self._paths.rows))
            self._passes.clear()

    def _new_buffers(self, size: int, rows: int) -> Buffers:
        self._adapter_rows = np.full(size, _NO_ADAPTER, np.int32)
        self._paths = self._new_paths(size)
        return super()._new_buffers(size, rows)

    def _new_paths(self, size: int) -> PathTables:
        return PathTables(size, self._capacity + SPARE_ROWS, self._slots)

    def _attention_inputs(self, step: BoundPass) -> dict[str, NDArray[Any]]:
        size = len(step.positions)
        inputs: dict[str, NDArray[Any]] = {
            graph.KV_POOL: self.pool.memory,
            graph.KV_LAYOUT: self._layout,
            graph.PATH_SLOTS: self._paths.slots,
            graph.ROWS: self._paths.rows[:size],
        }
        if self._adapters is not None:
            inputs[graph.ADAPTER_WEIGHTS], inputs[graph.ADAPTER_TABLE] = self._adapters.weights, self._adapters.table
            inputs[graph.ADAPTER_ROWS] = self._adapter_rows[:size]
        if self._states is not None:
            inputs[graph.STATE_POOL], inputs[graph.STATE_LAYOUT] = self._states.memory, self._states.array
        return inputs

    def nbytes(self) -> dict[str, int]:
        states = 0 if self._states is None else self._states.nbytes
        terms = {"kv": self.pool.nbytes + states, "buffers": self._buffer_bytes + self._paths.nbytes}
        return terms if self._adapters is None else terms | {"adapters": self._adapters.nbytes}

    def cancel(self) -> None:
        if self._windows is not None:
            self._windows.cancelled = True
        super().cancel()

    def close(self) -> None:
        if self._windows is not None:
            self._windows.close()
        super().close()
        del self.pool, self._paths, self._states, self._adapters


def _whole(batch: Pass) -> bool:
    """Whether a pass adds rows of the text in all layers; other rows are cut off again."""
    return batch.layer_mask is None and batch.planes == 2


def _least_rows(manifest: Manifest) -> tuple[int, int]:
    """Rows of a pass, and of its logits if there are any, from which on every row has the same bits."""
    floats = {t.name for t in manifest.tensors if t.bits == 32 and len(t.shape) == 2 and not is_looked_up(t.name)}
    if any(t.bits < 32 for t in manifest.tensors):
        # In a quantized model, float matrices other than experts have an operator of ours.
        floats = {name for name in floats if find_expert(name) is not None}
    head = "head" in floats
    return 2 if floats - {"head"} else 1, 2 if head else 0


def _placed(cache: PagedCache, batch: Pass) -> Pass:
    """An input with the positions that its rows have where contexts before them lie side by side."""
    return dataclasses.replace(batch, positions=batch.positions - cache.shift) if cache.shift else batch


def _joined(batches: Sequence[Pass]) -> Pass:
    """One input of the rows of several, without what each row sees."""
    first = batches[0]
    if not all(first.goes_with(other) for other in batches[1:]):
        raise BackendError("The sequences of a pass must run through the same layers, planes and experts.")
    starts = np.cumsum([0, *(len(batch.tokens) for batch in batches)])
    states = [batch.hidden for batch in batches if batch.hidden is not None]
    return dataclasses.replace(
        first,
        tokens=np.concatenate([batch.tokens for batch in batches]),
        positions=np.concatenate([batch.positions for batch in batches]),
        rows=np.concatenate([batch.rows + start for batch, start in zip(batches, starts[:-1], strict=True)]),
        tree=None,
        gains=None,
        hidden=np.concatenate(states) if states else None,
    )


def _tables_of(caches: Sequence[PagedCache]) -> NDArray[np.int32]:  # (N, P)
    """The pages of several sequences, -1 behind the shorter ones' last."""
    tables = np.full((len(caches), max(len(cache.table) for cache in caches)), -1, np.int32)
    for row, cache in enumerate(caches):
        tables[row, : len(cache.table)] = cache.table
    return tables
