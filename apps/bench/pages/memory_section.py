"""The sections of `edgeinfer bench memory`: plans, budgets, chats and caches."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.apps.bench.render import Paragraph, Part, Section, Table, commands, run_facts
from edgeinfer.config import format_size

__all__ = ["budget_rows", "chat_section", "kv_section", "plans_section", "smallest_section", "spec_memory_section"]

_MB = 1e6


def plans_section(data: Any) -> Section:
    """Random plans: kept or not, and how near to what was measured."""
    runs, outcomes, gap = data["runs"], data["outcomes"], data["gap"]
    ran = [run for run in runs if run["ended"] == "ran"]
    counts = (str(len(runs)), *(str(count) for count in outcomes.values()))
    parts: list[Part] = [
        Table("What became of random plans, each in a process of its own", ("plans", *outcomes), (counts,))
    ]
    if ran:
        shown = f"{gap['median']:.1%} [{gap['p25']:.1%} to {gap['p75']:.1%}]"
        note = Paragraph(f"Planned but not taken, of the budget: median {shown}.")
        parts += [_gaps(ran), note, _planned_chart(ran)]
    enforced = ", ".join(sorted({run["enforced"] for run in runs}))
    facts = (("Plans", str(len(runs))), ("Seed", str(data["seed"])), ("Limits enforced by", enforced))
    return Section("Are plans kept?", (*facts, *run_facts(data)), tuple(parts), commands(data))


def _gaps(ran: Sequence[Mapping[str, Any]]) -> Table:
    """Planned beside measured, by model."""
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for run in ran:
        by_model.setdefault(run["case"]["subject"]["name"], []).append(run)
    rows = []
    for name, runs in sorted(by_model.items()):
        gaps = [(run["planned"] - run["measured"]) / run["budget"] for run in runs]
        middle = [format_size(round(statistics.median(run[key] for run in runs))) for key in ("planned", "measured")]
        rows.append((name, str(len(runs)), *middle, f"{statistics.median(gaps):.1%}", f"{min(gaps):.1%}"))
    header = ("model", "plans", "planned", "measured", "gap of the budget", "least")
    return Table("Planned and measured peaks, medians", header, tuple(rows))


def _planned_chart(ran: Sequence[Mapping[str, Any]]) -> Chart:
    points: dict[str, list[tuple[float, float]]] = {}
    for run in ran:
        points.setdefault(run["counted"], []).append((run["planned"] / _MB, run["measured"] / _MB))
    lines = [Line(f"counting {name} pages", tuple(each), joined=False) for name, each in sorted(points.items())]
    most = max(x for each in points.values() for x, _ in each)
    lines.append(Line("as planned", ((0.0, 0.0), (most, most)), dashed=True))
    return Chart("Measured against planned", "planned, MB", "measured peak, MB", tuple(lines))


def smallest_section(data: Any) -> Section:
    """Speed against budget: a row for each kind of chat, a column for each budget."""
    points = [point for point in data["points"] if point["setup"]["options"].get("memory")]
    header, rows = budget_rows(data["model"], points)
    table = Table("Tokens per second inside an enforced budget", header, rows)
    kept = _budget_table(points)
    drawn = [point for point in points if not _reason(point)]
    lines = [
        Line(name, tuple(sorted((point["setup"]["options"]["memory"] / _MB, point[key]) for point in drawn)))
        for name, key in (("short chat", "short_speed"), ("chat near the end of the context", "deep_speed"))
    ]
    chart = Chart("Speed against budget", "budget, MB", "tokens per second", tuple(lines))
    facts = (("Model", data["model"]), ("Context", f"{data['context']} tokens"), *run_facts(data))
    parts: tuple[Part, ...] = (table, chart, kept, *_peers(data["peers"]))
    return Section("What a budget costs", facts, parts, commands(data))


def budget_rows(model: str, points: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """A table's header, the budgets, and its rows, one for each kind of chat."""
    budgets = [format_size(point["setup"]["options"]["memory"]) for point in points]
    rows = [
        (f"{model}, {name}", *("-" if _reason(point) else f"{point[key]:.1f}" for point in points))
        for name, key in (("short", "short_speed"), ("deep", "deep_speed"))
    ]
    return ("model, chat", *budgets), tuple(rows)


