"""The section of `edgeinfer bench spec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.apps.bench.render import Facts, Paragraph, Part, Section, Table, commands, run_facts
from edgeinfer.apps.bench.spec_results import PLAIN

__all__ = ["spec_section"]


def spec_section(data: Any) -> Section:
    """Drafting beside plain decoding, by category of prompts."""
    modes = [mode for mode in data["modes"] if mode != PLAIN]
    categories = list(data["categories"][PLAIN])
    header = ("category", "prompts", f"{PLAIN}: ms per token", *modes)
    rows = [(name, *_plain(data, name), *(_speedup(data, mode, name) for mode in modes)) for name in categories]
    rows.append(
        ("geometric mean", "", "", *(_number(data["overall"][mode], "geometric_mean_speedup") for mode in modes))
    )
    lengths = [
        (name, *(_number(data["categories"][mode].get(name), "accepted_length") for mode in modes))
        for name in categories
    ]
    wrong = sum(found["mismatches"] for found in data["overall"].values())
    parts: tuple[Part, ...] = (
        Table("Times faster than plain decoding, mean over prompts, and the least", header, tuple(rows)),
        Table("Tokens per pass of the model", ("category", *modes), tuple(lengths)),
        Paragraph(f"{wrong} replies had other tokens than plain decoding's."),
        *(Paragraph(f"{mode}: skipped: {reason}") for mode, reason in data["skipped"].items()),
    )
    return Section("Drafting ahead", (*_facts(data["setup"]), *run_facts(data)), parts, commands(data))


def _plain(data: Mapping[str, Any], category: str) -> tuple[str, str]:
    summary = data["categories"][PLAIN][category]
    return str(summary["prompts"]), f"{summary['ms']:.2f}"


def _speedup(data: Mapping[str, Any], mode: str, category: str) -> str:
    summary = data["categories"][mode].get(category)
    return "" if summary is None else f"{summary['speedup']:.2f} (least {summary['least']:.2f})"


def _number(found: Mapping[str, Any] | None, name: str) -> str:
    return "" if found is None or found[name] is None else f"{found[name]:.2f}"


def _facts(setup: Mapping[str, Any]) -> Facts:
    names = {"Model": "model", "Kernel": "kernel", "Threads": "threads"}
    return tuple((name, str(setup[key])) for name, key in names.items() if key in setup)
