"""The report page: all figures of the files are on it, what they say is only text, other files are refused."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.apps.bench.environment import run_header
from edgeinfer.apps.bench.memory_budgets import BudgetPeer, BudgetPeerFigures, SmallestResults, SpecMemoResults
from edgeinfer.apps.bench.memory_kv import KVQuality
from edgeinfer.apps.bench.memory_plans import PlanCase, PlannedModel, PlanRun, PlansResults
from edgeinfer.apps.bench.memory_timed import ChatResults, LoadSetup, Timed, TimedRun
from edgeinfer.apps.bench.plots import Chart, Line, chart_svg
from edgeinfer.apps.bench.render import Paragraph, Section, Table, page_html, section_markdown
from edgeinfer.apps.bench.report import read_section
from edgeinfer.apps.cli.main import main
from edgeinfer.errors import UsageError
from tests.apps.bench.here import known_limits
from tests.recorded import check_recorded
from tests.speculation import needs_builtin

RUN = ["-t", "1", "-r", "2", "-c", "64", "--speculation", "off"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the benchmarks write."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        known_limits(patch)
        return _measured(folder)


def _measured(folder: Path) -> dict[str, Path]:
    found = {name: folder / f"{name}.json" for name in ("speed", "curve", "spec")}
    tests = ["-p", "8", "-n", "4", "-d", "0,8"]
    assert main(["bench", "speed", *tests, *RUN, "-o", "json", "--out", str(found["speed"])]) == 0
    assert main(["bench", "curve", "--sizes", "1,2,4", "-d", "8", *RUN, "--json", str(found["curve"])]) == 0
    spec = ["--categories", "tales/write,tales/start", "--per-category", "1", "-n", "8", "--repeats", "1", "-t", "1"]
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


OTHER = (
    *("", "{", "[]", "{}", "[1]", '"x"', '{"points": 3, "limits": null}', '[{"samples_ts": []}]'),
    *('{"benchmark": "spec", "prompts": []}', '{"benchmark": "quality", "subjects": []}'),
    *('{"benchmark": "memory-plans"}', '{"benchmark": "poetry"}'),
)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in OTHER:
        path.write_text(text)
        with pytest.raises(UsageError, match=r"other\.json"):
            read_section(path)
        assert main(["bench", "report", str(path), "--out", str(tmp_path / "page.html")]) == 2, text
        assert not (tmp_path / "page.html").exists()


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert main(["bench", "report", str(tmp_path / "none.json"), "--out", str(tmp_path / "page.html")]) == 2
    assert main(["bench", "report", "--out", str(tmp_path / "page.html")]) == 2


WORDS = st.text(max_size=30)


@given(title=WORDS, name=WORDS, cell=WORDS, command=WORDS)
def test_what_files_say_is_text(title: str, name: str, cell: str, command: str) -> None:
    chart = Chart(title, name, cell, (Line(name, ((0.0, 1.0), (1.0, 2.0))),))
    table, note = Table(title, (name,), ((cell,),), words=(cell,)), Paragraph(cell)
    section = Section(title, ((name, cell),), (table, chart, note), (command,))
    page = _Texts(page_html(title, name, [section]))
    parts = (Table("x", ("x",), (("x",),)), chart, Paragraph("x"))
    plain = _Texts(page_html("x", "x", [Section("x", (("x", "x"),), parts, ("x",))]))

    def shape(found: _Texts) -> list[Any]:
        return [tag for tag, _ in found.elements]

    assert shape(page) == shape(plain)


def told(planned: int, reason: str = "") -> TimedRun:
    """What one process of a memory benchmark says."""
    found = {
        "planned": planned,
        "plan_given_up": ["cache in int8"],
        "given_up": [],
        "tokens": [11, 11],
        "ms_per_token": [10.0, 20.0],
        "processor_ms_per_token": [10.0, 20.0],
        "terms": {"kv": 3_000_000, "weights_mapped": 50_000_000},
        "choice": {"weights": "mapped"},
        "weights_resident": 50_000_000,
        "generation": planned - 51_000_000,
    }
    return TimedRun(reason, planned - 1_000_000, planned // 2, 0, found)


def check_section(path: Path, name: str) -> None:
    """Compares what a file of results is shown as with the record."""
    section, _ = read_section(path)
    shown = [section_markdown(section), *(chart_svg(part) for part in section.parts if isinstance(part, Chart))]
    check_recorded(f"page-{name}", [line.partition(", When: ")[0] for line in "\n".join(shown).splitlines()])


def memory_results() -> dict[str, dict[str, Any]]:
    """By benchmark, what its results are as JSON."""
    subject = PlannedModel("tiny", "tiny", 1000, 64, "64")
    case = PlanCase(0, subject, 1.2, 0, 1, False, {"counted": "resident"})
    ran = PlanRun(case, "cgroup", "ran", "", 90_000_000, 100_000_000, 85_000_000, 40_000_000)
    killed = PlanRun(case, "cgroup", "killed", "gone")
    points = [Timed(LoadSetup(str(size), {"memory": size}), (told(size),)) for size in (400_000_000, 300_000_000)]
    points.append(Timed(LoadSetup("200", {"memory": 200_000_000}), (told(200_000_000, "too small"),)))
    peer = BudgetPeerFigures(BudgetPeer("llamacpp", Path("x")), "", 600_000_000, 300_000_000, 57.7, 34.6)
    unbounded = Timed(LoadSetup("unconstrained"), (told(500_000_000),))
    caches = [KVQuality("tales", "int8", 9.37, 0.001, 0.988, 0.731, 0.013, 0.02, 8340, 4000, 0.97, 1024)]
    return {
        "memory-plans": PlansResults(1, (ran, killed)).to_dict(),
        "memory-smallest": SmallestResults("big", 2048, tuple(points), (peer,)).to_dict(),
        "memory-spec": SpecMemoResults("big", 512, ("a", "b"), (unbounded, *points[:1])).to_dict(),
        "memory-chat": ChatResults((80_000_000,) * 20, 90_000_000, 256).to_dict(),
        "memory-kv": {"caches": [vars(each) for each in caches]},
    }


MEMORY_IS_ON_THE_PAGE = (
    ("memory-plans", {"tiny", "90.0 MB", "85.0 MB", "5.0%", "planned, MB", "measured peak, MB", "as planned"}),
    ("memory-smallest", {"400.0 MB", "300.0 MB", "big, short", "100.0", "50.0", "-", "too small", "57.7"}),
    ("memory-spec", {"unconstrained", "400.0 MB", "100.0%"}),
    (
        "memory-chat",
        {
            "peak of the process, MB",
            "turn",
            "The peak grew by 0.00% after turn 10: flat (less than 1%). Planned: 90.0 MB.",
        },
    ),
    ("memory-kv", {"tales, int8", "+0.100%", "98.80%", "8340"}),
)


def test_memory_is_on_the_page(tmp_path: Path) -> None:
    for benchmark, shown in MEMORY_IS_ON_THE_PAGE:
        path = tmp_path / "found.json"
        path.write_text(json.dumps(run_header(benchmark, "the command") | memory_results()[benchmark]))
        check_section(path, benchmark)
        assert main(["bench", "report", str(path), "--out", str(tmp_path / "page.html")]) == 0
        texts = _Texts((tmp_path / "page.html").read_text("utf-8")).texts
        assert shown <= set(texts), shown - set(texts)
        assert "the command" in texts


def quality(number: int, divergence: float, cache: str | None = None, tasks: int = 2) -> dict[str, Any]:
    """A subject of which no figure is another's, nor another subject's."""
    scores = {
        name: {"right": number, "of": number + 1 + place, "tokens_right": 9 + number, "tokens": 15 + place}
        for place, name in enumerate(["tales/who", "tales/again"][:tasks])
    }
    figures = {"bytes": 3_000_000 * number, "bits_per_weight": 8.5 / number, "cache_bytes": 1_000_000 + number}
    return figures | {
        "model": "m", "variant": f"{8 * number} bits", "weights": f"{8 * number} bits", "cache": cache, "layout": None,
        "perplexity": 9.3 + number, "perplexity_error": 0.1 / number, "divergence": divergence, "context": 64 + number,
        "divergence_error": 0.001, "agreement": 0.99 - number / 50, "tokens": 10 * number, "tasks": scores,
    }  # fmt: skip


def test_quality_and_tuning_are_on_the_page(tmp_path: Path) -> None:
    skipped = [{"model": "m", "variant": "2 bits", "reason": "no room"}]
    subjects = [quality(1, 0.0), quality(2, 0.25, tasks=0), quality(3, 0.5, "int4", tasks=1)]
    layouts = [{"layouts": ["native", "portable"], "mean": 0.25, "error": 0.125, "model": "m", "scheme": "8 bits"}]
    found = {"text": "a book", "subjects": subjects, "skipped": skipped, "layouts": layouts}
    (tmp_path / "quality.json").write_text(json.dumps(run_header("quality", "x") | found))
    part = {"usual_ms": 2.0, "tuned_ms": 1.0, "ratio": 2.0}
    attempts = [{"name": "prefill_chunk", "value": 128, "outcome": "better", "time_ratio": 0.5}]
    device = {"settings": {"threads": 2, "affinity": ""}, "threads": 2, "parts": {"decode": part}, "attempts": attempts}
    layers = {"matchness": 0.5, "predicted_speedup": 1.25}
    tuned = {"exit": layers, "skip": layers, "kept": {"exit": True, "skip": False}, "device": device}
    # What the command prints has no header.
    (tmp_path / "tune.json").write_text(json.dumps(tuned))
    files = [str(tmp_path / name) for name in ("quality.json", "tune.json")]
    for name in ("quality", "tune"):
        check_section(tmp_path / f"{name}.json", name)
    assert main(["bench", "report", *files, "--out", str(tmp_path / "page.html")]) == 0
    page = _Texts((tmp_path / "page.html").read_text("utf-8"))
    shown = {"1/2 (66.7%)", "0.250000 ± 0.001000", "int4", "m, weights", "m, 2 bits: skipped: no room", "a book"}
    shown |= {"Kept: threads 2.", "prefill chunk", "better", "1.25", "2.00", "weights and cache, MB"}
    assert shown <= set(page.texts), shown - set(page.texts)
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    anchors = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert links == [f"#{anchor}" for anchor in anchors] and len(links) == 2


def test_what_all_runs_share_stands_once(tmp_path: Path) -> None:
    files = []
    for number, cores in enumerate((2, 4)):
        header = run_header("memory-kv", "x")
        header["environment"] |= {"processor": "the processor", "cores": cores}
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(header | memory_results()["memory-kv"]))
    out = tmp_path / "page.html"
    assert main(["bench", "report", *map(str, files), "--out", str(out)]) == 0
    texts = _Texts(out.read_text("utf-8")).texts
    assert texts.count("the processor") == 1 and texts.count("Cores") == 2
