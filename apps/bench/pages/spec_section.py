"""The section of `edgeinfer bench spec`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from edgeinfer.apps.bench.pages.page import Section, Table
from edgeinfer.apps.bench.pages.run_facts import commands
from edgeinfer.apps.bench.spec_results import FEWEST_TIMED, PLAIN

__all__ = ["spec_section"]


def spec_section(data: Any) -> Section | None:
    """A section, if this is JSON of speculation."""
    if not (isinstance(data, dict) and data.get("benchmark") == "spec"):
        return None
    modes = [mode for mode in data["prompts"][0]["modes"] if mode != PLAIN]
    categories = list(dict.fromkeys(prompt["category"] for prompt in data["prompts"]))
    rows = []
    for category in categories:
        inside = [prompt["modes"] for prompt in data["prompts"] if prompt["category"] == category]
        rows.append((category, str(len(inside)), *(_speedups(inside, mode) for mode in modes)))
    wrong = sum(found["mismatches"] for prompt in data["prompts"] for found in prompt["modes"].values())
    caption = f"Times faster than plain decoding, mean over prompts; {wrong} replies with other tokens than plain ones"
    table = Table(caption, ("category", "prompts", *modes), tuple(rows))
    return Section("Drafting ahead", _facts(data["setup"]), (table,), commands(data))


def _speedups(prompts: list[Mapping[str, Any]], mode: str) -> str:
    """Mean over prompts, and the least."""
    ratios = [
        statistics.median(found[PLAIN]["ms_per_token"]) / statistics.median(found[mode]["ms_per_token"])
        for found in prompts
        if mode in found and min(*found[PLAIN]["tokens"], *found[mode]["tokens"]) > FEWEST_TIMED
    ]
    return f"{statistics.fmean(ratios):.2f} (least {min(ratios):.2f})" if ratios else ""


def _facts(environment: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    names = {"Model": "model", "Kernel": "kernel", "Processor": "machine", "System": "platform", "Threads": "threads"}
    return tuple((name, str(environment[key])) for name, key in names.items() if key in environment)
