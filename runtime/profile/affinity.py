"""Which processors the threads of a pass should stay on: one of each core, the fastest cores first; knows no model.

Linux says in sysfs which processors share a core and how fast each is. Elsewhere nothing is pinned.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edgeinfer.runtime.system.machine import usable_processors

__all__ = ["pinning"]

_CPUS = Path("/sys/devices/system/cpu")
# What tells processors of different speed apart: relative capacity (Arm), else the highest frequency.
_SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")


def pinning(threads: int) -> str:
    """Processors for all threads but the calling one, as onnxruntime takes them; "" where nothing can be pinned.

    The calling thread is the program's own and stays free; the fastest core is left for it.
    """
    if sys.platform != "linux" or threads < 2:
        return ""
    cores = _cores()
    return ";".join(str(processor + 1) for processor in cores[1:threads]) if len(cores) >= threads else ""


def _cores() -> list[int]:
    """One processor of each core that this process may use, the fastest first."""
    first: dict[str, int] = {}
    for processor in usable_processors():
        siblings = _read(processor, "topology/thread_siblings_list")
        if siblings is None:
            return []
        first.setdefault(siblings, processor)
    return sorted(first.values(), key=lambda processor: (-_speed(processor), processor))


def _speed(processor: int) -> int:
    for name in _SPEEDS:
        text = _read(processor, name)
        if text is not None and text.isdecimal():
            return int(text)
    return 0


def _read(processor: int, name: str) -> str | None:
    try:
        return (_CPUS / f"cpu{processor}" / name).read_text("ascii").strip()
    except (OSError, ValueError):
        return None
