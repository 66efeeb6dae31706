"""Times edgeinfer and its peers side by side, in turns: same shape, bits and threads; knows nothing of their calls.

python -m edgeinfer.apps.bench.compare --shape qwen2.5-0.5b --threads 1 --past 128 --repeats 7 --json compare.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.artifacts import Artifacts, default_folder, tree_bytes
from edgeinfer.apps.bench.driver import Worker
from edgeinfer.apps.bench.report import Comparison, Contender, print_comparison
from edgeinfer.apps.bench.shapes import SHAPES, Shape, find_shape
from edgeinfer.apps.bench.timing import DECODE, Samples, Task, visits
from edgeinfer.errors import BackendError, EdgeInferError, UsageError

__all__ = ["CompareConfig", "compare", "main"]

ENGINES = ("edgeinfer", "llamacpp", "genai")
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class CompareConfig:
    """What is compared.

    Attributes:
        shape: the models' sizes.
        threads: of every engine.
        past: tokens in the cache before each pass.
        repeats: visits to every engine and pass size.
        burst: timed passes per visit.
        decode_tokens: greedy steps per visit.
        sizes: new tokens per pass; 1 is always among them, as the ratios' base.
        engines: which of `ENGINES`.
        group_sizes: a bundle of each is timed. Q4_0 has 32.
        exact: edgeinfer's exact mode on, off, or one after the other.
        symmetric: bundles without zero points, as Q4_0.
        head_bits: of edgeinfer's embedding and head. The GGUF file has 4.
    """

    shape: Shape
    threads: int = 1
    past: int = 128
    repeats: int = 7
    burst: int = 3
    decode_tokens: int = 8
    sizes: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    engines: tuple[str, ...] = ENGINES
    group_sizes: tuple[int, ...] = (32,)
    exact: tuple[bool, ...] = (True, False)
    symmetric: bool = True
    head_bits: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(sorted({1, *self.sizes})))
        for name in ("threads", "past", "repeats", "burst", "decode_tokens"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}.")
        _require(self.sizes[0] >= 1 and self.sizes[-1] <= 64, "Pass sizes must lie between 1 and 64.")
        _require(bool(self.engines) and set(self.engines) <= set(ENGINES), f"Engines are {', '.join(ENGINES)}.")
        _require(set(self.group_sizes) <= set(GROUP_SIZES), f"Group sizes are {', '.join(map(str, GROUP_SIZES))}.")
        _require(
            self.context <= self.shape.max_position,
            f"{self.shape.name} holds no more than {self.shape.max_position} tokens.",
        )

    @property
    def context(self) -> int:
        """Tokens of cache every engine is given: the longest visit, rounded up to llama.cpp's multiple of 256."""
        needed = self.past + max(*self.sizes, self.decode_tokens + 1)
        return -(-needed // 256) * 256

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What each repeat times, in the order of the report."""
        return (DECODE, *self.sizes)


@dataclass(frozen=True)
class _Entry:
    """An engine to start: how it is labelled, what it loads and with which interpreter."""

    label: str
    engine: str
    path: Path
    options: dict[str, Any]
    python: str | None = None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message, "See --help.")


def compare(
    config: CompareConfig,
    artifacts: Artifacts,
    genai_python: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Builds what is missing, starts every engine that is there, and times them in turns.

    Args:
        genai_python: interpreter that has onnxruntime-genai; None looks in this one.
        progress: called with the visits done and their number.

    Raises:
        BackendError: an engine stopped while it was timed, or edgeinfer could not load its bundle.
    """
    skipped: dict[str, str] = {}
    samples = Samples()
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        contenders = []
        for entry in _entries(config, artifacts, genai_python, skipped):
            options = {"path": str(entry.path), "threads": config.threads, "context": config.context, **entry.options}
            try:
                worker = stack.enter_context(Worker(entry.engine, options, entry.python))
            except BackendError as error:
                if entry.engine == "edgeinfer":
                    raise
                skipped[entry.engine] = error.message
                continue
            workers[entry.label] = worker
            contenders.append(Contender(entry.label, entry.engine, worker.version, tree_bytes(entry.path)))
        order = list(visits(list(workers), config.tasks, config.repeats))
        for done, (label, task) in enumerate(order):
            if progress:
                progress(done, len(order))
            samples.add(label, task, _visit(workers[label], task, config))
    return Comparison(config.shape, config.threads, config.past, config.sizes, tuple(contenders), skipped, samples)


def _visit(worker: Worker, task: Task, config: CompareConfig) -> list[float]:
    if task == DECODE:
        return worker.decode_times(config.decode_tokens, config.past)
    return worker.pass_times(task, config.past, config.burst)


def _entries(
    config: CompareConfig, artifacts: Artifacts, genai_python: str | None, skipped: dict[str, str]
) -> Iterator[_Entry]:
    """The engines to start, with their model files built; those that cannot be are put in `skipped` with the reason."""
    if "edgeinfer" in config.engines:
        for group_size in config.group_sizes:
            path = artifacts.bundle(group_size, symmetric=config.symmetric, head_bits=config.head_bits)
            for exact in config.exact:
                label = f"edgeinfer g{group_size} {'exact' if exact else 'fast'}"
                yield _Entry(label, "edgeinfer", path, {"exact": exact})
    if "llamacpp" in config.engines:
        missing = [name for name in ("llama_cpp", "gguf") if find_spec(name) is None]
        if missing:
            skipped["llamacpp"] = f"{' and '.join(missing)} not installed (extra: edgeinfer[gguf])"
        else:
            yield _Entry("llama.cpp Q4_0", "llamacpp", artifacts.gguf(), {})
    if "genai" in config.engines:
        if genai_python is None and find_spec("onnxruntime_genai") is None:
            skipped["genai"] = "onnxruntime-genai not installed here; name its interpreter with --genai-python"
            return
        try:
            path = artifacts.genai(genai_python)
        except BackendError as error:
            skipped["genai"] = error.message
            return
        yield _Entry("genai int4 g32", "genai", path, {}, genai_python)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m edgeinfer.apps.bench.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen2.5-0.5b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--threads", type=int, default=1, help="of every engine")
    parser.add_argument("--past", type=int, default=128, help="tokens in the cache before each pass")
    parser.add_argument("--repeats", type=int, default=7, help="visits to every engine and pass size")
    parser.add_argument("--burst", type=int, default=3, help="timed passes per visit")
    parser.add_argument("--decode-tokens", type=int, default=8, help="greedy steps per visit")
    parser.add_argument("--sizes", type=_numbers, default="1,2,3,4,6,8,12,16", help="new tokens per pass")
    parser.add_argument("--engines", default=",".join(ENGINES), help="default: %(default)s")
    parser.add_argument("--group-sizes", type=_numbers, default="32,128", help="edgeinfer's: 32, 64, 128, or several")
    parser.add_argument("--exact", choices=("on", "off", "both"), default="both", help="edgeinfer's exact mode")
    parser.add_argument("--asymmetric", action="store_true", help="edgeinfer bundles with zero points")
    parser.add_argument("--head-bits", type=int, choices=(4, 8), default=4, help="of edgeinfer's embedding and head")
    parser.add_argument("--genai-python", metavar="PATH", help="interpreter that has onnxruntime-genai")
    parser.add_argument("--work", type=Path, default=default_folder(), help="model files, kept (%(default)s)")
    parser.add_argument("--rebuild", action="store_true", help="export the bundles again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, samples included")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _run(args: argparse.Namespace) -> None:
    shape = find_shape(args.shape)
    config = CompareConfig(
        shape=shape,
        threads=args.threads,
        past=args.past,
        repeats=args.repeats,
        burst=args.burst,
        decode_tokens=args.decode_tokens,
        sizes=args.sizes,
        engines=tuple(args.engines.split(",")),
        group_sizes=args.group_sizes,
        exact={"on": (True,), "off": (False,), "both": (True, False)}[args.exact],
        symmetric=not args.asymmetric,
        head_bits=args.head_bits,
    )
    artifacts = Artifacts(args.work, shape, rebuild=args.rebuild)
    with _progress_bar() as progress:
        comparison = compare(config, artifacts, args.genai_python, progress)
    print_comparison(comparison)
    if args.json:
        args.json.write_text(json.dumps(comparison.to_dict(), indent=1) + "\n", encoding="utf-8")


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
