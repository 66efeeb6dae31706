"""Reproducing the published figures: what is run, kept, skipped and shown; that no figure on a page is stale."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.apps.bench.environment import run_header
from edgeinfer.apps.bench.reproduce import Reproduced, main, reproduce
from edgeinfer.apps.bench.reproduce_files import (
    RUNS,
    Places,
    ReproducibleRun,
    block,
    fill,
    find_runs,
    finished,
    keep,
    names,
    read_result,
    redact,
    write_index,
    write_page,
)
from tests.apps.bench.here import exports_here
from tests.speculation import needs_builtin
from tests.tables import each_row

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
PAGES = [(ROOT / name).read_text("utf-8") for name in ("README.md", "docs/figures.md", "docs/REMOTE.md")]
# Folders of machines; an address of a page is none.
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
        assert fill(page, RESULTS) == page, "run: python -m edgeinfer.apps.bench.reproduce --readme"
    (summary, devices), shown, remote = map(names, PAGES)
    assert remote == ["remote.links", "remote.devices"]
    assert set(shown) <= {run.name for run in RUNS} and len(set(shown)) == len(shown) > 5
    # Every engine's figures, the slower ones' too.
    assert (summary, devices) == ("peers.summary", "devices")
    engines = [row["engine"] for row in read_result(RESULTS, "peers")["models"][-1]["engines"]]
    assert [line.split("|")[1].strip() for line in block(RESULTS, summary).splitlines()[2:]] == engines


@each_row("run", [run for run in RUNS if (RESULTS / f"{run.name}.json").is_file()])
def test_results_say_what_they_depend_on_and_nothing_of_folders(run: ReproducibleRun) -> None:
    data = read_result(RESULTS, run.name)
    first = data[0] if isinstance(data, list) else data
    assert {"test_time", "command"} <= set(first) and not first.get("quick")
    assert isinstance(data, list) or data["environment"]["processor"]
    assert [text for text in strings(data) if PATHS.search(text)] == []


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places((tmp_path / "checkpoints" / "small",), tmp_path / "data", tmp_path / "work", ("genai=/x/python",))


def test_every_run_is_known_and_lists_what_it_needs(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Places, "bundle", lambda self: self.work / "bundle")
    assert find_runs(None) == list(RUNS) and len({run.name for run in RUNS}) == len(RUNS)
    assert [run.name for run in find_runs(["tune", "speed"])] == ["speed", "tune"]
    nothing = Places((), None, places.work)
    for run in RUNS:
        assert run.missing(places) == ""
        assert bool(run.missing(nothing)) == bool(run.needs)
        for quick in (False, True):
            chosen = Places(places.checkpoints, places.data, places.work, places.pythons, quick)
            assert run.arguments(chosen)[0] in ("bench", "tune")
    assert "--python genai=/x/python" in " ".join(find_runs(["peers"])[0].arguments(places))


def header(**facts: Any) -> dict[str, Any]:
    caches = [{"model": "m", "kv": "int8", "perplexity": 9.0, "change": 0.01, "agreement": 0.9, "copied": 0.7}]
    caches[0] |= {"attention_error": 0.01, "tokens": 5}
    return run_header("memory-kv", "old") | {"caches": caches} | facts


def test_results_are_kept_without_folders(places: Places, tmp_path: Path) -> None:
    words = {str(places.data): "DATA", str(tmp_path): "HERE"}
    told = header(where=[f"{places.data}/x", {str(tmp_path / "y"): "none"}])
    keep(tmp_path, "kv", told, command="new", words=words, facts={"seconds": 3.0})
    data = read_result(tmp_path, "kv")
    assert data["where"] == ["DATA/x", {"HERE/y": "none"}]
    assert (data["command"], data["seconds"], data["benchmark"]) == ("new", 3.0, "memory-kv")
    # What has no header gets one; rows of a list say it each.
    keep(tmp_path, "tune", {"device": None}, command="new", words={}, facts={"quick": True})
    assert read_result(tmp_path, "tune")["benchmark"] == "tune"
    keep(tmp_path, "speed", [{"a": 1}, {"a": 2}], command="new", words={}, facts={})
    assert [row["command"] for row in read_result(tmp_path, "speed")] == ["new", "new"]
    assert finished(tmp_path, "kv", quick=False) and not finished(tmp_path, "curve", quick=True)
    assert finished(tmp_path, "tune", quick=True) and not finished(tmp_path, "tune", quick=False)


@settings(max_examples=40)
@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_without_paths_nothing_is_changed(data: Any) -> None:
    assert redact(data, {}) == data


def test_tables_come_from_results(tmp_path: Path) -> None:
    text = "a\n<!-- results:kv -->\nold\n<!-- /results -->\nb\n<!-- results:tune -->\n<!-- /results -->\n"
    assert "Not measured yet: `python -m edgeinfer.apps.bench.reproduce --only kv`." in fill(text, tmp_path)
    keep(tmp_path, "kv", header(), command="edgeinfer it", words={}, facts={"quick": True})
    assert "Not measured yet" in block(tmp_path, "kv"), "figures made in a hurry are shown"
    keep(tmp_path, "kv", header(), command="edgeinfer it", words={}, facts={})
    filled = fill(text, tmp_path)
    assert "| m, int8 | 9.0000 | +1.000% | 90.00% | 70.00% | 1.00% |" in filled and "`edgeinfer it`" in filled
    assert "old" not in filled and filled.startswith("a\n<!-- results:kv -->\n") and filled.count("/results") == 2
    assert fill(filled, tmp_path) == filled


def test_the_index_and_the_page(tmp_path: Path) -> None:
    assert write_page(tmp_path) is None
    keep(tmp_path, "kv", header(), command="edgeinfer it", words={}, facts={"seconds": 90.0})
    write_index(tmp_path, "all of it")
    said = (tmp_path / "README.md").read_text("utf-8")
    assert "all of it" in said and "| `kv.json` |" in said and "| 1.5 | `edgeinfer it` |" in said
    page = write_page(tmp_path)
    assert page is not None and "Quantized caches" in page.read_text("utf-8")


def tried(name: str, arguments: list[str], **options: Any) -> ReproducibleRun:
    make: Callable[[Places], list[str]] = lambda places: arguments  # noqa: E731
    return ReproducibleRun(name, "words", 1, make, **options)


def test_what_cannot_be_run_is_skipped_or_fails_alone(places: Places, tmp_path: Path) -> None:
    skipped = reproduce(tried("kv", [], needs=("data",)), Places((), None, tmp_path), tmp_path, again=False)
    assert (skipped.outcome, skipped.reason) == ("skipped", "needs --data")
    failed = reproduce(tried("kv", ["bench", "speed", "-m", "none"]), places, tmp_path, again=False)
    assert failed.outcome == "failed" and "exit code" in failed.reason and not list(tmp_path.glob("*.json"))
    silent = reproduce(tried("kv", ["--version"], output=()), places, tmp_path, again=False)
    assert silent.outcome == "failed" and "no figures" in silent.reason


@needs_builtin
def test_a_run_is_made_once(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exports_here(monkeypatch, "reproduce")
    run = tried("speed", ["bench", "speed", "-p", "8", "-n", "4", "-r", "1"], output=("-o", "json", "--out"))
    made = reproduce(run, places, tmp_path, again=False)
    assert made.outcome == "made" and str(made).startswith("speed: made in ")
    first = read_result(tmp_path, "speed")
    assert first[0]["command"] == "edgeinfer bench speed -p 8 -n 4 -r 1" and first[0]["test"] == "pp8"
    assert reproduce(run, places, tmp_path, again=False) == Reproduced(run, "kept")
    assert reproduce(run, places, tmp_path, again=True).outcome == "made"
    assert "pp8" in block(tmp_path, "speed")
    assert [text for text in strings(first) if PATHS.search(text)] == []


def test_the_others_go_on_where_one_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [tried("kv", ["bench", "poetry"]), tried("tune", ["eval"]), tried("quality", [], needs=("checkpoints",))]
    monkeypatch.setattr("edgeinfer.apps.bench.reproduce.find_runs", lambda names: runs)
    exports_here(monkeypatch, "reproduce")
    assert main(["--out", str(tmp_path / "results")]) == 1
    said = capsys.readouterr().out
    assert "kv: failed" in said and "tune: failed" in said and "quality: skipped: needs --checkpoint" in said
    assert (tmp_path / "results" / "README.md").is_file()


def test_an_interrupt_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> Reproduced:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgeinfer.apps.bench.reproduce.reproduce", interrupted)
    assert main(["--only", "tune", "--out", str(tmp_path)]) == 130


def test_runs_are_listed_and_readmes_filled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(run.name in said for run in RUNS) and "needs --checkpoint and --data" in said
    keep(tmp_path, "kv", header(), command="edgeinfer it", words={}, facts={})
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:kv -->\n<!-- /results -->\n")
    assert main(["--readme", str(readme), "--out", str(tmp_path)]) == 0
    assert "| m, int8 |" in readme.read_text()


@each_row(
    ("wrong", "says"),
    [(["--only", "poetry"], "poetry"), (["--data", "none"], "none"), (["--checkpoint", "none"], "none")],
)
def test_bad_input_is_one_line(wrong: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(wrong) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1


def test_json_of_results_is_whole() -> None:
    for path in RESULTS.glob("*.json"):
        json.loads(path.read_text("utf-8"))
