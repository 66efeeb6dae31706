"""A pytest plugin that makes clocks jump ahead, as on a busy machine: tests that rely on measured times fail.

    .venv/bin/python -m pytest -p tests.tools.hiccups

Every so often a reading of `time.perf_counter` is some milliseconds late, and so are all that follow. Nothing waits, so
a run takes no longer. Processes that tests start have the true clock. EDGEINFER_TEST_HICCUPS is the seed.
"""

from __future__ import annotations

import os
import random
import time

# Of readings, how many are late; by how many milliseconds, on average.
_SHARE, _MEAN_MS = 0.03, 10.0

_true_ns = time.perf_counter_ns
_chance = random.Random(os.environ.get("EDGEINFER_TEST_HICCUPS", "1"))
_late_ns = 0


def _perf_counter_ns() -> int:
    global _late_ns
    if _chance.random() < _SHARE:
        _late_ns += round(_chance.expovariate(1 / _MEAN_MS) * 1e6)
    return _true_ns() + _late_ns


def pytest_configure() -> None:
    """Replaces the clock before any test runs."""
    time.perf_counter_ns = _perf_counter_ns
    time.perf_counter = lambda: _perf_counter_ns() / 1e9
