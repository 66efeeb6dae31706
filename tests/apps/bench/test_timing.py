"""The order of visits is fair, and ratios survive a machine that changes speed."""

from __future__ import annotations

import mmap
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.apps.bench import watch
from edgeinfer.apps.bench.timing import DECODE, Spread, rotated, visits
from edgeinfer.apps.bench.watch import _Sample, resident_bytes, run_watched
from edgeinfer.errors import BackendError

NAMES = st.lists(st.sampled_from("abcde"), min_size=1, max_size=5, unique=True)


@given(
    engines=NAMES, tasks=st.lists(st.integers(1, 16), min_size=1, max_size=6, unique=True), repeats=st.integers(1, 5)
)
def test_every_repeat_visits_everything_once(engines: list[str], tasks: list[int], repeats: int) -> None:
    order = list(visits(engines, tasks, repeats))
    per_repeat = len(engines) * len(tasks)
    for repeat in range(repeats):
        seen = Counter(order[repeat * per_repeat : (repeat + 1) * per_repeat])
        assert seen == Counter({(engine, task): 1 for engine in engines for task in tasks})


def test_no_engine_always_comes_first() -> None:
    order = list(visits(["a", "b"], [DECODE, 1, 2], 4))
    firsts = Counter(engine for engine, _ in order[::2])
    assert firsts == {"a": 6, "b": 6}


@given(items=NAMES, by=st.integers(-10, 10))
def test_rotation_keeps_the_cyclic_order(items: list[str], by: int) -> None:
    assert "".join(rotated(items, by)) in "".join(items * 2)


def test_spread_is_the_quartiles() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(median=3.0, p25=2.0, p75=4.0)


def test_watching_sees_the_peak_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that find it at work, one that finds it with less, and one that comes after its end."""
    looks = [_Sample(rss, peak, rss // 2, rss // 4) for rss, peak in ((40, 40), (90, 95), (30, 95))]
    found: list[_Sample | None] = [*looks, None]
    monkeypatch.setattr("edgeinfer.apps.bench.watch._sample", lambda pid: found.pop(0) if found else None)
    monkeypatch.setattr("edgeinfer.apps.bench.watch.INTERVAL_SECONDS", 0)

    class Child:
        pid, returncode = 7, 0

        def __enter__(self) -> Child:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def poll(self) -> int | None:
            return None if found else 0

    monkeypatch.setattr("edgeinfer.apps.bench.watch.subprocess", SimpleNamespace(Popen=lambda *_, **__: Child()))
    watched = run_watched(["anything"])
    assert (watched.peak_rss_bytes, watched.anonymous_bytes, watched.file_bytes) == (95, 45, 22)
    assert watched.peak_anonymous_bytes == 45


def test_watching_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when a look has found what it took."""
    seen = tmp_path / "seen"
    code = (
        "import os, time\nblock = bytearray(b'x') * 80_000_000\n"
        f"for _ in range(6000):\n  if os.path.exists({str(seen)!r}): break\n  time.sleep(0.01)\nprint('done')"
    )

    look = watch._sample

    def sample(pid: int) -> _Sample | None:
        found = look(pid)
        if found and found.rss > 80_000_000:
            seen.touch()
        return found

    monkeypatch.setattr(watch, "_sample", sample)
    watched = run_watched([sys.executable, "-c", code])
    assert seen.exists() and watched.stdout.strip() == "done"
    assert 80e6 < watched.peak_rss_bytes < 130e6


def test_watching_a_child_that_fails_tells_its_last_line() -> None:
    with pytest.raises(BackendError, match="out of cheese"):
        run_watched([sys.executable, "-c", "raise SystemExit('error: out of cheese')"])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_what_a_process_has_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(range(256)) * 4096)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        assert sum(memory[:: mmap.PAGESIZE]) == 0
        assert resident_bytes(path) == 1 << 20
    assert resident_bytes(path) == 0
