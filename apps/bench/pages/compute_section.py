"""The section of `edgeinfer bench compute`."""

from __future__ import annotations

from typing import Any

from edgeinfer.apps.bench.compute_report import (
    HEADER,
    comparison_rows,
    compute_chart,
    floor_header,
    floor_rows,
    point_rows,
)
from edgeinfer.apps.bench.render import Paragraph, Section, Table, commands, run_facts

__all__ = ["compute_section"]


def compute_section(data: Any) -> Section:
    """Quality against speed where less than the whole model is computed."""
    points = Table("Every policy at several levels", HEADER, tuple(point_rows(data["points"])))
    tables = [Table(title, header, tuple(rows)) for title, header, rows in comparison_rows(data)]
    floors = Table("Floors, on texts that nothing was calibrated with", floor_header(), tuple(floor_rows(data)))
    notes = [Paragraph(f"{policy}: skipped: {reason}") for policy, reason in data["skipped"].items()]
    if data.get("expanded"):
        notes.append(Paragraph("Speeds are those of cost-expanded models: small ones at the sizes of larger ones."))
    drafter = (("Draft model", data["drafter"]),) if data["drafter"] else ()
    facts = (("Model", data["model"]), *drafter, ("Text", data["text"]), *run_facts(data))
    return Section(
        "What less compute costs", facts, (compute_chart(data), points, *tables, floors, *notes), commands(data)
    )
