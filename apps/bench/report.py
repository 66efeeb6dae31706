"""What a comparison found, as tables; knows nothing of how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from edgeinfer.apps.bench.comparison import Comparison, Contender
from edgeinfer.apps.bench.environment import machine_name
from edgeinfer.apps.bench.timing import DECODE, PREFILL, Task
from edgeinfer.config import format_size

__all__ = ["print_comparison"]

Cell = Callable[[str, Task], str]


def print_comparison(comparison: Comparison) -> None:
    """Tables on stdout: times, growth with the pass size, distance to the machine's limits, and a table of speed-ups
    over each baseline; then versions, and who was skipped."""
    console = Console(highlight=False)
    config = comparison.config
    threads = "1 thread" if config.threads == 1 else f"{config.threads} threads"
    title = f"{config.shape.name}, {threads}, {config.past} tokens of past, {machine_name()}"
    everyone = comparison.contenders
    _print_table(console, comparison, f"{title}\nms: median [p25-p75]", everyone, config.tasks, _time_cell(comparison))
    _print_table(console, comparison, "c(m)/c(1)", everyone, config.sizes[1:], _growth_cell(comparison))
    if comparison.limits:
        known = [entry for entry in everyone if comparison.floor(entry.label, DECODE)]
        _print_table(console, comparison, _limits_title(comparison), known, config.tasks, _floor_cell(comparison))
    for baseline in comparison.baselines:
        name = f"times faster than {baseline.label}: median [p25-p75] of the repeats"
        _print_table(console, comparison, name, everyone, config.tasks, _speedup_cell(comparison, baseline))
    for entry in everyone:
        line = f"{entry.label}: version {entry.version}, {format_size(entry.model_bytes)} on disk"
        console.print(line, markup=False, soft_wrap=True)
    for engine, reason in comparison.skipped.items():
        console.print(f"{engine}: skipped: {reason}", markup=False, soft_wrap=True)


def _time_cell(comparison: Comparison) -> Cell:
    def cell(label: str, task: Task) -> str:
        time = comparison.time(label, task)
        text = f"{time.median:.2f} [{time.p25:.2f}-{time.p75:.2f}]"
        if task == PREFILL:
            text += f" {comparison.config.prefill / time.median * 1e3:.0f} tokens/s"
        return text

    return cell


def _growth_cell(comparison: Comparison) -> Cell:
    def cell(label: str, task: Task) -> str:
        assert isinstance(task, int)
        return f"{comparison.growth(label, task).median:.2f}"

    return cell


def _limits_title(comparison: Comparison) -> str:
    read, multiply = comparison.read_rate(), comparison.multiply_rate()
    rates = f"memory is read at {read.median / 1e9:.1f} [{read.p25 / 1e9:.1f}-{read.p75 / 1e9:.1f}] GB/s"
    if multiply:
        kernel = next(iter(comparison.limits.values()))[0].kernel
        spread = f"[{multiply.p25 / 1e9:.0f}-{multiply.p75 / 1e9:.0f}]"
        rates += f", {kernel} multiplies and adds {multiply.median / 1e9:.0f} {spread} G times a second"
    return f"ms: reading weights | multiplying | measured time over the larger\n{rates}"


def _floor_cell(comparison: Comparison) -> Cell:
    def cell(label: str, task: Task) -> str:
        floor = comparison.floor(label, task)
        assert floor is not None
        multiply = "-" if floor.multiply_ms is None else f"{floor.multiply_ms:.2f}"
        return f"{floor.read_ms:.2f} | {multiply} | {floor.times.median:.2f}"

    return cell


def _speedup_cell(comparison: Comparison, baseline: Contender) -> Cell:
    def cell(label: str, task: Task) -> str:
        if label == baseline.label:
            return "1"
        speedup = comparison.speedup(label, task, baseline.label)
        return f"{speedup.median:.2f} [{speedup.p25:.2f}-{speedup.p75:.2f}]"

    return cell


def _row_name(comparison: Comparison, task: Task) -> str:
    if task == DECODE:
        return "decode, per token"
    return f"prefill of {comparison.config.prefill}" if task == PREFILL else f"m = {task}"


def _print_table(
    console: Console,
    comparison: Comparison,
    title: str,
    contenders: Sequence[Contender],
    tasks: Sequence[Task],
    cell: Cell,
) -> None:
    """A row per task and a column per contender."""
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", style="cyan", no_wrap=True)
    for entry in contenders:
        table.add_column(Text(entry.label), justify="right", no_wrap=True)
    for task in tasks:
        table.add_row(_row_name(comparison, task), *(Text(cell(entry.label, task)) for entry in contenders))
    # Its natural width, whatever the terminal's or, for a pipe, the assumed one: a figure cut short is no figure.
    width = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    Console(highlight=False, width=width).print(table)
    console.print()
