"""Streamed weights: the bits of weights that stay, a window resident, parts that stay, plans."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import sys
import threading
from collections.abc import Iterator
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
from edgeinfer.core.errors import BackendError, CapabilityError, StorageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import Pass, PassCancelledError, PassResult
from edgeinfer.runtime.backends.onnx.windowed import ReadAhead
from edgeinfer.runtime.backends.registry import facts_of
from edgeinfer.runtime.planning import speed_model
from edgeinfer.runtime.planning.facts import Configuration
from edgeinfer.runtime.planning.speed_model import DiskReads
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.speculation.assembly import OPTION_BYTES
from edgeinfer.runtime.system.memory import process_memory, releases_pages
from edgeinfer.runtime.weights import disk_rate, streaming
from edgeinfer.runtime.weights.experts import ExpertBytes
from edgeinfer.runtime.weights.streaming import (
    PIECE_BYTES,
    dropped_windows,
    layer_runs,
    layer_windows,
    streamed_bytes,
    streamed_runs,
    window_bytes,
)
from edgeinfer.runtime.weights.weight_pages import WeightPart
from tests.alone import Alone
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, depths, make_graph_backend, passes
from tests.windowed import stream_layers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages of files are counted on Linux alone")

LAYERS, CAPACITY = 4, 64
# Layers large enough to show in a process's memory.
LARGE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": LAYERS}


def small(layout: Layout) -> Bundle:
    """A model of 8 bits, which has planes."""
    config = ExportConfig(bits=8, keep_small=False, layout=layout)
    return bundle_of("qwen2", config, hidden_size=128, num_hidden_layers=LAYERS)


Pair = tuple[Alone[Any], Alone[Any]]


@pytest.fixture(scope="module", params=[(3, 0), (1, 2), (LAYERS, 0)], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A streamed backend, with nothing left in the system's cache where layers are kept, and one that is not."""
    window, kept = request.param
    require_kernel()
    plain, inner = (make_graph_backend(small(NATIVE), CAPACITY) for _ in range(2))
    streamed = stream_layers(inner, window, kept_layers=kept, room=0 if kept else None)
    yield streamed, plain
    plain.close()
    streamed.close()


def same(steps: list[PassResult]) -> None:
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


PASSES = passes(LAYERS, planes=st.sampled_from((1, 2)), resumes=st.booleans(), kept=st.integers(0, 6))


