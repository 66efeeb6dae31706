"""A row of edgeinfer.Attention has the same bits whatever the company: other rows, branches, sequences, pages, threads,
instruction sets, and any cut into passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from edgeinfer.runtime.native.binding import Binding
from edgeinfer.runtime.native.library import NativeKernel
from edgeinfer.runtime.paging.codecs import ROW_CODECS
from tests.runtime.native.attention_oracle import Floats, Shape, Weights, make_layout
from tests.runtime.native.attention_runs import Node, Runner, Store

SHAPE = Shape(heads=6, kv_heads=2, key_size=20, value_size=24, rotary=12)
# Windows that begin within a block and a page, a soft cap, sinks; each with every type.
SHAPES = {
    "plain": SHAPE,
    "window": replace(SHAPE, window=71, softcap=3.0),
    "long-window": replace(SHAPE, window=270, key_size=64, value_size=64, rotary=64, heads=14, interleaved=True),
}
CAPACITY = 640
# Slots behind a chain: of whom each node is a child, -1 is the chain's last row. The second branch is accepted.
PARENTS = [-1, 0, 1, 0, 3, -1, 5, 4, 2]
BRANCH = [0, 3, 4, 7]
MakeRunner = Callable[[str, Shape, int], Runner]


@pytest.fixture
def make_runner(kernel: NativeKernel, binding: Binding) -> Iterator[MakeRunner]:
    """Sessions on an instruction set; the best is selected again afterwards."""
    rng = np.random.default_rng(1)
    angles = rng.uniform(0, 6, (CAPACITY, 64))

    def make(isa: str, shape: Shape, threads: int) -> Runner:
        binding.select(isa)
        half = shape.rotary // 2
        cos, sin = (function(angles[:, :half]).astype(np.float32) for function in (np.cos, np.sin))
        norm = np.linspace(0.5, 1.5, shape.key_size, dtype=np.float32)
        sinks = np.linspace(-2, 2, shape.heads, dtype=np.float32) if shape.window else None
        return Runner(kernel, shape, Weights(cos, sin, norm, norm[::-1].copy(), sinks), threads)

    yield make
    binding.select(kernel.isa)


def chain(sequence: int, values: Floats, start: int = 0) -> list[Node]:  # (S, width)
    """Rows one behind the other; each path is a prefix."""
    return [Node(sequence, tuple(range(s + 1)), values[s], s) for s in range(start, len(values))]


def tree(sequence: int, length: int, values: Floats) -> list[Node]:  # (len(PARENTS), width)
    """PARENTS behind a chain, each node in the slot of its number."""
    paths = {-1: tuple(range(length))}
    for node, parent in enumerate(PARENTS):
        paths[node] = (*paths[parent], length + node)
    return [Node(sequence, paths[n], values[n], len(paths[n]) - 1) for n in range(len(PARENTS))]


def alone(runner: Runner, store: Store, nodes: Sequence[Node]) -> Floats:
    """Every row in a pass of its own."""
    return np.concatenate([runner(store, [node]) for node in nodes])


def branches(runner: Runner, store: Store, known: Floats, values: Floats) -> Floats:
    """What each node of a tree gives when the path to it is all there is: rows of chains, one at a time."""
    results, length = [], len(known)
    for node in range(len(PARENTS)):
        path, at = [node], PARENTS[node]
        while at >= 0:
            path.insert(0, at)
            at = PARENTS[at]
        results.append(alone(runner, store, chain(0, np.concatenate([known, values[path]]), length))[-1])
    return np.stack(results)


@pytest.mark.every_case
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "window" else pytest.mark.slow) for n in SHAPES])
def test_the_same_bits_in_any_company(make_runner: MakeRunner, binding: Binding, name: str) -> None:
    shape, rng = SHAPES[name], np.random.default_rng(2)
    first, second, behind = 515 if name == "long-window" else 275, 70, 4
    values = [rng.standard_normal((n, shape.width), np.float32) for n in (first + behind, second, len(PARENTS))]
    for kind in ROW_CODECS:
        layout = make_layout(shape, kind, kind)
        single = make_runner("portable", shape, 1)
        store = Store.of(layout, 2, CAPACITY)
        # The last rows of a chain alone, one at a time, with all before them in one pass; and a short chain wholly so.
        single(store, chain(0, values[0][: first - 40]))
        wanted = alone(single, store, chain(0, values[0][:first], first - 40))
        wanted_second = alone(single, store, chain(1, values[1]))
        wanted_tree = branches(single, store.copy(), values[0][:first], values[2])
        accepted = np.concatenate([values[0][:first], values[2][BRANCH], values[0][first:]])
        wanted_behind = alone(single, store, chain(0, accepted, first))[-behind:]
        for isa, threads in [(isa, threads) for isa in binding.isas() for threads in (1, 2)]:
            runner, label = make_runner(isa, shape, threads), f"{kind} {isa} {threads}"
            other = Store.of(layout, 2, CAPACITY, rng)
            # Both chains in passes of any size, rows in any order; the second sequence grows beside the first.
            got: dict[tuple[int, int], Floats] = {}
            rows = [chain(0, values[0][:first]), chain(1, values[1])]
            while any(rows):
                taken = [rng.integers(1, 1 + len(r)) if r else 0 for r in rows]
                nodes = [node for r, n in zip(rows, taken, strict=True) for node in r[:n]]
                rows = [r[n:] for r, n in zip(rows, taken, strict=True)]
                order = rng.permutation(len(nodes))
                for at, y in zip(order, runner(other, [nodes[i] for i in order]), strict=True):
                    got[nodes[at].sequence, nodes[at].path[-1]] = y
            for sequence, start, expected in ((0, first - 40, wanted), (1, 0, wanted_second)):
                found = np.stack([got[sequence, start + i] for i in range(len(expected))])
                np.testing.assert_array_equal(found, expected, err_msg=label)
            # The tree in one pass with a row of the other sequence, which is written again.
            nodes = [*tree(0, first, values[2]), chain(1, values[1])[-1]]
            order = rng.permutation(len(nodes))
            y = runner(other, [nodes[i] for i in order])[np.argsort(order)]
            np.testing.assert_array_equal(y[:-1], wanted_tree, err_msg=label)
            np.testing.assert_array_equal(y[-1], wanted_second[-1], err_msg=label)
            # What follows the side branch that was accepted, its rows left where they are.
            path = nodes[BRANCH[-1]].path
            after = [len(PARENTS) + first + i for i in range(behind)]
            nodes = [Node(0, (*path, *after[: i + 1]), values[0][first + i], len(path) + i) for i in range(behind)]
            y = np.concatenate([runner(other, nodes[:1]), runner(other, nodes[1:])])
            np.testing.assert_array_equal(y, wanted_behind, err_msg=label)
