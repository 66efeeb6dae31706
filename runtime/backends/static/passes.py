"""How a pass is cut into runs of static graphs, and which graphs a way of running needs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.static_graph import StaticGraph, StaticGraphs
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Ints

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Run:
    """One run of one graph over rows start..stop-1 of a pass."""

    graph: StaticGraph
    start: int
    stop: int


@dataclass(frozen=True)
class GraphSet:
    """The graphs that passes may use.

    Attributes:
        narrow: the narrowest first; at least one.
        prompts: for prompts; None where they go through the others.
    """

    narrow: tuple[StaticGraph, ...]
    prompts: StaticGraph | None

    @property
    def all(self) -> tuple[StaticGraph, ...]:
        """Every graph."""
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
    """The graphs for a way of running.

    Rows of passes are bit-identical on the CPU where they have a neighbour, in even numbers (as operators there take
    rows in pairs and a single one goes another way); on other devices within one graph, if at all.

    Args:
        chunk: prompt tokens per pass.
    """
    narrow = static.narrow
    if exact:
        narrow = tuple(g for g in narrow if g.rows % 2 == 0) or narrow[-1:]
    enough = next((index for index, graph in enumerate(narrow) if graph.rows >= rows), len(narrow) - 1)
    narrow = narrow[enough : enough + 1] if exact and not on_cpu else narrow[: enough + 1]
    worth = chunk > narrow[-1].rows and _fills(chunk, static.prompts)
    return GraphSet(narrow, static.prompts if worth else None)
