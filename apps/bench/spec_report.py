"""What a speculation benchmark found, as tables and verdicts; knows nothing of how it was measured."""

from __future__ import annotations

from rich.console import Console

from edgeinfer.apps.bench.cost_expanded import COST_EXPANDED
from edgeinfer.apps.bench.environment import current_environment
from edgeinfer.apps.bench.spec_results import CONTROL, GROUPS, PLAIN, SpecResults
from edgeinfer.apps.bench.tables import print_table

__all__ = ["LEAST_SPEEDUP", "print_results"]

# What counts as not slower: the noise of a median of three on a quiet machine is about 2%.
LEAST_SPEEDUP = 0.98
_JUDGED = "auto"


def print_results(results: SpecResults) -> None:
    """Tables on stdout: one per category, then means over categories, verdicts, and what the figures depend on."""
    console = Console(highlight=False)
    for category in results.categories:
        print_table(
            f"{_title(results)}: {category}", _CATEGORY_HEADER, _category_rows(results, category), words=("on",)
        )
    title = f"{_title(results)}: mean speed-up over {PLAIN}"
    print_table(title, ("", "geometric, all categories", *GROUPS), _overall_rows(results), words=("on",))
    for line in (*_verdict(results), *_notes(results), *_environment(results)):
        console.print(line, markup=False, soft_wrap=True)


_CATEGORY_HEADER = ("", "prompts", "tokens per pass", "ms per token", "speed-up", "least", "on")


def _title(results: SpecResults) -> str:
    """The model, and that its figures are of a cost-expanded one where they are."""
    setup = results.setup
    threads = "1 thread" if setup.threads == 1 else f"{setup.threads} threads"
    return f"{setup.model}, {setup.kernel}, {threads}"


def _category_rows(results: SpecResults, category: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for mode in results.modes:
        summary = results.summary(mode, category)
        if summary is None:
            rows.append((mode, "0", "-", "-", "-", "-", ""))
            continue
        figures = (f"{summary.accepted_length:.2f}", f"{summary.ms:.2f}", f"{summary.speedup:.2f}")
        least = (f"{summary.least:.2f}", summary.worst)
        rows.append((mode, str(summary.prompts), *figures, *least))
    return rows


def _overall_rows(results: SpecResults) -> list[tuple[str, ...]]:
    rows = []
    for mode in results.modes:
        groups = [results.group_speedup(mode, categories) for categories in GROUPS.values()]
        cells = ("-" if value is None else f"{value:.2f}" for value in (results.overall_speedup(mode), *groups))
        rows.append((mode, *cells))
    return rows


def _verdict(results: SpecResults) -> list[str]:
    """Whether the governor's choice is never slower than plain decoding, and where it is."""
    if _JUDGED not in results.modes:
        return []
    slower, timed = results.slower(_JUDGED, LEAST_SPEEDUP), results.timed(_JUDGED)
    claim = f"{_JUDGED} >= {LEAST_SPEEDUP} x {PLAIN} on every prompt"
    if not slower:
        return [f"{claim}: yes, on {len(timed)} of {len(timed)}."]
    lines = [f"{claim}: no, on {len(timed) - len(slower)} of {len(timed)}. Slower on:"]
    return lines + [f"  {times.item.prompt.name}: {times.speedup(_JUDGED):.3f}" for times in slower]


def _notes(results: SpecResults) -> list[str]:
    """What a reader must know before believing the figures."""
    notes = [f"{mode}: skipped: {reason}" for mode, reason in results.skipped.items()]
    for mode in results.modes:
        wrong, plain = results.mismatches(mode), results.prompts[0].plain[mode] if results.prompts else PLAIN
        if wrong:
            notes.append(f"{mode}: {wrong} replies differ from those of {plain}.")
    if not any(results.mismatches(mode) for mode in results.modes):
        notes.append("Every lossless mode gave the tokens of its plain one in every reply.")
    if CONTROL in results.modes and (timed := results.timed(CONTROL)):
        ratios = sorted(times.speedup(CONTROL) for times in timed)
        notes.append(f"Noise: {PLAIN} is {ratios[0]:.3f} to {ratios[-1]:.3f} times as fast as itself.")
    if results.cut:
        notes.append(f"{results.cut} prompts were cut at the front to leave room for the reply.")
    if results.untimed:
        notes.append(f"{results.untimed} prompts had replies of fewer than 3 tokens in some mode: not timed there.")
    if not results.learning:
        notes.append("What drafters learn was not put back between replies: repeats profit from each other.")
    if COST_EXPANDED in results.setup.model:
        notes.append(f"The model is {COST_EXPANDED}: text of a small trained model, time and memory of a large one.")
    return notes


def _environment(results: SpecResults) -> list[str]:
    options = ", ".join(f"{name}={value}" for name, value in results.setup.options.items())
    return [current_environment().summary, f"Options: {options}"]
