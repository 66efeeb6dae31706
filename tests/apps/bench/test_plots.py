"""Charts: axes that hold every point, and SVG that any reader can parse."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.apps.bench.plots import Chart, Line, chart_svg, decades, ticks
from tests.recorded import check_recorded

SVG = "{http://www.w3.org/2000/svg}"
sizes = st.floats(1e-6, 1e9)


@given(sizes)
def test_ticks_are_few_and_reach_the_highest(highest: float) -> None:
    found = ticks(highest)
    assert found[0] == 0 and found[-1] >= highest * (1 - 1e-8)
    assert 2 <= len(found) <= 7
    assert found[-2] < highest


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5))
def test_every_point_lies_inside(points: list[tuple[float, float]]) -> None:
    root = ElementTree.fromstring(chart_svg(Chart("t", "x", "y", (Line("a", tuple(points)),))))
    drawn = [(float(c.get("cx", "-1")), float(c.get("cy", "-1"))) for c in root.iter(f"{SVG}circle")][: len(points)]
    assert len(drawn) == len(points)
    assert all(72 <= x <= 700 and 44 <= y <= 324 for x, y in drawn)


def test_words_are_escaped_and_labelled() -> None:
    text = chart_svg(Chart("a < b & c", "share, %", "tokens/s", (Line("<one>", ((0.5, 2.0), (1.0, 4.0))),)))
    words = [node.text for node in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert {"a < b & c", "share, %", "tokens/s", "<one>", "4"} <= set(words)


@given(st.lists(sizes, min_size=1, max_size=5))
def test_logarithmic_axes_hold_every_point(values: list[float]) -> None:
    found = decades(values)
    assert found[0] <= min(values) * (1 + 1e-9) and found[-1] >= max(values) * (1 - 1e-9) and len(found) > 1
    points = tuple((float(index), value) for index, value in enumerate(values))
    line = Line("a", points, tuple(map(str, values)))
    root = ElementTree.fromstring(chart_svg(Chart("t", "x", "y", (line,), logarithmic=True)))
    drawn = [(float(c.get("cx", "-1")), float(c.get("cy", "-1"))) for c in root.iter(f"{SVG}circle")][: len(points)]
    assert all(72 <= x <= 700 and 44 <= y <= 324 for x, y in drawn)


def test_words_stand_beside_points_and_not_on_each_other() -> None:
    line = Line("a", ((1.0, 1.0), (1.0, 1.0), (2.0, 0.5), (4.0, 2.0)), ("same", "place", "alone", "at the edge"))
    root = ElementTree.fromstring(chart_svg(Chart("t", "x", "y", (line,))))
    marks = {node.text: node for node in root.iter(f"{SVG}text") if node.get("class") == "mark"}
    assert set(marks) == {"same", "place", "alone", "at the edge"}
    assert marks["same"].get("y") != marks["place"].get("y")
    # Words that would leave the picture are on the other side.
    assert (marks["alone"].get("text-anchor"), marks["at the edge"].get("text-anchor")) == ("start", "end")


def test_charts_are_drawn_as_they_were() -> None:
    marked = Line("a", ((1.0, 1.0), (1.0, 1.0), (2.0, 0.5), (4.0, 2.0)), ("same", "place", "alone", "at the edge"))
    other = Line("b", ((0.5, 0.02), (3.0, 30.0)))
    charts = [Chart("t", "x", "y", (marked, other), logarithmic=way) for way in (False, True)]
    charts.append(Chart("empty", "x", "y", ()))
    check_recorded("charts", [line for chart in charts for line in chart_svg(chart).splitlines()])


def test_long_legends_go_on_below() -> None:
    lines = tuple(Line(f"a model with a long name {number}", ((1.0, 2.0),)) for number in range(6))
    root = ElementTree.fromstring(chart_svg(Chart("t", "x", "y", lines)))
    heights = {float(node.get("y", "0")) for node in root.iter(f"{SVG}text") if "long name" in (node.text or "")}
    assert len(heights) > 1 and max(heights) < float(root.get("viewBox", "0 0 0 0").split()[3])
