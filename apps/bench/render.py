"""The one renderer of results: tables, charts and paragraphs for a terminal, as Markdown, JSON and HTML."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from edgeinfer.apps.bench.environment import current_environment, run_header
from edgeinfer.apps.bench.plots import Chart, chart_svg
from edgeinfer.config import format_size

Facts = tuple[tuple[str, str], ...]

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#57606a;--line:#d0d7de;--page:#fff;--panel:#f6f8fa;--link:#0969da}
@media(prefers-color-scheme:dark){
:root{--ink:#e6edf3;--soft:#9198a1;--line:#30363d;--page:#0d1117;--panel:#161b22;--link:#58a6ff}}
*{box-sizing:border-box}
body{margin:0 auto;padding:2.5rem 1.25rem 4rem;max-width:64rem;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .25rem;letter-spacing:-.02em}
h2{font-size:1.25rem;margin:2.75rem 0 .25rem;padding-top:1.25rem;border-top:1px solid var(--line)}
p{margin:.25rem 0 1rem}.soft{color:var(--soft)}
.panel{padding:.85rem 1.1rem;background:var(--panel);border:1px solid var(--line);border-radius:8px;margin:1.25rem 0}
.panel dl,.panel ol{margin:0}
nav ol{columns:2;column-gap:2rem;padding-left:1.4rem}nav li{break-inside:avoid;padding:.1rem 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.25rem;margin:.5rem 0 1.25rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.wide{overflow-x:auto;margin:0 0 1.25rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.94rem}
caption{text-align:left;color:var(--soft);padding-bottom:.35rem;white-space:nowrap}
th,td{padding:.35rem 1.1rem .35rem 0;text-align:right;vertical-align:top;border-bottom:1px solid var(--line);
white-space:nowrap}
th{font-weight:600;vertical-align:bottom}th:first-child,td:first-child,.words{text-align:left}
.words{white-space:normal;min-width:16rem}
figure{margin:0 0 1.25rem}svg{display:block;width:100%;max-width:46rem;height:auto}
pre{margin:0 0 1.25rem;padding:.75rem 1rem;background:var(--panel);border:1px solid var(--line);border-radius:8px;
white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media(max-width:40rem){nav ol{columns:1}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.4rem}}
@media print{body{max-width:none;padding:0}section{break-inside:avoid}}
"""


@dataclass(frozen=True)
class Table:
    """Figures in rows; the first column names them, and the caption says their units.

    Attributes:
        words: names of columns, besides the first, that hold words.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Paragraph:
    """A sentence about what stands above it."""

    text: str


Part = Table | Chart | Paragraph


@dataclass(frozen=True)
class Section:
    """One run.

    Attributes:
        title: what was measured.
        facts: names and values of what figures depend on.
        parts: tables, charts and notes, in order.
        commands: that give such figures again; empty where that was not recorded.
    """

    title: str
    facts: Facts
    parts: tuple[Part, ...]
    commands: tuple[str, ...] = ()


def page_html(title: str, lead: str, sections: Sequence[Section], facts: Facts = ()) -> str:
    """The page."""
    numbered = [(f"s{number}", section) for number, section in zip(itertools.count(1), sections, strict=False)]
    body = [f"<h1>{escape(title)}</h1>", f'<p class="soft">{escape(lead)}</p>']
    body += [f'<div class="panel">{_facts(facts)}</div>'] if facts else []
    body += [_contents(numbered)] if len(numbered) > 1 else []
    body += [_section(anchor, section) for anchor, section in numbered]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    head = f"<head>{head}<style>{_STYLE}</style></head>"
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


def print_section(section: Section) -> None:
    """A section on stdout: title and facts, its tables as wide as they are, paragraphs, and what was measured with."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(section.title, style="bold"), soft_wrap=True)
    if section.facts:
        facts = "; ".join(f"{name.lower()}: {value}" for name, value in section.facts)
        console.print(Text(facts), soft_wrap=True)
    console.print()
    for part in section.parts:
        if isinstance(part, Table):
            print_table(part)
        elif isinstance(part, Paragraph):
            console.print(part.text, markup=False, soft_wrap=True)
    console.print(current_environment().summary, markup=False, soft_wrap=True)


