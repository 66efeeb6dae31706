"""Figures of several engines as Markdown and as JSON; knows nothing of how they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeinfer.apps.bench.environment import current_environment
from edgeinfer.apps.bench.peers_config import PeersConfig
from edgeinfer.apps.bench.peers_results import BudgetFigures, EngineFigures, ModelFigures
from edgeinfer.apps.bench.timing import Spread
from edgeinfer.config import format_size

__all__ = ["peers_json", "peers_markdown"]

_MB = 1e6


def peers_json(figures: Sequence[ModelFigures], config: PeersConfig) -> dict[str, Any]:
    """As JSON's types, less what every result file begins with."""
    return {
        "threads": config.threads,
        "repeats": config.repeats,
        "rounds": config.rounds,
        "past": config.past,
        "budget_prompt": config.asked,
        "budget_reply": config.answered,
        "models": [each.to_dict() for each in figures],
    }


def peers_markdown(figures: Sequence[ModelFigures], config: PeersConfig) -> str:
    """Tables of every model, and what has to be known about them."""
    parts = [_model(each, config) for each in figures]
    return "\n".join([*parts, current_environment().summary, ""])


def _model(figures: ModelFigures, config: PeersConfig) -> str:
    timed = [each for each in figures.engines if not each.skipped]
    threads = f"{config.threads} thread{'s' * (config.threads > 1)}"
    lines = [f"## {figures.model}: {threads}, context {figures.context}, medians of {config.repeats}", ""]
    header = ["engine", "weights", "on disk", "load ms", *(f"{test} t/s" for test in figures.tests)]
    header += [f"c({size}) ms" for size in figures.sizes] + ["peak RSS MB", "same tokens"]
    lines += _table(header, [_speeds(each, figures) for each in timed])
    if figures.budgets and not figures.limits:
        lines += [f"Tokens/s of a reply of {config.answered} tokens to {config.asked}, all memory limited:", ""]
        header = ["engine", *(format_size(budget) for budget in figures.budgets)]
        lines += _table(header, [_within(each, figures) for each in timed])
    lines += [f"- {figures.check}"]
    if figures.limits:
        lines.append(f"- Speed within budgets was not measured: {figures.limits}.")
    lines += [f"- {each.engine}: {each.note}." for each in timed if each.note]
    wrong = [each for each in timed if each.same_tokens is False]
    lines += [f"- {each.engine}: wrong, its speed does not count." for each in wrong]
    for each in timed:
        refused = {budget: found.reason for budget, found in each.budgets.items() if ":" in found.reason}
        lines += [f"- {each.engine} at {format_size(budget)}: {reason}" for budget, reason in refused.items()]
    lines += [f"- {each.engine}: skipped: {each.skipped.rstrip('.')}." for each in figures.engines if each.skipped]
    return "\n".join([*lines, ""])


def _speeds(engine: EngineFigures, figures: ModelFigures) -> list[str]:
    peak = f"{engine.peak_rss_bytes / _MB:.0f}" if engine.peak_rss_bytes else ""
    agreed = "" if engine.agreement is None else f"{engine.agreement:.0%} of {engine.checked}"
    return [
        f"{engine.engine} {engine.version.partition('-')[0]}",
        engine.weights,
        format_size(engine.size),
        _median(engine.load_ms, 0),
        *(_median(engine.rates.get(test), 1) for test in figures.tests),
        *(_median(engine.passes.get(size), 2) for size in figures.sizes),
        peak,
        agreed,
    ]


def _within(engine: EngineFigures, figures: ModelFigures) -> list[str]:
    return [engine.engine, *(_cell(engine.budgets.get(budget)) for budget in figures.budgets)]


def _cell(found: BudgetFigures | None) -> str:
    """The rate, or in a word why there is none."""
    if found is None:
        return ""
    return found.reason.partition(":")[0] if found.tokens_per_second is None else f"{found.tokens_per_second:.1f}"


def _median(spread: Spread | None, digits: int) -> str:
    return "" if spread is None else f"{spread.median:.{digits}f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Of Markdown, its columns aligned."""
    cells = [header, *rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [lines[0], rule, *lines[1:], ""]
