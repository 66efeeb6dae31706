"""llama.cpp's backend against itself and against numpy: passes, cuts, trees, copies, errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import LLAMA_KV
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BackendError, BundleError, CapabilityError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass, PassCancelledError
from edgeinfer.runtime.backends.llamacpp.backend import LlamaCppBackend
from tests.alone import Alone, restore
from tests.runtime.backends.llamacpp.conftest import CAPACITY, Q4_0
from tests.runtime.backends.llamacpp.models import Shape
from tests.runtime.interrupts import elsewhere
from tests.tables import each_row

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")
pytestmark = pytest.mark.gguf

Make = Callable[..., Alone[LlamaCppBackend]]
each_kv = pytest.mark.parametrize("kv", list(LLAMA_KV))
# Logits deviate by 1. A quantized number that rounding tips over changes them far more than the rounding itself.
NEAR = {"float32": 1e-5, "float16": 1e-3, "q8_0": 0.02, "q4_0": 0.3}
TEXT = np.random.default_rng(1).integers(0, 250, CAPACITY)


def feed(
    backend: Alone[LlamaCppBackend], tokens: Sequence[int] | NDArray[Any], rows: Sequence[int] | None = None
) -> Floats:  # (R, V)
    size = len(tokens)
    positions = np.arange(backend.cache.length, backend.cache.length + size)
    wanted = np.arange(size) if rows is None else np.array(rows, np.int64)
    return backend.forward(Pass(np.array(tokens), positions, wanted)).logits.copy()


def close(got: NDArray[Any], wanted: NDArray[Any], near: float) -> bool:
    return got.shape == wanted.shape and bool(np.allclose(got, wanted, atol=near))


@each_kv
def test_any_division_into_passes(make_backend: Make, kv: str) -> None:
    backend = make_backend(kv=kv)
    whole = feed(backend, TEXT[:40])
    for sizes in ([1] * 40, [7, 7, 7, 7, 7, 5], [2, 3, 1, 14, 20]):
        backend.cache.trim(0)
        ends = np.cumsum(sizes)
        parts = [feed(backend, TEXT[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        assert close(np.concatenate(parts), whole, NEAR[kv])


@pytest.fixture
def two(make_backend: Make) -> tuple[Alone[LlamaCppBackend], Alone[LlamaCppBackend]]:
    return make_backend(kv="float32"), make_backend(kv="float32")


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chain=st.lists(st.tuples(st.integers(1, 9), st.integers(0, CAPACITY)), max_size=8))
def test_any_chain_of_passes_and_cuts(
    two: tuple[Alone[LlamaCppBackend], Alone[LlamaCppBackend]], chain: list[tuple[int, int]]
) -> None:
    backend, straight = two
    backend.cache.trim(0)
    held = list[int]()
    for step, (size, cut) in enumerate(chain):
        if len(held) + size > CAPACITY:
            backend.cache.trim(0)
            held.clear()
        tokens = np.roll(TEXT, step)[:size].tolist()
        held += tokens
        got = feed(backend, tokens)
        straight.cache.trim(0)
        assert close(got, feed(straight, held)[-size:], NEAR["float32"])
        if cut <= len(held):
            backend.cache.trim(cut)
            del held[cut:]
        assert backend.cache.length == len(held)


def test_more_rows_than_fit_a_pass_run_in_parts(make_backend: Make) -> None:
    whole = feed(make_backend(kv="float32", chunk=CAPACITY, draft_rows=CAPACITY), TEXT)
    backend = make_backend(kv="float32", chunk=10, draft_rows=4)
    assert close(feed(backend, TEXT), whole, NEAR["float32"])
    backend.cache.trim(0)
    assert close(feed(backend, TEXT, [47, 0, 20, 20]), whole[[47, 0, 20, 20]], NEAR["float32"])
    backend.cache.trim(0)
    feed(backend, TEXT[:5], [])
    assert close(feed(backend, TEXT[5:], [42]), whole[[47]], NEAR["float32"])


@pytest.mark.parametrize("shape", [Shape(head_dim=64), Shape(experts=4, used=2)], ids=["dense", "experts"])
@pytest.mark.parametrize("weights", ["packed", "mapped", "experts"])
def test_ways_of_keeping_weights_agree(make_backend: Make, shape: Shape, weights: str) -> None:
    wanted = feed(make_backend(shape, weights="mapped", kv="float32", file_type=Q4_0), TEXT)
    backend = make_backend(shape, weights=weights, kv="float32", threads=2, file_type=Q4_0)
    # Activations are rounded to eight bits either way, but not in the same blocks; that costs 1.8 at most.
    assert close(feed(backend, TEXT), wanted, 0.1)
    backend.vocabulary.drop_pages()
    backend.cache.clear()
    assert close(feed(backend, TEXT), wanted, 0.1)


def test_rows_that_fill_up_a_pass_leave_nothing_behind(make_backend: Make) -> None:
    backend = make_backend(kv="float32", file_type=Q4_0)
    whole = feed(backend, TEXT)
    backend.cache.trim(0)
    parts = [feed(backend, TEXT[:5])]
    for size in (2, 3, 1, 6, 7, 10, 11, 3):
        parts.append(feed(backend, TEXT[backend.cache.length : backend.cache.length + size]))
    assert close(np.concatenate(parts), whole, 0.02)
    tree, places = np.array([-1, 0, 0]), np.array([5, 6, 6])
    backend.cache.trim(5)
    got = backend.forward(Pass(np.array([TEXT[5], 1, TEXT[6]]), places, np.arange(3), tree=tree)).logits.copy()
    assert close(got[[0, 2]], whole[5:7], 0.02)
    backend.cache.keep(5, [0, 2])
    assert close(feed(backend, TEXT[7:9]), whole[7:9], 0.02)


TREES = {"two-leaves": [-1, 0, 0], "bushy": [-1, 0, 1, 0, 3, 3, 4], "two-roots": [-1, -1, 0, 1], "chain": [-1, 0, 1]}


def paths_of(tree: list[int]) -> list[list[int]]:
    paths = []
    for row in range(len(tree)):
        path = [row]
        while tree[path[0]] >= 0:
            path.insert(0, tree[path[0]])
        paths.append(path)
    return paths


@each_kv
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_trees_are_their_paths(make_backend: Make, tree: list[int], kv: str) -> None:
    start = 11
    backend, straight = make_backend(kv=kv), make_backend(kv=kv)
    tokens, paths = TEXT[20 : 20 + len(tree)], paths_of(tree)
    places = np.array([start + len(path) - 1 for path in paths])
    for path in paths:
        backend.cache.trim(0)
        feed(backend, TEXT[:start], [])
        got = backend.forward(Pass(tokens, places, np.arange(len(tree)), tree=np.array(tree))).logits.copy()
        assert backend.cache.length == start + len(tree)
        straight.cache.trim(0)
        feed(straight, TEXT[:start], [])
        assert close(got[path], feed(straight, tokens[path]), NEAR[kv])
        backend.cache.keep(start, path)
        assert backend.cache.length == start + len(path)
        assert close(feed(backend, TEXT[:5]), feed(straight, TEXT[:5]), NEAR[kv])


def test_what_is_left_of_a_tree(make_backend: Make) -> None:
    backend = make_backend(kv="float32", sequences=3)
    feed(backend, TEXT[:4], [])
    wanted = feed(backend, TEXT[4:8])
    backend.cache.trim(4)
    tree, places = np.array([-1, 0, 0]), np.array([4, 5, 5])
    backend.forward(Pass(TEXT[4:7], places, np.arange(3), tree=tree))
    for refused in (
        lambda: feed(backend, [1]),
        lambda: backend.cache.snapshot(),
        lambda: backend.cache.keep(4, [0, 1, 2]),
    ):
        with pytest.raises(BackendError):
            refused()
    backend.cache.trim(6)
    assert close(feed(backend, TEXT[6:8]), wanted[2:], NEAR["float32"])
    backend.cache.trim(4)
    with pytest.raises(BackendError, match="4 paths, 3 were planned"):
        backend.forward(Pass(TEXT[:5], np.array([4, 5, 5, 5, 5]), np.arange(5), tree=np.array([-1, 0, 0, 0, 0])))
    assert close(feed(backend, TEXT[4:8]), wanted, NEAR["float32"])
    with pytest.raises(BackendError, match="do not follow each other"):
        backend.cache.keep(4, [0, 2])
    backend.cache.keep(4, [0, 1])
    assert backend.cache.length == 6
    with pytest.raises(BackendError, match="larger than"):
        wide = make_backend(chunk=4, draft_rows=4)
        feed(wide, [1], [])
        wide.forward(Pass(TEXT[:9], 1 + np.arange(9), np.arange(9), tree=np.arange(9) - 1))


@each_kv
def test_copies_come_back(make_backend: Make, kv: str) -> None:
    backend = make_backend(kv=kv)
    feed(backend, TEXT[:21], [])
    wanted = feed(backend, TEXT[21:24])
    backend.cache.trim(21)
    whole, pieces = (
        backend.cache.snapshot(),
        [backend.cache.snapshot(0, 5), backend.cache.snapshot(5, 21), backend.cache.snapshot(7, 7)],
    )
    other = make_backend(kv=kv)
    for copies in ([whole], pieces):
        restore(other.cache, copies[0])
        for piece in copies[1:]:
            other.cache.append(piece)
        assert other.cache.length == 21
        assert close(feed(other, TEXT[21:24]), wanted, NEAR[kv])
    with pytest.raises(BackendError, match="cannot follow 24"):
        other.cache.append(whole)
    with pytest.raises(BackendError, match="do not fit"):
        make_backend(kv=kv, capacity=20).cache.append(whole)
    other.cache.clear()
    with pytest.raises(BackendError, match="another model"):
        other.cache.append(dataclasses.replace(whole, scales="another engine's"))
    with pytest.raises(BackendError, match="copy"):
        backend.cache.snapshot(3, 22)


def test_copies_after_a_tree_are_in_order(make_backend: Make) -> None:
    backend, straight = make_backend(kv="float32"), make_backend(kv="float32")
    feed(backend, TEXT[:3], [])
    backend.forward(Pass(TEXT[3:7], np.array([3, 4, 4, 5]), np.arange(1), tree=np.array([-1, 0, 0, 2])))
    backend.cache.keep(3, [0, 2, 3])
    feed(backend, TEXT[7:10], [])
    feed(straight, [*TEXT[:4], *TEXT[5:10]], [])
    other = make_backend(kv="float32")
    other.cache.append(backend.cache.snapshot())
    assert close(feed(other, TEXT[10:14]), feed(straight, TEXT[10:14]), 1e-4)


@each_row("kv", ["float32", "float16", "q8_0"])
def test_rows_behind_dropped_ones_are_as_if_fed_at_their_new_places(make_backend: Make, kv: str) -> None:
    """With one layer, what is cached of a token depends on nothing but its place."""
    shape = Shape(head_dim=64, layers=1)
    backend, straight = make_backend(shape, kv=kv), make_backend(shape, kv=kv)
    feed(backend, TEXT[:12], [])
    backend.cache.drop(2, 5)
    assert backend.cache.length == 9
    feed(straight, [*TEXT[:2], *TEXT[5:12]], [])
    # Turned keys are rounded a second time.
    near = 0.05 if LLAMA_KV[kv].blocks else 1e-2
    assert close(feed(backend, TEXT[12:14]), feed(straight, TEXT[12:14]), near)
    with pytest.raises(CapabilityError, match="cannot be edited"):
        backend.cache.rewrite(lambda _, keys, values: (keys, values))


class Interrupted:
    """llama.cpp that is stopped after a pass was requested and before it checks whether to go on."""

    def __init__(self, lib: Any, act: Callable[[], None]) -> None:
        self._lib, self._act = lib, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def llama_decode(self, *arguments: Any) -> Any:
        elsewhere(self._act)
        return self._lib.llama_decode(*arguments)


def test_a_cancelled_pass_leaves_the_cache(make_backend: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(kv="float32", shape=Shape(head_dim=64, ffn=512))
    feed(backend, TEXT[:2], [])
    wanted = feed(backend, TEXT[2:5])
    backend.cache.trim(2)
    with monkeypatch.context() as patch:
        patch.setattr(backend._context, "_lib", Interrupted(backend._context._lib, backend.cancel))
        for _ in range(2):
            with pytest.raises(PassCancelledError):
                feed(backend, TEXT[2:40], [])
            assert backend.cache.length == 2
            tree, places = np.array([-1, 0, 0, 1]), np.array([2, 3, 3, 4])
            with pytest.raises(PassCancelledError):
                backend.forward(Pass(TEXT[2:6], places, np.arange(1), tree=tree))
            assert backend.cache.length == 2
    assert close(feed(backend, TEXT[2:5]), wanted, NEAR["float32"])


def test_what_a_pass_may_not_ask_for(make_backend: Make) -> None:
    backend = make_backend()
    refused: list[dict[str, Any]] = [
        {"layer_mask": np.ones(4, np.bool_)},
        {"hidden": np.zeros((2, backend.geometry.hidden_size), np.float32)},
        {"planes": 1},
    ]
    for extra in refused:
        with pytest.raises(CapabilityError):
            backend.forward(Pass(np.array([1, 2]), np.arange(2), np.array([1]), **extra))
    with pytest.raises(BackendError, match="do not follow"):
        backend.forward(Pass(np.array([1, 2]), np.array([0, 5]), np.array([1])))
    with pytest.raises(BackendError, match="outside the vocabulary"):
        feed(backend, [backend.geometry.vocab_size])
    feed(backend, TEXT, [])
    with pytest.raises(BackendError, match="does not fit"):
        feed(backend, [1])
    with pytest.raises(BackendError, match="trim"):
        backend.cache.trim(CAPACITY + 1)
    assert backend.cache.length == CAPACITY


def test_a_file_that_llama_cannot_load(gguf_bundle: Callable[..., Bundle], tmp_path: Path) -> None:
    bundle = gguf_bundle()
    data = bundle.gguf.path.read_bytes()
    broken = tmp_path / "model.gguf"
    broken.write_bytes(data.replace(b"blk.0.ffn_down.", b"blk.0.ffn_dowx."))
    from edgeinfer.bundle.opening import open_bundle

    with pytest.raises(BundleError, match=r"llama.cpp cannot load .*ffn_down"):
        Alone(LlamaCppBackend(open_bundle(broken), 8), 8)


def test_fewer_experts(make_backend: Make) -> None:
    shape = Shape(experts=4, used=2)
    whole, fewer = make_backend(shape), make_backend(shape, expert_count=1)
    assert not close(feed(fewer, TEXT[:4]), feed(whole, TEXT[:4]), 1e-2)
    assert close(feed(make_backend(shape, expert_count=2, weights="experts"), TEXT[:4]), feed_again(whole), 1e-3)


def feed_again(backend: Alone[LlamaCppBackend]) -> Floats:
    backend.cache.trim(0)
    return feed(backend, TEXT[:4])


def test_cuts_of_sliding_windows(make_backend: Make) -> None:
    backend = make_backend(Shape(window=8))
    feed(backend, TEXT[:20], [])
    wanted = feed(backend, TEXT[20:24])
    backend.cache.trim(12)
    feed(backend, TEXT[12:20], [])
    assert close(feed(backend, TEXT[20:24]), wanted, 2e-3)


def test_closed_twice_and_told_by_name(make_backend: Make) -> None:
    backend = make_backend()
    assert backend.name == "llamacpp" and backend.kernel.startswith("llama.cpp ")
    sizes = backend.nbytes()
    assert sizes["kv"] == 256 * backend.geometry.kv_bytes_per_token("float16") and sizes["buffers"] > 0
    backend.close()
    backend.close()
