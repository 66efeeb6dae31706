"""With exact passes, logits and keys are the same bits for any way of cutting a text into passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle import Layout, open_bundle
from edgeinfer.export import ExportConfig, export_checkpoint
from edgeinfer.runtime.contracts import CacheSnapshot
from edgeinfer.runtime.onnx_backend import OnnxBackend
from tests.factories import make_checkpoint
from tests.kernel import require_kernel

TEXT = np.random.default_rng(3).integers(0, 320, 24)
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

    backend: OnnxBackend
    logits: NDArray[np.float32]  # (S, V)
    cache: CacheSnapshot


def run(backend: OnnxBackend, tokens: NDArray[np.int64]) -> NDArray[np.float32]:  # (S,) -> (S, V)
    rows = np.arange(len(tokens))
    return backend.forward(tokens, rows + backend.length, rows).logits.copy()


# float32 bundles are the same in both layouts.
LAYOUTS: dict[str, tuple[Layout, ...]] = dict.fromkeys(EXPORTS, ("native", "portable")) | {"float32": ("portable",)}


@pytest.fixture(
    scope="module",
    params=[(e, layout, t) for e in EXPORTS for layout in LAYOUTS[e] for t in (1, 2)],
    ids=lambda p: f"{p[0]}-{p[1]}-threads-{p[2]}",
)
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exact]:
    export, layout, threads = request.param
    if layout == "native":
        require_kernel()
    folder = tmp_path_factory.mktemp("exact")
    make_checkpoint(folder / "checkpoint", "qwen2", **SIZES)
    config = replace(EXPORTS[export], layout=layout)
    bundle = open_bundle(export_checkpoint(folder / "checkpoint", folder / "bundle", config))
    backend = OnnxBackend(bundle, 64, threads=threads)
    logits = run(backend, TEXT)
    yield Exact(backend, logits, backend.snapshot())
    backend.close()


def assert_same_cache(actual: CacheSnapshot, expected: CacheSnapshot) -> None:
    pairs = zip((*actual.keys, *actual.values), (*expected.keys, *expected.values), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@given(cuts=st.sets(st.integers(1, len(TEXT) - 1)))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chunking_gives_the_same_bits(exact: Exact, cuts: set[int]) -> None:
    exact.backend.truncate(0)
    logits = np.concatenate([run(exact.backend, chunk) for chunk in np.split(TEXT, sorted(cuts))])
    assert np.array_equal(logits, exact.logits)
    assert_same_cache(exact.backend.snapshot(), exact.cache)


@given(rounds=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=12))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rejected_drafts_leave_no_trace(exact: Exact, rounds: list[tuple[int, int]]) -> None:
    """Each round feeds some right tokens with wrong ones after them, and takes the wrong ones back."""
    exact.backend.truncate(0)
    done = 0
    for right, wrong in rounds:
        right = min(right, len(TEXT) - done)
        if right == 0:
            break
        tokens = np.concatenate([TEXT[done : done + right], np.arange(wrong)])
        logits = run(exact.backend, tokens)[:right]
        assert np.array_equal(logits, exact.logits[done : done + right])
        done += right
        exact.backend.truncate(done)


@pytest.mark.parametrize("rows", [[23], [0, 23], [5, 6, 7]])
def test_the_rows_asked_for_do_not_matter(exact: Exact, rows: list[int]) -> None:
    exact.backend.truncate(0)
    logits = exact.backend.forward(TEXT, np.arange(len(TEXT)), np.array(rows)).logits
    assert np.array_equal(logits, exact.logits[rows])
