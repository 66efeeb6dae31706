"""Measures what this machine can do at best with the native kernel's own instructions."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgeinfer.core.errors import UsageError
from edgeinfer.core.results import DeviceLimits
from edgeinfer.runtime.native.binding import Binding
from edgeinfer.runtime.native.library import NativeKernel

# Several times the last-level cache of any machine meant here.
_READ_BYTES = 256 << 20
# The best of so many is taken: what another job of the machine took for itself is not the machine's limit.
_ATTEMPTS = 3
# A measurement this long is not decided by how long starting a thread takes.
_SHORTEST_SECONDS = 0.01
_FIRST_ROUNDS = 1 << 16


def measure_limits(kernel: NativeKernel, threads: int) -> DeviceLimits:
    """Reads memory far beyond the caches, then does nothing but multiply-adds, on all threads at once.

    Takes about 0.2 s and 256 MB of memory for that time.
    """
    if threads < 1:
        raise UsageError(f"{threads} threads cannot be measured.", "Use at least 1.")
    binding = Binding(kernel.path)
    with ThreadPoolExecutor(threads) as pool:
        read = _read_rate(binding, pool, threads)
        return DeviceLimits(kernel.isa, threads, read, _dot_rate(binding, pool, threads))


def _read_rate(binding: Binding, pool: ThreadPoolExecutor, threads: int) -> float:
    """Bytes per second, each thread reading a run of its own."""
    memory = mmap.mmap(-1, _READ_BYTES)
    # Weights are pages of a mapped file, which the system keeps in large runs. Anonymous memory reads as fast with
    # huge pages (30 GB/s where both do 30), and a tenth slower without.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    words = np.frombuffer(memory, np.uint64)
    words.fill(1)  # pages never written are all one page of zeros
    runs = np.array_split(words, threads)

    def work(index: int) -> None:
        binding.probe_read(runs[index])

    return words.nbytes / min(_together(pool, threads, work) for _ in range(_ATTEMPTS))


def _dot_rate(binding: Binding, pool: ThreadPoolExecutor, threads: int) -> float | None:
    """Multiply-adds per second, or None where the instruction set has no instruction for them."""
    rounds = _FIRST_ROUNDS
    if binding.probe_dots(1) == 0:
        return None

    def work(index: int) -> None:
        binding.probe_dots(rounds)

    while (seconds := _together(pool, threads, work)) < _SHORTEST_SECONDS:
        rounds *= 2
    for _ in range(_ATTEMPTS - 1):
        seconds = min(seconds, _together(pool, threads, work))
    return threads * binding.probe_dots(1) * rounds / seconds


def _together(pool: ThreadPoolExecutor, threads: int, work: Callable[[int], None]) -> float:
    """Seconds from when `threads` threads begin `work(index)` to when the last has done it."""
    gate = threading.Barrier(threads)

    def timed(index: int) -> tuple[float, float]:
        gate.wait()
        started = time.perf_counter()
        work(index)
        return started, time.perf_counter()

    spans = list(pool.map(timed, range(threads)))
    return max(end for _, end in spans) - min(started for started, _ in spans)
