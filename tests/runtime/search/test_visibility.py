"""Several texts in one cache: each row gives what it gives in a cache of its own text, up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edgeinfer.bundle import Capabilities
from edgeinfer.bundle.graph import TREE_ROWS
from edgeinfer.errors import BackendError, CapabilityError
from edgeinfer.export import ExportConfig
from edgeinfer.export.options.config import StaticOptions
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.backends.onnx.factory import make_graph_backend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.backends.static.backend import StaticBackend
from edgeinfer.runtime.backends.visibility import Visibility
from tests.runtime.models import bundle_of
from tests.runtime.test_engine import TableBackend
from tests.tables import each_row

if TYPE_CHECKING:
    from tests.runtime.conftest import Family

CAPACITY = 40
TRUNK = [0, 17, 300, 5, 5, 42, 99]
# Two continuations of the trunk, and a text that shares nothing with it.
TEXTS = {"a": [123, 7, 250, 31, 64], "b": [9, 7, 18, 260], "c": [77, 201, 8, 8, 33, 4]}
ORDER = "abcacbcabacbacc"
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3-tied-biases"])
def some_family(request: pytest.FixtureRequest, make_family: Callable[..., Family]) -> Family:
    return make_family(request.param)


STATIC = ExportConfig(bits=32, static=StaticOptions(context=48, chunk=12, widths=(1, 2, 4)))
MAKERS: dict[str, Callable[[Family], Backend]] = {
    "onnx-exact": lambda family: make_graph_backend(family.bundle, CAPACITY),
    "onnx-plain": lambda family: make_graph_backend(family.bundle, CAPACITY, exact=False),
    "reference": lambda family: ReferenceBackend(family.bundle, CAPACITY),
    "static": lambda family: StaticBackend(bundle_of(family.name, STATIC), CAPACITY),
}


@pytest.fixture(scope="module", params=list(MAKERS))
def backend(request: pytest.FixtureRequest, some_family: Family) -> Iterator[Backend]:
    made = MAKERS[request.param](some_family)
    yield made
    made.close()


def run(backend: Backend, tokens: list[int]) -> np.ndarray:
    backend.cache.trim(0)
    return backend.forward(ForwardInput(np.array(tokens), np.arange(len(tokens)), np.arange(len(tokens)))).logits.copy()


@pytest.mark.parametrize("width", [1, 3, 5])
def test_texts_side_by_side_give_what_each_gives_alone(backend: Backend, width: int) -> None:
    alone = {name: run(backend, TRUNK * (name != "c") + text) for name, text in TEXTS.items()}
    run(backend, TRUNK)
    order = list(ORDER)
    fed = dict.fromkeys(TEXTS, 0)
    paths = {name: list(range(len(TRUNK) * (name != "c"))) for name in TEXTS}
    while order:
        names, order = order[:width], order[width:]
        tokens, starts, seen = [], [], []
        for slot, name in enumerate(names, backend.cache.length):
            starts.append(len(paths[name]))
            tokens.append(TEXTS[name][fed[name]])
            fed[name] += 1
            paths[name].append(slot)
            seen.append(np.array(paths[name]))
        rows, visibility = np.arange(len(names)), Visibility(tuple(seen))
        logits = backend.forward(ForwardInput(np.array(tokens), np.array(starts), rows, visibility=visibility)).logits
        for row, (name, place) in enumerate(zip(names, starts, strict=True)):
            np.testing.assert_allclose(logits[row], alone[name][place], atol=TOLERANCE, rtol=TOLERANCE)
    assert fed == {name: len(text) for name, text in TEXTS.items()}


def test_rows_that_are_kept_go_on_as_the_text_they_are_of(backend: Backend) -> None:
    alone = run(backend, TRUNK + TEXTS["a"])
    run(backend, TRUNK)
    n = len(TRUNK)
    paths = tuple(np.array([*range(n), *(n + i for i in own)]) for own in ([0], [1], [0, 2], [1, 3]))
    tokens = [TEXTS["b"][0], TEXTS["a"][0], TEXTS["b"][1], TEXTS["a"][1]]
    positions = np.array([n, n, n + 1, n + 1])
    nothing = np.zeros(0, np.int64)
    backend.forward(ForwardInput(np.array(tokens), positions, nothing, visibility=Visibility(paths)))
    backend.cache.keep(n, [1, 3])
    rest = TEXTS["a"][2:]
    logits = backend.forward(ForwardInput(np.array(rest), np.arange(len(rest)) + n + 2, np.arange(len(rest)))).logits
    np.testing.assert_allclose(logits, alone[n + 2 :], atol=TOLERANCE, rtol=TOLERANCE)


@each_row("make", [make_graph_backend, ReferenceBackend])
def test_what_rows_see_is_checked(make: Callable[..., Backend], make_family: Callable[..., Family]) -> None:
    backend = make(make_family("llama").bundle, CAPACITY)
    ok = Visibility((np.arange(1), np.arange(2)))

    def feed(sees: Visibility, tree: np.ndarray | None = None) -> None:
        start = backend.cache.length
        backend.forward(
            ForwardInput(np.array([3, 4]), np.arange(start, start + 2), np.array([1]), tree=tree, visibility=sees)
        )

    with pytest.raises(BackendError, match="at least one token in the cache"):
        feed(ok)
    run(backend, TRUNK)
    n = len(TRUNK)
    with pytest.raises(BackendError, match="paths of 1"):
        feed(Visibility((np.arange(n + 1),)))
    chain = Visibility((np.arange(n + 1), np.arange(n + 2)))
    with pytest.raises(BackendError, match="not both"):
        feed(chain, tree=np.array([-1, 0]))
    wrong = [np.arange(n + 1), np.array([]), np.array([-1, n + 1]), np.array([3, 2, n + 1]), np.array([3, 3, n + 1])]
    for path in (*wrong, np.arange(n + 3)):
        with pytest.raises(BackendError, match="must ascend to the row itself"):
            feed(Visibility((np.arange(n + 1), path)))
    assert backend.cache.length == n
    backend.close()


def test_a_window_bounds_the_context_of_several_texts(make_family: Callable[..., Family]) -> None:
    """The operator's window is that of the model and so many rows more, and counts other texts' rows."""
    bundle = make_family("mistral").bundle
    for capacity, can in ((6 + TREE_ROWS - 1, True), (6 + TREE_ROWS, False)):
        backend = make_graph_backend(bundle, capacity)
        assert backend.capabilities.branches is can
        backend.close()
    assert make_graph_backend(make_family("llama").bundle, 6 + TREE_ROWS).capabilities.branches


def test_a_backend_that_cannot_refuses() -> None:
    backend = TableBackend()
    assert not Capabilities(False, False, True).branches
    backend.cache.held = [1]
    with pytest.raises(CapabilityError, match="several texts in one cache"):
        sees = Visibility((np.arange(2),))
        backend.forward(ForwardInput(np.array([3]), np.array([1]), np.array([0]), visibility=sees))
