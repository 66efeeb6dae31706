"""Pools, conversations and sessions that run edgeinfer.Attention alone; knows nothing of what it should give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.runtime.native.library import NativeKernel
from edgeinfer.runtime.paging.layout import PAGE, PageLayout
from tests.runtime.native.attention_oracle import Floats, Shape, Tables, Weights, make_layout
from tests.runtime.native.graphs import make_model, open_session, run

NAMES = (
    *("qkv", "pool", "layout", "pages", "rows", "extras", "position_ids"),
    *("cos", "sin", "q_norm", "k_norm", "sinks", "layer_mask", "qkv_bias"),
)
PLAIN = Shape(heads=4, kv_heads=2, key_size=16, value_size=16)


def attributes(shape: Shape) -> dict[str, Any]:
    """Row of the node."""
    sizes = {"num_heads": shape.heads, "kv_num_heads": shape.kv_heads, "layer": shape.layer}
    sizes |= {"key_size": shape.key_size, "value_size": shape.value_size, "rotary_dim": shape.rotary}
    sizes |= {"window": shape.window, "interleaved": int(shape.interleaved), "shared": int(shape.shared)}
    sizes |= {"still": shape.still} if shape.still else {}
    return sizes | {"scale": shape.scale, "softcap": shape.softcap, "norm_epsilon": shape.epsilon}


def aligned(count: int) -> NDArray[np.uint8]:
    """Zero bytes that begin where a page of memory does."""
    memory = np.zeros(count + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + count]


@dataclass(frozen=True)
class Store:
    """A pool and the tables of its sequences."""

    layout: PageLayout
    memory: NDArray[np.uint8]
    pages: NDArray[np.int32]  # (B, P)

    @classmethod
    def of(cls, layout: PageLayout, sequences: int, capacity: int, order: np.random.Generator | None = None) -> Store:
        """Sequences that share nothing, with their pages in order or anywhere in the pool."""
        width = -(-capacity // PAGE)
        count = sequences * width if order is None else sequences * width + 3
        places = np.arange(count) if order is None else order.permutation(count)
        pages = places[: sequences * width].reshape(sequences, width).astype(np.int32)
        return cls(layout, aligned(count * layout.page_bytes), pages)

    @property
    def weights(self) -> NDArray[np.float32]:  # (pages, layers, H, 64)
        """Weights added to the scores of each position, as a view."""
        (group,) = self.layout.groups
        return group.weights(self.memory.reshape(-1, self.layout.page_bytes))

    def copy(self) -> Store:
        """A copy of the state."""
        memory = aligned(self.memory.size)
        memory[:] = self.memory
        return replace(self, memory=memory)


@dataclass(frozen=True)
class Node:
    """A row of a pass: of which sequence, its path and its values."""

    sequence: int
    path: tuple[int, ...]  # slots, its own last
    values: Floats = field(repr=False)  # (width,) queries, keys and values
    position: int = 0  # for the rotation


def _tables(pages: NDArray[np.int32], nodes: Sequence[Node]) -> Tables:
    rows: list[tuple[int, int, int, int]] = []
    extras: list[int] = []
    for node in nodes:
        prefix = next((i for i, slot in enumerate(node.path) if slot != i), len(node.path))
        rows.append((node.sequence, prefix, len(extras), len(node.path) - prefix))
        extras += node.path[prefix:]
    return Tables(pages, np.array(rows, np.int32).reshape(-1, 4), np.array(extras or [0], np.int32))


class Runner:
    """A node of the operator in a session."""

    def __init__(self, kernel: NativeKernel, shape: Shape, weights: Weights | None = None, threads: int = 1) -> None:
        self.shape, self.weights = shape, weights or Weights()
        given: dict[str, NDArray[Any]] = {name: w for name, w in vars(self.weights).items() if w is not None}
        known: dict[str, NDArray[Any]] = {
            n: given.pop(n) for n in ("q_norm", "k_norm", "sinks", "qkv_bias") if n in given
        }
        self._given = given
        types = self._inputs(
            Store.of(make_layout(shape, "float32", "float32"), 1, 1), _tables(np.zeros((1, 1), np.int32), [])
        )
        model = make_model("Attention", NAMES, types, known, **attributes(shape))
        self.session: ort.InferenceSession = open_session(kernel, model, threads)

    def _inputs(
        self, store: Store, tables: Tables, qkv: Floats | None = None, positions: Iterable[int] = ()
    ) -> dict[str, NDArray[Any]]:
        values = np.zeros((0, self.shape.width), np.float32) if qkv is None else qkv
        inputs: dict[str, NDArray[Any]] = {"qkv": values[None], "pool": store.memory, "layout": store.layout.array}
        inputs |= {"pages": tables.pages, "rows": tables.rows, "extras": tables.extras}
        return inputs | {"position_ids": np.array([list(positions)], np.int64)} | self._given

    def inputs(self, store: Store, nodes: Sequence[Node]) -> dict[str, NDArray[Any]]:
        """Inputs of one pass."""
        qkv = np.stack([node.values for node in nodes]).astype(np.float32)
        return self._inputs(store, _tables(store.pages, nodes), qkv, [node.position for node in nodes])

    def __call__(self, store: Store, nodes: Sequence[Node]) -> Floats:  # (S, heads v)
        """One pass, which writes to the store."""
        result: Floats = run(self.session, **self.inputs(store, nodes))[0]
        return result

    def tables(self, store: Store, nodes: Sequence[Node]) -> Tables:
        """The operator's attributes from `nodes`."""
        return _tables(store.pages, nodes)


def make_weights(rng: np.random.Generator, shape: Shape, norm: str = "", sinks: bool = False) -> Weights:
    """Random ones; `norm` is "", "head" or "whole"."""
    tables: dict[str, Floats] = {}
    if shape.rotary:
        angles = rng.uniform(0, 6, (600, shape.rotary // 2))
        tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    for name, heads in (("q_norm", shape.heads), ("k_norm", shape.kv_heads)):
        if norm:
            tables[name] = rng.uniform(0.5, 2, shape.key_size * (heads if norm == "whole" else 1)).astype(np.float32)
    if sinks:
        tables["sinks"] = rng.standard_normal(shape.heads).astype(np.float32) * np.float32(3)
    return Weights(**tables)


def small(kernel: NativeKernel, **changes: Any) -> tuple[Runner, Store, dict[str, NDArray[Any]]]:
    """Two sequences with five rows in a pass, of which two are branches; their inputs."""
    shape = replace(PLAIN, rotary=16, **changes)
    rng = np.random.default_rng(5)
    store = Store.of(make_layout(shape, "float32", "float32"), 2, 2 * PAGE)
    runner = Runner(kernel, shape, make_weights(rng, shape))
    paths = [(0, (0,)), (0, (0, 1)), (0, (0, 2)), (1, (0,)), (0, (0, 2, 3))]
    nodes = [Node(s, path, rng.standard_normal(shape.width, np.float32), len(path) - 1) for s, path in paths]
    runner(store, nodes)
    return runner, store, runner.inputs(store, nodes)
