"""The runs behind the published figures, the files of their results, and the tables that are filled from those."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.devices import devices_table
from edgeinfer.apps.bench.environment import run_header
from edgeinfer.apps.bench.model_files import Artifacts, BundleKind
from edgeinfer.apps.bench.remote_speed import company_table, links_table
from edgeinfer.apps.bench.render import Table, common, machine_facts, markdown, markdown_table
from edgeinfer.apps.bench.report import read_section, report_html
from edgeinfer.apps.bench.synthetic import find_shape
from edgeinfer.config import format_size

SHAPE = "qwen2.5-0.5b"
_LEAD = "Every published figure, and what it was made from. Medians, unless said otherwise."
_TEXT = "tinystories/tinystories_train_part0.txt"
_MARKED = re.compile(r"(<!-- results:(?P<name>[\w.-]+) -->\n)(?P<text>.*?)(<!-- /results -->)", re.DOTALL)
# Of sections with several parts those that pages show; all of others.
_SHOWN: Mapping[str, Sequence[int]] = {
    "curve": (0, 1),
    "kv": (0,),
    "memory-plans": (0, 2),
    "memory-smallest": (0, 2),
    "spec": (0, 2),
    "tune": (0, 1),
}


@dataclass(frozen=True)
class Places:
    """What runs are given.

    Attributes:
        checkpoints: trained ones, the built-in model's first.
        data: folder of data sets; None where there is none.
        work: where model files are kept.
        pythons: interpreters of other engines, as ENGINE=PATH.
        quick: so little of each that the figures tell nothing but that it runs.
    """

    checkpoints: tuple[Path, ...]
    data: Path | None
    work: Path
    pythons: tuple[str, ...] = ()
    quick: bool = False

    def bundle(self) -> Path:
        """A bundle of random weights at the sizes of a 0.5B, made where it is missing."""
        return Artifacts(self.work, find_shape(SHAPE)).bundle(BundleKind())

    def text(self) -> Path:
        """Stories to read."""
        assert self.data is not None, "who asks needs data"
        return self.data / _TEXT


@dataclass(frozen=True)
class ReproducibleRun:
    """One result file.

    Attributes:
        name: of the file, and of its tables in the README.
        words: what is measured.
        minutes: that it takes, about.
        arguments: of `edgeinfer`, less the output's.
        output: options before the file's name; none of a command that prints JSON.
        needs: of Places: "checkpoints" or "data", or both.
    """

    name: str
    words: str
    minutes: float
    arguments: Callable[[Places], list[str]]
    output: tuple[str, ...] = ("--json",)
    needs: tuple[str, ...] = ()

    def missing(self, places: Places) -> str:
        """Why it cannot be run; empty where it can."""
        lacks = [f"--{name.removesuffix('s')}" for name in self.needs if not getattr(places, name)]
        return f"needs {' and '.join(lacks)}" if lacks else ""


def _speed(places: Places) -> list[str]:
    return ["bench", "speed", "-t", "1", "-pg", "512,128", "-d", "0,256", *(["-r", "1"] if places.quick else [])]


def _peers(places: Places) -> list[str]:
    pythons = [part for python in places.pythons for part in ("--python", python)]
    sizes = ["--engines", "edgeinfer,llamacpp,genai,openvino,transformers"]
    sizes += ["--repeats", "3", "--rounds", "2", "--patience", "45"]
    if places.quick:
        sizes = ["--quick", "--models", "tales", "--budgets", "250"]
    return ["bench", "peers", *sizes, *pythons, "--work", str(places.work)]


def _curve(places: Places) -> list[str]:
    return ["bench", "curve", "-m", str(places.bundle()), "-t", "1", *(["-r", "1"] if places.quick else [])]


def _spec(places: Places) -> list[str]:
    expanded = ["--checkpoint", str(places.checkpoints[0]), "--expand", "--work", str(places.work), "-t", "1"]
    prompts = ["--data", str(places.data), "--categories", "tales"]
    if places.quick:
        return ["bench", "spec", *expanded, *prompts, "--per-category", "1", "-n", "16", "--repeats", "1"]
    sizes = ["--per-category", "2", "--warm-up", "6"]
    return ["bench", "spec", *expanded, *prompts, *sizes, "--modes", "auto", "--control"]


def _plans(places: Places) -> list[str]:
    sizes = ["--runs", "3", "--shapes", "tiny"] if places.quick else ["--runs", "30", "--seed", "1"]
    return ["bench", "memory", "plans", *sizes, "--work", str(places.work)]


def _smallest(places: Places) -> list[str]:
    sizes = ["-c", "2048", "--steps", "6", "--rounds", "1", "--halvings", "2"]
    if places.quick:
        sizes = ["-c", "512", "--steps", "2", "--rounds", "1", "--halvings", "0"]
    return ["bench", "memory", "smallest", "-m", str(places.bundle()), "-t", "1", "--speculation", "off", *sizes]


def _quality(places: Places) -> list[str]:
    models = [part for path in places.checkpoints for part in ("--checkpoint", str(path))]
    widths = ["--bits", "8,4small,2small", "--kv", "int8,int4", "--budget-bits", "4"]
    sizes = ["--stories", "100", "--questions", "10"]
    if places.quick:
        widths, sizes = ["--bits", "8", "--kv", "int8"], ["--stories", "2", "--questions", "1"]
    return ["bench", "quality", *models, *widths, "--data", str(places.data), *sizes]


def _kv(places: Places) -> list[str]:
    return ["bench", "memory", "kv", "--text", str(places.text()), "--stories", "2" if places.quick else "40"]


def _tune(places: Places) -> list[str]:
    return ["tune", "--json", *(["--quick", "--evaluations", "8"] if places.quick else [])]


RUNS = (
    ReproducibleRun("speed", "the built-in model's prompts and replies", 1, _speed, ("-o", "json", "--out")),
    ReproducibleRun("peers", "other engines on the same work, and inside the same budgets", 14, _peers),
    ReproducibleRun("curve", "a pass over several tokens, at the shape of a 0.5B", 1, _curve),
    ReproducibleRun("spec", "drafting ahead, on a cost-expanded model", 5, _spec, needs=("checkpoints", "data")),
    ReproducibleRun("memory-plans", "random plans, each inside an enforced limit", 5, _plans),
    ReproducibleRun("memory-smallest", "speed against budget, at the shape of a 0.5B", 6, _smallest),
    ReproducibleRun("quality", "what fewer bits cost", 8, _quality, needs=("checkpoints", "data")),
    ReproducibleRun("kv", "caches in fewer bits", 1, _kv, needs=("data",)),
    ReproducibleRun("tune", "what tuning the built-in model gains", 3, _tune, ()),
)


def find_runs(names: Sequence[str] | None) -> list[ReproducibleRun]:
    """Runs of these names, or all, in their own order."""
    known = {run.name: run for run in RUNS}
    for name in names or ():
        known[name]  # so that an unknown one is named
    return [run for run in RUNS if names is None or run.name in names]


def read_result(folder: Path, name: str) -> Any:
    """A run's JSON; None where there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def finished(folder: Path, name: str, *, quick: bool) -> bool:
    """Whether a run is there; one that was made in a hurry counts only where that is enough."""
    data = read_result(folder, name)
    return data is not None and (quick or not head(data).get("quick"))


