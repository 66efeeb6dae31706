"""Published figures: what is run, kept and skipped; and that every page shows what the result files say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.bench.benchmark import run_header
from tests.apps.bench.here import commands_here
from tests.speculation import needs_builtin
from tests.tables import each_row
from tests.tools.reproduce import (
    RUNS,
    Places,
    Run,
    block,
    fill,
    keep,
    main,
    read_result,
    redact,
    reproduce,
    result_names,
)

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
PAGES = [(ROOT / name).read_text("utf-8") for name in ("README.md", "docs/figures.md", "docs/REMOTE.md")]
# Folders of machines, but not addresses of pages.
PATHS = re.compile(r"(?<![\w./:~-])/(home|root|work|tmp|Users|mnt|opt)/")


def strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from (key, *strings(value))
    elif isinstance(data, list):
        for value in data:
            yield from strings(value)


def test_pages_show_what_the_results_say() -> None:
    for page in PAGES:
        assert fill(page, RESULTS) == page, "run: python -m tests.tools.reproduce --readme"
    summary, shown, remote = map(result_names, PAGES)
    assert remote == ["remote.links", "remote.devices"] and summary == ["peers.summary", "devices"]
    assert set(shown) <= {run.name for run in RUNS} and len(set(shown)) == len(shown) > 5
    # Every engine's figures, the slower ones' too.
    engines = [row["engine"] for row in read_result(RESULTS, "peers")["models"][-1]["engines"]]
    assert [line.split("|")[1].strip() for line in block(RESULTS, "peers.summary").splitlines()[2:]] == engines


@each_row("path", sorted(RESULTS.glob("*.json")))
def test_results_name_their_machine_and_command_but_no_folders(path: Path) -> None:
    data = json.loads(path.read_text("utf-8"))
    assert [text for text in strings(data) if PATHS.search(text)] == []
    if path.stem in {run.name for run in RUNS}:
        first = data[0] if isinstance(data, list) else data
        assert {"test_time", "command"} <= set(first) and not first.get("quick")
        assert isinstance(data, list) or data["environment"]["processor"]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    for name in ("bundle", "expanded", "checkpoint"):
        monkeypatch.setattr(Places, name, lambda self, shape="": self.work / f"model{shape}")
    return Places((tmp_path / "checkpoints" / "small",), tmp_path / "data", tmp_path / "work", ("genai=/x/python",))


def test_every_run_has_its_command(places: Places) -> None:
    for run in RUNS:
        assert run.missing(places) == "" and run.arguments(places)[0] in ("bench", "tune")


def header(**facts: Any) -> dict[str, Any]:
    parts = {"decode": {"usual_ms": 2.0, "tuned_ms": 1.6, "ratio": 1.25}}
    return (
        run_header("tune", "old") | {"device": {"threads": 1, "parts": parts, "settings": {}, "attempts": []}} | facts
    )


def test_results_are_kept_without_folders(places: Places, tmp_path: Path) -> None:
    words = {str(places.data): "DATA", str(tmp_path): "HERE"}
    keep(tmp_path, "tune", header(where=[f"{places.data}/x", {str(tmp_path / "y"): "none"}]), {"command": "new"}, words)
    data = read_result(tmp_path, "tune")
    assert data["where"] == ["DATA/x", {"HERE/y": "none"}]
    assert (data["command"], data["benchmark"]) == ("new", "tune")
    # A result without a header gets one; each row of a list repeats the facts.
    keep(tmp_path, "other", {"device": None}, {"quick": True}, {})
    assert read_result(tmp_path, "other")["benchmark"] == "other"
    keep(tmp_path, "speed", [{"a": 1}, {"a": 2}], {"command": "new"}, {})
    assert [row["command"] for row in read_result(tmp_path, "speed")] == ["new", "new"]
    assert redact(data, {}) == data


def test_tables_come_from_results(tmp_path: Path) -> None:
    text = "a\n<!-- results:tune -->\nold\n<!-- /results -->\nb\n<!-- results:curve -->\n<!-- /results -->\n"
    assert "Not measured yet: `python -m tests.tools.reproduce --only tune`." in fill(text, tmp_path)
    keep(tmp_path, "tune", header(), {"command": "edgeinfer it", "quick": True}, {})
    assert "Not measured yet" in block(tmp_path, "tune"), "quick figures are shown"
    keep(tmp_path, "tune", header(), {"command": "edgeinfer it"}, {})
    filled = fill(text, tmp_path)
    assert "| decode | 2.00 | 1.60 | 1.25 |" in filled and "`edgeinfer it`" in filled
    assert "old" not in filled and filled.count("/results") == 2 and fill(filled, tmp_path) == filled
    page = tmp_path / "page.md"
    page.write_text(text)
    assert main(["--readme", str(page), "--out", str(tmp_path)]) == 0 and "| decode |" in page.read_text()


@needs_builtin
def test_a_run_is_made_once(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands_here(monkeypatch, "tests.tools.reproduce")
    failed = reproduce(Run("tune", "", 1, lambda _: ["bench", "speed", "-m", "none"]), places, tmp_path, again=False)
    assert failed.startswith("failed") and "exit code" in failed and not list(tmp_path.glob("*.json"))
    arguments = ["bench", "speed", "-p", "8", "-n", "4", "-r", "1"]
    run = Run("speed", "", 1, lambda _: arguments, output=("-o", "json", "--out"))
    assert reproduce(run, places, tmp_path, again=False).startswith("made in ")
    (first, *_) = read_result(tmp_path, "speed")
    assert first["command"] == "edgeinfer " + " ".join(arguments) and first["test"] == "pp8"
    assert reproduce(run, places, tmp_path, again=False) == "kept"
    assert "pp8" in block(tmp_path, "speed") and [text for text in strings(first) if PATHS.search(text)] == []
