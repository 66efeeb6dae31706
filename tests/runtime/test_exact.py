"""With exact passes, logits and caches are the same bits for any way of cutting a text into passes, in both
layouts; what paged caches promise beyond that is in test_exact_company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle.layouts import LAYOUTS
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, make_graph_backend

pytestmark = pytest.mark.matrix

TEXT = np.random.default_rng(3).integers(0, 320, 24)
CONTEXT = 8
# A main branch of five rows, then other branches.
PARENTS = np.array([-1, 0, 1, 2, 3, 0, 5, 2, -1, 8])
SIDE = np.array([9, 17, 300, 5, 42])
# Widths of 128 and 256 take blocks of 32, 64 and 128.
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
EXPORTS = {
    **{f"{bits}-bit-{group}": ExportConfig(bits, group, keep_small=False) for bits in (4, 8) for group in (32, 128)},
    "8-bit-64": ExportConfig(8, 64, keep_small=False),
    "2-bit-128": ExportConfig(2, 128, keep_small=False),
    # Small layers stay wider: 8 bits here, float32 in the one below.
    "4-bit-wider": ExportConfig(4, 128),
    "8-bit-wider": ExportConfig(8, 128),
    "float32": ExportConfig(32),
}


@dataclass(frozen=True)
class Exact:
    """An exact backend and what it gives for TEXT in one pass."""

    backend: GraphBackend
    logits: NDArray[np.float32]  # (S, V)
    cache: CacheSnapshot


def run(backend: GraphBackend, tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:  # (S,) -> (S, V)
    rows = np.arange(len(tokens))
    return backend.forward(ForwardInput(np.array(tokens), rows + backend.cache.length, rows)).logits.copy()


@pytest.fixture(
    scope="module",
    params=[(e, layout, t) for e in EXPORTS for layout in LAYOUTS for t in (1, 2)],
    ids=lambda p: f"{p[0]}-{p[1]}-threads-{p[2]}",
)
def exact(request: pytest.FixtureRequest) -> Iterator[Exact]:
    export, layout, threads = request.param
    if layout == "native":
        require_kernel()
    bundle = bundle_of("qwen2", replace(EXPORTS[export], layout=layout), **SIZES)
    backend = make_graph_backend(bundle, 64, threads=threads, layout=layout)
    logits = run(backend, TEXT)
    yield Exact(backend, logits, backend.cache.snapshot())
    backend.close()


def same_cache(actual: CacheSnapshot, expected: CacheSnapshot) -> bool:
    assert (actual.length, actual.kv, actual.scales) == (expected.length, expected.kv, expected.scales)
    pairs = zip((*actual.keys, *actual.values), (*expected.keys, *expected.values), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@given(cuts=st.sets(st.integers(1, len(TEXT) - 1)), wanted=st.lists(st.integers(0, len(TEXT) - 1), max_size=3))
@example(cuts=set(range(1, len(TEXT))), wanted=[])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chunking_gives_the_same_bits(exact: Exact, cuts: set[int], wanted: list[int]) -> None:
    exact.backend.cache.trim(0)
    logits = np.concatenate([run(exact.backend, chunk) for chunk in np.split(TEXT, sorted(cuts))])
    assert np.array_equal(logits, exact.logits)
    assert same_cache(exact.backend.cache.snapshot(), exact.cache)
    # Nor does it matter which rows are asked for.
    exact.backend.cache.trim(0)
    few = exact.backend.forward(ForwardInput(TEXT, np.arange(len(TEXT)), np.array(wanted, np.int64))).logits
    assert np.array_equal(few, exact.logits[wanted])


@given(rounds=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=12))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rejected_drafts_leave_no_trace(exact: Exact, rounds: list[tuple[int, int]]) -> None:
    """Each round feeds some right tokens with wrong ones after them, and takes the wrong ones back."""
    exact.backend.cache.trim(0)
    done = 0
    for right, wrong in rounds:
        right = min(right, len(TEXT) - done)
        if right == 0:
            break
        tokens = np.concatenate([TEXT[done : done + right], np.arange(wrong)])
        assert np.array_equal(run(exact.backend, tokens)[:right], exact.logits[done : done + right])
        done += right
        exact.backend.cache.trim(done)


def test_trees_and_copies_give_the_same_bits(exact: Exact) -> None:
    backend = exact.backend
    backend.cache.trim(0)
    run(backend, TEXT[:CONTEXT])
    # The next tokens as the main branch, with other branches.
    depths: list[int] = []
    for parent in PARENTS:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    tokens = np.concatenate([TEXT[CONTEXT : CONTEXT + 5], SIDE])
    spine = backend.forward(
        ForwardInput(tokens, CONTEXT + np.array(depths), np.arange(len(tokens)), tree=PARENTS)
    ).logits[:5]
    assert np.array_equal(spine, exact.logits[CONTEXT : CONTEXT + 5])
    backend.cache.keep(CONTEXT, [0, 1, 2])
    assert np.array_equal(run(backend, TEXT[CONTEXT + 3 :]), exact.logits[CONTEXT + 3 :])
    assert same_cache(backend.cache.snapshot(), exact.cache)
    # Rows are rewritten as they are, cut by an edit, and computed again.
    backend.cache.rewrite(lambda layer, keys, values: (keys, values))
    assert same_cache(backend.cache.snapshot(), exact.cache)
    backend.cache.rewrite(lambda layer, keys, values: (keys[:, :CONTEXT], values[:, :CONTEXT]))
    assert backend.cache.length == CONTEXT
    assert np.array_equal(run(backend, TEXT[CONTEXT:]), exact.logits[CONTEXT:])
    # They come back whole and in pieces.
    first, second = backend.cache.snapshot(0, CONTEXT), backend.cache.snapshot(CONTEXT)
    backend.cache.trim(CONTEXT)
    backend.cache.restore(exact.cache)
    assert same_cache(backend.cache.snapshot(), exact.cache)
    backend.cache.restore(first)
    backend.cache.append(second)
    assert same_cache(backend.cache.snapshot(), exact.cache)
