"""Backends with the quantized caches of bundles made before caches were paged: static scales, a graph for each type."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.bundle import Bundle, KVScales, open_bundle
from edgeinfer.bundle.kv_scales import read_kv_scales
from edgeinfer.bundle.kv_types import KV, QUANTIZED_KV, store
from edgeinfer.errors import BackendError, UsageError
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.cache import made
from tests.old_bundle import old_bundle

TEXT = np.random.default_rng(3).integers(0, 320, 24)
CONTEXT = 8
# A spine of five rows, then branches beside it.
PARENTS = np.array([-1, 0, 1, 2, 3, 0, 5, 2, -1, 8])
SIDE = np.array([9, 17, 300, 5, 42])
Floats = NDArray[np.float32]
each_type = pytest.mark.parametrize("kv", QUANTIZED_KV)


def make_old(folder: Path) -> None:
    old_bundle(folder / "bundle")


@pytest.fixture
def bundle() -> Bundle:
    return open_bundle(made(make_old) / "bundle")


def run(backend: Backend, tokens: Sequence[int] | NDArray[np.int64], **options: Any) -> Floats:  # (S,) -> (S, V)
    rows = np.arange(len(tokens))
    return backend.forward(ForwardInput(np.array(tokens), rows + backend.cache.length, rows, **options)).logits.copy()


@cache
def _scales_in(path: Path) -> KVScales:
    scales = read_kv_scales(open_bundle(path))
    assert scales is not None
    return scales


def scales_of(bundle: Bundle) -> KVScales:
    return _scales_in(bundle.path)


def assert_alike(actual: Floats, expected: Floats) -> None:
    """The kernel rounds activations to 8 bits, the reference does not: on edges of levels that moves some logits."""
    difference = np.abs(actual - expected)
    assert np.median(difference) < 0.05 and difference.max() < 0.6


@each_type
def test_logits_match_the_reference(bundle: Bundle, kv: str) -> None:
    scales = scales_of(bundle)
    onnx, reference = (make(bundle, 64, kv=kv, kv_scales=scales) for make in (OnnxBackend, ReferenceBackend))
    logits = [np.concatenate([run(b, part) for part in np.split(TEXT, [9, 10])]) for b in (onnx, reference)]
    assert_alike(*logits)
    onnx.close()


@each_type
def test_the_operator_stores_what_we_would(bundle: Bundle, kv: str) -> None:
    """The first layer's rows do not depend on any cache."""
    scales = scales_of(bundle)
    floats, quantized = OnnxBackend(bundle, 64), OnnxBackend(bundle, 64, kv=kv, kv_scales=scales)
    for backend in (floats, quantized):
        run(backend, TEXT)
    exact, stored, own = floats.cache.snapshot(), quantized.cache.snapshot(), scales.of(kv)[0]
    assert np.array_equal(stored.keys[0], store(KV[kv], exact.keys[0], own.keys))
    assert np.array_equal(stored.values[0], store(KV[kv], exact.values[0], own.values))
    assert stored.nbytes * 32 == exact.nbytes * KV[kv].bits


@each_type
def test_masked_layers_match_the_reference(bundle: Bundle, kv: str) -> None:
    scales = scales_of(bundle)
    onnx, reference = (make(bundle, 64, kv=kv, kv_scales=scales) for make in (OnnxBackend, ReferenceBackend))
    for mask in ([False, True] * 2, [True, False] * 2, [True, True, False, False]):
        for backend in (onnx, reference):
            backend.cache.trim(0)
            run(backend, TEXT[:CONTEXT])
        logits = [run(b, TEXT[CONTEXT:], layer_mask=np.array(mask)) for b in (onnx, reference)]
        assert_alike(*logits)
        # What was skipped left the rows before as they were.
        for backend in (onnx, reference):
            backend.cache.trim(CONTEXT)
        assert_alike(run(onnx, TEXT[CONTEXT:]), run(reference, TEXT[CONTEXT:]))


def feed_tree(backend: Backend) -> Floats:  # (10, V)
    """The next five tokens of TEXT as a spine, with branches beside it."""
    depths: list[int] = []
    for parent in PARENTS:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    tokens = np.concatenate([TEXT[CONTEXT : CONTEXT + 5], SIDE])
    positions, rows = CONTEXT + np.array(depths), np.arange(len(tokens))
    return backend.forward(ForwardInput(tokens, positions, rows, tree=PARENTS)).logits.copy()


@each_type
def test_a_branch_of_a_tree_is_like_a_chain(bundle: Bundle, kv: str) -> None:
    tree, chain = (OnnxBackend(bundle, 64, kv=kv, kv_scales=scales_of(bundle)) for _ in range(2))
    for backend in (tree, chain):
        run(backend, TEXT[:CONTEXT])
    logits = feed_tree(tree)[[0, 5, 6]]
    expected = run(chain, [TEXT[CONTEXT], SIDE[0], SIDE[1]])
    assert_alike(logits, expected)
    tree.cache.keep(CONTEXT, [0, 5, 6])
    assert tree.cache.length == chain.cache.length
    assert_alike(run(tree, TEXT[12:]), run(chain, TEXT[12:]))


def test_another_cache_is_refused(bundle: Bundle) -> None:
    scales = scales_of(bundle)
    floats = OnnxBackend(bundle, 64)
    run(floats, TEXT)
    with pytest.raises(UsageError, match="needs scales"):
        OnnxBackend(bundle, 64, kv="int8")
    for make in (OnnxBackend, ReferenceBackend):
        with pytest.raises(BackendError, match="of a cache of float32, this one is of int8"):
            make(bundle, 64, kv="int8", kv_scales=scales).cache.restore(floats.cache.snapshot())


@each_type
def test_a_grown_cache_holds_what_it_held(bundle: Bundle, kv: str) -> None:
    text = np.random.default_rng(1).integers(0, 320, 300)
    scales = scales_of(bundle)
    whole, parts = (OnnxBackend(bundle, 600, kv=kv, kv_scales=scales) for _ in range(2))
    expected = run(whole, text)
    assert np.array_equal(np.concatenate([run(parts, part) for part in np.split(text, [250, 251, 256, 257])]), expected)
    assert whole.nbytes()["kv"] * 32 == 512 * bundle.manifest.geometry.kv_bytes_per_token() * KV[kv].bits


def test_growth_without_memory_leaves_the_backend_usable(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(1).integers(0, 320, 256)
    backend, other = (OnnxBackend(bundle, 600, kv="int8", kv_scales=scales_of(bundle)) for _ in range(2))
    for each in (backend, other):
        run(each, text)
    zeros, left = np.zeros, iter(range(3))

    def scarce(shape: Any, *args: Any) -> Any:
        if isinstance(shape, tuple) and len(shape) == 4 and next(left, None) is None:
            raise MemoryError
        return zeros(shape, *args)

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", scarce)
        with pytest.raises(MemoryError):
            run(backend, TEXT)
    assert backend.cache.length == 256
    assert np.array_equal(run(backend, TEXT), run(other, TEXT))