def head(data: Any) -> Mapping[str, Any]:
    """What a result says of itself: of speed's list each row says it."""
    row: Mapping[str, Any] = data[0] if isinstance(data, list) else data
    return row


def keep(
    folder: Path, name: str, data: Any, *, command: str, words: Mapping[str, str], facts: Mapping[str, Any]
) -> None:
    """Writes a result, whole or not at all."""
    data = redact(data, words)
    if isinstance(data, list):
        kept: Any = [row | {"command": command} | facts for row in data]
    else:
        header = {} if "benchmark" in data else run_header(name, command)
        kept = {**header, **data, "command": command, **facts}
    partial = folder / f"{name}.json.partial"
    partial.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    partial.replace(folder / f"{name}.json")


def redact(value: Any, words: Mapping[str, str]) -> Any:
    """The same with paths replaced, in all its strings; the longest first, as one may lie in another."""
    if isinstance(value, str):
        for path in sorted(words, key=len, reverse=True):
            value = value.replace(path, words[path])
        return value
    if isinstance(value, list):
        return [redact(each, words) for each in value]
    if isinstance(value, dict):
        return {redact(key, words): redact(each, words) for key, each in value.items()}
    return value


def write_page(folder: Path) -> Path | None:
    """The report of all runs that are there; None of none."""
    files = [path for run in RUNS if (path := folder / f"{run.name}.json").is_file()]
    if not files:
        return None
    out = folder / "report.html"
    out.write_text(report_html(files, "edgeinfer, measured", _LEAD), "utf-8")
    return out


