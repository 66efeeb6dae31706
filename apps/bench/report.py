"""`edgeinfer bench report`: result files of benchmarks and of `edgeinfer tune` as one HTML page."""

from __future__ import annotations

import importlib.resources
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.benchmark import Benchmark
from edgeinfer.apps.bench.compute import COMPUTE
from edgeinfer.apps.bench.curve import CURVE
from edgeinfer.apps.bench.devices import DEVICES
from edgeinfer.apps.bench.memory import MEMORY
from edgeinfer.apps.bench.peers import PEERS_BENCHMARK
from edgeinfer.apps.bench.quality import QUALITY
from edgeinfer.apps.bench.render import (
    Facts,
    Paragraph,
    Part,
    Section,
    Table,
    chart_svg,
    commands,
    common,
    machine_facts,
    run_facts,
)
from edgeinfer.apps.bench.spec import SPEC
from edgeinfer.apps.bench.speed import SPEED
from edgeinfer.core.errors import UsageError

# In the order of the help.
BENCHMARKS: tuple[Benchmark, ...] = (SPEC, *MEMORY, SPEED, CURVE, QUALITY, COMPUTE, PEERS_BENCHMARK, DEVICES)
_MOST_BYTES = 256 * 1024**2


def read_section(path: Path) -> tuple[Section, Facts]:
    """The section of a result file, and the facts about its machine."""
    hint = "Give JSON files that edgeinfer bench and edgeinfer tune wrote."
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is too large.", hint)
        data = json.loads(path.read_text(encoding="utf-8"))
        kind, sections = _kind(data), {each.key: each.section for each in BENCHMARKS} | {"tune": tune_section}
        if kind not in sections:
            raise UsageError(f"{path} is not what a benchmark wrote.", hint)
        return sections[kind](data), machine_facts(data)
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", hint) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration) as error:
        raise UsageError(f"{path} is not what a benchmark wrote ({error}).", hint) from error


def _kind(data: Any) -> str:
    """The benchmark of a result; a list is of speed, in llama-bench's form."""
    if isinstance(data, list):
        return "speed"
    if "benchmark" not in data and "device" in data and "kept" in data:
        return "tune"  # the command's own output, which has no header
    return str(data.get("benchmark"))


def report_html(paths: Sequence[Path], title: str, lead: str) -> str:
    """The page of these files, in order."""
    found = [read_section(path) for path in paths]
    shared = common([facts for _, facts in found])
    # Facts that all runs share are shown once.
    sections = [
        replace(section, facts=(*section.facts, *(fact for fact in facts if fact not in shared)))
        for section, facts in found
    ]
    return page_html(title, lead, sections, shared)


def page_html(title: str, lead: str, sections: Sequence[Section], facts: Facts = ()) -> str:
    """The page."""
    numbered = [(f"s{number}", section) for number, section in zip(itertools.count(1), sections, strict=False)]
    body = [f"<h1>{escape(title)}</h1>", f'<p class="soft">{escape(lead)}</p>']
    body += [f'<div class="panel">{_facts(facts)}</div>'] if facts else []
    body += [_contents(numbered)] if len(numbered) > 1 else []
    body += [_section(anchor, section) for anchor, section in numbered]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    style = importlib.resources.files("edgeinfer.apps.bench").joinpath("report.css").read_text("utf-8")
    head = f"<head>{head}<style>\n{style}</style></head>"
    return "\n".join(["<!doctype html>", '<html lang="en">', head, "<body>", *body, "</body>", "</html>", ""])


def _contents(numbered: Sequence[tuple[str, Section]]) -> str:
    entries = "".join(f'<li><a href="#{anchor}">{escape(section.title)}</a></li>' for anchor, section in numbered)
    return f'<nav class="panel" aria-label="Contents"><ol>{entries}</ol></nav>'


def _facts(facts: Facts) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts) + "</dl>"


def _section(anchor: str, section: Section) -> str:
    parts = "\n".join(map(_part, section.parts))
    again = "To measure it again:" if section.commands else "The command that gave these figures was not recorded."
    listing = f"<pre>{escape(chr(10).join(section.commands))}</pre>" if section.commands else ""
    return (
        f'<section id="{anchor}"><h2>{escape(section.title)}</h2>\n{_facts(section.facts)}\n{parts}\n'
        f'<p class="soft">{again}</p>{listing}</section>'
    )


def _part(part: Part) -> str:
    if isinstance(part, Paragraph):
        return f"<p>{escape(part.text)}</p>"
    return _table(part) if isinstance(part, Table) else f"<figure>{chart_svg(part)}</figure>"


def _table(table: Table) -> str:
    kinds = [' class="words"' if name in table.words else "" for name in table.header]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(table.header, kinds, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=False)) + "</tr>"
        for row in table.rows
    )
    caption = f"<caption>{escape(table.caption)}</caption>"
    return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def tune_section(data: Any) -> Section:
    """The usual and the tuned settings, and the layers that draft."""
    device = data["device"]
    parts = [*(_device(device) if device else ()), *_layers(data)]
    facts = (("Threads", str(device["threads"])),) if device else ()
    return Section("What tuning gains", (*facts, *run_facts(data)), tuple(parts), commands(data))


def _device(device: Mapping[str, Any]) -> Iterator[Table | Paragraph]:
    rows = tuple(
        (name, f"{part['usual_ms']:.2f}", f"{part['tuned_ms']:.2f}", f"{part['ratio']:.2f}")
        for name, part in device["parts"].items()
    )
    yield Table("Milliseconds, as usual and as tuned, and how many times faster", ("", "usual", "tuned", "ratio"), rows)
    chosen = {name: value for name, value in device["settings"].items() if value not in (None, "")}
    kept = ", ".join(f"{name} {value}" for name, value in chosen.items())
    yield Paragraph(f"Kept: {kept}." if kept else "Nothing was better beyond doubt: the usual settings stay.")
    tried = tuple(
        (
            each["name"].replace("_", " "),
            str(each["value"]),
            "" if each["time_ratio"] is None else f"{each['time_ratio']:.2f}",
            each["outcome"],
        )
        for each in device["attempts"]
    )
    if tried:
        header = ("setting", "value", "time, of the usual", "outcome")
        yield Table("Settings that were tried", header, tried, words=("outcome",))


def _layers(data: Mapping[str, Any]) -> Iterator[Table]:
    names = {"exit": "leaving early", "skip": "skipping blocks"}
    rows = tuple(
        (
            words,
            f"{data[name]['match_rate']:.1%}",
            f"{data[name]['predicted_speedup']:.2f}",
            "yes" if data["kept"][name] else "no",
        )
        for name, words in names.items()
        if name in data
    )
    if rows:
        yield Table("Layers that draft", ("", "guessed right", "predicted speed-up", "kept"), rows)
