"""Line charts as self-contained SVG, legible on light and dark pages; knows nothing of what is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["Chart", "Line", "chart_svg", "ticks"]

Point = tuple[float, float]

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 52
# Okabe and Ito's colours, which the colour-blind tell apart; both kinds of page show them.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_STYLE = (
    "text{font:12px sans-serif;fill:#1f2328}.title{font-size:14px;font-weight:600}"
    ".grid{stroke:#d0d7de;stroke-width:1}.axis{stroke:#57606a;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.grid{stroke:#30363d}.axis{stroke:#8b949e}}"
)


@dataclass(frozen=True)
class Line:
    """Points joined in the order given."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """What is drawn; both axes begin at zero and labels carry their units."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]


def ticks(highest: float, most: int = 6) -> list[float]:
    """Round numbers from zero to the first that is not below `highest`: steps of 1, 2 or 5 times a power of ten."""
    if not highest > 0 or not math.isfinite(highest):
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if highest <= power * factor * most)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def chart_svg(chart: Chart) -> str:
    """The chart as the text of an SVG file."""
    points = [point for line in chart.lines for point in line.points]
    x_ticks, y_ticks = (ticks(max((p[axis] for p in points), default=1.0)) for axis in (0, 1))

    def place(point: Point) -> tuple[float, float]:
        x = _LEFT + point[0] / x_ticks[-1] * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - point[1] / y_ticks[-1] * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    right, bottom = place((x_ticks[-1], 0))
    parts = [f'<text class="title" x="{_LEFT}" y="22">{escape(chart.title)}</text>']
    for value in y_ticks:
        _, y = place((0, value))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{value:g}", "end"))
    for value in x_ticks:
        x, _ = place((value, 0))
        parts.append(_text(x, bottom + 18, f"{value:g}", "middle"))
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 12, chart.x_label, "middle"))
    parts.append(f'<g transform="rotate(-90 16 {_HEIGHT / 2})">{_text(16, _HEIGHT / 2, chart.y_label, "middle")}</g>')
    for index, line in enumerate(chart.lines):
        parts += _line([place(p) for p in line.points], line.name, index, right)
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
    return f"{head}\n<style>{_STYLE}</style>\n{body}\n</svg>\n"


def _line(places: Sequence[Point], name: str, index: int, right: float) -> list[str]:
    """A line, its points and its entry in the legend."""
    colour = _COLOURS[index % len(_COLOURS)]
    path = " ".join(f"{x},{y}" for x, y in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in places]
    y = _TOP + 8 + 18 * index
    parts.append(f'<circle cx="{right - 6}" cy="{y - 4}" r="4" fill="{colour}"/>')
    parts.append(_text(right - 16, y, name, "end"))
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
