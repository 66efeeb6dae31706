"""Measures every published figure again, and fills the tables of README.md, docs/figures.md and docs/REMOTE.md.

    python -m tests.tools.reproduce --checkpoint CHECKPOINT --data DATA
    python -m tests.tools.reproduce --readme

Each run is a process of its own. Runs that are there already are kept unless --again is given; a run that needs
something that was not given is skipped with the reason; one that fails does not end the others.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.benchmark import run_header
from edgeinfer.apps.bench.devices import devices_table
from edgeinfer.apps.bench.listing import BENCHMARKS
from edgeinfer.apps.bench.processes import child_environment
from edgeinfer.apps.bench.render import (
    Paragraph,
    Section,
    Table,
    commands,
    machine_facts,
    markdown,
    markdown_table,
    run_facts,
)
from edgeinfer.apps.bench.speed import FORMATS
from edgeinfer.core.errors import BackendError, EdgeInferError, UsageError
from edgeinfer.core.options import format_size
from tests.tools.cost_expanded import expand_checkpoint
from tests.tools.random_models import find_shape, write_random_checkpoint
from tests.tools.remote_speed import devices_together, links_table

SHAPE = "qwen2.5-0.5b"
PLANNED_SHAPES = ("tiny", "15m", "60m", SHAPE)
_PAGES = (Path("README.md"), Path("docs", "figures.md"), Path("docs", "REMOTE.md"))
_MARKED = re.compile(r"(<!-- results:(?P<name>[\w.-]+) -->\n)(?P<text>.*?)(<!-- /results -->)", re.DOTALL)
# Indices of the parts that pages show; None shows all.
_SHOWN: Mapping[str, Sequence[int]] = {
    "curve": (0,),
    "memory-plans": (0, 1),
    "memory-smallest": (0, 1),
    "spec": (0, 2),
    "tune": (0, 1),
}


@dataclass(frozen=True)
class Places:
    """Inputs of the runs: trained checkpoints (the built-in model's first), data sets, a folder for models, and
    interpreters of other engines as ENGINE=PATH; `quick` measures so little that figures only show that runs work."""

    checkpoints: tuple[Path, ...]
    data: Path | None
    work: Path
    pythons: tuple[str, ...] = ()
    quick: bool = False

    def checkpoint(self, shape: str = SHAPE) -> Path:
        """A checkpoint of random weights at published sizes."""
        return self._made(self.work / shape, lambda path: write_random_checkpoint(path, find_shape(shape)))

    def bundle(self, shape: str = SHAPE) -> Path:
        """A bundle in 4 bits of that checkpoint."""
        return self._made(self.work / f"{shape}-b4", lambda path: _export(self.checkpoint(shape), path))

    def expanded(self) -> Path:
        """A bundle in 4 bits of the first checkpoint, expanded to the cost of a 0.5B."""
        small, folder = self.checkpoints[0], self.work / f"{self.checkpoints[0].name}-cost-expanded"
        large = self._made(folder, lambda path: expand_checkpoint(small, path, find_shape(SHAPE)))
        return self._made(folder.with_name(folder.name + "-b4"), lambda path: _export(large, path))

    def _made(self, target: Path, write: Callable[[Path], object]) -> Path:
        if not target.exists():
            partial = target.with_name(target.name + ".partial")
            write(partial)
            partial.replace(target)
        return target


def _export(checkpoint: Path, out: Path) -> None:
    options = ["--bits", "4", "--symmetric", "--head-bits", "4", "--name", checkpoint.name, "--force"]
    done = subprocess.run([*_EDGEINFER, "export", str(checkpoint), str(out), *options], env=child_environment())
    if done.returncode != 0:
        raise BackendError(f"{checkpoint} cannot be exported.", "Export it alone to see more.")


_EDGEINFER = (sys.executable, "-m", "edgeinfer")


def _speed(places: Places) -> list[str]:
    return ["bench", "speed", "-t", "1", "-pg", "512,128", "-d", "0,256", *(["-r", "1"] if places.quick else [])]


def _peers(places: Places) -> list[str]:
    pythons = [part for python in places.pythons for part in ("--python", python)]
    sizes = ["--quick", "--budgets", "250"]
    if not places.quick:
        sizes = ["--models", f"tales,{places.checkpoint()}", "--tolerance", "0.5"]
        sizes += ["--repeats", "3", "--rounds", "2", "--patience", "45"]
    return ["bench", "peers", *sizes, *pythons, "--work", str(places.work)]


def _curve(places: Places) -> list[str]:
    return ["bench", "curve", "-m", str(places.bundle()), "-t", "1", *(["-r", "1"] if places.quick else [])]


def _spec(places: Places) -> list[str]:
    prompts = ["-m", str(places.expanded()), "-t", "1", "--data", str(places.data), "--categories", "tales"]
    if places.quick:
        return ["bench", "spec", *prompts, "--per-category", "1", "-n", "16", "--repeats", "1"]
    return ["bench", "spec", *prompts, "--per-category", "2", "--warm-up", "6", "--modes", "auto", "--control"]


def _plans(places: Places) -> list[str]:
    if places.quick:
        return ["bench", "memory", "plans", "--runs", "3"]
    bundles = [Path(edgeinfer.__file__).parent / "builtin" / "tales", *map(places.bundle, PLANNED_SHAPES)]
    return ["bench", "memory", "plans", "--runs", "200", "--seed", "27", *(p for b in bundles for p in ("-m", str(b)))]


def _smallest(places: Places) -> list[str]:
    sizes = ["-c", "2048", "--steps", "6", "--rounds", "1", "--halvings", "2"]
    if places.quick:
        sizes = ["-c", "512", "--steps", "2", "--rounds", "1", "--halvings", "0"]
    return ["bench", "memory", "smallest", "-m", str(places.bundle()), "-t", "1", "--speculation", "off", *sizes]


def _quality(places: Places) -> list[str]:
    models = [part for path in places.checkpoints for part in ("--checkpoint", str(path))]
    widths, sizes = ["--bits", "8,auto,4,3,2", "--kv", "int8,int4"], ["--pieces", "100", "--questions", "10"]
    if places.quick:
        widths, sizes = ["--bits", "8", "--kv", "int8"], ["--pieces", "2", "--questions", "1"]
    return ["bench", "quality", *models, *widths, "--data", str(places.data), *sizes]


def _tune(places: Places) -> list[str]:
    return ["tune", "--json", *(["--quick", "--evaluations", "8"] if places.quick else [])]


@dataclass(frozen=True)
class Run:
    """A result file: its name, words, minutes, the command without output, options before the output file (none if the
    command prints JSON), and the fields of `Places` that it needs."""

    name: str
    words: str
    minutes: float
    arguments: Callable[[Places], list[str]]
    output: tuple[str, ...] = ("--json",)
    needs: tuple[str, ...] = ()

    def missing(self, places: Places) -> str:
        """Why it cannot be run; empty if it can."""
        lacks = [f"--{name.removesuffix('s')}" for name in self.needs if not getattr(places, name)]
        return f"needs {' and '.join(lacks)}" if lacks else ""


RUNS = (
    Run("speed", "the built-in model's prompts and replies", 1, _speed, ("-o", "json", "--out")),
    Run("peers", "other engines on the same work, and inside the same budgets", 14, _peers),
    Run("curve", "a pass over several tokens, at the shape of a 0.5B", 1, _curve),
    Run("spec", "speculation, on a cost-expanded model", 5, _spec, needs=("checkpoints", "data")),
    Run("memory-plans", "random plans, each inside an enforced limit", 30, _plans),
    Run("memory-smallest", "speed against budget, at the shape of a 0.5B", 6, _smallest),
    Run("quality", "what fewer bits cost", 8, _quality, needs=("checkpoints", "data")),
    Run("tune", "what tuning the built-in model gains", 3, _tune, ()),
)


def reproduce(run: Run, places: Places, out: Path, *, again: bool) -> str:
    """Run one, unless it is there or lacks something; the outcome in words."""
    kept = read_result(out, run.name)
    if not again and kept is not None and (places.quick or not _head(kept).get("quick")):
        return "kept"
    if reason := run.missing(places):
        return f"skipped: {reason}"
    started = time.monotonic()
    try:
        arguments = run.arguments(places)
        with tempfile.TemporaryDirectory(prefix="edgeinfer-reproduce-") as folder:
            data, reason = _result(run, arguments, Path(folder))
    except EdgeInferError as error:
        return f"failed: {error}"
    seconds, words = time.monotonic() - started, _words(places)
    facts = {"seconds": round(seconds, 1)} | ({"quick": True} if places.quick else {})
    command = shlex.join(["edgeinfer", *redact(arguments, words)])
    keep(out, run.name, data, {"command": command, **facts}, words)
    return f"made in {seconds / 60:.1f} min" + (f": {reason}" if reason else "")


def _result(run: Run, arguments: Sequence[str], folder: Path) -> tuple[Any, str]:
    """The JSON of a process, and its last complaint if it failed although it gave one."""
    file = folder / f"{run.name}.json"
    command = [*_EDGEINFER, *arguments, *([*run.output, str(file)] if run.output else [])]
    # An empty cache, as other sessions' learning and tuning would change the figures.
    env = child_environment() | {"XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    reason = f"exit code {done.returncode}: {last}" if done.returncode else ""
    try:
        return json.loads(file.read_text("utf-8") if run.output else done.stdout), reason
    except (OSError, ValueError) as error:
        raise BackendError(reason or f"it wrote no figures ({error}).", "Run its command alone to see more.") from error


def _words(places: Places) -> dict[str, str]:
    """Replacements for paths of this machine in published files."""
    words = {str(places.work): "WORK", str(Path(edgeinfer.__file__).resolve().parents[1]): "."}
    words |= {str(path.parent): "CHECKPOINTS" for path in places.checkpoints}
    words |= {str(places.data): "DATA"} if places.data else {}
    words |= {python.partition("=")[2]: "PYTHON" for python in places.pythons}
    return words | {str(Path.home()): "~", tempfile.gettempdir(): "TEMPORARY"}


def redact(value: Any, words: Mapping[str, str]) -> Any:
    """Replace paths in all strings, the longest first."""
    if isinstance(value, str):
        for path in sorted(words, key=len, reverse=True):
            value = value.replace(path, words[path])
        return value
    if isinstance(value, list):
        return [redact(each, words) for each in value]
    if isinstance(value, dict):
        return {redact(key, words): redact(each, words) for key, each in value.items()}
    return value


def keep(folder: Path, name: str, data: Any, facts: Mapping[str, Any], words: Mapping[str, str]) -> None:
    """Write a result with further facts."""
    data = redact(data, words)
    if isinstance(data, list):
        kept: Any = [{**row, **facts} for row in data]
    else:
        header = {} if "benchmark" in data else run_header(name, "")
        kept = {**header, **data, **facts}
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def read_result(folder: Path, name: str) -> Any:
    """A run's JSON; None if there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def _head(data: Any) -> Mapping[str, Any]:
    """The facts of a result, which each row of a list repeats."""
    row: Mapping[str, Any] = data[0] if isinstance(data, list) else data
    return row


def result_names(text: str) -> list[str]:
    """The names of the results that a page shows."""
    return [found["name"] for found in _MARKED.finditer(text)]


def fill(text: str, folder: Path) -> str:
    """The text with every marked part as the result files have it."""
    return _MARKED.sub(lambda found: found[1] + block(folder, found["name"]) + found[4], text)


def block(folder: Path, name: str) -> str:
    """The tables of a run with machine, date and command; or one table alone."""
    if name == "devices":
        return devices_table(folder / name)
    name, _, summary = name.partition(".")
    data = read_result(folder, name)
    if data is None or _head(data).get("quick"):
        return f"Not measured yet: `python -m tests.tools.reproduce --only {name}`.\n"
    if summary:
        return _SUMMARIES[f"{name}.{summary}"](data)
    if isinstance(data, list):  # of speed, in llama-bench's form
        tables = [FORMATS["md"](data).rstrip("\n")]
    else:
        shown, parts = _SHOWN.get(name), enumerate(_section(data).parts)
        tables = markdown([part for index, part in parts if shown is None or index in shown])
    said, facts = _head(data), dict(machine_facts(data))
    cores = f", {facts['Cores']} cores" if "Cores" in facts else ""
    source = f"{facts['Processor']}{cores}, {said['test_time'][:10]}: `{said['command']}`"
    return "\n\n".join([*tables, source]) + "\n"


def _section(data: Any) -> Section:
    """The tables of a result."""
    sections = {each.key: each.section for each in BENCHMARKS if each.section} | {"tune": _tune_section}
    return sections[data["benchmark"]](data)


def _tune_section(data: Any) -> Section:
    """The usual and the tuned settings."""
    device = data["device"]
    facts = (("Threads", str(device["threads"])),) if device else ()
    parts = tuple(_device(device)) if device else ()
    return Section("What tuning gains", (*facts, *run_facts(data)), parts, commands(data))


def _device(device: Mapping[str, Any]) -> Iterator[Table | Paragraph]:
    rows = tuple(
        (name, f"{part['usual_ms']:.2f}", f"{part['tuned_ms']:.2f}", f"{part['ratio']:.2f}")
        for name, part in device["parts"].items()
    )
    yield Table("Milliseconds, as usual and as tuned, and how many times faster", ("", "usual", "tuned", "ratio"), rows)
    chosen = {name: value for name, value in device["settings"].items() if value not in (None, "")}
    kept = ", ".join(f"{name} {value}" for name, value in chosen.items())
    yield Paragraph(f"Kept: {kept}." if kept else "Nothing was better beyond doubt: the usual settings stay.")
    tried = tuple(
        (
            each["name"].replace("_", " "),
            str(each["value"]),
            "" if each["time_ratio"] is None else f"{each['time_ratio']:.2f}",
            each["outcome"],
        )
        for each in device["attempts"]
    )
    if tried:
        header = ("setting", "value", "time, of the usual", "outcome")
        yield Table("Settings that were tried", header, tried, words=("outcome",))


def _peers_summary(data: Any) -> str:
    """Speed and memory of the larger model in every engine."""
    header = ("engine", "reply, tokens/s", "prompt, tokens/s", "peak memory", "reply in 350 MB, tokens/s")
    rows = []
    for row in data["models"][-1]["engines"]:
        within = row["budgets"]["350000000"]
        speed = within["tokens_per_second"]
        peak = format_size(row["peak_rss_bytes"])
        figures = [f"{row['tg128']:.0f}", f"{row['pp512']:.0f}", peak, f"{speed:.1f}" if speed else within["reason"]]
        rows.append((row["engine"], *figures))
    return markdown_table(header, rows, left=(0,))


def _tables(make: Callable[[Any], Any]) -> Callable[[Any], str]:
    return lambda data: "\n".join(markdown_table(table.header, table.rows, left=()) for table in make(data))


_SUMMARIES: Mapping[str, Callable[[Any], str]] = {
    "peers.summary": _peers_summary,
    "remote.links": _tables(links_table),
    "remote.devices": _tables(devices_together),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.tools.reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [run.name for run in RUNS]
    parser.add_argument("--only", type=lambda text: text.split(","), default=names, help=f"of {', '.join(names)}")
    text = "a trained checkpoint, the built-in model's first; can be repeated"
    parser.add_argument("--checkpoint", action="append", type=Path, default=[], metavar="PATH", help=text)
    parser.add_argument("--data", type=Path, metavar="PATH", help="folder with tinystories/ and tales_dialogues/")
    parser.add_argument(
        "--python", action="append", default=[], metavar="ENGINE=PATH", help="for peers; can be repeated"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results"), metavar="PATH", help="default: %(default)s")
    work = Path.home() / ".cache" / "edgeinfer" / "bench"
    parser.add_argument("--work", type=Path, default=work, metavar="PATH", help="folder for models")
    parser.add_argument("--again", action="store_true", help="measure results that are there already, too")
    parser.add_argument("--quick", action="store_true", help="measure so little that pages do not show it")
    text = f"fill the tables of pages from --out, and run nothing (default: {' '.join(map(str, _PAGES))})"
    parser.add_argument("--readme", nargs="*", type=Path, metavar="FILE", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit code 1 if a run failed."""
    args = _parser().parse_args(argv)
    if args.readme is not None:
        for page in args.readme or _PAGES:
            page.write_text(fill(page.read_text("utf-8"), args.out), "utf-8")
        return 0
    for path in (*args.checkpoint, *([args.data] if args.data else [])):
        if not path.is_dir():
            raise UsageError(f"{path} is no folder.", "Give the folder of a checkpoint, or of data sets.")
    places = Places(tuple(path.resolve() for path in args.checkpoint), args.data and args.data.resolve(),
                    args.work.expanduser().resolve(), tuple(args.python), args.quick)  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for run in [run for run in RUNS if run.name in args.only]:
        print(f"{run.name}: {run.words}, about {run.minutes:g} min", flush=True)
        outcomes.append(reproduce(run, places, args.out, again=args.again))
        print(f"  {outcomes[-1]}", flush=True)
    return 1 if any(outcome.startswith("failed") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
