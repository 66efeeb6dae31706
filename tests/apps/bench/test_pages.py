"""Charts and the report page: every figure is shown, text stays text, and files of other kinds are refused."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.apps.bench.benchmark import run_header
from edgeinfer.apps.bench.render import Chart, Line, Paragraph, Section, Table, chart_svg, decades, ticks
from edgeinfer.apps.bench.report import page_html, read_section
from edgeinfer.apps.cli.main import main
from edgeinfer.core.errors import UsageError
from tests.recorded import check_recorded
from tests.tools.reproduce import RUNS, write_page

RESULTS = Path(__file__).parents[3] / "docs" / "results"
SVG = "{http://www.w3.org/2000/svg}"
sizes = st.floats(1e-6, 1e9)


@given(sizes)
def test_ticks_are_few_and_reach_the_highest(highest: float) -> None:
    found = ticks(highest)
    assert found[0] == 0 and found[-1] >= highest * (1 - 1e-8)
    assert 2 <= len(found) <= 7 and found[-2] < highest


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5), st.booleans())
def test_every_point_lies_inside(points: list[tuple[float, float]], logarithmic: bool) -> None:
    chart = Chart("t", "x", "y", (Line("a", tuple(points), tuple(map(str, points))),), logarithmic=logarithmic)
    circles = list(ElementTree.fromstring(chart_svg(chart)).iter(f"{SVG}circle"))[: len(points)]
    drawn = [(float(c.get("cx", "-1")), float(c.get("cy", "-1"))) for c in circles]
    assert len(drawn) == len(points) and all(72 <= x <= 700 and 44 <= y <= 324 for x, y in drawn)
    found = decades([y for _, y in points])
    assert found[0] <= min(y for _, y in points) * (1 + 1e-9) and len(found) > 1


def test_charts_are_drawn_as_they_were() -> None:
    marked = Line("a", ((1.0, 1.0), (1.0, 1.0), (2.0, 0.5), (4.0, 2.0)), ("same", "place", "alone", "at the edge"))
    other = Line("b", ((0.5, 0.02), (3.0, 30.0)))
    charts = [Chart("t", "x", "y", (marked, other), logarithmic=way) for way in (False, True)]
    charts.append(Chart("empty", "x", "y", ()))
    check_recorded("charts", [line for chart in charts for line in chart_svg(chart).splitlines()])


class _Texts(HTMLParser):
    """The texts of a page, and its elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


OTHER = (
    *("", "{", "[]", "{}", "[1]", '"x"', '{"points": 3, "limits": null}', '[{"samples_ts": []}]'),
    *('{"benchmark": "spec", "prompts": []}', '{"benchmark": "quality", "subjects": []}'),
    *('{"benchmark": "memory-plans"}', '{"benchmark": "poetry"}'),
)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path, page = tmp_path / "other.json", tmp_path / "page.html"
    assert main(["bench", "report", str(path), "--out", str(page)]) == 2
    for text in OTHER:
        path.write_text(text)
        with pytest.raises(UsageError, match=r"other\.json"):
            read_section(path)
        assert main(["bench", "report", str(path), "--out", str(page)]) == 2, text
    assert not page.exists()


WORDS = st.text(max_size=30)


@given(title=WORDS, name=WORDS, cell=WORDS, command=WORDS)
def test_text_of_files_stays_text(title: str, name: str, cell: str, command: str) -> None:
    chart = Chart(title, name, cell, (Line(name, ((0.0, 1.0), (1.0, 2.0))),))
    table, note = Table(title, (name,), ((cell,),), words=(cell,)), Paragraph(cell)
    section = Section(title, ((name, cell),), (table, chart, note), (command,))
    parts = (Table("x", ("x",), (("x",),)), chart, Paragraph("x"))
    pages = page_html(title, name, [section]), page_html("x", "x", [Section("x", (("x", "x"),), parts, ("x",))])
    found, plain = ([tag for tag, _ in _Texts(page).elements] for page in pages)
    assert found == plain


def test_the_page_of_all_results_is_as_published(tmp_path: Path) -> None:
    for run in RUNS:
        (tmp_path / f"{run.name}.json").write_text((RESULTS / f"{run.name}.json").read_text("utf-8"), "utf-8")
    write_page(tmp_path)
    text = (tmp_path / "report.html").read_text("utf-8")
    assert text == (RESULTS / "report.html").read_text("utf-8"), "run: python -m tests.tools.reproduce --readme"
    page = _Texts(text)
    # Nothing is fetched, nothing runs.
    assert not [tag for tag, attributes in page.elements if tag in ("script", "link", "img") or "src" in attributes]
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links == [f"#{attributes['id']}" for tag, attributes in page.elements if tag == "section"]


def test_facts_that_differ_and_runs_that_failed_are_shown(tmp_path: Path) -> None:
    refused = {"budget": 200_000_000, "reason": "too small", "runs": [], "short_speed": 0.0, "deep_speed": 0.0}
    found = {
        "memory-smallest": {"model": "big", "context": 2048, "points": [refused]},
        "memory-chat": {"peaks": [80_000_000] * 20, "planned": 1, "context": 256, "growth": 0.0, "flat": True},
    }
    files = []
    for number, (name, data) in enumerate(found.items()):
        header = run_header(name, "the command")
        header["environment"] |= {"processor": "the processor", "cores": 2 + number}
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(header | data))
    out = tmp_path / "page.html"
    assert main(["bench", "report", *map(str, files), "--out", str(out), "--title", "A <b>page</b>"]) == 0
    texts = _Texts(out.read_text("utf-8")).texts
    assert {"A <b>page</b>", "200.0 MB", "-", "too small", "peak of the process, MB", "the command"} <= set(texts)
    assert texts.count("the processor") == 1 and texts.count("Cores") == 2
