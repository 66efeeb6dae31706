"""The backend of concatenating caches, over a hand-made graph whose logits sum what each layer's cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgeinfer.bundle import concat_graph
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.layouts import MODEL
from edgeinfer.bundle.manifest import Capabilities, Manifest
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import seal
from edgeinfer.core.errors import BackendError, BundleError, CapabilityError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CopiedRows
from edgeinfer.runtime.backends.contract import Pass, PassCancelledError
from edgeinfer.runtime.backends.onnx.concat import ConcatBackend
from edgeinfer.runtime.backends.registry import facts_of, make_backend
from edgeinfer.runtime.decoding.sequence import Sequence as Text
from edgeinfer.runtime.planning.candidates import Drafting, configurations
from tests.alone import Alone, restore
from tests.runtime.interrupts import within_runs
from tests.runtime.test_sequence import generate
from tests.tables import each_row

V, L, H, D, CAPACITY = 7, 2, 3, 2, 12
GEOMETRY = Geometry(V, H * D, L, H, D, CAPACITY)
RNG = np.random.default_rng(0)
EMBED = RNG.normal(size=(V, 2 * L * H * D)).astype(np.float32)
HEAD = RNG.normal(size=(2 * L * H * D, V)).astype(np.float32)


def make_graph(*, positions: bool, mask: bool = True) -> onnx.ModelProto:
    """Keys and values are parts of the embedding; logits are the sums over a token and its past, times a matrix."""
    nodes = [helper.make_node("Gather", ["embed", "input_ids"], ["hidden"])]  # (1, S, 2 L H D)
    if positions:
        nodes += [
            helper.make_node("Cast", ["position_ids"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["floats", "two"], ["column"]),
            helper.make_node("Add", ["hidden", "column"], ["placed"]),
        ]
    else:
        nodes.append(helper.make_node("Identity", ["hidden"], ["placed"]))
    parts = [f"part{i}" for i in range(2 * L)]
    nodes.append(helper.make_node("Split", ["placed"], parts, axis=2, num_outputs=2 * L))
    nodes.append(helper.make_node("Neg", ["length"], ["tail"]))
    nodes.insert(0, helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2))
    names = list(zip(parts, concat_graph.past_names(L), concat_graph.present_names(L), strict=True))
    for part, past, present in names:
        nodes += [
            helper.make_node("Reshape", [part, "split_shape"], [f"{part}.split"]),
            helper.make_node("Transpose", [f"{part}.split"], [f"{part}.new"], perm=[0, 2, 1, 3]),
            helper.make_node("Concat", [past, f"{part}.new"], [present], axis=2),
            helper.make_node("CumSum", [present, "two_scalar"], [f"{part}.sums"]),
            helper.make_node("Slice", [f"{part}.sums", "tail", "far", "two"], [f"{part}.last"]),
            helper.make_node("Transpose", [f"{part}.last"], [f"{part}.back"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"{part}.back", "join_shape"], [f"{part}.joined"]),
        ]
    nodes.append(helper.make_node("Concat", [f"{part}.joined" for part in parts], ["joined"], axis=2))
    nodes.append(helper.make_node("MatMul", ["joined", "head"], ["logits"]))
    constants = {
        "embed": EMBED,
        "head": HEAD,
        "two": np.array([2]),
        "two_scalar": np.array(2),
        "far": np.array([2**62]),
        "split_shape": np.array([1, -1, H, D]),
        "join_shape": np.array([1, -1, H * D]),
    }
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "S"])]
    if mask:
        inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, [1, "T"]))
    if positions:
        inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, [1, "S"]))
    inputs += [helper.make_tensor_value_info(p, TensorProto.FLOAT, [1, H, "P", D]) for _, p, _ in names]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "S", V])]
    outputs += [helper.make_tensor_value_info(p, TensorProto.FLOAT, [1, H, "T", D]) for _, _, p in names]
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "sums", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def make_bundle(folder: Path, graph: onnx.ModelProto, layers: int = L) -> Bundle:
    folder.mkdir()
    (folder / MODEL).write_bytes(graph.SerializeToString())
    geometry = Geometry(V, H * D, layers, H, D, CAPACITY)
    seal(folder, Manifest("sums", "Sums", "onnx-optimum", geometry, EMBED.size, Capabilities(False, False, False)))
    return open_bundle(folder)


@dataclass(frozen=True)
class Sums:
    """A bundle of the graph, and what it must compute."""

    bundle: Bundle
    positions: bool

    def expected(self, tokens: Sequence[int]) -> NDArray[np.float32]:  # (S, V)
        places = np.arange(len(tokens), dtype=np.float32)[:, None] * self.positions
        return np.asarray((EMBED[list(tokens)] + places).cumsum(axis=0) @ HEAD, np.float32)


@pytest.fixture(
    scope="module", params=[True, pytest.param(False, marks=pytest.mark.more_cases)], ids=["positions", "counts-itself"]
)
def sums(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sums:
    graph = make_graph(positions=request.param, mask=request.param)
    return Sums(make_bundle(tmp_path_factory.mktemp("sums") / "bundle", graph), request.param)


# Where a graph that counts its positions itself is another case, and not one more of the same.
either = pytest.mark.parametrize("sums", [True, False], ids=["positions", "counts-itself"], indirect=True)


@pytest.fixture(scope="module")
def used(sums: Sums) -> Alone[ConcatBackend]:
    return Alone(ConcatBackend(sums.bundle, CAPACITY), CAPACITY)


@pytest.fixture
def backend(used: Alone[ConcatBackend]) -> Alone[ConcatBackend]:
    """The backend with an empty cache; what tests leave behind its length must not matter."""
    used.cache.trim(0)
    return used


def feed(backend: Alone[ConcatBackend], tokens: Sequence[int], rows: Sequence[int]) -> NDArray[np.float32]:  # (R, V)
    positions = np.arange(backend.cache.length, backend.cache.length + len(tokens))
    return backend.forward(Pass(np.array(tokens), positions, np.array(rows, np.int64))).logits.copy()


def close(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    return got.shape == wanted.shape and bool(np.allclose(got, wanted, atol=1e-3))


chains = st.lists(st.tuples(st.lists(st.integers(0, V - 1), min_size=1, max_size=5), st.integers(0, CAPACITY)))


@either
@settings(deadline=None, max_examples=60)
@given(chain=chains)
def test_any_chain_of_passes_and_cuts(
    sums: Sums, used: Alone[ConcatBackend], chain: list[tuple[list[int], int]]
) -> None:
    backend, held = used, list[int]()
    backend.cache.trim(0)
    for tokens, cut in chain:
        if len(held) + len(tokens) > CAPACITY:
            backend.cache.trim(0)
            held.clear()
        held += tokens
        got = feed(backend, tokens, range(len(tokens)))
        assert close(got, sums.expected(held)[-len(tokens) :])
        if cut <= len(held):
            backend.cache.trim(cut)
            del held[cut:]
        assert backend.cache.length == len(held)


@pytest.mark.parametrize("rows", [[], [2], [0, 1, 2], [0, 2], [2, 0], [1, 1]])
def test_wanted_rows(sums: Sums, backend: Alone[ConcatBackend], rows: list[int]) -> None:
    assert close(feed(backend, [3, 1, 4], rows), sums.expected([3, 1, 4])[rows].reshape(-1, V))


def test_keep_takes_the_first_rows_of_a_pass(sums: Sums, backend: Alone[ConcatBackend]) -> None:
    feed(backend, [1, 2], [])
    feed(backend, [3, 4, 5], [])
    backend.cache.keep(2, [0, 1])
    assert close(feed(backend, [6], [0]), sums.expected([1, 2, 3, 4, 6])[-1:])
    with pytest.raises(CapabilityError):
        backend.cache.keep(2, [0, 2])


def test_trees_layers_and_hidden_states_are_refused(backend: Alone[ConcatBackend]) -> None:
    extras: list[dict[str, Any]] = [
        {"tree": np.array([-1, -1])},
        {"layer_mask": np.ones(2 * L, np.bool_)},
        {"hidden": np.zeros((2, H * D), np.float32)},
    ]
    for extra in extras:
        with pytest.raises(CapabilityError):
            backend.forward(Pass(np.array([1, 2]), np.arange(2), np.array([1]), **extra))
    assert backend.cache.length == 0


@either
def test_positions_other_than_the_next_ones(sums: Sums, backend: Alone[ConcatBackend]) -> None:
    if sums.positions:
        backend.forward(Pass(np.array([1, 2]), np.array([0, 5]), np.array([1])))
        assert backend.cache.length == 2
        return
    with pytest.raises(BackendError, match="positions"):
        backend.forward(Pass(np.array([1, 2]), np.array([0, 5]), np.array([1])))
    assert backend.cache.length == 0


def test_snapshots_come_back(sums: Sums, backend: Alone[ConcatBackend]) -> None:
    feed(backend, [1, 2, 3, 4], [])
    backend.cache.trim(3)
    snapshot = backend.cache.snapshot()
    assert (snapshot.length, snapshot.keys[0].shape) == (3, (H, 3, D))
    feed(backend, [5, 5, 5], [])
    restore(backend.cache, snapshot)
    assert close(feed(backend, [6], [0]), sums.expected([1, 2, 3, 6])[-1:])
    backend.cache.trim(0)
    for piece in (snapshot.part(0, 1), snapshot.part(1, 3)):
        backend.cache.append(piece)
    assert close(feed(backend, [6], [0]), sums.expected([1, 2, 3, 6])[-1:])
    other = Alone(ConcatBackend(sums.bundle, 2), 2)
    with pytest.raises(BackendError, match="do not fit"):
        restore(other.cache, snapshot)
    with pytest.raises(BackendError, match="another model"):
        restore(other.cache, CopiedRows(2, (), snapshot.values))
    with pytest.raises(BackendError, match="copy"):
        backend.cache.snapshot(3, backend.cache.length + 1)


def test_rows_are_rewritten_layer_by_layer(sums: Sums, backend: Alone[ConcatBackend]) -> None:
    feed(backend, [1, 2, 3, 4, 5], [])
    backend.cache.trim(4)
    held, seen = backend.cache.snapshot(), []

    def edit(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        seen.append(layer)
        assert np.array_equal(keys, held.keys[layer]) and np.array_equal(values, held.values[layer])
        kept = keys[:, :2].copy(), values[:, :2].copy()
        keys[:], values[:] = 0, 0
        return kept

    backend.cache.rewrite(edit)
    assert seen == list(range(L)) and backend.cache.length == 2
    assert close(feed(backend, [6], [0]), sums.expected([1, 2, 6])[-1:])


def test_a_bad_edit_empties_the_cache(sums: Sums, backend: Alone[ConcatBackend]) -> None:
    feed(backend, [1, 2, 3], [])
    with pytest.raises(BackendError, match="An edit of 3 rows"):
        backend.cache.rewrite(lambda layer, keys, values: (keys[:, layer:], values[:, layer:]))
    assert backend.cache.length == 0
    assert close(feed(backend, [1, 2], [0, 1]), sums.expected([1, 2]))


def test_a_full_cache_and_a_bad_cut_are_refused(backend: Alone[ConcatBackend]) -> None:
    feed(backend, [1] * CAPACITY, [])
    with pytest.raises(BackendError, match="does not fit"):
        feed(backend, [1], [0])
    with pytest.raises(BackendError, match="trim"):
        backend.cache.trim(CAPACITY + 1)


def test_the_cache_takes_only_its_rows_bytes(backend: Alone[ConcatBackend]) -> None:
    feed(backend, [1] * 8, [])
    assert backend.nbytes()["kv"] == 8 * GEOMETRY.kv_bytes_per_token()
    backend.cache.trim(3)
    feed(backend, [2], [0])
    assert backend.nbytes()["kv"] == 4 * GEOMETRY.kv_bytes_per_token()
    backend.cache.clear()
    assert backend.nbytes()["kv"] == 0


def test_a_cancelled_pass_leaves_the_cache(sums: Sums, backend: Alone[ConcatBackend]) -> None:
    feed(backend, [1, 2], [])
    with within_runs(backend.cancel), pytest.raises(PassCancelledError):
        feed(backend, [3, 4, 5, 6], [])
    assert backend.cache.length == 2
    assert close(feed(backend, [3], [0]), sums.expected([1, 2, 3])[-1:])


def test_the_registry_finds_it(sums: Sums) -> None:
    config = LoadOptions(context=CAPACITY)
    facts = facts_of(sums.bundle, config)
    configuration = next(configurations(facts, config, (Drafting((), 0, False),)))
    backend = make_backend(facts, config, configuration)
    assert isinstance(backend, ConcatBackend)
    tokens = [1, 2, 3, 4]
    for token in generate(Text(backend, backend.new_sequence(CAPACITY), chunk=3), tokens, 3):
        assert token == int(sums.expected(tokens)[-1].argmax())
        tokens.append(token)
    assert len(tokens) == 7


@each_row(("graph", "match"), [(make_graph(positions=True), "has inputs or outputs that"), (None, "cannot be loaded")])
def test_graphs_of_another_shape_are_refused(tmp_path: Path, graph: onnx.ModelProto | None, match: str) -> None:
    bundle = make_bundle(tmp_path / "bundle", graph or onnx.ModelProto(), layers=L + 1)
    with pytest.raises(BundleError, match=match):
        Alone(ConcatBackend(bundle, CAPACITY), CAPACITY)
