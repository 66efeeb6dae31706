"""How many threads a pass works with while other programs use the processors too.

llama.cpp's threads wait for each other at hundreds of barriers in a pass. Where there is no processor for one of them,
the others wait until the system lets it run, so that two threads take many times as long as one on two busy processors.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from edgeinfer.runtime.system.machine import usable_processors

# Seconds between looks: the system counts in hundredths.
_INTERVAL = 0.1
_STAT = Path("/proc/stat")


class ProcessorTimes(NamedTuple):
    """Seconds.

    Attributes:
        wall: since some moment.
        busy: in which processors that this process may use worked, for any program, all of them together.
        own: in which they worked for this process.
        processors: that this process may use.
    """

    wall: float
    busy: float
    own: float
    processors: int


class SpareThreads:
    """As many threads as there are processors that others leave, at least one.

    Args:
        most: threads when no other program works.
        look: tells the time that processors worked.
    """

    def __init__(self, most: int, look: Callable[[], ProcessorTimes] | None = None) -> None:
        self._most = self._count = most
        self._look = look or processor_times
        self._last = self._look()
        self._due = time.monotonic() + _INTERVAL

    def count(self) -> int:
        """For the next pass; costs next to nothing."""
        if self._most > 1 and time.monotonic() >= self._due:
            before, self._last = self._last, self._look()
            wall = self._last.wall - before.wall
            if wall > 0:
                others = (self._last.busy - before.busy - (self._last.own - before.own)) / wall
                spare = int(self._last.processors - others + 0.5)
                self._count = max(1, min(self._most, spare))
            self._due = time.monotonic() + _INTERVAL
        return self._count


def processor_times() -> ProcessorTimes:
    """As the system counts them now."""
    if sys.platform == "linux":
        # user nice system idle iowait irq softirq steal: what another machine on the same hardware took counts as busy.
        usable = [f"cpu{number}" for number in usable_processors()]
        lines = dict(line.split(" ", 1) for line in _STAT.read_text("ascii").splitlines() if line.startswith("cpu"))
        times = [[int(part) for part in lines[name].split()[:8]] for name in usable if name in lines]
        busy = sum(sum(each) - each[3] - each[4] for each in times) / os.sysconf("SC_CLK_TCK")
        processors = len(times)
    else:
        import psutil  # a megabyte of modules that Linux mostly does without

        each = psutil.cpu_times(percpu=True)
        busy = sum(sum(one) - one.idle for one in each)
        processors = len(each)
    return ProcessorTimes(time.monotonic(), busy, time.process_time(), processors)
