"""The order of visits is fair, and ratios survive a machine that changes speed."""

from __future__ import annotations

import io
import json
import mmap
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.apps.bench import watch
from edgeinfer.apps.bench.comparison import Comparison, Contender
from edgeinfer.apps.bench.contenders import CompareConfig
from edgeinfer.apps.bench.report import print_comparison
from edgeinfer.apps.bench.shapes import SHAPES
from edgeinfer.apps.bench.timing import DECODE, PREFILL, Samples, Spread, Task, rotated, visits
from edgeinfer.apps.bench.watch import _Sample, mapped_memory, run_watched
from edgeinfer.errors import BackendError
from edgeinfer.results import DeviceLimits, PassWork

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


@given(speeds=st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_ratios_do_not_see_drift_between_repeats(speeds: list[float]) -> None:
    samples = Samples()
    for speed in speeds:
        samples.add("slow", 1, [30 * speed, 31 * speed, 32 * speed])
        samples.add("fast", 1, [20 * speed])
    assert samples.ratio(("slow", 1), ("fast", 1)).median == pytest.approx(31 / 20)


OURS, PORTABLE, PEER = "edgeinfer native g32 exact", "edgeinfer MatMulNBits g32 exact", "llama.cpp Q4_0"
CONFIG = CompareConfig(SHAPES["tiny"], past=64, sizes=(1, 4), prefill=100)


def _comparison(*labels: str, **facts: Any) -> Comparison:
    """Times of 10, 15 and 50 ms, of each further contender as many times longer."""
    samples = Samples()
    times: dict[Task, float] = {DECODE: 10.0, 1: 10.0, 4: 15.0, PREFILL: 50.0}
    for factor, label in enumerate(labels, 1):
        for task, time in times.items():
            samples.add(label, task, [time * factor])
    contenders = tuple(Contender(label, label.split(" g32")[0], "1.0", 1_000_000) for label in labels)
    return Comparison(CONFIG, contenders, {"genai": "not installed"}, samples, **facts)


def _rows(text: str, start: str) -> list[list[str]]:
    return [line.removeprefix(start).split() for line in text.splitlines() if line.startswith(start)]


def test_report_names_times_growth_and_speedup(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(_comparison(OURS, PEER))
    text = capsys.readouterr().out
    times, growth, speedup = _rows(text, "m = 4")
    assert times == ["15.00", "[15.00-15.00]", "30.00", "[30.00-30.00]"]
    assert growth == ["1.50", "1.50"]
    assert speedup == ["2.00", "[2.00-2.00]", "1"]
    assert _rows(text, "prefill of 100")[0][:4] == ["50.00", "[50.00-50.00]", "2000", "tokens/s"]
    assert "genai: skipped: not installed" in text.splitlines()


def test_every_family_but_a_lonely_first_is_compared_with() -> None:
    assert _comparison(OURS).baselines == ()
    assert [b.label for b in _comparison(OURS, PORTABLE, PEER).baselines] == [PORTABLE, PEER]
    fast = OURS.replace("exact", "fast")
    assert [b.label for b in _comparison(OURS, fast, PEER).baselines] == [OURS, PEER]


def test_report_without_a_peer_leaves_out_speedups(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = _comparison(OURS)
    print_comparison(comparison)
    assert "faster" not in capsys.readouterr().out
    assert comparison.to_dict()["engines"][OURS]["speedup_vs"] == {}


def test_comparison_becomes_json_with_its_samples() -> None:
    data = json.load(io.StringIO(json.dumps(_comparison(OURS, PEER).to_dict())))
    engine = data["engines"][OURS]
    assert engine["samples"] == {"decode": [[10.0]], "1": [[10.0]], "4": [[15.0]], "prefill": [[50.0]]}
    assert engine["speedup_vs"][PEER]["4"]["median"] == 2.0
    assert data["limits"] is None and "floors" not in engine


@pytest.mark.parametrize(("rate", "multiply_ms", "times"), [(2e9, 5.0, 2.5), (1e9, 10.0, 1.5), (None, None, 2.5)])
def test_times_stand_beside_the_larger_limit(
    rate: float | None, multiply_ms: float | None, times: float, capsys: pytest.CaptureFixture[str]
) -> None:
    work = PassWork(weight_bytes=60_000_000, multiply_adds=10_000_000)
    comparison = _comparison(
        OURS,
        PEER,
        limits={task: [DeviceLimits("avx2", 1, 10e9, rate)] for task in CONFIG.tasks},
        work={(OURS, task): work for task in CONFIG.tasks},
    )
    floor = comparison.floor(OURS, 4)
    assert floor is not None
    assert (floor.read_ms, floor.multiply_ms) == (6.0, multiply_ms)
    assert floor.times.median == times
    assert comparison.floor(PEER, 4) is None
    print_comparison(comparison)
    text = capsys.readouterr().out
    assert ("avx2 multiplies" in text) == (rate is not None)
    shown = "-" if multiply_ms is None else f"{multiply_ms:.2f}"
    assert _rows(text, "m = 4")[2] == ["6.00", "|", shown, "|", f"{times:.2f}"]


def test_distance_to_the_limits_does_not_see_drift_between_repeats() -> None:
    samples = Samples()
    for speed in (1, 2, 5):
        samples.add(OURS, 1, [12.0 / speed])
    limits = [DeviceLimits("avx2", 1, speed * 1e9, None) for speed in (1, 2, 5)]
    work: dict[tuple[str, Task], PassWork] = {(OURS, 1): PassWork(10_000_000, 0)}
    floor = Comparison(CONFIG, (), {}, samples, {1: limits}, work).floor(OURS, 1)
    assert floor is not None
    assert [floor.times.p25, floor.times.p75] == pytest.approx([1.2, 1.2])


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
    path, other = tmp_path / "mapped", tmp_path / "other"
    path.write_bytes(bytes(range(256)) * 4096)
    other.write_bytes(b"x")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        assert sum(memory[:: mmap.PAGESIZE]) == 0
        mapped = mapped_memory(os.getpid(), path)
        assert mapped.resident_bytes == mapped.proportional_bytes == mapped.private_bytes == 1 << 20
        with pytest.raises(BackendError, match="does not map"):
            mapped_memory(os.getpid(), other)
