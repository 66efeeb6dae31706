"""The report page: all figures of the files are on it, what they say is only text, other files are refused."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.apps.bench.pages.page import Section, Table, page_html
from edgeinfer.apps.bench.pages.sections import read_section
from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.cli.main import main
from edgeinfer.errors import UsageError
from tests.speculation import needs_builtin

RUN = ["-t", "1", "-r", "2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the benchmarks write."""
    folder = tmp_path_factory.mktemp("results")
    found = {name: folder / f"{name}.json" for name in ("speed", "curve", "spec")}
    tests = ["-p", "16", "-n", "8", "-d", "0,16"]
    assert main(["bench", "speed", *tests, *RUN, "-o", "json", "--out", str(found["speed"])]) == 0
    assert main(["bench", "curve", "--sizes", "1,2,4", "-d", "8", *RUN, "--json", str(found["curve"])]) == 0
    spec = ["--per-category", "1", "-n", "16", "--repeats", "1", "-t", "1"]
    assert main(["bench", "spec", *spec, "--json", str(found["spec"])]) == 0
    return found


class _Texts(HTMLParser):
    """The text of a page, and its elements."""

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
def test_a_page_of_all_kinds(files: dict[str, Path], tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "[1]",
        '"x"',
        '{"points": 3, "limits": null}',
        '{"prompts": [], "environment": 1}',
        '[{"samples_ts": []}]',
    ],
)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"other\.json"):
        read_section(path)
    assert main(["bench", "report", str(path), "--out", str(tmp_path / "page.html")]) == 2
    assert not (tmp_path / "page.html").exists()


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert main(["bench", "report", str(tmp_path / "none.json"), "--out", str(tmp_path / "page.html")]) == 2
    assert main(["bench", "report", "--out", str(tmp_path / "page.html")]) == 2


WORDS = st.text(max_size=30)


@given(title=WORDS, name=WORDS, cell=WORDS, command=WORDS)
def test_what_files_say_is_text(title: str, name: str, cell: str, command: str) -> None:
    chart = Chart(title, name, cell, (Line(name, ((0.0, 1.0), (1.0, 2.0))),))
    section = Section(title, ((name, cell),), (Table(title, (name,), ((cell,),)), chart), (command,))
    page = _Texts(page_html(title, name, [section]))
    plain = _Texts(page_html("x", "x", [Section("x", (("x", "x"),), (Table("x", ("x",), (("x",),)), chart), ("x",))]))

    def shape(found: _Texts) -> list[Any]:
        return [tag for tag, _ in found.elements]

    assert shape(page) == shape(plain)
