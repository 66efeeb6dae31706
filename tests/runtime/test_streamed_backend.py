"""Streamed weights: every pass gives the same bits as with weights that stay, and no more than a window is resident."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle.layouts import NATIVE, PORTABLE, Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.errors import BackendError, CapabilityError
from edgeinfer.export.options import ExportConfig
from edgeinfer.options.load import LoadConfig
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, ForwardOutput, PassCancelledError
from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend
from edgeinfer.runtime.backends.onnx.windowed import StreamedBackend
from edgeinfer.runtime.loading.registry import plan_input_of
from edgeinfer.runtime.planning import planner
from edgeinfer.runtime.planning.plan_input import BackendChoice
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.speculation.assembly import OPTION_BYTES
from edgeinfer.runtime.system.memory import process_memory, releases_pages
from edgeinfer.runtime.weights import disk_rate
from edgeinfer.runtime.weights.streaming import pass_bytes, reread_ms, streamed_bytes
from edgeinfer.runtime.weights.weight_pages import WeightPart
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, make_graph_backend

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages of files are counted on Linux alone")

LAYERS, CAPACITY = 4, 64


# Layers large enough to show in a process's memory.
LARGE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": LAYERS}


def small(layout: Layout) -> Bundle:
    """A model of 8 bits, which has planes."""
    config = ExportConfig(bits=8, keep_small=False, layout=layout)
    return bundle_of("qwen2", config, hidden_size=128, num_hidden_layers=LAYERS)


Pair = tuple[Backend, Backend]


@pytest.fixture(scope="module", params=[(3, 0), (1, 2), (LAYERS, 0)], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A streamed backend, with nothing left in the system's cache where layers are kept, and one that is not."""
    window, kept = request.param
    require_kernel()
    plain, inner = (make_graph_backend(small(NATIVE), CAPACITY) for _ in range(2))
    streamed = StreamedBackend(inner, window, kept_layers=kept, room=0 if kept else None)
    yield streamed, plain
    plain.close()
    streamed.close()


def same(steps: list[ForwardOutput]) -> None:
    np.testing.assert_array_equal(steps[0].logits, steps[1].logits)
    assert steps[0].hidden is not None
    assert steps[1].hidden is not None
    np.testing.assert_array_equal(steps[0].hidden, steps[1].hidden)


def same_cache(pair: Pair, layer_mask: NDArray[np.bool_] | None = None) -> None:
    """In the layers whose attention ran; others keep what padding once left in rows that are not in use."""
    mine, theirs = (backend.cache.snapshot() for backend in pair)
    assert mine.length == theirs.length
    for layer in range(LAYERS):
        if layer_mask is None or layer_mask[2 * layer]:
            np.testing.assert_array_equal(mine.keys[layer], theirs.keys[layer])
            np.testing.assert_array_equal(mine.values[layer], theirs.values[layer])


@st.composite
def passes(draw: st.DrawFn) -> dict[str, Any]:
    """Options of `forward` other than positions and hidden states."""
    size = draw(st.integers(1, 6))
    tree = draw(st.none() | st.tuples(*(st.integers(-1, row - 1) for row in range(size))).map(np.array))
    mask = draw(st.none() | st.lists(st.booleans(), min_size=2 * LAYERS, max_size=2 * LAYERS).map(np.array))
    return {
        "tokens": np.array(draw(st.lists(st.integers(0, 319), min_size=size, max_size=size))),
        "rows": np.array(draw(st.lists(st.integers(0, size - 1), max_size=size)), np.int64),
        "tree": tree,
        "layer_mask": mask,
        "planes": draw(st.sampled_from((1, 2))),
        "resumes": draw(st.booleans()),
        "kept": draw(st.integers(0, size)),
    }


