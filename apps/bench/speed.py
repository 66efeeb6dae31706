"""`edgeinfer bench speed`: llama-bench's tests, timed in turns."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer.apps.bench.benchmark import (
    BenchContext,
    Benchmark,
    BenchResult,
    StageProgress,
    machine_name,
    numbers,
    option,
    rotated,
    system_name,
    timestamp,
)
from edgeinfer.apps.bench.render import markdown_table
from edgeinfer.core.errors import BackendError, NativeUnavailableError, Setting, UsageError
from edgeinfer.core.options import format_size
from edgeinfer.core.results import DeviceLimits

if TYPE_CHECKING:
    from edgeinfer import Model


_S = 1e9


@dataclass(frozen=True, order=True)
class SpeedTest:
    """A test: tokens of a prompt and of a reply after `depth` tokens that are not timed."""

    prompt: int
    reply: int
    depth: int = 0

    def __post_init__(self) -> None:
        if min(self.prompt, self.reply, self.depth) < 0 or self.tokens == 0:
            raise UsageError(f"{self} has nothing to time.", "Give a prompt or a reply of at least one token.")

    @property
    def tokens(self) -> int:
        """Tokens that are timed."""
        return self.prompt + self.reply

    @property
    def context(self) -> int:
        """Tokens of context that the test needs."""
        return self.depth + self.tokens + 1

    def __str__(self) -> str:
        parts = [f"{name}{count}" for name, count in (("pp", self.prompt), ("tg", self.reply)) if count]
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")


_DESCRIPTION = """\
Time prompts and replies as llama-bench does, and in its words: pp512 prefills 512 tokens, tg128 decodes 128 plainly,
and "@ d4096" does so after 4096 others. Tests take turns; the first visit to each warms up and is not counted. The
floor is the shortest time in which this machine can read weights and cache once per pass and multiply.

examples:
  edgeinfer bench speed -m BUNDLE -t 1
  edgeinfer bench speed -m BUNDLE -p 512 -n 128 -pg 512,128 -d 0,2048 -o json
"""
_TESTS = "tests"


def _pair(text: str) -> tuple[int, int]:
    prompt, reply = numbers(text)
    return prompt, reply


@dataclass(frozen=True)
class SpeedConfig:
    """Tests to run: each length after each depth, `repeats` times and once more to warm up."""

    prompts: tuple[int, ...] = option(
        "-p",
        "--n-prompt LIST",
        default=(512,),
        group=_TESTS,
        help="comma-separated prompt lengths in tokens; 0 for none",
    )
    replies: tuple[int, ...] = option(
        "-n", "--n-gen LIST", default=(128,), help="comma-separated reply lengths in tokens; 0 for none"
    )
    both: Sequence[tuple[int, int]] = option(
        "-pg P,N",
        default=(),
        action="append",
        type=_pair,
        help="lengths of a prompt and a reply to time together; can be repeated",
    )
    depths: tuple[int, ...] = option(
        "-d", "--n-depth LIST", default=(0,), help="comma-separated numbers of tokens in the KV cache before each test"
    )
    repeats: int = option("-r", "--repetitions N", default=5, help="number of measurements per test")
    output: str = option(
        "-o",
        "--output",
        default="md",
        choices=("md", "csv", "json", "jsonl"),
        help="output format: md, csv, json or jsonl",
    )
    out: Path | None = option("--out FILE", default=None, help="file to write to instead of stdout")

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(Setting("repeats", self.repeats) + " is out of range.", "Give 1 or more.")
        if not self.tests:
            raise UsageError("There is nothing to time.", "Give -p, -n or -pg.")

    @property
    def tests(self) -> list[SpeedTest]:
        """Each test once, in the order of llama-bench."""
        pairs = [(n, 0) for n in self.prompts if n] + [(0, n) for n in self.replies if n] + list(self.both)
        return list(dict.fromkeys(SpeedTest(*pair, depth) for depth in self.depths for pair in pairs))

    @property
    def context(self) -> int:
        """Tokens of context that all tests need."""
        return max(test.context for test in self.tests)


def run_speed(model: Model, config: SpeedConfig, progress: StageProgress, command: str = "") -> list[dict[str, Any]]:
    """Time all tests in turns, each round beginning with another one; a row of llama-bench's JSON for each. A test
    whose greedy tokens differ between visits is an error: a fast wrong answer never counts."""
    tests = config.tests
    samples: dict[SpeedTest, list[int]] = {test: [] for test in tests}
    tokens: dict[SpeedTest, tuple[int, ...]] = {}
    limits: list[DeviceLimits] = []
    visits = [(visit, test) for visit in range(config.repeats + 1) for test in rotated(tests, visit)]
    for done, (visit, test) in enumerate(visits):
        progress(done, len(visits))
        times = edgeinfer.tools.measure_work(model, test.prompt, test.reply, past=test.depth)
        if tokens.setdefault(test, times.token_ids) != times.token_ids:
            raise BackendError(f"{test} gave other tokens the second time.", "Report it: the engine is at fault.")
        if visit:
            samples[test].append(round(times.ms * 1e6))
        if done % len(tests) == 0:  # once in each round, as the machine's speed drifts
            limits += device_limits(model.threads)
    progress(len(visits), len(visits))
    best, facts = median_limits(limits), describe_run(model, command)
    return [facts | _row(test, taken, floor_ns(model, test, best)) for test, taken in samples.items()]


def _row(test: SpeedTest, ns: Sequence[int], floor: float | None) -> dict[str, Any]:
    """llama-bench's keys for a test, and the median and the floor."""
    ts = [test.tokens * _S / each for each in ns]
    return {
        "n_prompt": test.prompt,
        "n_gen": test.reply,
        "n_depth": test.depth,
        "test": str(test),
        "avg_ns": round(statistics.fmean(ns)),
        "stddev_ns": round(_deviation(ns)),
        "median_ns": round(statistics.median(ns)),
        "floor_ns": None if floor is None else round(floor),
        "avg_ts": statistics.fmean(ts),
        "stddev_ts": _deviation(ts),
        "median_ts": statistics.median(ts),
        "samples_ns": list(ns),
        "samples_ts": ts,
    }


