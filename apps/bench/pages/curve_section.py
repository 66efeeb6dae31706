"""The section of `edgeinfer bench curve`."""

from __future__ import annotations

from typing import Any

from edgeinfer.apps.bench.curve import lines_chart
from edgeinfer.apps.bench.pages.page import Section, Table
from edgeinfer.apps.bench.pages.run_facts import commands, run_facts

__all__ = ["curve_section"]


def curve_section(data: Any) -> Section:
    """A pass over several tokens beside the least it can take."""
    points = data["points"]
    rows = tuple(
        (
            str(point["size"]),
            f"{point['ms']['median']:.2f}",
            f"{point['ms']['p25']:.2f} to {point['ms']['p75']:.2f}",
            f"{point['growth']['median']:.2f}",
            "" if point["limit_ms"] is None else f"{point['limit_ms']:.2f}",
        )
        for point in points
    )
    header = ("m", "median", "25% to 75%", "c(m)/c(1)", "least")
    table = Table("Milliseconds of a pass over m new tokens, and the least the machine needs", header, rows)
    measured = [(p["size"], p["ms"]["median"]) for p in points]
    reading = [(p["size"], p["read_ms"]) for p in points if p["read_ms"] is not None]
    multiplying = [(p["size"], p["multiply_ms"]) for p in points if p["multiply_ms"] is not None]
    chart = lines_chart("A pass over m tokens", measured, reading, multiplying)
    facts = (*run_facts(data), ("Tokens before", str(data.get("n_depth", 0))))
    return Section("What verifying several tokens costs", facts, (chart, table), commands(data))
