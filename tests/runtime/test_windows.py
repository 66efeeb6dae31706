"""Streamed weights of which a part stays: the same windows are dropped in every pass, and plans know their bytes."""

from __future__ import annotations

import itertools
import mmap
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.errors import StorageError
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.onnx.windowed import ReadAhead, StreamedBackend
from edgeinfer.runtime.planning import planner
from edgeinfer.runtime.planning.plan_input import Configuration
from edgeinfer.runtime.planning.speed_model import DiskReads
from edgeinfer.runtime.system.memory import releases_pages
from edgeinfer.runtime.weights import streaming
from edgeinfer.runtime.weights.experts import ExpertBytes
from edgeinfer.runtime.weights.streaming import (
    PIECE_BYTES,
    dropped_windows,
    layer_runs,
    layer_windows,
    streamed_runs,
    window_bytes,
)
from edgeinfer.runtime.weights.weight_pages import WeightPart
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, make_graph_backend

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
@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not told what to keep")
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
    streamed = StreamedBackend(inner, 1, kept_layers=1, room=room)
    batch = ForwardInput(np.array([5, 6]), np.arange(2), np.array([1]))
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
@pytest.mark.skipif(sys.platform != "linux", reason="pages of files are counted on Linux alone")
def test_what_was_asked_for_is_read_until_its_window_has_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("other systems are not told what to read")
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
    if sys.platform != "linux":
        pytest.skip("other systems are not told what to read")
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
    if sys.platform != "linux":
        pytest.skip("other systems are not told what to read")
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(5 * PIECE_BYTES))
    reading = ReadAhead(path)
    reading.read([(0, 3 * PIECE_BYTES), (3 * PIECE_BYTES + 5, 100), (5 * PIECE_BYTES - 10, 10)])
    lines = Path("/proc/self/smaps").read_text().split(str(path))[1].splitlines()
    assert next(line for line in lines if line.startswith("Rss:")).split()[1] == "0"
    reading.close()
    assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("kept", [0, 8])
def test_streaming_brings_back_the_experts_that_are_chosen_alone(kept: int) -> None:
    way = Configuration(64, 8, "float32", "streamed", 1, (), 0, "kept", kept_layers=kept)
    read = planner._Read(WEIGHTS, RUNS, 100, 0)
    none, half, whole = (planner._streamed_again_ms(way, read, share) for share in (0.0, 0.5, 1.0))
    assert none < half < whole
    assert half - none == pytest.approx(whole - half)
