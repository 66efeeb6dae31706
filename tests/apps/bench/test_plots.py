"""Charts: axes that hold every point, and SVG that any reader can parse."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.apps.bench.plots import Chart, Line, chart_svg, ticks

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
    assert all(64 <= x <= 624 and 40 <= y <= 308 for x, y in drawn)


def test_words_are_escaped_and_labelled() -> None:
    text = chart_svg(Chart("a < b & c", "share, %", "tokens/s", (Line("<one>", ((0.5, 2.0), (1.0, 4.0))),)))
    words = [node.text for node in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert {"a < b & c", "share, %", "tokens/s", "<one>", "4"} <= set(words)


def test_nothing_to_draw_is_still_a_chart() -> None:
    ElementTree.fromstring(chart_svg(Chart("empty", "x", "y", ())))
