"""Tables, charts and paragraphs, shown in a terminal, as Markdown and as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from edgeinfer.core.options import format_size

Facts = tuple[tuple[str, str], ...]
Point = tuple[float, float]
# Left, top, right, bottom.
_Box = tuple[float, float, float, float]

_WIDTH, _HEIGHT = 720, 400
_MOST_STEPS = 6
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 20, 44, 76
# Close to Okabe and Ito's colours, for colour-blind readers, on light and dark pages.
_COLOURS = ("#2f81d6", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_SVG_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2328}.title{font-size:14px;font-weight:600}.mark{font-size:11px}"
    ".grid{stroke:#d0d7de;stroke-width:1}.axis{stroke:#57606a;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.grid{stroke:#30363d}.axis{stroke:#8b949e}}"
)
# Widths of a legend's letter and of its dot with gaps, and the height of its rows.
_LETTER, _AROUND, _ROW = 6.2, 34, 18


@dataclass(frozen=True)
class Line:
    """Points with optional words next to them; `dashed` marks a line that was not measured."""

    name: str
    points: tuple[Point, ...]
    marks: tuple[str, ...] = ()
    joined: bool = True
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """A line chart; labels carry units. With a logarithmic y axis every y is above 0, other axes begin at zero."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    logarithmic: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of figures; the first column names them, `words` names other columns of text, the caption says units."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Paragraph:
    """A sentence below the part before it."""

    text: str


Part = Table | Chart | Paragraph


@dataclass(frozen=True)
class Section:
    """The figures of one run; `facts` are names and values that they depend on, `commands` reproduce them."""

    title: str
    facts: Facts
    parts: tuple[Part, ...]
    commands: tuple[str, ...] = ()


def divergence_chart(title: str, x_label: str, points: Mapping[str, Sequence[tuple[float, float, str]]]) -> Chart:
    """Divergence against something: lines of points, each with its label."""
    lines = [
        Line(name, tuple(point[:2] for point in sorted(each)), tuple(point[2] for point in sorted(each)))
        for name, each in points.items()
    ]
    return Chart(title, x_label, "KL divergence, nats per token", tuple(lines), logarithmic=True)


def print_section(section: Section, machine: Facts = ()) -> None:
    """Print a section: title, facts, tables, paragraphs, and the machine."""
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
    if machine:
        console.print("; ".join(value for _, value in machine), markup=False, soft_wrap=True)


def print_table(table: Table) -> None:
    """Print a table at its full width: figures are never cut."""
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


def markdown(parts: Sequence[Part]) -> list[str]:
    """Tables and paragraphs as Markdown."""
    return [
        part.text if isinstance(part, Paragraph) else _table_markdown(part)
        for part in parts
        if not isinstance(part, Chart)
    ]


def _table_markdown(table: Table) -> str:
    rows = [f"| {' | '.join(cells)} |" for cells in (table.header, ["---"] * len(table.header), *table.rows)]
    return "\n".join([f"{table.caption}:", "", *rows])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] | None = None) -> str:
    """A Markdown table with padded columns; those in `left` are aligned left, the others right (None: no alignment)."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if left is None or index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if left is None or i in left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(map(line, (header, rule, *rows))) + "\n"


def run_facts(data: Mapping[str, Any]) -> Facts:
    """Facts about the model and settings of a run."""
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
    """Facts about the machine and the library versions."""
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
    """Facts that all runs which state them agree on."""
    values: dict[str, set[str]] = {}
    for name, value in (fact for facts in sorted(each, key=len, reverse=True) for fact in facts):
        values.setdefault(name, set()).add(value)
    return tuple((name, next(iter(found))) for name, found in values.items() if len(found) == 1)


def commands(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The recorded command, if any."""
    return (data["command"],) if data.get("command") else ()


