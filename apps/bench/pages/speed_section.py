"""The section of `edgeinfer bench speed`."""

from __future__ import annotations

from typing import Any

from edgeinfer.apps.bench.pages.page import Section, Table
from edgeinfer.apps.bench.pages.run_facts import commands, run_facts
from edgeinfer.apps.bench.plots import Chart, Line

__all__ = ["speed_section"]


def speed_section(data: Any) -> Section:
    """Tests in llama-bench's words."""
    rows = tuple(
        (
            row["test"],
            f"{row['median_ts']:.1f}",
            f"{row['avg_ts']:.1f} ± {row['stddev_ts']:.1f}",
            str(len(row["samples_ts"])),
        )
        for row in data
    )
    table = Table("Tokens per second", ("test", "median", "mean ± deviation", "visits"), rows)
    chart = _by_depth(data)
    return Section("Prompts and replies", run_facts(data[0]), (table, *chart), commands(data[0]))


def _by_depth(data: list[dict[str, Any]]) -> tuple[Chart, ...]:
    """Speed against depth, where there are several depths."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in data:
        lines.setdefault(row["test"].partition(" @")[0], []).append((row["n_depth"], row["median_ts"]))
    if max(map(len, lines.values())) < 2:
        return ()
    drawn = tuple(Line(name, tuple(sorted(points))) for name, points in lines.items())
    return (Chart("Speed behind a longer past", "tokens before", "tokens per second", drawn),)