def print_table(table: Table) -> None:
    """A table on stdout, as wide as it is: a figure cut short is no figure."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(table.caption, style="bold"), soft_wrap=True)
    shown = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(table.header):
        left = index == 0 or name in table.words
        shown.add_column(Text(name), style="cyan" if index == 0 else "", justify="left" if left else "right")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    width = Measurement.get(console, console.options.update(max_width=10_000), shown).maximum
    Console(highlight=False, width=width).print(shown)
    console.print()


def section_markdown(section: Section) -> str:
    """What a terminal and a Markdown file show of a section: its facts, tables and notes."""
    facts = ", ".join(f"{name}: {value}" for name, value in section.facts)
    return "\n\n".join([f"## {section.title}", *([facts] if facts else []), *markdown(section.parts)]) + "\n"


def markdown(parts: Sequence[Part]) -> list[str]:
    """Tables and sentences as Markdown; charts have none."""
    return [
        part.text if isinstance(part, Paragraph) else _table_markdown(part)
        for part in parts
        if not isinstance(part, Chart)
    ]


def _table_markdown(table: Table) -> str:
    rows = [f"| {' | '.join(cells)} |" for cells in (table.header, ["---"] * len(table.header), *table.rows)]
    return "\n".join([f"{table.caption}:", "", *rows])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] | None = None) -> str:
    """A Markdown table with aligned columns, ending in a newline.

    Args:
        left: indices of columns that are aligned left while the others are aligned right; None says nothing of it.
    """
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if left is None or index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if left is None or i in left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(map(line, (header, rule, *rows))) + "\n"


def result_json(benchmark: str, command: str, data: Mapping[str, Any]) -> str:
    """Figures as a result file, behind what they depend on: machine, versions, date and command."""
    return json.dumps({**run_header(benchmark, command), **data}, indent=1) + "\n"


def run_facts(data: Mapping[str, Any]) -> Facts:
    """Facts of one run's model and settings, as `speed.describe_run` and the headers of result files say them."""
    facts = {
        "Model": data.get("model_type"),
        "Size": format_size(data["model_size"]) if "model_size" in data else None,
        "Parameters": f"{data['model_n_params'] / 1e6:.1f} M" if "model_n_params" in data else None,
        "Engine": data.get("backends"),
        "Threads": data.get("n_threads"),
        "Cache": data.get("type_k"),
        "When": data.get("test_time"),
    }
    return tuple((name, str(value)) for name, value in facts.items() if value is not None)


def machine_facts(data: Any) -> Facts:
    """Facts of the machine and the versions that a run was made with; what is missing is left out."""
    row = data[0] if isinstance(data, list) else data
    environment = row.get("environment") or {}
    libraries = [f"{name} {number}" for name, number in environment.get("libraries", {}).items()]
    python = environment.get("python")
    version = f"edgeinfer {row['edgeinfer']}" if "edgeinfer" in row else row.get("build_commit")
    facts = {
        "Processor": environment.get("processor", row.get("cpu_info")),
        "Cores": str(environment["cores"]) if "cores" in environment else None,
        "Memory": format_size(environment["memory_bytes"]) if "memory_bytes" in environment else None,
        "System": environment.get("system", row.get("platform")),
        "Version": version,
        "Libraries": ", ".join([f"python {python}", *libraries]) if python else None,
    }
    return tuple((name, str(value)) for name, value in facts.items() if value is not None)


def common(each: Sequence[Facts]) -> Facts:
    """Facts on which all runs agree that state them."""
    # In the order of whoever states most.
    values: dict[str, set[str]] = {}
    for name, value in (fact for facts in sorted(each, key=len, reverse=True) for fact in facts):
        values.setdefault(name, set()).add(value)
    return tuple((name, next(iter(found))) for name, found in values.items() if len(found) == 1)


def commands(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The command that gave the figures, if it was recorded."""
    return (data["command"],) if data.get("command") else ()