def write_index(folder: Path, again: str) -> None:
    """README.md: which files there are, on which machine, when and how they were made."""
    found = {run: data for run in RUNS if (data := read_result(folder, run.name)) is not None}
    shared = common([machine_facts(data) for data in found.values()])
    lines = ["# Results", "", "Made by", "", "```", again, "```", ""]
    lines += [
        "`report.html` shows all of them; the tables of README.md and docs/figures.md are filled from these files.",
        "",
    ]
    lines += _lines(("", ""), shared) if shared else []
    rows = []
    for run, data in found.items():
        said = head(data)
        seconds = f"{said['seconds'] / 60:.1f}" if "seconds" in said else ""
        hurried = " (in a hurry: no figures)" if said.get("quick") else ""
        rows.append((f"`{run.name}.json`", run.words + hurried, said["test_time"], seconds, f"`{said['command']}`"))
    lines += ["", *_lines(("file", "what", "when", "minutes", "command"), rows)]
    lines += ["", "Other files here belong to [MEASUREMENTS](../MEASUREMENTS.md).", ""]
    (folder / "README.md").write_text("\n".join(lines), "utf-8")


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def names(text: str) -> list[str]:
    """The names of the results that a text shows."""
    return [found["name"] for found in _MARKED.finditer(text)]


def fill(text: str, folder: Path) -> str:
    """The text with every marked part as the result files have it."""
    return _MARKED.sub(lambda found: found[1] + block(folder, found["name"]) + found[4], text)


def block(folder: Path, name: str) -> str:
    """What stands between the marks of a run: its tables, then machine, date and command; or one table alone."""
    if name in _TABLES:
        return _TABLES[name](folder / name)
    name, _, summary = name.partition(".")
    data = read_result(folder, name)
    if data is None or head(data).get("quick"):
        command = _SCRIPTS.get(name, f"python -m edgeinfer.apps.bench.reproduce --only {name}")
        return f"Not measured yet: `{command}`.\n"
    if summary:
        return _SUMMARIES[f"{name}.{summary}"](data)
    section, _ = read_section(folder / f"{name}.json")
    shown = _SHOWN.get(name)
    parts = [part for index, part in enumerate(section.parts) if shown is None or index in shown]
    said = head(data)
    facts = dict(machine_facts(data))
    cores = f", {facts['Cores']} cores" if "Cores" in facts else ""
    source = f"{facts['Processor']}{cores}, {said['test_time'][:10]}: `{said['command']}`"
    return "\n\n".join([*markdown(parts), source]) + "\n"


def _peers_summary(data: Any) -> str:
    """Speed and memory of the larger model in every engine, in one table."""
    model = data["models"][-1]
    header = ("engine", "reply, tokens/s", "prompt, tokens/s", "peak memory", "reply in 350 MB, tokens/s")
    rows = []
    for row in model["engines"]:
        within = row["budgets"]["350000000"]
        speed = within["tokens_per_second"]
        peak = format_size(row["peak_rss_bytes"])
        figures = [f"{row['tg128']:.0f}", f"{row['pp512']:.0f}", peak, f"{speed:.1f}" if speed else within["reason"]]
        rows.append((row["engine"], *figures))
    return markdown_table(header, rows, left=(0,))


def _tables(make: Callable[[Any], Iterable[Table]]) -> Callable[[Any], str]:
    """Shows the tables that a function makes of a result."""
    return lambda data: "\n".join(markdown_table(table.header, table.rows, left=()) for table in make(data))


# Blocks that show one table of a result, by the names in their marks.
_SUMMARIES: Mapping[str, Callable[[Any], str]] = {
    "peers.summary": _peers_summary,
    "remote.links": _tables(links_table),
    "remote.devices": _tables(company_table),
}
# What measures results that no run makes.
_SCRIPTS = {
    "remote": "python -m edgeinfer.apps.bench.remote_speed --checkpoint ../shared/models/tales "
    "--out docs/results/remote.json"
}
# Blocks that show all files of a folder, by the folder's name.
_TABLES: Mapping[str, Callable[[Path], str]] = {"devices": devices_table}
