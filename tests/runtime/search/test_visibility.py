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
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.backends.static.backend import StaticBackend
from edgeinfer.runtime.backends.visibility import Visibility
from tests.runtime.models import bundle_of
from tests.runtime.test_engine import TableBackend

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
    "onnx-exact": lambda family: OnnxBackend(family.bundle, CAPACITY),
    "onnx-plain": lambda family: OnnxBackend(family.bundle, CAPACITY, exact=False),
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
    owners, places = [""] * len(TRUNK), list(range(len(TRUNK)))
    while order:
        names, order = order[:width], order[width:]
        start, tokens, starts = backend.cache.length, [], []
        for name in names:
            starts.append(len(TRUNK) * (name != "c") + fed[name])
            tokens.append(TEXTS[name][fed[name]])
            fed[name] += 1
        owners, places = owners + names, places + starts
        sees = np.array([
            [i <= start + row and (owner == name or (owner == "" and name != "c")) for i, owner in enumerate(owners)]
            for row, name in enumerate(names)
        ])  # fmt: skip
        rows, visibility = np.arange(len(names)), Visibility(sees, np.array(places))
        logits = backend.forward(ForwardInput(np.array(tokens), np.array(starts), rows, visibility=visibility)).logits
        for row, (name, place) in enumerate(zip(names, starts, strict=True)):
            np.testing.assert_allclose(logits[row], alone[name][place], atol=TOLERANCE, rtol=TOLERANCE)
    assert fed == {name: len(text) for name, text in TEXTS.items()}


def test_rows_that_are_kept_go_on_as_the_text_they_are_of(backend: Backend) -> None:
    alone = run(backend, TRUNK + TEXTS["a"])
    run(backend, TRUNK)
    n = len(TRUNK)
    sees = np.zeros((4, n + 4), np.bool_)
    sees[:, :n] = True
    for row, earlier in enumerate([[0], [1], [0, 2], [1, 3]]):
        sees[row, [n + i for i in earlier]] = True
    tokens = [TEXTS["b"][0], TEXTS["a"][0], TEXTS["b"][1], TEXTS["a"][1]]
    positions = np.array([n, n, n + 1, n + 1])
    places = np.concatenate([np.arange(n), positions])
    backend.forward(
        ForwardInput(np.array(tokens), positions, np.zeros(0, np.int64), visibility=Visibility(sees, places))
    )
    backend.cache.keep(n, [1, 3])
    rest = TEXTS["a"][2:]
    logits = backend.forward(ForwardInput(np.array(rest), np.arange(len(rest)) + n + 2, np.arange(len(rest)))).logits
    np.testing.assert_allclose(logits, alone[n + 2 :], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("make", [OnnxBackend, ReferenceBackend])
def test_what_rows_see_is_checked(make: Callable[..., Backend], make_family: Callable[..., Family]) -> None:
    backend = make(make_family("llama").bundle, CAPACITY)
    ok = Visibility(np.tri(2, dtype=np.bool_), np.arange(2))

    def feed(sees: Visibility, tree: np.ndarray | None = None) -> None:
        start = backend.cache.length
        backend.forward(
            ForwardInput(np.array([3, 4]), np.arange(start, start + 2), np.array([1]), tree=tree, visibility=sees)
        )

    with pytest.raises(BackendError, match="at least one token in the cache"):
        feed(ok)
    run(backend, TRUNK)
    with pytest.raises(BackendError, match="shapes"):
        feed(ok)
    n = len(TRUNK)
    wide = Visibility(np.ones((2, n + 2), np.bool_), np.arange(n + 2))
    with pytest.raises(BackendError, match="no later row of its pass"):
        feed(wide)
    blind = np.tri(2, n + 2, n, dtype=np.bool_)
    with pytest.raises(BackendError, match="not both"):
        feed(Visibility(blind, np.arange(n + 2)), tree=np.array([-1, 0]))
    blind[1, n + 1] = False
    with pytest.raises(BackendError, match="must see itself"):
        feed(Visibility(blind, np.arange(n + 2)))
    assert backend.cache.length == n
    backend.close()


def test_a_window_bounds_the_context_of_several_texts(make_family: Callable[..., Family]) -> None:
    """The operator's window is that of the model and so many rows more, and counts other texts' rows."""
    bundle = make_family("mistral").bundle
    for capacity, can in ((6 + TREE_ROWS - 1, True), (6 + TREE_ROWS, False)):
        backend = OnnxBackend(bundle, capacity)
        assert backend.capabilities.branches is can
        backend.close()
    assert OnnxBackend(make_family("llama").bundle, 6 + TREE_ROWS).capabilities.branches


def test_a_backend_that_cannot_refuses() -> None:
    backend = TableBackend()
    assert not Capabilities(False, False, True).branches
    backend.cache.held = [1]
    with pytest.raises(CapabilityError, match="several texts in one cache"):
        sees = Visibility(np.ones((1, 2), np.bool_), np.arange(2))
        backend.forward(ForwardInput(np.array([3]), np.array([1]), np.array([0]), visibility=sees))