def floor_ns(model: Model, test: SpeedTest, limits: DeviceLimits | None) -> float | None:
    """The shortest possible time of a test, with a reply's steps all like its middle one; None if unknown."""
    chunk, begin = model.plan.prefill_chunk, test.depth
    starts = range(0, test.prompt, chunk)
    try:
        passes = [(min(chunk, test.prompt - at), int(at + chunk >= test.prompt), begin + at) for at in starts]
        works = [edgeinfer.tools.pass_work(model, tokens, rows, past=past) for tokens, rows, past in passes]
        middle = edgeinfer.tools.pass_work(model, 1, 1, past=begin + test.prompt + test.reply // 2)
    except UsageError:  # a bundle that does not list its weights
        return None
    if limits is None:
        return None
    floors = [max(each or 0.0 for each in limits.floor_ms(work)) for work in (*works, *[middle] * test.reply)]
    return sum(floors) * _S / 1e3


def device_limits(threads: int) -> list[DeviceLimits]:
    """The machine's present limits; empty without the native kernel, which measures them."""
    try:
        return [edgeinfer.tools.measure_device(threads)]
    except NativeUnavailableError:
        return []


def median_limits(limits: Sequence[DeviceLimits]) -> DeviceLimits | None:
    """The median of measured limits."""
    if not limits:
        return None
    first = limits[0]
    multiplying = [each.multiply_adds_per_s for each in limits if each.multiply_adds_per_s is not None]
    return DeviceLimits(
        first.kernel,
        first.threads,
        statistics.median(each.read_bytes_per_s for each in limits),
        statistics.median(multiplying) if multiplying else None,
    )


def describe_run(model: Model, command: str) -> dict[str, Any]:
    """Model, engine and machine, under llama-bench's keys where it has them."""
    from edgeinfer import __version__

    info, plan = model.info, model.plan
    return {
        "build_commit": f"edgeinfer {__version__}",
        "cpu_info": machine_name(),
        "platform": system_name(),
        "backends": f"{info.backend} ({info.kernel})",
        "model_filename": Path(info.name).name,
        "model_type": f"{info.name} {info.bits_per_weight:.3g} bits",
        "model_architecture": info.architecture,
        "model_size": round(info.parameters * info.bits_per_weight / 8),
        "model_n_params": info.parameters,
        "n_batch": plan.prefill_chunk,
        "n_threads": model.threads,
        "type_k": plan.configuration.kv,
        "type_v": plan.configuration.kv,
        "weights": plan.configuration.weights,
        "command": command,
        "test_time": timestamp(),
    }


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _run(config: SpeedConfig, context: BenchContext) -> BenchResult:
    with context.open_model(context.model, {"context": config.context} | context.load) as model:
        results = run_speed(model, config, context.stage("timing"), context.command)
    return BenchResult(results)


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """llama-bench's table, with each test's time as a multiple of its floor."""
    header = ("model", "size", "params", "backend", "threads", "test", "t/s", "floor")
    cells = [
        (
            row["model_type"],
            format_size(row["model_size"]),
            f"{row['model_n_params'] / 1e6:.2f} M",
            row["backends"],
            str(row["n_threads"]),
            row["test"],
            f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
            _of_floor(row),
        )
        for row in rows
    ]
    return markdown_table(header, cells, left=(0, 3))


def _of_floor(row: Mapping[str, Any]) -> str:
    """A test's time as a multiple of its floor, if that is known."""
    floor = row["floor_ns"]
    return f"{row['median_ns'] / floor:.2f}x" if floor else ""


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    plain = [{key: value for key, value in row.items() if not key.startswith("samples")} for row in rows]
    writer = csv.DictWriter(out, list(plain[0]), quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return out.getvalue()


FORMATS: dict[str, Callable[[Sequence[Mapping[str, Any]]], str]] = {
    "md": _markdown,
    "csv": _csv,
    "json": lambda rows: json.dumps(rows, indent=2) + "\n",
    "jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
}


SPEED = Benchmark(
    "speed",
    "prompts and replies, as llama-bench times them",
    _DESCRIPTION,
    SpeedConfig,
    _run,
    loads=True,
    text=lambda config, rows: FORMATS[config.output](rows),
    files=False,
)
