"""The section of `edgeinfer bench peers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.apps.bench.render import Paragraph, Section, Table, commands, run_facts
from edgeinfer.config import format_size

__all__ = ["peers_section"]

_MB = 1e6
Row = Mapping[str, Any]


def peers_section(data: Any) -> Section:
    """Every model's engines side by side, and how fast they are in how little memory."""
    facts = (
        *run_facts(data),
        ("Threads", str(data["threads"])),
        ("Visits", f"{data['repeats']} to each test, {data['rounds']} processes at each budget"),
    )
    parts = tuple(part for model in data["models"] for part in _parts(model, data))
    return Section("Beside other engines", facts, parts, commands(data))


def _parts(model: Row, data: Row) -> Iterator[Table | Chart | Paragraph]:
    timed = [engine for engine in model["engines"] if not engine["skipped"]]
    yield _speeds(model, timed)
    budgets = sorted({int(budget) for engine in timed for budget in engine["budgets"]})
    if budgets:
        asked = f"reply of {data['budget_reply']} tokens to {data['budget_prompt']}"
        yield _within(model, timed, budgets, asked)
        lines = tuple(line for engine in timed if (line := _line(engine)).points)
        if lines:
            yield Chart(f"{model['model']}: speed within a memory limit", "limit, MB", "tokens per second", lines)
    yield from map(Paragraph, _notes(model, timed, data))


def _speeds(model: Row, timed: Sequence[Row]) -> Table:
    tests = model["tests"]
    sizes = sorted({int(size) for engine in timed for size in engine["c"]})
    figures = (*(f"{test} t/s" for test in tests), *(f"c({size}) ms" for size in sizes))
    header = ("engine", "weights", "on disk", "load ms", *figures, "peak MB", "same tokens")
    rows = tuple(
        (
            engine["engine"],
            engine["weights"],
            format_size(engine["bytes"]),
            _number(engine["load_ms"], 0),
            *(_number(engine.get(test), 1) for test in tests),
            *(_number(engine["c"].get(str(size)), 2) for size in sizes),
            _number(engine["peak_rss_bytes"] and engine["peak_rss_bytes"] / _MB, 0),
            "" if engine["agreement"] is None else f"{engine['agreement']:.0%}",
        )
        for engine in timed
    )
    caption = f"{model['model']}, context of {model['context']} tokens"
    return Table(caption, header, rows)


def _within(model: Row, timed: Sequence[Row], budgets: Sequence[int], asked: str) -> Table:
    rows = tuple((engine["engine"], *(_cell(engine["budgets"].get(str(b))) for b in budgets)) for engine in timed)
    caption = f"{model['model']}: tokens per second of a {asked}, the whole process inside an enforced limit"
    return Table(caption, ("engine", *map(format_size, budgets)), rows)


def _line(engine: Row) -> Line:
    found = sorted((int(budget), figures["tokens_per_second"]) for budget, figures in engine["budgets"].items())
    return Line(engine["engine"], tuple((budget / _MB, rate) for budget, rate in found if rate is not None))


def _notes(model: Row, timed: Sequence[Row], data: Row) -> Iterator[str]:
    yield f"t/s: tokens per second. c(m): a pass over m new tokens behind {data['past']}. Peak: resident memory."
    yield model["check"]
    versions = ", ".join(f"{engine['engine']} {engine['version']}" for engine in timed)
    yield f"Versions: {versions}."
    if model["limits"]:
        yield f"Speed within budgets was not measured: {model['limits']}."
    for engine in timed:
        if engine["note"]:
            yield f"{engine['engine']}: {engine['note']}."
        if engine["same_tokens"] is False:
            yield f"{engine['engine']}: wrong, its speed does not count."
    for engine in model["engines"]:
        if engine["skipped"]:
            yield f"{engine['engine']}: skipped: {engine['skipped'].rstrip('.')}."


def _cell(figures: Row | None) -> str:
    """The rate, or in a word why there is none."""
    if figures is None:
        return ""
    rate = figures["tokens_per_second"]
    return str(figures["reason"]).partition(":")[0] if rate is None else f"{rate:.1f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
