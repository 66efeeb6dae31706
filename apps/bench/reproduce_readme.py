"""Tables of the README, filled from result files, so that no figure is typed by hand; knows nothing of running."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgeinfer.apps.bench.pages.page import markdown
from edgeinfer.apps.bench.pages.run_facts import machine_facts
from edgeinfer.apps.bench.pages.sections import read_section
from edgeinfer.apps.bench.reproduce_files import head, read_result

__all__ = ["block", "fill", "names"]

_MARKED = re.compile(r"(<!-- results:(?P<name>[\w-]+) -->\n)(?P<text>.*?)(<!-- /results -->)", re.DOTALL)
# Of sections with several parts those that the README shows; all of others.
_SHOWN: Mapping[str, Sequence[int]] = {
    "memory-plans": (0, 2),
    "memory-smallest": (0, 2),
    "spec": (0, 2),
    "tune": (0, 1),
}


def names(text: str) -> list[str]:
    """Of the results that a text shows."""
    return [found["name"] for found in _MARKED.finditer(text)]


def fill(text: str, folder: Path) -> str:
    """The text with every marked part as the result files have it."""
    return _MARKED.sub(lambda found: found[1] + block(folder, found["name"]) + found[4], text)


def block(folder: Path, name: str) -> str:
    """What stands between the marks of a run: its tables, then machine, date and command."""
    data = read_result(folder, name)
    if data is None or head(data).get("quick"):
        return f"Not measured yet: `python -m edgeinfer.apps.bench.reproduce --only {name}`.\n"
    section, _ = read_section(folder / f"{name}.json")
    shown = _SHOWN.get(name)
    parts = [part for index, part in enumerate(section.parts) if shown is None or index in shown]
    said = head(data)
    facts = dict(machine_facts(data))
    cores = f", {facts['Cores']} cores" if "Cores" in facts else ""
    source = f"{facts['Processor']}{cores}, {said['test_time'][:10]}: `{said['command']}`"
    return "\n\n".join([*markdown(parts), source]) + "\n"
