"""What the memory benchmarks found, as tables and verdicts; knows nothing of how it was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from edgeinfer.apps.bench.environment import machine_name
from edgeinfer.apps.bench.kv_quality import KVQuality
from edgeinfer.apps.bench.memory_chat import FLAT_SHARE, WARM_TURNS, ChatResults
from edgeinfer.apps.bench.memory_plans import PlanRun, PlansResults
from edgeinfer.apps.bench.memory_smallest import BEST_SHARE, SmallestResults
from edgeinfer.apps.bench.memory_spec import DEFAULT, KEPT_SHARE, UNCONSTRAINED, SpecMemoResults
from edgeinfer.apps.bench.memory_timed import Timed
from edgeinfer.apps.bench.tables import print_table
from edgeinfer.apps.bench.timing import Spread
from edgeinfer.config import format_size

__all__ = ["print_chat", "print_kv", "print_plans", "print_smallest", "print_spec"]

Rows = Sequence[Sequence[str]]


def print_plans(results: PlansResults) -> None:
    """How near plans are to what was measured, by bundle, kind of page and cache; terms; every plan not kept."""
    groupings: dict[str, Callable[[PlanRun], str]] = {
        "bundle": lambda run: run.case.subject.name,
        "counted": lambda run: run.counted,
        "cache": lambda run: str(run.details["choice"]["kv"]),
        "weights": lambda run: str(run.details["choice"]["weights"]),
    }
    header = ("", "runs", "kept", "gap: median", "quartiles", "least", "most")
    for name, key in groupings.items():
        rows = [_gap_row(group, runs) for group, runs in results.groups(key).items()]
        print_table(f"(planned - measured) / budget, by {name}", header, rows)
    print_table("largest terms, medians", ("", "planned, of all kinds", "held"), list(_term_rows(results.finished)))
    for run in results.runs:
        if run.outcome != "kept":
            what = f"{run.case.number} {run.outcome}: {run.case.subject.name}, {_sizes(run)} {run.reason}"
            _line(f"{what} {run.case.options}")
    counts = ", ".join(
        f"{len(results.of(name))} {name}" for name in ("kept", "exceeded", "refused", "failed", "killed")
    )
    enforced = ", ".join(sorted({run.enforced for run in results.runs}))
    full = sum(run.times_full > 0 for run in results.runs)
    _line(f"{len(results.runs)} plans: {counts}. Limits enforced by: {enforced}; reached in {full} runs.")
    if results.finished:
        gaps = Spread.of([run.gap for run in results.finished])
        _line(f"Planned but not taken: {gaps.median:.1%} of the budget [{gaps.p25:.1%} - {gaps.p75:.1%}].")
    _line(machine_name())


def _gap_row(name: str, runs: Sequence[PlanRun]) -> list[str]:
    gaps = [run.gap for run in runs]
    spread = Spread.of(gaps)
    kept = sum(run.outcome == "kept" for run in runs)
    quartiles = f"{spread.p25:.1%} - {spread.p75:.1%}"
    return [name, str(len(runs)), str(kept), f"{spread.median:.1%}", quartiles, f"{min(gaps):.1%}", f"{max(gaps):.1%}"]


def _term_rows(runs: Sequence[PlanRun]) -> Iterator[list[str]]:
    """Of every term, what was planned and, of those that a model accounts for, what it held at the end."""
    names = dict.fromkeys(name for run in runs for kind in ("anonymous", "file") for name in run.details[kind])
    held_only = dict.fromkeys(name for run in runs for name in run.details["used"])
    for name in [*names, *(name for name in held_only if name not in names)]:
        planned = [sum(run.details[kind].get(name, 0) for kind in ("anonymous", "file")) for run in runs]
        held = [run.details["used"][name] for run in runs if name in run.details["used"]]
        yield [
            name.replace("_", " "),
            format_size(round(statistics.median(planned))) if name in names else "",
            format_size(round(statistics.median(held))) if held else "",
        ]


def _sizes(run: PlanRun) -> str:
    return (
        f"planned {format_size(run.planned)}, measured {format_size(run.measured)}, budget {format_size(run.budget)}."
    )


def print_spec(results: SpecMemoResults) -> None:
    """Speed and generation memory of every setup, and the smallest budget that keeps the speed."""
    header = (
        "",
        "tokens/s",
        "of the speed",
        "generation, reserved",
        "measured",
        "without runtime, reserved",
        "measured",
    )
    rows = []
    for timed in results.timed:
        if timed.reason:
            rows.append([_budget(timed), "-", "-", timed.reason, "", "", ""])
            continue
        speed = results.speed(timed)
        sizes = [_generation(timed, planned, alone) for alone in (False, True) for planned in (True, False)]
        rows.append([_budget(timed), f"{speed:.1f}", f"{results.share(timed):.1%}", *sizes])
    print_table(
        f"{results.model}, {len(results.prompts)} prompts, {results.context} tokens of context",
        header,
        rows,
        words=("how",),
    )
    smallest = results.smallest
    if smallest is None:
        _line(f"No budget keeps {KEPT_SHARE:.0%} of the unconstrained speed.")
        return
    _line(f"Smallest budget with {KEPT_SHARE:.0%} of the speed: {_budget(smallest)}, {_choice(smallest)}.")
    for name in (UNCONSTRAINED, DEFAULT):
        cuts = [
            f"{results.cut(smallest, name, planned=planned, alone=alone):.1%}"
            for alone in (False, True)
            for planned in (True, False)
        ]
        text = f"{cuts[0]} reserved, {cuts[1]} measured; of cache, passes and drafts alone {cuts[2]}, {cuts[3]}"
        _line(f"Generation memory cut against {name}: {text}.")
    _line(machine_name())


def _generation(timed: Timed, planned: bool, alone: bool) -> str:
    return format_size(round(timed.median(lambda run: run.generation_bytes(planned=planned, alone=alone))))


def print_smallest(results: SmallestResults) -> None:
    """Throughput against budget, and what other engines take."""
    header = ("budget", "short chat, tokens/s", "deep", "peak RSS", "anonymous", "limit reached", "how")
    rows = []
    for point in results.points:
        if point.reason:
            rows.append([_budget(point), "-", "-", "", "", "", point.reason])
            continue
        pace = zip(results.speeds(point), results.shares(point), strict=True)
        peak, anonymous = (round(point.median(size)) for size in (lambda r: r.peak_rss, lambda r: r.peak_anonymous))
        full = f"{point.median(lambda run: run.times_full):.0f}"
        sizes = [format_size(peak), format_size(anonymous)]
        shown = (f"{speed:.1f} ({share:.0%})" for speed, share in pace)
        rows.append([_budget(point), *shown, *sizes, full, _choice(point)])
    for figures in results.peers:
        speeds = [f"{figures.short_speed:.1f}", f"{figures.deep_speed:.1f}"]
        sizes = [format_size(figures.peak_rss), format_size(figures.peak_anonymous)]
        cells = [*speeds, *sizes, "", ""] if not figures.reason else ["-", "-", "", "", "", figures.reason]
        rows.append([figures.peer.engine, *cells])
    print_table(f"{results.model}, {results.context} tokens of context", header, rows, words=("how",))
    fast, running = results.smallest_fast, results.smallest_running
    if fast is not None and running is not None:
        _line(f"Smallest budget with {BEST_SHARE:.0%} of the best speed: {_budget(fast)}; at all: {_budget(running)}.")
    _line(machine_name())


def print_chat(results: ChatResults) -> None:
    """The peak after some turns, and whether it stayed flat."""
    last = len(results.peaks)
    turns = sorted({1, WARM_TURNS, *(last * part // 4 for part in range(1, 5))} - {0})
    rows = [[str(turn), format_size(results.peaks[turn - 1])] for turn in turns]
    print_table(f"{last} turns, {results.context} tokens of context", ("turn", "peak RSS"), rows)
    verdict = "flat" if results.flat else "not flat"
    grown = f"grew by {results.growth:.2%} after turn {WARM_TURNS}"
    _line(f"The peak {grown}: {verdict} (less than {FLAT_SHARE:.0%}). Planned: {format_size(results.planned)}.")


def print_kv(results: Sequence[KVQuality]) -> None:
    """What every type of cache does to a model's predictions."""
    header = ("", "perplexity", "change", "same next token", "copied", "attention error", "worst layer")
    rows = []
    for each in results:
        shares = (f"{share:.2%}" for share in (each.agreement, each.copied, each.attention_error, each.worst_layer))
        rows.append([each.kv, f"{each.perplexity:.4f}", f"{each.change:+.3%}", *shares])
    print_table(f"{results[0].model}, {results[0].tokens} tokens", header, rows)


def _budget(timed: Timed) -> str:
    return format_size(timed.setup.budget) if timed.setup.budget else timed.setup.name


def _choice(timed: Timed) -> str:
    """How it ran, in words."""
    found = timed.runs[0].found
    choice = found["choice"]
    spared = "; ".join((*found["plan_given_up"], *(f"under way: {name}" for name in found["given_up"])))
    return f"{choice['context']} tokens in {choice['kv']}, {choice['weights']}" + (f": {spared}" if spared else "")


def _line(text: str) -> None:
    Console(highlight=False).print(text, markup=False, soft_wrap=True)
