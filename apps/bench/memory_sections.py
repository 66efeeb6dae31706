"""What the parts of `edgeinfer bench memory` found, as sections: plans, budgets, chats and caches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edgeinfer.apps.bench.memory_budgets import BEST_SHARE, DEFAULT, KEPT_SHARE, UNCONSTRAINED
from edgeinfer.apps.bench.memory_timed import FLAT_SHARE, WARM_TURNS
from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.apps.bench.render import Paragraph, Part, Section, Table, commands, run_facts
from edgeinfer.apps.bench.timing import Spread
from edgeinfer.config import format_size

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
    parts += _groupings(ran)
    parts += [Paragraph(_broken(run)) for run in runs if run["outcome"] != "kept"]
    enforced = ", ".join(sorted({run["enforced"] for run in runs}))
    full = sum(run["times_full"] > 0 for run in runs)
    counted = ", ".join(f"{count} {name}" for name, count in outcomes.items())
    parts.append(Paragraph(f"{len(runs)} plans: {counted}. The enforced limit was reached in {full} runs."))
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


def _groupings(ran: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Gaps by bundle, kind of page, cache and weights; and the terms."""
    keys: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "bundle": lambda run: run["case"]["subject"]["name"],
        "counted": lambda run: run["counted"],
        "cache": lambda run: str(run["details"]["choice"]["kv"]),
        "weights": lambda run: str(run["details"]["choice"]["weights"]),
    }
    known = [run for run in ran if "choice" in run["details"]]
    if not known:
        return
    header = ("", "runs", "kept", "gap: median", "quartiles", "least", "most")
    for name, key in keys.items():
        groups = {group: [run for run in known if key(run) == group] for group in sorted(set(map(key, known)))}
        rows = tuple(_gap_row(group, runs) for group, runs in groups.items())
        yield Table(f"(planned - measured) / budget, by {name}", header, rows)
    yield Table("Largest terms, medians", ("", "planned, of all kinds", "in use at the end"), tuple(_term_rows(known)))