@given(script=st.lists(PASSES, min_size=1, max_size=6), seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_pass_gives_the_same_bits(pair: Pair, script: list[dict[str, Any]], seed: int) -> None:
    chance = np.random.default_rng(seed)
    for backend in pair:
        backend.cache.trim(0)
        backend.forward(Pass(np.array([5, 6]), np.arange(2), np.array([1])))
    for asked in script:
        tokens, start = asked["tokens"], pair[0].cache.length
        hidden = chance.normal(size=(len(tokens), 128)).astype(np.float32) if asked["resumes"] else None
        places = start + np.array(range(len(tokens)) if asked["tree"] is None else depths(asked["tree"]))
        options = {"tree": asked["tree"], "layer_mask": asked["layer_mask"], "hidden": hidden}
        options["planes"] = asked["planes"] if pair[0].capabilities.high_planes else 2
        same([backend.forward(Pass(tokens, places, asked["rows"], **options)) for backend in pair])
        same_cache(pair, asked["layer_mask"])
        for backend in pair:
            # Rows that a layer was skipped in are computed again before anything may read them.
            backend.cache.keep(start, range(min(asked["kept"], len(tokens)) if asked["layer_mask"] is None else 0))
    same_cache(pair)


def test_sequences_share_passes(pair: Pair) -> None:
    found = []
    for backend in pair:
        sequences = [backend.new_sequence(16) for _ in range(2)]
        starts = [Pass(np.arange(size), np.arange(size), np.arange(size)) for size in (3, 5)]
        together = [output.copy() for output in backend.forward_together(list(zip(sequences, starts, strict=True)))]
        one = Pass(np.array([7]), np.array([3]), np.array([0]))
        found.append([*together, backend.forward_together([(sequences[0], one)])[0].copy()])
    for mine, theirs in zip(*found, strict=True):
        same([mine, theirs])


@pytest.mark.parametrize("kind", ["cancelled", "failed"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_pass_that_ends_early_does_not_change_the_cache(monkeypatch: pytest.MonkeyPatch, kind: str, at: int) -> None:
    require_kernel()
    inner = make_graph_backend(small(NATIVE), CAPACITY)
    streamed = stream_layers(inner, 1)
    tokens = np.array([3, 4, 5, 6])
    wanted = streamed.forward(Pass(tokens, np.arange(4), np.arange(4))).logits.copy()
    streamed.cache.trim(2)
    before = streamed.cache.snapshot()

    windows, run = [], inner.model._session.run

    def act(binding: Any) -> None:
        run(binding)
        windows.append(binding)
        count = len(windows)
        if count == at and kind == "failed":
            raise BackendError("no")
        if count == at:
            streamed.cancel()

    monkeypatch.setattr(inner.model._session, "run", act)
    with pytest.raises(PassCancelledError if kind == "cancelled" else BackendError):
        streamed.forward(Pass(tokens[2:], np.array([2, 3]), np.array([1])))
    assert streamed.cache.length == 2
    for mine, theirs in zip(
        (*before.keys, *before.values), (*(s := streamed.cache.snapshot()).keys, *s.values), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    again = streamed.forward(Pass(tokens[2:], np.array([2, 3]), np.array([0, 1])))
    np.testing.assert_array_equal(again.logits, wanted[2:])
    streamed.close()


def test_what_it_refuses(pair: Pair) -> None:
    with pytest.raises(CapabilityError, match="cannot be streamed"):
        stream_layers(make_graph_backend(small(PORTABLE), CAPACITY), 1)
    length = pair[0].cache.length
    with pytest.raises(BackendError, match="outside a pass"):
        pair[0].forward(Pass(np.array([1]), np.array([length]), np.array([1])))
    assert pair[0].cache.length == length


@pytest.mark.skipif(not releases_pages(), reason="pages cannot be streamed here")
@pytest.mark.slow
def test_only_a_window_is_resident() -> None:
    require_kernel()
    bundle = bundle_of("llama", ExportConfig(4, 32, keep_small=False, layout=NATIVE, calibration="none"), **LARGE)
    tensors = tensors_in(bundle.manifest, NATIVE)
    inner = make_graph_backend(bundle, CAPACITY)
    whole = sum(t.nbytes for t in tensors if t.name != "embed")

    def resident(backend: Alone[Any]) -> int:
        backend.forward(Pass(np.array([3, 4]), np.arange(2), np.array([1])))
        backend.cache.trim(0)
        return process_memory().file

    inner.forward(Pass(np.array([3, 4]), np.arange(2), np.array([1])))
    inner.cache.trim(0)
    all_resident = resident(inner)
    streamed = stream_layers(inner, 1)
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
    bundle = bundle_of("qwen2", ExportConfig(4, 32, keep_small=False, layout=NATIVE, calibration="none"), **shape)
    tensors = tensors_in(bundle.manifest, NATIVE)
    head = next(t.nbytes for t in tensors if t.name == "head")
    inner = make_graph_backend(bundle, CAPACITY, threads=threads)
    batch = Pass(np.array([3, 40_000, 65_535]), np.arange(3), np.arange(3))
    wanted = inner.forward(batch).logits.copy()
    whole = process_memory().file
    inner.cache.trim(0)
    streamed = stream_layers(inner, window)
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
        streamed = stream_layers(inner, 2, disk_rate.DiskMeter(path, keeps=keeps))
        assert disk_rate.kept_rate(path) is None
        for _ in passes:
            streamed.cache.trim(0)
            streamed.forward(Pass(np.array([5]), np.arange(1), np.array([0])))
        assert disk_rate.kept_rate(path) == rate
    inner.close()
    for damaged in ("{", "[]", '{"bytes_per_second": -1}', "9" * 400):
        (place,) = (tmp_path / "edgeinfer" / "disks").iterdir()
        place.write_text(damaged)
        assert disk_rate.kept_rate(path) is None, damaged


@pytest.mark.parametrize("stored", [NATIVE, PORTABLE])
def test_plans_ask_for_the_disk_that_passes_are_timed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: Layout
) -> None:
    """Weights that were converted lie in the user's cache, which may be another disk than the bundle's."""
    require_kernel()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle, asked = small(stored), list[Path]()

    def planned() -> Path:
        subject = facts_of(bundle, LoadOptions(native=True))
        subject = dataclasses.replace(subject, option_bytes=OPTION_BYTES)
        speed_model.speed_model(subject, lambda variant, **_: DeviceProfile(None))
        return asked[-1]

    def kept_rate(path: Path) -> None:
        assert disk_rate.kept_rate(path) is None  # also of a file that is still to be made
        asked.append(path)

    monkeypatch.setattr(speed_model, "kept_rate", kept_rate)
    before = planned()
    backend = make_graph_backend(bundle, CAPACITY, layout=NATIVE)
    assert backend.pages is not None
    assert before == planned() == backend.pages.path
    backend.close()


MB = 1_000_000
# The layers of a 0.5B at four bits behind its head: 24 of 7.6 MB.
RUNS = tuple((70_123_456 + layer * 7_600_128, 7_600_128) for layer in range(24))
WEIGHTS = sum(RUNS[-1])
NO_EXPERTS = ExpertBytes(None, 0, 0)


@pytest.mark.parametrize(
    ("layers", "window", "kept"), [(24, 1, 8), (24, 1, 2), (7, 2, 1), (24, 8, 0), (5, 9, 0), (3, 1, 2)]
)
def test_every_layer_runs_once_and_in_order(layers: int, window: int, kept: int) -> None:
    cut = layer_windows(layers, window, kept)
    assert [layer for each in cut for layer in range(each.first, each.stop)] == list(range(layers))
    streamed = [each.stop - each.streamed for each in cut]
    assert sum(streamed) == layers - kept
    assert 0 < min(streamed) <= max(streamed) <= window
    # As evenly as can be, so that no window waits for two others.
    beside = [each.streamed - each.first for each in cut]
    assert max(beside) - min(beside) <= 1


@pytest.mark.parametrize("kept", [0, 2, 8, 20])
def test_only_pieces_in_which_nothing_stays_are_dropped(kept: int) -> None:
    cut = layer_windows(len(RUNS), 1, kept)
    dropped = streamed_runs(RUNS, cut)
    assert all(begin % PIECE_BYTES == length % PIECE_BYTES == 0 for begin, length in dropped)
    assert all(sum(one) <= other[0] for one, other in itertools.pairwise(dropped))
    stays = {layer for each in cut for layer in range(each.first, each.streamed)}
    for begin, length in dropped:
        assert not any(begin < sum(RUNS[layer]) and RUNS[layer][0] < begin + length for layer in stays)
    # Less than two pieces of each stretch stay with its neighbours.
    stretches = len(stays) + 1
    assert 0 <= (24 - kept) * RUNS[0][1] - sum(length for _, length in dropped) <= 2 * stretches * PIECE_BYTES


@pytest.mark.parametrize(("kept", "room"), [(8, 200), (8, 215), (2, 130), (0, 150), (18, 235)])
def test_what_is_not_dropped_has_room_beside_the_window_that_is_read_ahead(kept: int, room: int) -> None:
    sizes = window_bytes(RUNS, 1, kept)
    chosen = dropped_windows(sizes, WEIGHTS, room * MB)
    assert chosen is not None
    dropped = sum(sizes[each] for each in chosen)
    assert WEIGHTS - dropped + 2 * max(sizes) <= room * MB
    # Hardly more than needed.
    assert WEIGHTS - dropped + 4 * max(sizes) > room * MB
    gaps = np.diff([-1, *chosen])
    assert gaps.max() - gaps.min() <= 1


def test_nothing_is_dropped_where_all_fits_and_all_where_nothing_does() -> None:
    sizes = window_bytes(RUNS, 1, 8)
    assert dropped_windows(sizes, WEIGHTS, WEIGHTS) == ()
    assert dropped_windows(sizes, WEIGHTS, 50 * MB) is None


def reads(room: int, window: int, kept: int, rows: int = 1) -> float:
    """Bytes that a plan expects a pass to read."""
    way = Configuration(2048, 64, "int8", "streamed" if window else "mapped", window, (), 0, "kept", kept_layers=kept)
    return DiskReads(None, WEIGHTS, NO_EXPERTS, RUNS, room * MB).pass_bytes(way, rows)


def test_plans_expect_dropped_weights() -> None:
    """Mapped weights and large windows are read again far beyond what has no room."""
    assert reads(200, 1, 8) == 35 * PIECE_BYTES
    assert reads(200, 1, 8) < 0.5 * reads(200, 0, 0)
    assert reads(200, 8, 0) > 2 * reads(200, 1, 8)
    assert reads(30, 1, 8) == WEIGHTS
    by_room = [reads(room, 1, 2) for room in range(100, 240, 5)]
    assert by_room == sorted(by_room, reverse=True)


@pytest.fixture
def small_pieces() -> Iterator[None]:
    """Pieces of a page: the layers of a small model are less than one of those that are usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "PIECE_BYTES", mmap.PAGESIZE)
        window_bytes.cache_clear()
        yield
    window_bytes.cache_clear()


@pytest.mark.skipif(not releases_pages(), reason="pages are not dropped here")
@pytest.mark.usefixtures("small_pieces")
def test_passes_drop_the_same_windows_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    require_kernel()
    bundle = bundle_of("qwen2", ExportConfig(8, keep_small=False, layout=NATIVE), hidden_size=128, num_hidden_layers=4)
    runs = layer_runs(tensors_in(bundle.manifest, NATIVE))
    forgotten, ahead = list[tuple[int, int]](), list[tuple[int, int]]()
    monkeypatch.setattr(WeightPart, "forget", lambda part: forgotten.extend(part.runs))
    monkeypatch.setattr(ReadAhead, "ask", lambda self, asked, running: ahead.extend(asked))
    inner = make_graph_backend(bundle, 64)
    assert inner.pages is not None
    weights, sizes = inner.pages.nbytes, window_bytes(runs, 1, 1)
    room = weights - min(sizes) // 2  # less than a window too little, and two are there at once
    chosen = dropped_windows(sizes, weights, room)
    assert chosen == (0, 1, 2)
    streamed = stream_layers(inner, 1, kept_layers=1, room=room)
    batch = Pass(np.array([5, 6]), np.arange(2), np.array([1]))
    for _ in range(3):
        streamed.cache.trim(0)
        streamed.forward(batch)
    pieces = streamed_runs(runs, layer_windows(4, 1, 1))
    assert forgotten == [pieces[each] for each in chosen] * 3
    # The first window is asked for when the last one runs.
    assert ahead == [*pieces[1:], pieces[0]] * 3
    way = Configuration(64, 8, "float32", "streamed", 1, (), 0, "kept", kept_layers=1)
    expected = DiskReads(None, weights, NO_EXPERTS, runs, room).pass_bytes(way, 1)
    assert sum(length for _, length in forgotten) == 3 * expected
    streamed.close()


@pytest.mark.skipif(not releases_pages(), reason="pages are not dropped here")
def test_what_was_asked_for_is_read_until_its_window_has_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(12 * PIECE_BYTES))
    reading = ReadAhead(path)
    first, second, third = [(0, 3 * PIECE_BYTES)], [(3 * PIECE_BYTES, 3 * PIECE_BYTES)], [(9 * PIECE_BYTES, 1)]
    began, go, done = threading.Event(), threading.Event(), threading.Event()
    read = list[int]()

    def advise(self: ReadAhead, offset: int, length: int, advice: int) -> int:
        if advice != mmap.MADV_DONTNEED:
            read.append(offset // PIECE_BYTES)
            began.set()
            assert go.wait(20)
            if read[-1] == 9:
                done.set()
        return 0

    monkeypatch.setattr(ReadAhead, "_advise", advise)
    reading.ask(first)
    assert began.wait(20)
    # A window that runs is still read; one that has run is not, nor what a pass that was cancelled asked for.
    reading.ask(second, first)
    reading.used(first)
    reading.ask(third, [(6 * PIECE_BYTES, PIECE_BYTES)])
    go.set()
    assert done.wait(20)
    assert read == [0, 9]
    done.clear()
    reading.ask(second)
    reading.ask(third, second)
    assert done.wait(20)
    reading.close()
    assert read[2:] == [3, 4, 5, 9]


def test_what_cannot_be_read_ahead_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "weights.bin"
    path.touch()
    with pytest.raises(StorageError, match="cannot be mapped"):
        ReadAhead(path)
    path.write_bytes(bytes(PIECE_BYTES))
    reading, tried = ReadAhead(path), threading.Semaphore(0)

    def fail(self: ReadAhead, offset: int, length: int, advice: int) -> int:
        tried.release()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ReadAhead, "_advise", fail)
    for _ in range(2):
        reading.ask([(0, 10)])
        assert tried.acquire(timeout=20)
    reading.close()
    assert [record.message for record in caplog.records] == [
        f"{path} cannot be read ahead: Input/output error. Replies may be slower."
    ]


def test_what_is_read_ahead_is_not_kept_mapped(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(5 * PIECE_BYTES))
    reading = ReadAhead(path)
    reading.read([(0, 3 * PIECE_BYTES), (3 * PIECE_BYTES + 5, 100), (5 * PIECE_BYTES - 10, 10)])
    lines = Path("/proc/self/smaps").read_text().split(str(path))[1].splitlines()
    assert next(line for line in lines if line.startswith("Rss:")).split()[1] == "0"
    reading.close()
    assert str(path) not in Path("/proc/self/maps").read_text()
