"""Quality against bytes as a Markdown table and as a chart; knows nothing of how it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.apps.bench.render import Paragraph, Section, Table, commands, run_facts
from edgeinfer.config import format_size

__all__ = ["quality_chart", "quality_section"]


def _header(subjects: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the columns; those of tasks come last."""
    fixed = ("model", "variant", "weights", "bits", "cache", "perplexity", "KL divergence, nats", "same next token")
    return (*fixed, *(name.removeprefix("tales/") for name in _tasks(subjects)))


def _rows(subjects: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each subject of the JSON."""
    rows = []
    for each in subjects:
        cells = (
            each["model"],
            each["variant"],
            format_size(each["bytes"]),
            f"{each['bits_per_weight']:.2f}",
            format_size(each["cache_bytes"]),
            f"{each['perplexity']:.3f} ± {each['perplexity_error']:.3f}",
            f"{each['divergence']:.6f} ± {each['divergence_error']:.6f}" if each["divergence"] else "0",
            f"{each['agreement']:.2%}",
        )
        rows.append((*cells, *(_score(each["tasks"].get(name)) for name in _tasks(subjects))))
    return rows


def quality_section(data: Any) -> Section:
    """Predictions and answers against bytes."""
    subjects = data["subjects"]
    table = Table(
        "Beside the reference of each model, its first row",
        _header(subjects),
        tuple(_rows(subjects)),
    )
    answers = "Of answers, replies that are right letter for letter; in brackets the share of their tokens that are "
    notes = [Paragraph(answers + "likeliest after the right ones.")] if any(each["tasks"] for each in subjects) else []
    for each in data["layouts"]:
        one, other = each["layouts"]
        difference = f"{one} - {other} = {each['mean']:+.6f} ± {each['error']:.6f} nats"
        notes.append(Paragraph(f"{each['model']}, {each['scheme']}: {difference}"))
    notes += [Paragraph(f"{each['model']}, {each['variant']}: skipped: {each['reason']}") for each in data["skipped"]]
    facts = (("Text", data["text"]), ("Tokens", str(subjects[0]["tokens"])), *run_facts(data))
    return Section("What fewer bits cost", facts, (quality_chart(subjects), table, *notes), commands(data))


def quality_chart(subjects: Sequence[Mapping[str, Any]]) -> Chart:
    """Divergence against bytes, for each model one line over its weights and one over its caches."""
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for each in subjects:
        # The reference's own divergence, nothing, has no place on a logarithmic axis.
        if each["divergence"] > 0:
            kind = "caches" if each["cache"] else "weights"
            size = (each["bytes"] + each["cache_bytes"]) / 1e6
            label = each["cache"] or each["weights"].removesuffix(", small layers too")
            lines.setdefault(f"{each['model']}, {kind}", []).append((size, each["divergence"], label))
    drawn = []
    for name, points in lines.items():
        ordered = sorted(points)
        drawn.append(Line(name, tuple(point[:2] for point in ordered), tuple(point[2] for point in ordered)))
    title, y = "What fewer bytes cost", "KL divergence, nats per token"
    return Chart(title, "weights and cache, MB", y, tuple(drawn), logarithmic=True)


def _tasks(subjects: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for each in subjects for name in each["tasks"]))


def _score(score: Mapping[str, int] | None) -> str:
    if score is None:
        return ""
    return f"{score['right']}/{score['of']} ({score['tokens_right'] / score['tokens']:.1%})"
