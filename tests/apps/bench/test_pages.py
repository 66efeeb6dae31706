"""Charts and the report page: every figure is shown, text stays text, and files of other kinds are refused."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.apps.bench.benchmark import run_header
from edgeinfer.apps.bench.render import (
    Chart,
    Line,
    Paragraph,
    Section,
    Table,
    chart_svg,
    decades,
    section_markdown,
    ticks,
)
from edgeinfer.apps.bench.report import page_html, read_section
from edgeinfer.apps.cli.main import main
from edgeinfer.errors import UsageError
from tests.apps.bench.here import known_limits
from tests.recorded import check_recorded
from tests.speculation import needs_builtin

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


@needs_builtin
def test_a_page_of_several_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known_limits(monkeypatch)
    files = {name: tmp_path / f"{name}.json" for name in ("speed", "curve", "spec")}
    load = ["-t", "1", "-r", "2", "-c", "64", "--speculation", "off"]
    tests = ["-p", "8", "-n", "4", "-d", "0,8", "-o", "json", "--out", str(files["speed"])]
    assert main(["bench", "speed", *tests, *load]) == 0
    assert main(["bench", "curve", "--sizes", "1,2,4", "-d", "8", *load, "--json", str(files["curve"])]) == 0
    spec = ["--categories", "tales/write,tales/start", "--per-category", "1", "-n", "8", "--repeats", "1", "-t", "1"]
    assert main(["bench", "spec", *spec, "--json", str(files["spec"])]) == 0
    out = tmp_path / "report.html"
    assert main(["bench", "report", *map(str, files.values()), "--out", str(out), "--title", "A <b>page</b>"]) == 0
    page = _Texts(out.read_text("utf-8"))
    text = "\n".join(page.texts)
    speed, curve = (json.loads(files[name].read_text()) for name in ("speed", "curve"))
    for row in speed:
        assert row["test"] in page.texts and f"{row['median_ts']:.1f}" in page.texts
    for point in curve["points"]:
        assert f"{point['ms']['median']:.2f}" in page.texts
    assert "A <b>page</b>" in text and speed[0]["cpu_info"] in page.texts and speed[0]["command"] in text
    assert {"tokens per second", "m, new tokens in a pass", "tokens before"} <= set(page.texts)
    # Nothing is fetched, nothing runs.
    assert not [tag for tag, attributes in page.elements if tag in ("script", "link", "img") or "src" in attributes]
    assert [tag for tag, _ in page.elements].count("svg") == 2


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


def results() -> dict[str, dict[str, Any]]:
    """Result files by benchmark, in which no figure is another's."""
    case = {"number": 0, "subject": {"name": "tiny"}, "options": {"counted": "resident"}}
    details = {"choice": {"kv": "float32", "weights": "mapped"}, "anonymous": {"kv": 5}, "file": {}, "used": {"kv": 4}}
    plan = {"case": case, "enforced": "cgroup", "counted": "resident", "details": details, "times_full": 0}
    ran = plan | {"outcome": "kept", "reason": "", "planned": 90_000_000, "budget": 100_000_000, "measured": 85_000_000}
    killed = plan | {"outcome": "killed", "reason": "gone", "planned": 0, "budget": 0, "measured": 0}
    outcomes = {"kept": 1, "exceeded": 0, "refused": 0, "failed": 0, "killed": 1}
    gap = {"median": 0.05, "p25": 0.05, "p75": 0.05}
    found = {"planned": 390_000_000, "plan_given_up": ["cache in int8"], "given_up": []}
    good = {"reason": "", "peak_rss": 380_000_000, "peak_anonymous": 190_000_000, "found": found}
    shares = {"short_share": 1.0, "deep_share": 0.97}
    points = [
        {"budget": 400_000_000, "reason": "", "runs": [good], "short_speed": 100.0, "deep_speed": 50.0, **shares},
        {"budget": 200_000_000, "reason": "too small", "runs": [], "short_speed": 0.0, "deep_speed": 0.0},
    ]
    cache = {"model": "tales", "kv": "int8", "perplexity": 9.37, "change": 0.001, "agreement": 0.988, "copied": 0.731}
    subjects = [_subject(1, 0.0), _subject(2, 0.25, tasks=0), _subject(3, 0.5, "int4", tasks=1)]
    skipped = [{"model": "m", "variant": "2 bits", "reason": "no room"}]
    chat = {"peaks": [80_000_000] * 20, "planned": 90_000_000, "context": 256, "growth": 0.0, "flat": True}
    return {
        "memory-plans": {"seed": 1, "outcomes": outcomes, "gap": gap, "runs": [ran, killed]},
        "memory-smallest": {"model": "big", "context": 2048, "points": points},
        "memory-chat": chat,
        "memory-kv": {"caches": [cache | {"attention_error": 0.013, "tokens": 8340}]},
        "quality": {"text": "a book", "subjects": subjects, "skipped": skipped},
    }


