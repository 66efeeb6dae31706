"""Times edgeinfer and its peers side by side, in turns: same shape, bits and threads; knows nothing of their calls.

python -m edgeinfer.apps.bench.compare --shape qwen2.5-0.5b --threads 1 --past 128 --repeats 7 --json compare.json

Beside edgeinfer's times stand the machine's limits, measured in the same run: how long it takes at least to read the
weights and to do the multiply-adds.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.artifacts import LAYOUTS, Artifacts, default_folder, tree_bytes
from edgeinfer.apps.bench.comparison import Comparison, Contender
from edgeinfer.apps.bench.contenders import BITS, ENGINES, GROUP_SIZES, CompareConfig, entries
from edgeinfer.apps.bench.driver import Worker
from edgeinfer.apps.bench.environment import script_json
from edgeinfer.apps.bench.report import print_comparison
from edgeinfer.apps.bench.shapes import SHAPES, find_shape
from edgeinfer.apps.bench.timing import DECODE, PREFILL, Samples, Task, visits
from edgeinfer.errors import BackendError, EdgeInferError, NativeUnavailableError
from edgeinfer.results import DeviceLimits, PassWork

__all__ = ["compare", "main"]

# Visited like an engine, so that its figures are taken in the same minutes as theirs.
_DEVICE = "device"


def compare(
    config: CompareConfig,
    artifacts: Artifacts,
    pythons: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Builds what is missing, starts every engine that is there, and times them in turns.

    Args:
        pythons: interpreters of engines that are not installed here, by engine.
        progress: called with the visits done and their number.

    Raises:
        BackendError: an engine stopped while it was timed, or edgeinfer could not load its bundle.
    """
    skipped: dict[str, str] = {}
    samples = Samples()
    limits: dict[Task, list[DeviceLimits]] = {}
    work: dict[tuple[str, Task], PassWork] = {}
    try:
        edgeinfer.measure_device(config.threads)
        device = [_DEVICE]
    except NativeUnavailableError as error:
        skipped["edgeinfer native"], device = str(error), []
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        contenders = []
        for entry in entries(config, artifacts, pythons or {}, skipped):
            options = {"path": str(entry.path), "threads": config.threads, "context": config.context, **entry.options}
            try:
                worker = stack.enter_context(Worker(entry.engine, options, entry.python))
            except BackendError as error:
                if entry.engine == "edgeinfer":
                    raise
                skipped[entry.engine] = error.message
                continue
            if entry.engine == "edgeinfer":
                work |= {(entry.label, task): _work(worker, task, config) for task in config.tasks}
            workers[entry.label] = worker
            contenders.append(Contender(entry.label, entry.family, worker.version, tree_bytes(entry.path)))
        order = list(visits([*workers, *device], config.tasks, config.repeats))
        for done, (label, task) in enumerate(order):
            if progress:
                progress(done, len(order))
            if label == _DEVICE:
                limits.setdefault(task, []).append(edgeinfer.measure_device(config.threads))
            else:
                samples.add(label, task, _visit(workers[label], task, config))
    return Comparison(config, tuple(contenders), skipped, samples, limits, work)


def _visit(worker: Worker, task: Task, config: CompareConfig) -> list[float]:
    if task == DECODE:
        return worker.decode_times(config.decode_tokens, config.past)
    if task == PREFILL:
        return worker.prefill_times(config.prefill)
    return worker.pass_times(task, config.past, config.burst)


def _work(worker: Worker, task: Task, config: CompareConfig) -> PassWork:
    if task == PREFILL:
        return worker.prefill_work(config.prefill)
    return worker.pass_work(1 if task == DECODE else task)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m edgeinfer.apps.bench.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen2.5-0.5b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--threads", type=int, default=1, help="of every engine")
    parser.add_argument("--past", type=int, default=128, help="tokens in the cache before each pass")
    parser.add_argument("--repeats", type=int, default=7, help="visits to every engine and pass size")
    parser.add_argument("--burst", type=int, default=3, help="timed passes per visit")
    parser.add_argument("--decode-tokens", type=int, default=8, help="greedy steps per visit")
    parser.add_argument("--sizes", type=_numbers, default="1,2,3,4,6,8,12,16,32", help="new tokens per pass, up to 64")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a prompt taken in whole, 0 for none")
    parser.add_argument("--prefill-chunk", type=int, default=64, help="tokens per pass of edgeinfer's prompts")
    parser.add_argument("--engines", type=_names, default=",".join(ENGINES), help="default: %(default)s")
    parser.add_argument("--layouts", type=_names, default=",".join(LAYOUTS), help="edgeinfer's (default: %(default)s)")
    parser.add_argument("--bits", type=_numbers, default="4", help=f"edgeinfer's: {BITS}, or several")
    parser.add_argument("--group-sizes", type=_numbers, default="128", help=f"edgeinfer's: {GROUP_SIZES}, or several")
    parser.add_argument("--exact", choices=("on", "off", "both"), default="on", help="edgeinfer's exact mode")
    parser.add_argument("--asymmetric", action="store_true", help="edgeinfer bundles with zero points")
    parser.add_argument("--head-bits", type=int, choices=BITS, help="of edgeinfer's embedding and head (as --bits)")
    parser.add_argument("--openvino-python", metavar="PATH", help="interpreter that has openvino")
    parser.add_argument("--genai-python", metavar="PATH", help="interpreter that has onnxruntime-genai")
    parser.add_argument("--work", type=Path, default=default_folder(), help="model files, kept (%(default)s)")
    parser.add_argument("--rebuild", action="store_true", help="export the bundles again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, samples included")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _run(args: argparse.Namespace) -> None:
    shape = find_shape(args.shape)
    spelled: dict[str, Any] = {
        "shape": shape,
        "exact": {"on": (True,), "off": (False,), "both": (True, False)}[args.exact],
        "symmetric": not args.asymmetric,
    }
    same: dict[str, Any] = {f.name: getattr(args, f.name) for f in fields(CompareConfig) if f.name not in spelled}
    config = CompareConfig(**same, **spelled)
    artifacts = Artifacts(args.work, shape, rebuild=args.rebuild)
    pythons = {"openvino": args.openvino_python, "genai": args.genai_python}
    pythons = {engine: python for engine, python in pythons.items() if python}
    with _progress_bar() as progress:
        comparison = compare(config, artifacts, pythons, progress)
    print_comparison(comparison)
    if args.json:
        args.json.write_text(script_json("compare", comparison.to_dict()), encoding="utf-8")


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr; nothing where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("preparing", total=None)
        yield lambda done, total: bar.update(task, description="timing", completed=done, total=total)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except EdgeInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