def _gap_row(name: str, runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    gaps = [(run["planned"] - run["measured"]) / run["budget"] for run in runs]
    spread = Spread.of(gaps)
    kept = sum(run["outcome"] == "kept" for run in runs)
    quartiles = f"{spread.p25:.1%} - {spread.p75:.1%}"
    return (name, str(len(runs)), str(kept), f"{spread.median:.1%}", quartiles, f"{min(gaps):.1%}", f"{max(gaps):.1%}")


def _term_rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """What was planned of every term and, where a model accounts for it, what was in use at the end."""
    names = dict.fromkeys(name for run in runs for kind in ("anonymous", "file") for name in run["details"][kind])
    used_only = dict.fromkeys(name for run in runs for name in run["details"]["used"])
    for name in [*names, *(name for name in used_only if name not in names)]:
        planned = [sum(run["details"][kind].get(name, 0) for kind in ("anonymous", "file")) for run in runs]
        used = [run["details"]["used"][name] for run in runs if name in run["details"]["used"]]
        yield (
            name.replace("_", " "),
            format_size(round(statistics.median(planned))) if name in names else "",
            format_size(round(statistics.median(used))) if used else "",
        )


def _broken(run: Mapping[str, Any]) -> str:
    """A plan that was not kept."""
    case = run["case"]
    planned, measured, budget = (format_size(run[name]) for name in ("planned", "measured", "budget"))
    sizes = f"planned {planned}, measured {measured}, budget {budget}"
    what = f"{case['number']} {run['outcome']}: {case['subject']['name']}, {sizes}."
    return f"{what} {run['reason']} {case['options']}"


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
    shares = _shares(points)
    parts: tuple[Part, ...] = (table, chart, kept, *_peers(data["peers"]), shares, *_smallest_budgets(points))
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


def _shares(points: Sequence[Mapping[str, Any]]) -> Table:
    """Each budget's share of the best speed, and how it was kept."""
    rows: list[tuple[str, ...]] = []
    for point in points:
        reason, budget = _reason(point), format_size(point["setup"]["options"]["memory"])
        if reason:
            rows.append((budget, "-", "-", "", reason))
            continue
        full = statistics.median(run["times_full"] for run in point["runs"])
        shares = (f"{point[key]:.0%}" for key in ("short_share", "deep_share"))
        rows.append((budget, *shares, f"{full:.0f}", _choice(point)))
    header = ("budget", "short chat", "deep chat", "limit reached", "how")
    return Table("Shares of the best speed", header, tuple(rows), words=("how",))


def _smallest_budgets(points: Sequence[Mapping[str, Any]]) -> Iterator[Paragraph]:
    """The smallest budgets at which chats are fast, and run at all."""
    found = []
    for least in (BEST_SHARE, 0.0):
        kept = [
            point["setup"]["options"]["memory"]
            for point in points
            if not _reason(point) and min(point["short_share"], point["deep_share"]) >= least
        ]
        found += [format_size(min(kept))] if kept else []
    if len(found) == 2:
        yield Paragraph(f"Smallest budget with {BEST_SHARE:.0%} of the best speed: {found[0]}; at all: {found[1]}.")


def _choice(timed: Mapping[str, Any]) -> str:
    """How it ran, in words."""
    found = timed["runs"][0]["found"]
    choice = found["choice"]
    spared = "; ".join((*found["plan_given_up"], *(f"under way: {name}" for name in found["given_up"])))
    ran = ", ".join(part for part in (_cache(choice), choice.get("weights")) if part)
    return f"{ran}: {spared}" if spared else ran


def _cache(choice: Mapping[str, Any]) -> str:
    return f"{choice['context']} tokens in {choice['kv']}" if "context" in choice else ""


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
    rows, measured = list[tuple[str, ...]](), []
    for setup in data["setups"]:
        budget = setup["setup"]["options"].get("memory")
        name = format_size(budget) if budget else setup["setup"]["name"]
        if _reason(setup):
            rows.append((name, "-", "-", "-", "-", "-"))
            continue
        sizes = setup["generation_bytes"]
        shown = (format_size(round(sizes["planned_alone"])), format_size(round(sizes["planned"])))
        shares = (f"{setup[key]:.1%}" for key in ("share", "processor_share"))
        rows.append((name, f"{setup['tokens_per_second']:.1f}", *shares, *shown))
        measured.append((name, *(format_size(round(sizes[key])) for key in ("measured_alone", "measured"))))
    sizes_of = ("cache, passes, drafts", "all beyond the weights")
    header = ("", "tokens/s", "of the speed", "by the processor's time", *sizes_of)
    table = Table("Speed and generation memory", header, tuple(rows))
    facts = (("Model", data["model"]), ("Context", f"{data['context']} tokens"), *run_facts(data))
    least = data["smallest_budget"]
    kept = f"The smallest budget that keeps the speed is {format_size(least)}." if least else "No budget keeps it."
    seen = Table("The same, measured", ("", *sizes_of), tuple(measured))
    parts: tuple[Part, ...] = (table, Paragraph(kept), seen, *(Paragraph(text) for text in _cuts(data)))
    return Section("What speculation needs", facts, parts, commands(data))


def _cuts(data: Mapping[str, Any]) -> Iterator[str]:
    """What the smallest budget that keeps the speed does without."""
    setups = {setup["setup"]["options"].get("memory") or setup["setup"]["name"]: setup for setup in data["setups"]}
    least = data["smallest_budget"]
    if not least:
        yield f"No budget keeps {KEPT_SHARE:.0%} of the unconstrained speed."
        return
    smallest = setups[least]
    yield f"Smallest budget with {KEPT_SHARE:.0%} of the speed: {format_size(least)}, {_choice(smallest)}."
    for name in (UNCONSTRAINED, DEFAULT):
        if "generation_bytes" not in setups.get(name, {}):
            continue
        sizes, whole = smallest["generation_bytes"], setups[name]["generation_bytes"]
        cuts = {key: f"{1 - sizes[key] / whole[key]:.1%}" if whole[key] else "-" for key in sizes}
        alone = f"of cache, passes and drafts alone {cuts['planned_alone']}, {cuts['measured_alone']}"
        text = f"{cuts['planned']} reserved, {cuts['measured']} measured; {alone}"
        yield f"Generation memory cut against {name}: {text}."


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
    verdict = f"{'flat' if data['flat'] else 'not flat'} (less than {FLAT_SHARE:.0%})"
    planned = format_size(data["planned"])
    text = f"The peak grew by {data['growth']:.2%} after turn {WARM_TURNS}: {verdict}. Planned: {planned}."
    turns = sorted({1, WARM_TURNS, *(len(peaks) * part // 4 for part in range(1, 5))} - {0})
    rows = tuple((str(turn), format_size(peaks[turn - 1])) for turn in turns)
    table = Table("The peak after some turns", ("turn", "peak RSS"), rows)
    return Section("Does memory stay flat?", facts, (chart, Paragraph(text), table), commands(data))


def kv_section(data: Any) -> Section:
    """What smaller caches do to predictions."""
    # Results made before there were needles are shown without.
    needles = all("needle" in each for each in data["caches"])
    rows = tuple(
        (
            f"{each['model']}, {each['kv']}",
            f"{each['perplexity']:.4f}",
            f"{each['change']:+.3%}",
            f"{each['agreement']:.2%}",
            f"{each['copied']:.2%}",
            *([f"{each['needle']:.1%} of {each['needle_context']}"] if needles else []),
            f"{each['attention_error']:.2%}",
        )
        for each in data["caches"]
    )
    needle = ("needle",) if needles else ()
    header = ("cache", "perplexity", "change", "same next token", "copied", *needle, "error of attention")
    caption = "Caches in fewer bits; copied: tokens foreseen where a passage comes a second time" + (
        "; needle: of a short passage within so many tokens" if needles else ""
    )
    facts = (("Tokens", str(data["caches"][0]["tokens"])), *run_facts(data))
    worst = tuple(
        (f"{each['model']}, {each['kv']}", f"{each['worst_layer']:.2%}")
        for each in data["caches"]
        if "worst_layer" in each
    )
    layers = [Table("The layer with the largest error", ("cache", "error of attention"), worst)] if worst else []
    parts = (Table(caption, header, rows), *layers)
    return Section("Quantized caches", facts, parts, commands(data))
