"""Whose passes and prompts `edgeinfer bench curve` times: our model with some cache and threads, or llama.cpp."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import edgeinfer
from edgeinfer.apps.bench.driver import Worker, token_ids
from edgeinfer.apps.bench.speed import SpeedTest, floor_ns
from edgeinfer.errors import UsageError
from edgeinfer.results import DeviceLimits

if TYPE_CHECKING:
    from edgeinfer import Model


# Passes over each size at one visit, whose median counts.
_BURST = 3
# Room that llama.cpp's cache needs beside what is measured.
_MARGIN = 8


class Contender(Protocol):
    """An engine with one type of cache and a number of threads.

    Attributes:
        kv: the type of its cache, for tables; another engine's with its name before it.
    """

    kv: str
    threads: int

    def passes(self, sizes: Sequence[int], depth: int) -> dict[int, float]:
        """Milliseconds of a pass over each number of new tokens, all with logits, behind `depth` others."""

    def prompt(self, tokens: int) -> float:
        """Milliseconds from an empty cache to the logits after a prompt."""

    def pass_floor(
        self, size: int, depth: int, limits: DeviceLimits | None
    ) -> tuple[float, float | None] | tuple[None, None]:
        """The least that reading and multiplying take, in milliseconds; None where that is not known."""

    def prompt_floor(self, tokens: int, limits: DeviceLimits | None) -> float | None:
        """The least that a prompt takes, in milliseconds; None where that is not known."""


class Ours:
    """A loaded model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.kv: str = model.plan.configuration.kv
        self.threads = model.threads

    def passes(self, sizes: Sequence[int], depth: int) -> dict[int, float]:
        """See `Contender.passes`; the cache keeps the past for the next visit."""
        times = edgeinfer.tools.measure_passes(self._model, sizes, past=depth, repeats=_BURST)
        return {size: statistics.median(taken) for size, taken in times.items()}

    def prompt(self, tokens: int) -> float:
        """See `Contender.prompt`."""
        return edgeinfer.tools.measure_prefill(self._model, tokens, repeats=1)[0]

    def pass_floor(
        self, size: int, depth: int, limits: DeviceLimits | None
    ) -> tuple[float, float | None] | tuple[None, None]:
        """See `Contender.pass_floor`."""
        if limits is None:
            return None, None
        try:
            return limits.floor_ms(edgeinfer.tools.pass_work(self._model, size, size, past=depth))
        except UsageError:  # a bundle that does not list its weights
            return None, None

    def prompt_floor(self, tokens: int, limits: DeviceLimits | None) -> float | None:
        """See `Contender.prompt_floor`."""
        floor = floor_ns(self._model, SpeedTest(tokens, 0), limits)
        return None if floor is None else floor / 1e6


class LlamaCpp:
    """llama.cpp with a cache of float16, in a process of its own that sleeps except while it is asked.

    Args:
        path: its GGUF file.
        context: tokens that it must hold.

    Raises:
        BackendError: it cannot be loaded.
    """

    kv = "llama.cpp float16"

    def __init__(self, path: Path, threads: int, context: int) -> None:
        self.threads = threads
        self._worker = Worker("llamacpp", {"path": str(path), "threads": threads, "context": context + _MARGIN})

    def passes(self, sizes: Sequence[int], depth: int) -> dict[int, float]:
        """See `Contender.passes`."""
        past = token_ids(depth)
        return {
            size: statistics.median(self._worker.ask("pass_times", tokens=token_ids(size), past=past, count=_BURST))
            for size in sizes
        }

    def prompt(self, tokens: int) -> float:
        """See `Contender.prompt`."""
        (taken,) = self._worker.ask("prefill_times", prompt=token_ids(tokens))
        return float(taken)

    def pass_floor(self, size: int, depth: int, limits: DeviceLimits | None) -> tuple[None, None]:
        """See `Contender.pass_floor`: what its file makes it read is not known here."""
        return None, None

    def prompt_floor(self, tokens: int, limits: DeviceLimits | None) -> None:
        """See `Contender.prompt_floor`."""

    def close(self) -> None:
        """Ends the process."""
        self._worker.close()
