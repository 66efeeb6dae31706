"""The section of `edgeinfer bench quality`."""

from __future__ import annotations

from typing import Any

from edgeinfer.apps.bench.quality_report import quality_chart, quality_header, quality_rows
from edgeinfer.apps.bench.render import Paragraph, Section, Table, commands, run_facts

__all__ = ["quality_section"]


def quality_section(data: Any) -> Section:
    """Predictions and answers against bytes."""
    subjects = data["subjects"]
    table = Table(
        "Beside the reference of each model, its first row",
        quality_header(subjects),
        tuple(quality_rows(subjects)),
    )
    answers = "Of answers, replies that are right letter for letter; in brackets the share of their tokens that are "
    notes = [Paragraph(answers + "likeliest after the right ones.")] if any(each["tasks"] for each in subjects) else []
    notes += [Paragraph(f"{each['model']}, {each['variant']}: skipped: {each['reason']}") for each in data["skipped"]]
    facts = (("Text", data["text"]), ("Tokens", str(subjects[0]["tokens"])), *run_facts(data))
    return Section("What fewer bits cost", facts, (quality_chart(subjects), table, *notes), commands(data))