def ticks(highest: float) -> list[float]:
    """Round numbers from zero to the first that is not below `highest`: steps of 1, 2 or 5 times a power of ten."""
    if not highest > 0 or not math.isfinite(highest):
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / _MOST_STEPS))
    step = next(power * factor for factor in (1, 2, 5, 10) if highest <= power * factor * _MOST_STEPS)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def decades(values: Sequence[float]) -> list[float]:
    """Powers of ten from the last that is not above the smallest value to the first that is not below the largest."""
    if not values:
        return [0.1, 1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def chart_svg(chart: Chart) -> str:
    """The chart as the text of an SVG file."""
    points = [point for line in chart.lines for point in line.points]
    x_ticks = ticks(max((x for x, _ in points), default=1.0))
    y_ticks = decades([y for _, y in points]) if chart.logarithmic else ticks(max((y for _, y in points), default=1.0))
    height, rows = _legend_rows(chart.lines)
    bottom = _HEIGHT - _BOTTOM
    place = _placed(x_ticks, y_ticks, chart.logarithmic)
    right = _WIDTH - _RIGHT
    parts = [f'<text class="title" x="{_LEFT}" y="24">{escape(chart.title)}</text>']
    for value in y_ticks:
        _, y = place((0, value))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{value:g}", "end"))
    for value in x_ticks:
        x, _ = place((value, y_ticks[0]))
        parts.append(_text(x, bottom + 18, f"{value:g}", "middle"))
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(_text((_LEFT + right) / 2, bottom + 38, chart.x_label, "middle"))
    middle = (_TOP + bottom) / 2
    parts.append(f'<g transform="rotate(-90 16 {middle:g})">{_text(16, middle, chart.y_label, "middle")}</g>')
    words: list[_Box] = []
    for index, line in enumerate(chart.lines):
        places = [place(point) for point in line.points]
        parts += _line(places, line, _COLOURS[index % len(_COLOURS)])
        parts += _marks(places, line.marks, words)
        parts += _entry(line.name, _COLOURS[index % len(_COLOURS)], *rows[index])
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT + height:g}" role="img">'
    return f"{head}\n<style>{_SVG_STYLE}</style>\n{body}\n</svg>\n"


def _placed(x_ticks: Sequence[float], y_ticks: Sequence[float], logarithmic: bool) -> Callable[[Point], Point]:
    """Maps a point to its place in the picture."""
    low, high = (math.log10(y_ticks[0]), math.log10(y_ticks[-1])) if logarithmic else (0.0, y_ticks[-1])

    def place(point: Point) -> Point:
        share = ((math.log10(point[1]) if logarithmic else point[1]) - low) / (high - low)
        x = _LEFT + point[0] / x_ticks[-1] * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    return place


def _line(places: Sequence[Point], line: Line, colour: str) -> list[str]:
    """A line and its points."""
    path = " ".join(f"{x},{y}" for x, y in places)
    style = ' stroke-dasharray="5 4"' if line.dashed else ""
    joined = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{style}/>'
    parts = [joined] if line.joined else []
    if not line.dashed:
        parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in places]
    return parts


def _marks(places: Sequence[Point], marks: Sequence[str], taken: list[_Box]) -> list[str]:
    """Words next to points, left out where there is no room."""
    parts = []
    for (x, y), mark in zip(places, marks, strict=False):
        width = _LETTER * len(mark)
        for right, below in ((True, False), (True, True), (False, False), (False, True)):
            left, base = (x + 7 if right else x - 7 - width), (y + 15 if below else y - 6)
            box = (left, base - 11, left + width, base + 3)
            inside = box[0] > _LEFT and box[2] < _WIDTH and box[1] > _TOP and box[3] < _HEIGHT - _BOTTOM
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                anchor = ("start", x + 7) if right else ("end", x - 7)
                parts.append(_text(anchor[1], base, mark, anchor[0], "mark"))
                break
    return parts


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _legend_rows(lines: Sequence[Line]) -> tuple[float, list[Point]]:
    """The extra height that the legend takes, and where its entries begin."""
    x, y, places = float(_LEFT), float(_HEIGHT - 16), []
    for line in lines:
        width = _AROUND + _LETTER * len(line.name)
        if x > _LEFT and x + width > _WIDTH:
            x, y = float(_LEFT), y + _ROW
        places.append((round(x, 1), y))
        x += width
    return y - (_HEIGHT - 16), places


def _entry(name: str, colour: str, x: float, y: float) -> list[str]:
    return [f'<circle cx="{x + 5:g}" cy="{y - 4:g}" r="4" fill="{colour}"/>', _text(x + 15, y, name, "start")]


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