def _subject(number: int, divergence: float, cache: str | None = None, tasks: int = 2) -> dict[str, Any]:
    scores = {
        name: {"right": number, "of": number + 1 + place, "tokens_right": 9 + number, "tokens": 15 + place}
        for place, name in enumerate(["tales/who", "tales/again"][:tasks])
    }
    sizes = {"bytes": 3_000_000 * number, "bits_per_weight": 8.5 / number, "cache_bytes": 1_000_000 + number}
    figures: dict[str, Any] = {"perplexity": 9.3 + number, "perplexity_error": 0.1 / number, "divergence": divergence}
    figures |= {"divergence_error": 0.001, "agreement": 0.99 - number / 50, "tokens": 10 * number, "tasks": scores}
    label = f"{8 * number} bits"
    return {"model": "m", "variant": label, "weights": label, "cache": cache, **sizes, **figures}


SHOWN = {
    "memory-plans": {"tiny", "90.0 MB", "85.0 MB", "5.0%", "planned, MB", "measured peak, MB", "as planned"},
    "memory-smallest": {"400.0 MB", "200.0 MB", "big, short", "100.0", "50.0", "-", "too small", "97%"},
    "memory-chat": {"turn", "The peak grew by 0.00% after turn 10: flat (less than 1%). Planned: 90.0 MB."},
    "memory-kv": {"tales, int8", "+0.100%", "98.80%", "8340"},
    "quality": {"1/2 (66.7%)", "0.250000 ± 0.001000", "int4", "m, weights", "m, 2 bits: skipped: no room", "a book"},
}


def test_sections_are_shown_as_they_were(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for benchmark, data in results().items():
        path = tmp_path / "found.json"
        path.write_text(json.dumps(run_header(benchmark, "the command") | data))
        _check_section(path, benchmark)
        assert main(["bench", "report", str(path), "--out", str(page)]) == 0
        texts = set(_Texts(page.read_text("utf-8")).texts)
        assert SHOWN[benchmark] <= texts, SHOWN[benchmark] - texts
        assert "the command" in texts


def _check_section(path: Path, name: str) -> None:
    section, _ = read_section(path)
    shown = [section_markdown(section), *(chart_svg(part) for part in section.parts if isinstance(part, Chart))]
    check_recorded(f"page-{name}", [line.partition(", When: ")[0] for line in "\n".join(shown).splitlines()])


def test_tuning_and_shared_facts_are_on_the_page(tmp_path: Path) -> None:
    part = {"usual_ms": 2.0, "tuned_ms": 1.0, "ratio": 2.0}
    attempts = [{"name": "prefill_chunk", "value": 128, "outcome": "better", "time_ratio": 0.5}]
    device = {"settings": {"threads": 2, "affinity": ""}, "threads": 2, "parts": {"decode": part}, "attempts": attempts}
    layers = {"match_rate": 0.5, "predicted_speedup": 1.25}
    tuned = {"exit": layers, "skip": layers, "kept": {"exit": True, "skip": False}, "device": device}
    # The command prints no header.
    files = [tmp_path / "tune.json", tmp_path / "kv.json", tmp_path / "quality.json"]
    files[0].write_text(json.dumps(tuned))
    _check_section(files[0], "tune")
    for number, (path, name) in enumerate(zip(files[1:], ("memory-kv", "quality"), strict=True)):
        header = run_header(name, "x")
        header["environment"] |= {"processor": "the processor", "cores": 2 + number}
        path.write_text(json.dumps(header | results()[name]))
    assert main(["bench", "report", *map(str, files), "--out", str(tmp_path / "page.html")]) == 0
    page = _Texts((tmp_path / "page.html").read_text("utf-8"))
    assert {"Kept: threads 2.", "prefill chunk", "better", "1.25", "2.00"} <= set(page.texts)
    assert page.texts.count("the processor") == 1 and page.texts.count("Cores") == 2
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links == [f"#{attributes['id']}" for tag, attributes in page.elements if tag == "section"]
