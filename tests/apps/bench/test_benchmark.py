"""What benchmarks share: options declared as fields, exit codes, result files, and no need of the export extra."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgeinfer.apps.bench import listing
from edgeinfer.apps.bench.benchmark import (
    BenchContext,
    Benchmark,
    BenchResult,
    Spread,
    add_declared,
    option,
    options_from,
    rotated,
)
from edgeinfer.apps.bench.render import Section, Table, markdown_table
from edgeinfer.apps.cli.main import main
from tests.tables import each_row


@dataclass(frozen=True)
class Chosen:
    """Options of every kind."""

    file: Path = option(help="a file")
    sizes: tuple[int, ...] = option("-s", "--sizes LIST", default=(1, 2), group="what", help="lengths")
    names: tuple[str, ...] | None = option("--names LIST", default=None, help="some")
    share: float = option("--share X", default=0.0, help="of all")
    quick: bool = option("--quick", default=False, group="how", help="in a hurry")
    pairs: tuple[int, ...] = option("--pair N", default=(), action="append", type=int, help="several times")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_declared(made, Chosen)
    return made


def test_options_follow_from_fields() -> None:
    line = ["x", "-s", "3,4", "--names", "a, b", "--share", "0.5", "--quick", "--pair", "5", "--pair", "6"]
    found = options_from(Chosen, parser().parse_args(line))
    assert found == Chosen(Path("x"), (3, 4), ("a", "b"), 0.5, True, (5, 6))
    assert options_from(Chosen, parser().parse_args(["x"])) == Chosen(Path("x"))


def test_help_has_groups_placeholders_and_defaults() -> None:
    shown = " ".join(parser().format_help().split())
    assert "what: -s LIST, --sizes LIST lengths (default: 1,2) --names LIST some --share X of all (default: 0)" in shown
    assert "how: --quick in a hurry --pair N several times" in shown


def measured(result: BenchResult, monkeypatch: pytest.MonkeyPatch, *line: str) -> int:
    """The exit code of a benchmark with this result."""

    def show(data: dict[str, int]) -> Section:
        return Section("Things", (("Model", "m"),), (Table("How many", ("what", "n"), (("all", str(data["n"])),)),))

    def run(options: Chosen, context: BenchContext) -> BenchResult:
        return result

    things = Benchmark("things", "of some", "Counts things.", Chosen, run, show)
    monkeypatch.setattr(listing, "BENCHMARKS", (things,))
    return main(["bench", "things", "x", *line])


def test_a_result_is_shown_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "things.json"
    assert measured(BenchResult({"n": 3}), monkeypatch, "--json", str(data)) == 0
    assert "How many" in capsys.readouterr().out
    found = json.loads(data.read_text())
    assert (found["benchmark"], found["n"]) == ("things", 3)
    assert {"command", "test_time", "edgeinfer", "environment"} <= set(found)
    assert measured(BenchResult({"n": 3}), monkeypatch, "--json", str(tmp_path / "no" / "x")) == 5


@each_row(("result", "code"), [(BenchResult({"n": 1}, finished=False), 130), (BenchResult({"n": 1}, passed=False), 1)])
def test_the_code_says_how_it_ended(
    result: BenchResult, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(result, monkeypatch) == code
    assert ("Interrupted" in capsys.readouterr().err) == (code == 130)


def test_turns_start_elsewhere_and_quartiles_are_of_all_values() -> None:
    assert rotated("abc", 4) == ["b", "c", "a"]
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(median=3.0, p25=2.0, p75=4.0)


def test_markdown_is_aligned() -> None:
    assert markdown_table(("name", "n"), [("a", "10")]) == "| name | n   |\n| ---- | --- |\n| a    | 10  |\n"
    assert markdown_table(("name", "n"), [("a", "10")], left=(0,)).splitlines()[1] == "| ---- | --: |"


def test_benchmarks_are_listed_without_what_exports() -> None:
    script = (
        "import importlib.util as u, sys; find = u.find_spec; sys.modules['scipy'] = None\n"
        "u.find_spec = lambda name, package=None: None if name == 'onnx' else find(name, package)\n"
        "from edgeinfer.apps.cli.main import main; sys.exit(main(['bench', '--help']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(each.name.partition(" ")[0] in done.stdout for each in listing.BENCHMARKS)
