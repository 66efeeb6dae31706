"""Line charts as self-contained SVG, legible on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Point = tuple[float, float]
# Left, top, right, bottom.
_Box = tuple[float, float, float, float]

_WIDTH, _HEIGHT = 720, 400
_MOST_STEPS = 6
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 20, 44, 76
# Near Okabe and Ito's colours, which the colour-blind tell apart; both kinds of page show these well.
_COLOURS = ("#2f81d6", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2328}.title{font-size:14px;font-weight:600}.mark{font-size:11px}"
    ".grid{stroke:#d0d7de;stroke-width:1}.axis{stroke:#57606a;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.grid{stroke:#30363d}.axis{stroke:#8b949e}}"
)
# Of a legend's letters on average, of its dot and the gap behind an entry, and of its lines.
_LETTER, _AROUND, _ROW = 6.2, 34, 18


@dataclass(frozen=True)
class Line:
    """Points, and words beside them, or none.

    Attributes:
        joined: by a line, in the order given.
        dashed: a line that is no measurement.
    """

    name: str
    points: tuple[Point, ...]
    marks: tuple[str, ...] = ()
    joined: bool = True
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn; labels carry units.

    Attributes:
        logarithmic: the y axis is; every y is then above 0. Other axes begin at zero.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    logarithmic: bool = False


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
    return f"{head}\n<style>{_STYLE}</style>\n{body}\n</svg>\n"


def _placed(x_ticks: Sequence[float], y_ticks: Sequence[float], logarithmic: bool) -> Callable[[Point], Point]:
    """Where a point is drawn."""
    low, high = (math.log10(y_ticks[0]), math.log10(y_ticks[-1])) if logarithmic else (0.0, y_ticks[-1])

    def place(point: Point) -> Point:
        share = ((math.log10(point[1]) if logarithmic else point[1]) - low) / (high - low)
        x = _LEFT + point[0] / x_ticks[-1] * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    return place


def _line(places: Sequence[Point], line: Line, colour: str) -> list[str]:
    """A line, its points and the words beside them."""
    path = " ".join(f"{x},{y}" for x, y in places)
    style = ' stroke-dasharray="5 4"' if line.dashed else ""
    joined = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{style}/>'
    parts = [joined] if line.joined else []
    if not line.dashed:
        parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in places]
    return parts


def _marks(places: Sequence[Point], marks: Sequence[str], taken: list[_Box]) -> list[str]:
    """Words beside points, where nothing is written yet; those that have no room are left out."""
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
    """How much higher the chart is for its legend, and where the entries begin: below it, in rows."""
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
