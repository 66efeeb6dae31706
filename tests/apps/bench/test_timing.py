"""The order of visits is fair, and ratios survive a machine that changes speed."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.apps.bench.report import Comparison, Contender, print_comparison
from edgeinfer.apps.bench.shapes import SHAPES
from edgeinfer.apps.bench.timing import DECODE, Samples, Spread, Task, rotated, visits
from edgeinfer.apps.bench.watch import run_watched
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


@given(speeds=st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_ratios_do_not_see_drift_between_repeats(speeds: list[float]) -> None:
    samples = Samples()
    for speed in speeds:
        samples.add("slow", 1, [30 * speed, 31 * speed, 32 * speed])
        samples.add("fast", 1, [20 * speed])
    assert samples.ratio(("slow", 1), ("fast", 1)).median == pytest.approx(31 / 20)


def _comparison(*, with_peer: bool) -> Comparison:
    samples = Samples()
    times: dict[Task, float] = {DECODE: 10.0, 1: 10.0, 4: 15.0}
    labels = [("edgeinfer g32 exact", "edgeinfer", 1.0)] + [("llama.cpp Q4_0", "llamacpp", 2.0)] * with_peer
    for label, _, factor in labels:
        for task, time in times.items():
            samples.add(label, task, [time * factor])
    contenders = tuple(Contender(label, engine, "1.0", 1_000_000) for label, engine, _ in labels)
    return Comparison(SHAPES["tiny"], 1, 64, (1, 4), contenders, {"genai": "not installed"}, samples)


def test_report_names_times_growth_and_speedup(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(_comparison(with_peer=True))
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith("m = 4")]
    assert rows[0][3:] == ["15.00", "[15.00-15.00]", "30.00", "[30.00-30.00]"]
    assert rows[1][3:] == ["1.50", "1.50"]
    assert rows[2][3:] == ["2.00", "[2.00-2.00]", "1"]
    assert "genai: skipped: not installed" in lines


def test_report_without_the_peer_leaves_out_speedups(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = _comparison(with_peer=False)
    print_comparison(comparison)
    assert "faster" not in capsys.readouterr().out
    assert "speedup_vs_llamacpp" not in json.dumps(comparison.to_dict())


def test_comparison_becomes_json_with_its_samples() -> None:
    data = json.load(io.StringIO(json.dumps(_comparison(with_peer=True).to_dict())))
    engine = data["engines"]["edgeinfer g32 exact"]
    assert engine["samples"] == {"decode": [[10.0]], "1": [[10.0]], "4": [[15.0]]}
    assert engine["speedup_vs_llamacpp"]["4"]["median"] == 2.0


def test_watching_sees_the_peak_of_a_child() -> None:
    code = (
        "import time; block = bytearray(b'x') * 80_000_000; time.sleep(0.2); del block; time.sleep(0.1); print('done')"
    )
    watched = run_watched([sys.executable, "-c", code])
    assert watched.stdout.strip() == "done"
    assert 80e6 < watched.peak_rss_bytes < 130e6
    assert watched.seconds > 0.3


def test_watching_a_child_that_fails_tells_its_last_line() -> None:
    with pytest.raises(BackendError, match="out of cheese"):
        run_watched([sys.executable, "-c", "raise SystemExit('error: out of cheese')"])