def _reason(point: Mapping[str, Any]) -> str:
    return next((run["reason"] for run in point["runs"] if run["reason"]), "")


def _budget_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """Planned beside measured for every budget, and what was given up."""
    rows: list[tuple[str, ...]] = []
    for point in points:
        budget = format_size(point["setup"]["options"]["memory"])
        if _reason(point):
            rows.append((budget, "", "", "", _reason(point)))
            continue
        found = point["runs"][0]["found"]
        peaks = [statistics.median(run[key] for run in point["runs"]) for key in ("peak_rss", "peak_anonymous")]
        spared = "; ".join((*found["plan_given_up"], *(f"under way: {name}" for name in found["given_up"])))
        sizes = (format_size(found["planned"]), *(format_size(round(peak)) for peak in peaks))
        rows.append((budget, *sizes, spared or "nothing"))
    header = ("budget", "planned", "measured peak", "of it anonymous", "given up")
    return Table("Planned and measured", header, tuple(rows), words=("given up",))


def _peers(peers: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    if not peers:
        return
    rows = [
        (each["peer"], "", "", "", each["reason"])
        if each["reason"]
        else (
            each["peer"],
            f"{each['short_speed']:.1f}",
            f"{each['deep_speed']:.1f}",
            format_size(each["peak_rss"]),
            "",
        )
        for each in peers
    ]
    header = ("engine", "short", "deep", "peak", "skipped")
    yield Table("Others, without a limit: tokens per second", header, tuple(rows), words=("skipped",))


def spec_memory_section(data: Any) -> Section:
    """What speculation takes besides the weights, and how little of it is enough."""
    rows = []
    for setup in data["setups"]:
        budget = setup["setup"]["options"].get("memory")
        name = format_size(budget) if budget else setup["setup"]["name"]
        if _reason(setup):
            rows.append((name, "-", "-", "-", "-"))
            continue
        sizes = setup["generation_bytes"]
        shown = (format_size(round(sizes["planned_alone"])), format_size(round(sizes["planned"])))
        rows.append((name, f"{setup['tokens_per_second']:.1f}", f"{setup['share']:.1%}", *shown))
    header = ("", "tokens/s", "of the speed", "cache, passes, drafts", "all beyond the weights")
    table = Table("Speed and generation memory", header, tuple(rows))
    facts = (("Model", data["model"]), ("Context", f"{data['context']} tokens"), *run_facts(data))
    least = data["smallest_budget"]
    kept = f"The smallest budget that keeps the speed is {format_size(least)}." if least else "No budget keeps it."
    return Section("What speculation needs", facts, (table, Paragraph(kept)), commands(data))


def chat_section(data: Any) -> Section:
    """The peak after every turn of a long chat."""
    peaks = data["peaks"]
    points = tuple((turn + 1.0, peak / _MB) for turn, peak in enumerate(peaks))
    # Of hundreds of turns some are enough to draw.
    drawn = points[:: max(1, len(points) // 60)]
    lines = (
        Line("peak", drawn),
        Line("planned", ((1.0, data["planned"] / _MB), (float(len(peaks)), data["planned"] / _MB)), dashed=True),
    )
    chart = Chart("Memory over a long chat", "turn", "peak of the process, MB", lines)
    facts = (("Turns", str(len(peaks))), ("Context", f"{data['context']} tokens"), *run_facts(data))
    note = Paragraph(f"Grown after the first turns by {data['growth']:.2%}: {'flat' if data['flat'] else 'not flat'}.")
    return Section("Does memory stay flat?", facts, (chart, note), commands(data))


def kv_section(data: Any) -> Section:
    """What quantized caches do to predictions."""
    rows = tuple(
        (
            f"{each['model']}, {each['kv']}",
            f"{each['perplexity']:.4f}",
            f"{each['change']:+.3%}",
            f"{each['agreement']:.2%}",
            f"{each['copied']:.2%}",
            f"{each['attention_error']:.2%}",
        )
        for each in data["caches"]
    )
    header = ("cache", "perplexity", "change", "same next token", "copied", "error of attention")
    caption = "Caches in fewer bits; copied: tokens foreseen where a passage comes a second time"
    facts = (("Tokens", str(data["caches"][0]["tokens"])), *run_facts(data))
    return Section("Quantized caches", facts, (Table(caption, header, rows),), commands(data))
