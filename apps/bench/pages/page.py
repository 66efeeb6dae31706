"""A page of sections, tables and charts that needs no other file, for light and dark; knows nothing of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from edgeinfer.apps.bench.plots import Chart, chart_svg

__all__ = ["Section", "Table", "page_html"]

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#57606a;--line:#d0d7de;--page:#fff;--panel:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#30363d;--page:#0d1117;--panel:#161b22}}
*{box-sizing:border-box}
body{margin:0 auto;padding:2.5rem 1.25rem 4rem;max-width:60rem;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .25rem;letter-spacing:-.02em}
h2{font-size:1.25rem;margin:2.75rem 0 .25rem;padding-top:1.25rem;border-top:1px solid var(--line)}
p{margin:.25rem 0 1rem}.soft{color:var(--soft)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.25rem;margin:.5rem 0 1.25rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.wide{overflow-x:auto;margin:0 0 1.25rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding-bottom:.35rem}
th,td{padding:.35rem .9rem .35rem 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600}th:first-child,td:first-child{text-align:left}
figure{margin:0 0 1.25rem}svg{max-width:100%;height:auto}
pre{margin:0 0 1.25rem;padding:.75rem 1rem;background:var(--panel);border:1px solid var(--line);border-radius:8px;
overflow-x:auto;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
"""


@dataclass(frozen=True)
class Table:
    """Figures in rows; the first column names them, and the caption says their units."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """One run.

    Attributes:
        title: what was measured.
        facts: names and values of what figures depend on.
        parts: tables and charts, in order.
        commands: that give such figures again; empty where that was not recorded.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    parts: tuple[Table | Chart, ...]
    commands: tuple[str, ...] = ()


def page_html(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page."""
    body = [f"<h1>{escape(title)}</h1>", f'<p class="soft">{escape(lead)}</p>', *map(_section, sections)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    head = f"<head>{head}<style>{_STYLE}</style></head>"
    return "\n".join(["<!doctype html>", '<html lang="en">', head, "<body>", *body, "</body>", "</html>", ""])


def _section(section: Section) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in section.facts)
    parts = "\n".join(_table(part) if isinstance(part, Table) else _figure(part) for part in section.parts)
    again = "To measure it again:" if section.commands else "The command that gave these figures was not recorded."
    listing = f"<pre>{escape(chr(10).join(section.commands))}</pre>" if section.commands else ""
    return (
        f"<section><h2>{escape(section.title)}</h2>\n<dl>{facts}</dl>\n{parts}\n"
        f'<p class="soft">{again}</p>{listing}</section>'
    )


def _figure(chart: Chart) -> str:
    return f"<figure>{chart_svg(chart)}</figure>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    caption = f"<caption>{escape(table.caption)}</caption>"
    return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
