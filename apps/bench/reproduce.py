"""Makes every published figure again, run after run, each in a process of its own.

python -m edgeinfer.apps.bench.reproduce [--only NAME,...] [--checkpoint PATH]... [--data DATA] [--out docs/results]
    [--python ENGINE=PATH]... [--again] [--quick] [--list] [--readme]

Runs that are there already are kept unless --again says otherwise; what a run needs and lacks is skipped with the
reason; one that fails does not end the others. --readme fills the tables of README.md, docs/figures.md and
docs/REMOTE.md with what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import edgeinfer
from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.apps.bench.model_files import default_folder
from edgeinfer.apps.bench.reproduce_files import (
    RUNS,
    Places,
    ReproducibleRun,
    fill,
    find_runs,
    finished,
    keep,
    redact,
    write_index,
    write_page,
)
from edgeinfer.errors import BackendError, EdgeInferError, UsageError

# Pages with tables of results.
_PAGES = (Path("README.md"), Path("docs", "figures.md"), Path("docs", "REMOTE.md"))
_KEPT, _MADE, _SKIPPED, _FAILED = "kept", "made", "skipped", "failed"


@dataclass(frozen=True)
class Reproduced:
    """What became of a run.

    Attributes:
        outcome: kept, made, skipped or failed.
        reason: why it was skipped, or the last thing it said.
    """

    run: ReproducibleRun
    outcome: str
    reason: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        took = f" in {self.seconds / 60:.1f} min" if self.seconds else ""
        return f"{self.run.name}: {self.outcome}{took}" + (f": {self.reason}" if self.reason else "")


def reproduce(run: ReproducibleRun, places: Places, out: Path, *, again: bool) -> Reproduced:
    """Runs one, unless it is there or lacks something."""
    if not again and finished(out, run.name, quick=places.quick):
        return Reproduced(run, _KEPT)
    if reason := run.missing(places):
        return Reproduced(run, _SKIPPED, reason)
    started = time.monotonic()
    try:
        arguments = run.arguments(places)
        with tempfile.TemporaryDirectory(prefix="edgeinfer-reproduce-") as folder:
            data, said = _result(run, arguments, Path(folder))
    except EdgeInferError as error:
        return Reproduced(run, _FAILED, str(error), time.monotonic() - started)
    seconds = time.monotonic() - started
    words = _words(places)
    command = shlex.join(["edgeinfer", *redact(arguments, words)])
    facts = {"seconds": round(seconds, 1)} | ({"quick": True} if places.quick else {})
    keep(out, run.name, data, command=command, words=words, facts=facts)
    return Reproduced(run, _MADE, said, seconds)


def _result(run: ReproducibleRun, arguments: Sequence[str], folder: Path) -> tuple[object, str]:
    """The JSON of a process, and what it complained of although it gave one."""
    file = folder / f"{run.name}.json"
    command = [sys.executable, "-m", "edgeinfer.apps.cli.main", *arguments]
    command += [*run.output, str(file)] if run.output else []
    # What other sessions learnt and tuned would be in the figures, and what is learnt here in later sessions.
    env = child_environment() | {"XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    reason = f"exit code {done.returncode}: {last}" if done.returncode else ""
    try:
        text = file.read_text("utf-8") if run.output else done.stdout
        return json.loads(text), reason
    except (OSError, ValueError) as error:
        raise BackendError(reason or f"it wrote no figures ({error}).", "Run its command alone to see more.") from error


def _words(places: Places) -> Mapping[str, str]:
    """What stands for paths of this machine in files that others read."""
    words = {str(places.work): "WORK", str(Path(edgeinfer.__file__).resolve().parents[1]): "."}
    words |= {str(path.parent): "CHECKPOINTS" for path in places.checkpoints}
    words |= {str(places.data): "DATA"} if places.data else {}
    words |= {python.partition("=")[2]: "PYTHON" for python in places.pythons}
    return words | {str(Path.home()): "~", tempfile.gettempdir(): "TEMPORARY"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m edgeinfer.apps.bench.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", metavar="NAME,...", help=f"of {', '.join(run.name for run in RUNS)}")
    text = "a trained checkpoint; the first, which is expanded, is the built-in model's; may be given several times"
    parser.add_argument("--checkpoint", action="append", type=Path, default=[], metavar="PATH", help=text)
    parser.add_argument("--data", type=Path, metavar="PATH", help="folder with tinystories/ and tales_dialogues/")
    text = "an interpreter that has another engine, for peers; may be given several times"
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help=text)
    parser.add_argument("--out", type=Path, default=Path("docs/results"), metavar="PATH", help="default: %(default)s")
    parser.add_argument("--work", type=Path, default=default_folder(), metavar="PATH", help="for model files")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    text = "as little of each as shows that it runs; such figures are never shown on pages"
    parser.add_argument("--quick", action="store_true", help=text)
    parser.add_argument("--list", action="store_true", help="say which runs there are, and do nothing")
    text = (
        f"fill the tables of pages with the results in --out, and run nothing (default: {' '.join(map(str, _PAGES))})"
    )
    parser.add_argument("--readme", nargs="*", type=Path, metavar="FILE", help=text)
    return parser


def _list(runs: Sequence[ReproducibleRun], places: Places) -> None:
    for run in runs:
        reason = run.missing(places)
        print(f"{run.name:<16} {run.words}, about {run.minutes:g} min" + (f" ({reason})" if reason else ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code: 1 where a run failed, 130 where it was interrupted."""
    args = _parser().parse_args(argv)
    try:
        return _execute(args)
    except EdgeInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def _execute(args: argparse.Namespace) -> int:
    checkpoints = tuple(path.resolve() for path in args.checkpoint)
    data = args.data.resolve() if args.data else None
    for path in (*checkpoints, *([data] if data else [])):
        if not path.is_dir():
            raise UsageError(f"{path} is no folder.", "Give the folder of a checkpoint, or of data sets.")
    places = Places(checkpoints, data, args.work.expanduser().resolve(), tuple(args.python), args.quick)
    try:
        runs = find_runs(args.only.split(",") if args.only else None)
    except KeyError as error:
        raise UsageError(f"There is no run {error}.", f"Choose of {', '.join(run.name for run in RUNS)}.") from error
    if args.list:
        _list(runs, places)
        return 0
    if args.readme is not None:
        for page in args.readme or _PAGES:
            page.write_text(fill(page.read_text("utf-8"), args.out), "utf-8")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    return _run_all(runs, places, args.out, again=args.again)


def _run_all(runs: Sequence[ReproducibleRun], places: Places, out: Path, *, again: bool) -> int:
    found: list[Reproduced] = []
    interrupted = False
    for run in runs:
        print(f"{run.name}: {run.words}, about {run.minutes:g} min", flush=True)
        try:
            found.append(reproduce(run, places, out, again=again))
        except KeyboardInterrupt:
            interrupted = True
            break
        print(f"  {found[-1]}", flush=True)
        # After each, as the next may take long and be interrupted.
        write_index(out, _again(places))
        write_page(out)
    print(f"{out}{os.sep}report.html shows what is there.")
    if interrupted:
        return 130
    return 1 if any(each.outcome == _FAILED for each in found) else 0


def _again(places: Places) -> str:
    """The command that makes all results, in words."""
    words = _words(places)
    parts = [part for path in places.checkpoints for part in ("--checkpoint", redact(str(path), words))]
    parts += ["--data", "DATA"] if places.data else []
    parts += [part for python in places.pythons for part in ("--python", redact(python, words))]
    return shlex.join(["python", "-m", "edgeinfer.apps.bench.reproduce", *parts])


if __name__ == "__main__":
    sys.exit(main())
