"""What a comparison found, as an object, as JSON and as tables; knows nothing of how it was measured."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from edgeinfer.apps.bench.shapes import Shape
from edgeinfer.apps.bench.timing import DECODE, Samples, Spread, Task
from edgeinfer.config import format_size

__all__ = ["Comparison", "Contender", "machine_name", "print_comparison"]

BASELINE_ENGINE = "llamacpp"


@dataclass(frozen=True)
class Contender:
    """An engine that was timed, and the size of its model file or folder."""

    label: str
    engine: str
    version: str
    model_bytes: int


@dataclass(frozen=True)
class Comparison:
    """Times of every contender.

    Attributes:
        sizes: new tokens of the passes.
        skipped: engines that were not timed, with the reason.
        samples: by (label, task), in milliseconds.
    """

    shape: Shape
    threads: int
    past: int
    sizes: tuple[int, ...]
    contenders: tuple[Contender, ...]
    skipped: dict[str, str]
    samples: Samples

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What was timed, in the order of the tables."""
        return (DECODE, *self.sizes)

    @property
    def baseline(self) -> Contender | None:
        """The peer that speed-ups are relative to, where it ran."""
        return next((entry for entry in self.contenders if entry.engine == BASELINE_ENGINE), None)

    def time(self, label: str, task: Task) -> Spread:
        """Milliseconds per step or pass."""
        return self.samples.spread(label, task)

    def growth(self, label: str, size: int) -> Spread:
        """c(size) / c(1)."""
        return self.samples.ratio((label, size), (label, 1))

    def speedup(self, label: str, task: Task) -> Spread:
        """How many times faster than the baseline, which must be there."""
        assert self.baseline is not None
        return self.samples.ratio((self.baseline.label, task), (label, task))

    def to_dict(self) -> dict[str, Any]:
        """Everything, samples included."""
        engines = {}
        for entry in self.contenders:
            label = entry.label
            engines[label] = {
                **asdict(entry),
                "ms": {str(task): asdict(self.time(label, task)) for task in self.tasks},
                "growth": {str(size): asdict(self.growth(label, size)) for size in self.sizes},
                "samples": {str(task): self.samples.bursts[label, task] for task in self.tasks},
            }
            if self.baseline and entry != self.baseline:
                speedups = {str(task): asdict(self.speedup(label, task)) for task in self.tasks}
                engines[label]["speedup_vs_llamacpp"] = speedups
        return {
            "shape": self.shape.name,
            "parameters": self.shape.parameters,
            "threads": self.threads,
            "past": self.past,
            "machine": machine_name(),
            "python": platform.python_version(),
            "onnxruntime": version("onnxruntime"),
            "engines": engines,
            "skipped": self.skipped,
        }


def machine_name() -> str:
    """The processor as the system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    if sys.platform == "linux" and cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_comparison(comparison: Comparison) -> None:
    """Three tables on stdout: times, growth with the pass size, and speed-up over llama.cpp; then who was skipped."""
    console = Console(highlight=False)
    threads = "1 thread" if comparison.threads == 1 else f"{comparison.threads} threads"
    title = f"{comparison.shape.name}, {threads}, {comparison.past} tokens of past, {machine_name()}"
    _print_table(console, comparison, f"{title}\nms: median [p25-p75]", comparison.tasks, _time_cell(comparison))
    _print_table(console, comparison, "c(m)/c(1)", comparison.sizes[1:], _growth_cell(comparison))
    if comparison.baseline:
        name = f"times faster than {comparison.baseline.label}: median [p25-p75] of the repeats"
        _print_table(console, comparison, name, comparison.tasks, _speedup_cell(comparison))
    for entry in comparison.contenders:
        console.print(f"{entry.label}: version {entry.version}, {format_size(entry.model_bytes)} on disk", markup=False)
    for engine, reason in comparison.skipped.items():
        console.print(f"{engine}: skipped: {reason}", markup=False, soft_wrap=True)


def _time_cell(comparison: Comparison) -> Callable[[str, Task], str]:
    def cell(label: str, task: Task) -> str:
        time = comparison.time(label, task)
        return f"{time.median:.2f} [{time.p25:.2f}-{time.p75:.2f}]"

    return cell


def _growth_cell(comparison: Comparison) -> Callable[[str, Task], str]:
    def cell(label: str, task: Task) -> str:
        assert task != DECODE
        return f"{comparison.growth(label, task).median:.2f}"

    return cell


def _speedup_cell(comparison: Comparison) -> Callable[[str, Task], str]:
    def cell(label: str, task: Task) -> str:
        if comparison.baseline and label == comparison.baseline.label:
            return "1"
        speedup = comparison.speedup(label, task)
        return f"{speedup.median:.2f} [{speedup.p25:.2f}-{speedup.p75:.2f}]"

    return cell


def _print_table(
    console: Console, comparison: Comparison, title: str, tasks: tuple[Task, ...], cell: Callable[[str, Task], str]
) -> None:
    """A row per task and a column per contender."""
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", style="cyan", no_wrap=True)
    for entry in comparison.contenders:
        table.add_column(Text(entry.label), justify="right", no_wrap=True)
    for task in tasks:
        name = "decode, per token" if task == DECODE else f"m = {task}"
        table.add_row(name, *(Text(cell(entry.label, task)) for entry in comparison.contenders))
    # Its natural width, whatever the terminal's or, for a pipe, the assumed one: a figure cut short is no figure.
    width = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    Console(highlight=False, width=width).print(table)
    console.print()
