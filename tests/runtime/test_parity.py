"""Logits of both backends against transformers whatever a pass is asked for: rows, layers, trees, copies.

test_families has what every family is tried with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.core.errors import BackendError
from edgeinfer.runtime.backends.cache import CopiedRows
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.native.library import LIBRARY, switched_off
from tests.alone import Alone, restore
from tests.runtime.models import depths, feed, make_graph_backend
from tests.tables import each_row

if TYPE_CHECKING:
    from tests.runtime.conftest import Family

Floats = NDArray[np.float32]
TOLERANCE = 1e-4
CAPACITY = 32
TEXT = [0, 17, 300, 5, 5, 42, 99, 123, 7, 250, 31, 64, 8, 201, 19, 77, 310, 2, 146, 90]
OTHER = [88, 9, 9, 260, 15, 33, 4]
# A draft tree: two branches from the context, each forking, not in depth-first order.
PARENTS = [-1, -1, 0, 1, 0, 2, 3, 2, 5]
DRAFT = [12, 240, 7, 7, 180, 55, 301, 3, 99]
MAKERS: dict[str, Callable[..., Alone[Any]]] = {
    "onnx-exact": lambda bundle, capacity: make_graph_backend(bundle, capacity, exact=True),
    "onnx-plain": lambda bundle, capacity: make_graph_backend(bundle, capacity, exact=False),
    "reference": lambda bundle, capacity: Alone(ReferenceBackend(bundle, capacity), capacity),
}
if LIBRARY.is_file() and not switched_off():
    MAKERS["onnx-paged"] = lambda bundle, capacity: make_graph_backend(bundle, capacity, layout=NATIVE)


@pytest.fixture(scope="session")
def backends(family: Family) -> Iterator[dict[str, Alone[Any]]]:
    """All backends of a family, made once: what a test leaves in a cache beyond its length must not matter."""
    made = {name: make(family.bundle, CAPACITY) for name, make in MAKERS.items()}
    yield made
    for backend in made.values():
        backend.close()


@pytest.fixture(params=list(MAKERS))
def backend(request: pytest.FixtureRequest, backends: dict[str, Alone[Any]]) -> Alone[Any]:
    """Each backend in turn, empty."""
    made = backends[request.param]
    made.cache.trim(0)
    return made


@pytest.fixture(params=[name for name in MAKERS if name.startswith("onnx")])
def pair(request: pytest.FixtureRequest, backends: dict[str, Alone[Any]]) -> tuple[Alone[Any], Alone[Any]]:
    """An ONNX backend and the reference backend of the same bundle, empty."""
    onnx, reference = backends[request.param], backends["reference"]
    onnx.cache.trim(0)
    reference.cache.trim(0)
    return onnx, reference


def feed_in(backend: Alone[Any], tokens: Sequence[int], sizes: Sequence[int], **options: Any) -> Floats:  # (S, V)
    """A chain in passes of these sizes."""
    assert sum(sizes) == len(tokens)
    ends = np.cumsum(sizes)
    return np.concatenate([feed(backend, tokens[e - n : e], **options) for n, e in zip(sizes, ends, strict=True)])


def path(parents: Sequence[int], node: int) -> list[int]:
    """Rows from the root of a draft tree to a node."""
    return ([*path(parents, parents[node])] if parents[node] >= 0 else []) + [node]


def feed_tree(backend: Alone[Any], tokens: Sequence[int], parents: Sequence[int]) -> Floats:  # (S, V)
    positions = backend.cache.length + np.array(depths(parents))
    rows = np.arange(len(tokens))
    return backend.forward(Pass(np.array(tokens, np.int64), positions, rows, tree=np.array(parents))).logits.copy()


def assert_close(actual: Floats, expected: Floats, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    worst = float(np.abs(actual - expected).max())
    assert worst <= tolerance


def test_only_the_rows_asked_for(family: Family, backend: Alone[Any]) -> None:
    tokens, expected = np.array(TEXT), family.expected(TEXT)
    assert backend.forward(Pass(tokens[:6], np.arange(6), np.zeros(0, np.int64))).logits.shape == (0, 320)
    rest = backend.forward(Pass(tokens[6:], np.arange(6, 20), np.array([0, 13, 5])))
    assert_close(rest.logits, expected[[6, 19, 11]])


def test_a_draft_tree_needs_a_context(backend: Alone[Any]) -> None:
    with pytest.raises(BackendError, match="at least one token"):
        feed_tree(backend, DRAFT, PARENTS)
    assert backend.cache.length == 0


def layer_masks(layers: int) -> list[NDArray[np.bool_]]:
    """Nothing, everything but one part in turn, every other part, and a random half."""
    parts = 2 * layers
    one_out = [np.arange(parts) != part for part in range(parts)]
    random = np.random.default_rng(0).random(parts) < 0.5
    return [np.zeros(parts, np.bool_), *one_out, np.arange(parts) % 2 == 0, random]


def test_masked_layers_match_the_reference(pair: tuple[Alone[Any], Alone[Any]]) -> None:
    onnx, reference = pair
    for mask in layer_masks(onnx.geometry.num_layers):
        actual, expected = (feed_in(b, TEXT, [9, 1, 10], layer_mask=mask) for b in pair)
        assert_close(actual, expected)
        onnx.cache.trim(0)
        reference.cache.trim(0)


def test_masked_trees_match_the_reference(pair: tuple[Alone[Any], Alone[Any]]) -> None:
    mask = np.array([True, True, False, True, True, False])
    tree, positions = np.array(PARENTS), 5 + np.array(depths(PARENTS))
    outcomes = []
    for backend in pair:
        feed(backend, TEXT[:5], layer_mask=mask)
        rows = np.arange(len(DRAFT))
        outcomes.append(backend.forward(Pass(np.array(DRAFT), positions, rows, tree=tree, layer_mask=mask)).logits)
    assert_close(outcomes[0], outcomes[1])


def test_a_masked_pass_leaves_the_context_alone(family: Family, backend: Alone[Any]) -> None:
    feed(backend, TEXT[:8])
    for mask in layer_masks(backend.geometry.num_layers):
        feed(backend, OTHER, layer_mask=mask)
        backend.cache.trim(8)
    assert_close(feed(backend, TEXT[8:]), family.expected(TEXT)[8:])


@pytest.mark.parametrize("exit_layer", [0, 1, 2, 3])
def test_resuming_from_an_exit_layer(family: Family, backend: Alone[Any], exit_layer: int) -> None:
    expected = family.expected(TEXT)
    first = np.arange(2 * backend.geometry.num_layers) < 2 * exit_layer
    feed(backend, TEXT[:6])
    tokens, positions, rows = np.array(TEXT[6:13]), np.arange(6, 13), np.arange(7)
    early = backend.forward(Pass(tokens, positions, np.zeros(0, np.int64), layer_mask=first))
    assert early.hidden is not None
    hidden = early.hidden.copy()
    backend.cache.trim(6)
    resumed = backend.forward(Pass(tokens, positions, rows, layer_mask=~first, hidden=hidden))
    assert_close(resumed.logits, expected[6:13])
    # Both halves left their keys and values behind.
    assert_close(feed(backend, TEXT[13:]), expected[13:])


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_hidden_states_match_the_reference(pair: tuple[Alone[Any], Alone[Any]], exit_layer: int) -> None:
    mask = np.arange(2 * pair[0].geometry.num_layers) < 2 * exit_layer
    none = np.zeros(0, np.int64)
    early = [b.forward(Pass(np.array(TEXT), np.arange(len(TEXT)), none, layer_mask=mask)).hidden for b in pair]
    assert early[0] is not None and early[1] is not None
    assert early[0].shape == (len(TEXT), pair[0].geometry.hidden_size)
    assert_close(early[0], early[1])


def test_snapshot_and_restore(family: Family, backend: Alone[Any]) -> None:
    feed(backend, TEXT[:11])
    snapshot = backend.cache.snapshot()
    held = CopiedRows(snapshot.length, tuple(k.copy() for k in snapshot.keys), tuple(v.copy() for v in snapshot.values))
    backend.cache.trim(3)
    feed(backend, OTHER * 2)
    assert all(np.array_equal(a, b) for a, b in zip(snapshot.keys, held.keys, strict=True))
    restore(backend.cache, snapshot)
    assert backend.cache.length == 11
    assert_close(feed_in(backend, TEXT[11:], [1, 8]), family.expected(TEXT)[11:])


def test_a_snapshot_moves_to_another_backend(family: Family, pair: tuple[Alone[Any], Alone[Any]]) -> None:
    for source, target in (pair, pair[::-1]):
        source.cache.trim(0)
        feed(source, TEXT[:11])
        restore(target.cache, source.cache.snapshot())
        assert_close(feed(target, TEXT[11:]), family.expected(TEXT)[11:])


@each_row("maker", MAKERS)
def test_a_full_cache(make_family: Callable[..., Family], maker: str) -> None:
    family = make_family("llama")
    backend = MAKERS[maker](family.bundle, 21)
    assert_close(feed_in(backend, [*TEXT, 1], [20, 1]), family.expected([*TEXT, 1]))
    with pytest.raises(BackendError, match="does not fit"):
        feed(backend, [1])
    backend.cache.trim(18)
    assert_close(feed(backend, [*TEXT[18:], 1]), family.expected([*TEXT, 1])[18:])


BAD_PASSES: dict[str, dict[str, Any]] = {
    "empty": {"tokens": [], "positions": [], "rows": []},
    "positions": {"positions": [0]},
    "row": {"rows": [3]},
    "negative row": {"rows": [-1]},
    "token": {"tokens": [1, 2, 320]},
    "negative token": {"tokens": [1, -2, 3]},
    "forward parent": {"tree": [-1, 2, 0]},
    "own parent": {"tree": [-1, 1, 0]},
    "short tree": {"tree": [-1, 0]},
    "mask": {"layer_mask": [True] * 5},
    "hidden": {"hidden": np.zeros((2, 64), np.float32)},
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("fault", BAD_PASSES)
def test_impossible_passes_are_refused(make_family: Callable[..., Family], maker: str, fault: str) -> None:
    family = make_family("llama")
    backend = MAKERS[maker](family.bundle, CAPACITY)
    feed(backend, TEXT[:4])
    asked: dict[str, Any] = {"tokens": [1, 2, 3], "positions": [4, 5, 6], "rows": [2]} | BAD_PASSES[fault]
    integers: dict[str, Any] = {name: np.array(asked.pop(name), np.int64) for name in ("tokens", "positions", "rows")}
    rest: dict[str, Any] = {name: np.array(value) for name, value in asked.items()}
    with pytest.raises(BackendError):
        backend.forward(Pass(**integers, **rest))
    assert backend.cache.length == 4
    assert_close(feed(backend, TEXT[4:]), family.expected(TEXT)[4:])
