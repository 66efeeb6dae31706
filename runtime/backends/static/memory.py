"""Cuts a pass into runs of static graphs; memory of these graphs' sessions on onnxruntime, by term. Every graph has a
session with packed copies of all weights, and all sessions that a way of running may make are counted. All terms are
upper bounds; constants were fitted to measured processes (docs/log/2026-11-22.md)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.static_graph import StaticGraph, StaticGraphs
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.onnx.memory import OnnxMemory
from edgeinfer.runtime.planning.facts import Configuration, Footprint, TokenizerMode

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Run:
    """One run of one graph over rows start..stop-1 of a pass."""

    graph: StaticGraph
    start: int
    stop: int


@dataclass(frozen=True)
class GraphSet:
    narrow: tuple[StaticGraph, ...]  # the narrowest first; at least one
    prompts: StaticGraph | None  # the graph for prompts; None where they go through the others

    @property
    def all(self) -> tuple[StaticGraph, ...]:
        return self.narrow if self.prompts is None else (*self.narrow, self.prompts)

    def runs(self, size: int, rows: Ints) -> Iterator[Run]:
        """Cuts a pass: prompts by their graph while they fill half of it, the rest by the narrowest that fits."""
        widest, start = self.narrow[-1].rows, 0
        while start < size:
            graph = self.prompts
            left = size - start
            wanted = 0 if graph is None else len({int(row) for row in rows if start <= row < start + graph.rows})
            if graph is None or left <= widest or not _fills(left, graph) or wanted > 1:
                graph = next(g for g in self.narrow if g.rows >= min(left, widest))
            stop = start + min(left, graph.rows)
            yield Run(graph, start, stop)
            start = stop


def _fills(rows: int, graph: StaticGraph) -> bool:
    """Whether so many rows are worth a run of a graph: padding costs as much as they do at most."""
    return 2 * rows >= graph.rows


def choose_graphs(static: StaticGraphs, *, exact: bool, on_cpu: bool, rows: int, chunk: int) -> GraphSet:
    """The graphs for a way of running. Rows of passes are bit-identical on the CPU where they have a neighbour, in even
    numbers (as operators there take rows in pairs and a single one goes another way); on other devices within one
    graph, if at all."""
    narrow = static.narrow
    if exact:
        narrow = tuple(g for g in narrow if g.rows % 2 == 0) or narrow[-1:]
    enough = next((index for index, graph in enumerate(narrow) if graph.rows >= rows), len(narrow) - 1)
    narrow = narrow[enough : enough + 1] if exact and not on_cpu else narrow[: enough + 1]
    worth = chunk > narrow[-1].rows and _fills(chunk, static.prompts)
    return GraphSet(narrow, static.prompts if worth else None)


# Session and graph of onnxruntime: in all, and per layer; code that running and loading touch.
_SESSION_BYTES, _SESSION_LAYER_BYTES = 3_200_000, 250_000
_RUNNING_CODE_BYTES, _LOADING_CODE_BYTES = 2_500_000, 12_000_000
# Packed values keep their scales and two sums per block that are as large.
_SUMS = 2
# The largest matrix while it is turned and packed: as it is read, and turned.
_TURNING_COPIES = 2
# Largest set of a layer's activations alive at once, in widths of its widest linear, and copies of attention's scores.
_LIVE_WIDTHS, _LIVE_SCORES = 3, 3
# Keys and values with the new rows in place, and one of them turned.
_LIVE_CACHES = 3
_FLOAT_BYTES, _ID_BYTES = 4, 8


@dataclass(frozen=True)
class StaticMemory:
    """Implements `ModelMemory`."""

    bundle: Bundle
    ordinary: OnnxMemory  # memory of the bundle's ordinary graph, which has the tokenizer's terms
    exact: bool
    on_cpu: bool

    def import_libraries(self) -> None:
        self.ordinary.import_libraries()

    def weights(self, configuration: Configuration) -> Footprint:
        """A copy for every session; the embedding, of which rows are looked up, stays mapped."""
        copies = len(self._graphs(configuration).all) * sum(_packed(tensor) for tensor in self._matrices())
        return Footprint({"weights_packed": copies}, {"weights_mapped": self.bundle.manifest.tensor("embed").nbytes})

    def running(self, configuration: Configuration) -> Footprint:
        """Sessions, the whole cache whatever the context, and the largest run."""
        spec, geometry = self._spec, self.bundle.manifest.geometry
        graphs = self._graphs(configuration).all
        sessions = len(graphs) * (_SESSION_BYTES + _SESSION_LAYER_BYTES * geometry.num_layers)
        buffers = sum(_buffers(graph, spec) for graph in graphs)
        context = graphs[0].context
        tables = _FLOAT_BYTES * (configuration.context * spec.rope.dim + configuration.draft_max * geometry.vocab_size)
        return Footprint(
            {
                "session": sessions,
                "kv": geometry.kv_bytes_per_token(configuration.kv) * context,
                "activations": max(_activations(graph, spec) for graph in graphs) + buffers + tables,
            },
            {"code": _RUNNING_CODE_BYTES},
        )

    def tokenizer(self, mode: TokenizerMode, *, used: bool) -> Footprint:
        return self.ordinary.tokenizer(mode, used=used)

    def phases(self, outside: Footprint, running: Footprint, configuration: Configuration) -> Iterator[Footprint]:
        """While the tokenizer is parsed, and while the last session is made."""
        yield next(iter(self.ordinary.phases(outside, running, configuration)))
        turning = dict(running.anonymous) | {"activations": _TURNING_COPIES * max(map(_packed, self._matrices()))}
        yield Footprint(turning, dict(running.file) | {"loading_code": _LOADING_CODE_BYTES})

    @property
    def _spec(self) -> DecoderSpec:
        decoder = self.bundle.manifest.decoder
        assert decoder is not None, "static bundles describe their decoder"
        return decoder

    def _graphs(self, configuration: Configuration) -> GraphSet:
        static = self.bundle.manifest.static
        assert static is not None, "the factory looks for static graphs"
        return choose_graphs(
            static,
            exact=self.exact,
            on_cpu=self.on_cpu,
            rows=configuration.draft_max + 1,
            chunk=configuration.prefill_chunk,
        )

    def _matrices(self) -> list[TensorEntry]:
        return [tensor for tensor in self.bundle.manifest.tensors if tensor.name != "embed"]


def _packed(tensor: TensorEntry) -> int:
    return tensor.nbytes + (0 if tensor.scales is None else _SUMS * tensor.scales.nbytes)


def _buffers(graph: StaticGraph, spec: DecoderSpec) -> int:
    biases = 2 if spec.window_size else 1
    new = 2 * spec.num_layers * graph.rows * spec.kv_size
    logits = graph.logit_rows * spec.vocab_size
    tables = graph.rows * spec.rope.dim
    ids = graph.rows * (1 + 3 * spec.num_kv_heads) + 1
    return _FLOAT_BYTES * (biases * graph.rows * graph.context + new + logits + tables) + _ID_BYTES * ids


def _activations(graph: StaticGraph, spec: DecoderSpec) -> int:
    """Bytes alive in a run: a layer's widest values, attention's scores with the bias of each, the cache in order."""
    rows, context = graph.rows, graph.context
    widest = max(2 * spec.intermediate_size, spec.q_size + 2 * spec.kv_size) + spec.hidden_size
    scores = (_LIVE_SCORES * spec.num_heads + spec.num_heads // spec.num_kv_heads) * rows * context
    caches = _LIVE_CACHES * spec.kv_size * (context + rows)
    return _FLOAT_BYTES * (_LIVE_WIDTHS * rows * widest + scores + caches + graph.logit_rows * spec.vocab_size)
