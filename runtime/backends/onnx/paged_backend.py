"""The backend of graphs that attend through pages of a pool: our own operator, edgeinfer.Attention.

A row's result depends on its own path alone, to the last bit: not on the other rows of its pass, not on other
sequences, not on where its pages lie. So draft trees and texts side by side are as exact as chains, and nothing is
padded. Where nothing is quantized, or experts are not, ONNX Runtime multiplies those floats, and one row of them
differs in bits from several: such passes have two rows at least, the second of which is the last one again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import graph
from edgeinfer.bundle.geometry import FLOAT32
from edgeinfer.bundle.key_centres import key_centres
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.manifest import Manifest
from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import is_looked_up
from edgeinfer.core.errors import BackendError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import (
    NO_ADAPTER,
    Pass,
    PassObserver,
    PassResult,
    adapter_place,
    check_pass,
    runs_apart,
)
from edgeinfer.runtime.backends.onnx.adapters import PackedAdapters
from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend, bind_input
from edgeinfer.runtime.backends.onnx.passes import BoundPass, Buffers, Path, PathTables, paths_of, repeated
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.paging.layout import SPARE_ROWS, PageLayout, pages_of
from edgeinfer.runtime.paging.pool import PagePool
from edgeinfer.runtime.paging.states import StatePool
from edgeinfer.runtime.weights.layouts import Progress

# Addresses of further pages for snapshots, forks and searches while the context is full; untouched they take no memory.
_FURTHER_PAGES = 64

Sequences = Sequence[tuple[PagedCache, Pass]]


class PagedBackend(GraphBackend):
    """Implements `contract.Backend` for one sequence, and evaluates rows of several in one pass. `exact` pads passes
    where ONNX Runtime's float matrices make a single row differ. The pool has further `pages` for other sequences and
    kept prefixes; rows have weights where `weighed`, for those that stand for several tokens."""

    cache: PagedCache
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
        self.cache = PagedCache(self.pool, capacity, SPARE_ROWS, self._states)
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
        self.cache.observe_clear = self._unbind
        self.head_apart = runs_apart(bundle.manifest, NATIVE)
        self._no_layers = np.zeros(2 * self.geometry.num_layers, np.bool_)  # (2 L,)
        self.observe_pass: PassObserver | None = None

    def new_sequence(self, capacity: int) -> PagedCache:
        if capacity > self._capacity:
            raise BackendError(f"A sequence of {capacity} tokens is longer than a context of {self._capacity}.")
        return PagedCache(self.pool, capacity, SPARE_ROWS, self._states, reserves=False)

    @property
    def adapters(self) -> Mapping[str, str]:
        return {} if self._adapters is None else self._adapters.digests

    def use_adapter(self, name: str | None) -> None:
        self.cache.adapter = adapter_place(self.adapters, name)

    @property
    def free_pages(self) -> int:
        return self.pool.free - _FURTHER_PAGES

    def forward(self, batch: Pass) -> PassResult:
        check_pass(self, batch)
        cache, size, asked = self.cache, len(batch.tokens), batch
        if cache.shift:
            batch = _placed(cache, batch)
        if batch.block is not None:
            step = self._run_block(batch, batch.block)
        elif batch.tree is None and size >= self._least:
            cache.prepare(size)
            if cache.state is not None:
                cache.state.prepare(cache.length, size, size, chain=True, whole=_whole(batch))
            step = self._prepared(batch, size, self._logit_rows(len(batch.rows)), apart=False)
            self._paths.tell_chain(cache.length, size)
            self._adapter_rows[:size] = cache.adapter
            self._session.run(step.binding)
        else:
            step = self._run([(cache, batch)], batch)
        start = cache.length
        cache.advance(size)
        output = self._output(step, size, len(batch.rows))
        if self.observe_pass is not None:
            self.observe_pass(start, asked, output)
        return output

    def head(self, hidden: Floats) -> Floats:  # (R, D) -> (R, V)
        """A pass in which no layer runs, so that only the states are read; see `contract.HeadBackend.head`."""
        size = len(hidden)
        nothing = np.zeros(size, np.int64)
        batch = Pass(nothing, nothing, np.arange(size), layer_mask=self._no_layers, hidden=hidden)
        step = self._prepared(batch, size, self._logit_rows(size), apart=False)
        self._adapter_rows[:size] = self.cache.adapter
        self._session.run(step.binding)
        return step.logits[:size]

    def divided(self, batch: Pass) -> AbstractContextManager[None]:
        """See `GraphBackend.divided`; states of recurrent layers move on once."""
        state = self.cache.state
        return super().divided(batch) if state is None else state.divided(_whole(batch))

    def forward_together(self, sequences: Sequence[tuple[PagedCache, Pass]]) -> list[PassResult]:
        for cache, batch in sequences:
            check_pass(self, batch, cache)
        return self.forward_checked(sequences)

    def forward_checked(self, sequences: Sequence[tuple[PagedCache, Pass]]) -> list[PassResult]:
        if len({id(cache) for cache, _ in sequences}) != len(sequences):
            raise BackendError("A sequence can be in a pass only once.")
        own: Sequences = [(cache, _placed(cache, batch)) for cache, batch in sequences]
        if any(cache.pool is not self.pool for cache, _ in own):
            raise BackendError("A sequence of another model cannot be in this pass.")
        batch_of_all = _joined([batch for _, batch in own])
        step = self._run(own, batch_of_all)
        whole = self._output(step, len(batch_of_all.tokens), len(batch_of_all.rows))
        outputs, row, logit = list[PassResult](), 0, 0
        for cache, batch in own:
            size, wanted = len(batch.tokens), len(batch.rows)
            hidden = None if whole.hidden is None else whole.hidden[row : row + size]
            experts = None if whole.experts is None else whole.experts[:, row : row + size]
            tapped = None if whole.tapped is None else whole.tapped[row : row + size]
            outputs.append(PassResult(whole.logits[logit : logit + wanted], hidden, experts, tapped))
            cache.advance(size)
            row, logit = row + size, logit + wanted
        return outputs

    def _run_block(self, batch: Pass, block: int) -> BoundPass:
        """Runs a pass of a module that drafts in blocks; its last rows see each other."""
        cache, size = self.cache, len(batch.tokens)
        cache.prepare(size)
        step = self._prepared(batch, size, self._logit_rows(len(batch.rows)), apart=False)
        self._paths.tell_block(cache.length, size, block)
        self._session.run(step.binding)
        return step

    def _run(self, sequences: Sequences, whole: Pass) -> BoundPass:
        """Runs a pass of any rows; `whole` has them all."""
        total = len(whole.tokens)
        padding = max(0, self._least - total)
        paths = [paths_of(c.length, len(b.tokens), b.tree) for c, b in sequences]
        for place, (cache, batch) in enumerate(sequences):
            extra = padding if place == len(sequences) - 1 else 0
            own = cache.length + len(batch.tokens)
            paths[place] += [repeated(paths[place][-1], own + row) for row in range(extra)]
            size = len(batch.tokens)
            cache.prepare(size + extra)
            if cache.state is not None:
                cache.state.prepare(cache.length, size, size + extra, chain=batch.tree is None, whole=_whole(batch))
        self._reserve(paths)
        step = self._prepared(whole, total + padding, self._logit_rows(len(whole.rows)), apart=False)
        self._paths.tell(paths)
        start = 0
        for (cache, _), path in zip(sequences, paths, strict=True):
            self._adapter_rows[start : start + len(path)] = cache.adapter
            start += len(path)
        alone = len(sequences) == 1 and sequences[0][0] is self.cache
        if not alone:
            self._bind_sequences(step, [cache for cache, _ in sequences])
        try:
            self._session.run(step.binding)
        finally:
            if not alone:
                self._bind_sequences(step, [self.cache])
        return step

    def _bind_sequences(self, step: BoundPass, caches: Sequence[PagedCache]) -> None:
        alone = caches[0].table[None]  # read where it lies
        bind_input(step.binding, graph.KV_PAGES, alone if len(caches) == 1 else _tables_of(caches))
        rows = [cache.state.row for cache in caches if cache.state is not None]
        if rows:
            bind_input(step.binding, graph.STATE_ROWS, rows[0][None] if len(rows) == 1 else np.stack(rows))

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
        self._adapter_rows = np.full(size, NO_ADAPTER, np.int32)
        self._paths = self._new_paths(size)
        return super()._new_buffers(size, rows)

    def _new_paths(self, size: int) -> PathTables:
        return PathTables(size, self._capacity + SPARE_ROWS, self._slots)

    def _attention_inputs(self) -> dict[str, NDArray[Any]]:
        inputs: dict[str, NDArray[Any]] = {
            graph.KV_POOL: self.pool.memory,
            graph.KV_LAYOUT: self._layout,
            graph.KV_PAGES: self.cache.table[None],
            graph.PATH_SLOTS: self._paths.slots,
        }
        if self._adapters is not None:
            inputs[graph.ADAPTER_WEIGHTS], inputs[graph.ADAPTER_TABLE] = self._adapters.weights, self._adapters.table
        if self._states is not None and self.cache.state is not None:
            inputs[graph.STATE_POOL] = self._states.memory
            inputs[graph.STATE_LAYOUT] = self._states.array
            inputs[graph.STATE_ROWS] = self.cache.state.row[None]
        return inputs

    def _bind_cache(self, step: BoundPass) -> None:
        size = len(step.positions)
        bind_input(step.binding, graph.ROWS, self._paths.rows[:size])
        if self._adapters is not None:
            bind_input(step.binding, graph.ADAPTER_ROWS, self._adapter_rows[:size])

    def nbytes(self) -> dict[str, int]:
        states = 0 if self._states is None else self._states.nbytes
        terms = {"kv": self.pool.nbytes + states, "buffers": self._buffer_bytes + self._paths.nbytes}
        return terms if self._adapters is None else terms | {"adapters": self._adapters.nbytes}

    def close(self) -> None:
        super().close()
        del self.cache, self.pool, self._paths, self._states, self._adapters


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