@given(script=st.lists(passes(), min_size=1, max_size=6), seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_pass_gives_the_same_bits(pair: Pair, script: list[dict[str, Any]], seed: int) -> None:
    chance = np.random.default_rng(seed)
    for backend in pair:
        backend.cache.trim(0)
        backend.forward(ForwardInput(np.array([5, 6]), np.arange(2), np.array([1])))
    for asked in script:
        tokens, start = asked["tokens"], pair[0].cache.length
        hidden = chance.normal(size=(len(tokens), 128)).astype(np.float32) if asked["resumes"] else None
        depths = np.arange(len(tokens))
        if asked["tree"] is not None:
            for row, parent in enumerate(asked["tree"]):
                depths[row] = 0 if parent < 0 else depths[parent] + 1
        options = {"tree": asked["tree"], "layer_mask": asked["layer_mask"], "hidden": hidden}
        options["planes"] = asked["planes"] if pair[0].capabilities.high_planes else 2
        same([backend.forward(ForwardInput(tokens, start + depths, asked["rows"], **options)) for backend in pair])
        same_cache(pair, asked["layer_mask"])
        for backend in pair:
            # Rows that a layer was skipped in are computed again before anything may read them.
            backend.cache.keep(start, range(asked["kept"] if asked["layer_mask"] is None else 0))
    same_cache(pair)


def test_a_draft_is_resumed_behind_the_layers_that_made_it(pair: Pair) -> None:
    """Early layers run, rows are taken back, and later ones go on where they stopped, as self-drafting does."""
    tokens, positions = np.array([7, 8, 9]), np.arange(3)
    early = np.repeat(np.arange(LAYERS) < 2, 2)
    results = []
    for backend in pair:
        backend.cache.trim(0)
        hidden = backend.forward(ForwardInput(tokens, positions, np.array([2]), layer_mask=early)).hidden
        assert hidden is not None
        hidden = hidden.copy()
        backend.cache.trim(0)
        results.append(backend.forward(ForwardInput(tokens, positions, np.arange(3), layer_mask=~early, hidden=hidden)))
    same(results)
    same_cache(pair)
    pair[1].cache.trim(0)
    same([results[0], pair[1].forward(ForwardInput(tokens, positions, np.arange(3)))])


class _Inner:
    """Cancels, or fails, in the middle of a pass."""

    def __init__(self, backend: GraphBackend, act: Callable[[int], None]) -> None:
        self._backend, self._act, self._count = backend, act, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        step = self._backend.forward(batch)
        self._count += 1
        self._act(self._count)
        return step


@pytest.mark.parametrize("kind", ["cancelled", "failed"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_pass_that_ends_early_does_not_change_the_cache(monkeypatch: pytest.MonkeyPatch, kind: str, at: int) -> None:
    require_kernel()
    inner = make_graph_backend(small(NATIVE), CAPACITY)
    streamed = StreamedBackend(inner, 1)
    tokens = np.array([3, 4, 5, 6])
    wanted = streamed.forward(ForwardInput(tokens, np.arange(4), np.arange(4))).logits.copy()
    streamed.cache.trim(2)
    before = streamed.cache.snapshot()

    def act(count: int) -> None:
        if count == at and kind == "failed":
            raise BackendError("no")
        if count == at:
            streamed.cancel()

    monkeypatch.setattr(streamed, "_inner", _Inner(inner, act))
    with pytest.raises(PassCancelledError if kind == "cancelled" else BackendError):
        streamed.forward(ForwardInput(tokens[2:], np.array([2, 3]), np.array([1])))
    assert streamed.cache.length == 2
    for mine, theirs in zip(
        (*before.keys, *before.values), (*(s := streamed.cache.snapshot()).keys, *s.values), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    again = streamed.forward(ForwardInput(tokens[2:], np.array([2, 3]), np.array([0, 1])))
    np.testing.assert_array_equal(again.logits, wanted[2:])
    streamed.close()


def test_what_it_refuses(pair: Pair) -> None:
    with pytest.raises(CapabilityError, match="cannot be streamed"):
        StreamedBackend(make_graph_backend(small(PORTABLE), CAPACITY), 1)
    length = pair[0].cache.length
    with pytest.raises(BackendError, match="outside a pass"):
        pair[0].forward(ForwardInput(np.array([1]), np.array([length]), np.array([1])))
    assert pair[0].cache.length == length


@pytest.mark.skipif(not releases_pages(), reason="pages cannot be streamed here")
@pytest.mark.slow
def test_only_a_window_is_resident() -> None:
    require_kernel()
    bundle = bundle_of("llama", ExportConfig(4, 32, keep_small=False, layout=NATIVE), **LARGE)
    tensors = tensors_in(bundle.manifest, NATIVE)
    inner = make_graph_backend(bundle, CAPACITY)
    whole = sum(t.nbytes for t in tensors if t.name != "embed")

    def resident(backend: Backend) -> int:
        backend.forward(ForwardInput(np.array([3, 4]), np.arange(2), np.array([1])))
        backend.cache.trim(0)
        return process_memory().file

    inner.forward(ForwardInput(np.array([3, 4]), np.arange(2), np.array([1])))
    inner.cache.trim(0)
    all_resident = resident(inner)
    streamed = StreamedBackend(inner, 1)
    left = resident(streamed)
    assert all_resident - left > 0.7 * whole
    most = 0
    release = WeightPart.release

    def watched(part: WeightPart) -> None:
        nonlocal most
        most = max(most, process_memory().file)
        release(part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightPart, "release", watched)
        resident(streamed)
    assert 0.1 * whole < most - left < streamed_bytes(tensors, 1, threads=1) < streamed_bytes(tensors, 4, threads=1)
    streamed.close()


@pytest.mark.skipif(not releases_pages(), reason="pages cannot be streamed here")
@pytest.mark.parametrize(("threads", "window"), [(1, 1), (1, LAYERS), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_the_head_is_dropped_while_it_is_read(threads: int, window: int) -> None:
    require_kernel()
    shape = {"hidden_size": 256, "vocab_size": 65_536, "tie_word_embeddings": True, "num_hidden_layers": LAYERS}
    bundle = bundle_of("qwen2", ExportConfig(4, 32, keep_small=False, layout=NATIVE), **shape)
    tensors = tensors_in(bundle.manifest, NATIVE)
    head = next(t.nbytes for t in tensors if t.name == "head")
    inner = make_graph_backend(bundle, CAPACITY, threads=threads)
    batch = ForwardInput(np.array([3, 40_000, 65_535]), np.arange(3), np.arange(3))
    wanted = inner.forward(batch).logits.copy()
    whole = process_memory().file
    inner.cache.trim(0)
    streamed = StreamedBackend(inner, window)
    streamed.forward(batch)
    streamed.cache.trim(0)
    before = process_memory().file
    assert whole - before > 0.8 * head
    with pytest.MonkeyPatch.context() as patch:
        # What is in memory now, operators left there.
        patch.setattr(WeightPart, "release", lambda part: None)
        np.testing.assert_array_equal(streamed.forward(batch).logits, wanted)
        left = process_memory().file - before
    assert left < 0.3 * head
    staying = sum(t.nbytes for t in tensors if t.name.startswith("layers."))
    assert streamed_bytes(tensors, LAYERS, threads=threads) > staying
    streamed.close()


@pytest.mark.skipif(not releases_pages(), reason="pages are not advised about here")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages")
def test_large_pages_are_asked_for_where_all_is_read() -> None:
    require_kernel()
    backend = make_graph_backend(small(NATIVE), CAPACITY)
    assert backend.pages is not None
    flags = re.findall(r"weights\.bin\n(?:[A-Z].*\n)*?VmFlags:(.*)", Path("/proc/self/smaps").read_text())
    assert any(" hg" in each for each in flags)
    backend.close()


@pytest.mark.skipif(not releases_pages(), reason="pages are not dropped here")
def test_no_pages_are_dropped_where_another_backend_had_the_file_mapped() -> None:
    require_kernel()
    bundle = bundle_of("llama", ExportConfig(bits=8, keep_small=False), num_hidden_layers=LAYERS)
    first, second = (make_graph_backend(bundle, CAPACITY) for _ in range(2))
    assert first.pages is not None and second.pages is not None
    mine = set(first.pages.layers(0, LAYERS).places)
    assert set(second.pages.layers(0, LAYERS).places) > mine
    part = second.pages.layers(0, LAYERS)
    assert part.places
    first.close()
    assert part.places and not mine & set(part.places)
    second.close()


def test_converted_weights_are_found_where_they_lie() -> None:
    require_kernel()
    bundle = small(PORTABLE)
    inner = make_graph_backend(bundle, CAPACITY, layout=NATIVE)
    assert inner.pages is not None
    tensors = tensors_in(bundle.manifest, NATIVE)
    for layer in range(LAYERS):
        blobs = [blob for t in tensors if t.name.startswith(f"layers.{layer}.") for blob in t.blobs]
        ((offset, size),) = inner.pages.layers(layer, layer + 1).runs
        assert offset == min(blob.offset for blob in blobs)
        assert offset + size == max(blob.offset + blob.nbytes for blob in blobs)
    inner.close()


def test_what_the_disk_gives_is_measured_by_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Passes that read little are ignored; the others' waits are kept, once there were enough."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Nothing from the disk, slowly while libraries come, and four times as it is.
    passes = [(0, 0.1), (200_000_000, 2.0), *[(200_000_000, 0.5)] * 4]
    sums = np.cumsum(passes, axis=0)
    counted, clock = (iter(np.stack([sums[:, i] - np.array(passes)[:, i], sums[:, i]], 1).ravel()) for i in (0, 1))
    monkeypatch.setattr(disk_rate, "_read_bytes", lambda: next(counted))
    monkeypatch.setattr(disk_rate, "_busy_seconds", lambda: 0.0)
    monkeypatch.setattr(disk_rate, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    require_kernel()
    inner = make_graph_backend(small(NATIVE), CAPACITY)
    assert inner.pages is not None
    path = inner.pages.path
    for keeps, rate in ((False, None), (True, 400_000_000)):
        streamed = StreamedBackend(inner, 2, disk_rate.DiskMeter(path, keeps=keeps))
        assert disk_rate.kept_rate(path) is None
        for _ in passes:
            streamed.cache.trim(0)
            streamed.forward(ForwardInput(np.array([5]), np.arange(1), np.array([0])))
        assert disk_rate.kept_rate(path) == rate
    inner.close()
    for damaged in ("{", "[]", '{"bytes_per_second": -1}', "9" * 400):
        (place,) = (tmp_path / "edgeinfer" / "disks").iterdir()
        place.write_text(damaged)
        assert disk_rate.kept_rate(path) is None, damaged


def test_what_the_plan_reckons_with() -> None:
    tensors = tensors_in(small(NATIVE).manifest, NATIVE)
    layer = sum(t.nbytes for t in tensors if t.name.startswith("layers.1."))
    embedding = tensors[0].nbytes
    assert tensors[0].name == "embed"
    assert embedding < layer
    margin = streamed_bytes(tensors, 1, threads=1) - layer
    sizes = [streamed_bytes(tensors, window, threads=1) - margin for window in (1, 2, LAYERS, 2 * LAYERS)]
    assert sizes[:2] == [layer, 2 * layer] and LAYERS * layer < sizes[2] == sizes[3]
    assert pass_bytes(tensors) == sum(t.nbytes for t in tensors) - embedding
    # A window of six layers takes a quarter of what one of 24 does, and small arrays take faults of their own.
    assert 4 * reread_ms(0, layers_decided=6) == pytest.approx(reread_ms(0, layers_decided=24))
    assert reread_ms(2 * embedding, arrays=9) > 2 * reread_ms(embedding) > 0


@pytest.mark.parametrize("stored", [NATIVE, PORTABLE])
def test_plans_ask_for_the_disk_that_passes_are_timed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: Layout
) -> None:
    """Weights that were converted lie in the user's cache, which may be another disk than the bundle's."""
    require_kernel()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle, asked = small(stored), list[Path]()

    def planned() -> Path:
        subject = plan_input_of(BackendChoice("onnx", bundle, NATIVE), LoadConfig())
        subject = dataclasses.replace(subject, option_bytes=OPTION_BYTES)
        planner.speed_model(subject, lambda variant, **_: DeviceProfile(None))
        return asked[-1]

    def kept_rate(path: Path) -> None:
        assert disk_rate.kept_rate(path) is None  # also of a file that is still to be made
        asked.append(path)

    monkeypatch.setattr(planner, "kept_rate", kept_rate)
    before = planned()
    backend = make_graph_backend(bundle, CAPACITY, layout=NATIVE)
    assert backend.pages is not None
    assert before == planned() == backend.pages.path
    backend.close()
