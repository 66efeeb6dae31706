"""Result files of reproduced runs: kept whole, without paths of this machine, listed, as a page; knows no commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.environment import run_header
from edgeinfer.apps.bench.pages.sections import report_html
from edgeinfer.apps.bench.render import common, machine_facts
from edgeinfer.apps.bench.reproduce_runs import RUNS

__all__ = ["finished", "keep", "read_result", "redact", "write_index", "write_page"]

_LEAD = "Every figure of the README, and what it was made from. Medians, unless said otherwise."


def read_result(folder: Path, name: str) -> Any:
    """A run's JSON; None where there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def finished(folder: Path, name: str, *, quick: bool) -> bool:
    """Whether a run is there; one that was made in a hurry counts only where that is enough."""
    data = read_result(folder, name)
    return data is not None and (quick or not head(data).get("quick"))


def head(data: Any) -> Mapping[str, Any]:
    """What a result says of itself: of speed's list each row says it."""
    row: Mapping[str, Any] = data[0] if isinstance(data, list) else data
    return row


def keep(
    folder: Path, name: str, data: Any, *, command: str, words: Mapping[str, str], facts: Mapping[str, Any]
) -> None:
    """Writes a result, whole or not at all.

    Args:
        data: as the command wrote it.
        command: that gives it again, in words.
        words: what stands for paths of this machine, by path.
        facts: that the file shall say besides.
    """
    data = redact(data, words)
    if isinstance(data, list):
        kept: Any = [row | {"command": command} | facts for row in data]
    else:
        header = {} if "benchmark" in data else run_header(name, command)
        kept = {**header, **data, "command": command, **facts}
    partial = folder / f"{name}.json.partial"
    partial.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    partial.replace(folder / f"{name}.json")


def redact(value: Any, words: Mapping[str, str]) -> Any:
    """The same with paths replaced, in all its strings; the longest first, as one may lie in another."""
    if isinstance(value, str):
        for path in sorted(words, key=len, reverse=True):
            value = value.replace(path, words[path])
        return value
    if isinstance(value, list):
        return [redact(each, words) for each in value]
    if isinstance(value, dict):
        return {redact(key, words): redact(each, words) for key, each in value.items()}
    return value


def write_page(folder: Path) -> Path | None:
    """The report of all runs that are there; None of none."""
    files = [path for run in RUNS if (path := folder / f"{run.name}.json").is_file()]
    if not files:
        return None
    out = folder / "report.html"
    out.write_text(report_html(files, "edgeinfer, measured", _LEAD), "utf-8")
    return out


def write_index(folder: Path, again: str) -> None:
    """README.md: which files there are, on which machine, when and how they were made.

    Args:
        again: the command that makes all of them.
    """
    found = {run: data for run in RUNS if (data := read_result(folder, run.name)) is not None}
    shared = common([machine_facts(data) for data in found.values()])
    lines = ["# Results", "", "Made by", "", "```", again, "```", ""]
    lines += ["`report.html` shows all of them; the README's tables are filled from these files.", ""]
    lines += _lines(("", ""), shared) if shared else []
    rows = []
    for run, data in found.items():
        said = head(data)
        seconds = f"{said['seconds'] / 60:.1f}" if "seconds" in said else ""
        hurried = " (in a hurry: no figures)" if said.get("quick") else ""
        rows.append((f"`{run.name}.json`", run.words + hurried, said["test_time"], seconds, f"`{said['command']}`"))
    lines += ["", *_lines(("file", "what", "when", "minutes", "command"), rows)]
    lines += ["", "Other files here belong to [MEASUREMENTS](../MEASUREMENTS.md).", ""]
    (folder / "README.md").write_text("\n".join(lines), "utf-8")


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
