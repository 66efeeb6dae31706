"""`edgeinfer bench curve`: c(m), the time of a pass over m new tokens, against the machine's limits and llama.cpp."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer.apps.bench.benchmark import (
    BenchContext,
    Benchmark,
    BenchResult,
    Spread,
    StageProgress,
    names,
    option,
    rotated,
)
from edgeinfer.apps.bench.processes import Worker, token_ids
from edgeinfer.apps.bench.render import Paragraph, Part, Section, Table, commands, run_facts
from edgeinfer.apps.bench.speed import SpeedTest, describe_run, device_limits, floor_ns, median_limits
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.load import KV_TYPES
from edgeinfer.core.results import DeviceLimits

if TYPE_CHECKING:
    from edgeinfer import Model


Floor = tuple[float, float | None] | tuple[None, None]
# Passes over each size in one visit, of which the median counts.
_BURST = 3
# Extra tokens of llama.cpp's cache.
_MARGIN = 8
_DESCRIPTION = """\
Measure c(m): the time of a pass over m new tokens, which is what verifying a draft of m - 1 costs, and the shortest
time in which this machine can read weights and cache and multiply, measured in the same minutes. With several depths
and types of KV caches: the cost of long conversations. Models of all types and numbers of threads take turns at each
depth, and so does llama.cpp with --gguf. Its file should hold the same weights; its cache is in float16.

examples:
  edgeinfer bench curve -m BUNDLE -t 1
  edgeinfer bench curve -m BUNDLE -t 1 --sizes 1,4 -d 128,2048,8192 --kv-types float32,int8
  edgeinfer bench curve -m BUNDLE --gguf FILE --compare-threads 1,2 --sizes 1,4,8 -d 128,2048 --prompts 512
"""


@dataclass(frozen=True)
class CurveConfig:
    """Passes to measure; empty `kv_types` and `compare_threads` are those that the model is loaded with."""

    sizes: tuple[int, ...] = option(
        "--sizes LIST",
        default=(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16),
        group="passes",
        help="comma-separated numbers of tokens per pass",
    )
    depths: tuple[int, ...] = option(
        "-d", "--n-depth LIST", default=(64,), help="comma-separated numbers of tokens in the KV cache before the pass"
    )
    kv_types: tuple[str, ...] = option(
        "--kv-types LIST",
        default=(),
        type=names,
        help="comma-separated KV cache data types to compare (default: the one the model is loaded with)",
    )
    compare_threads: tuple[int, ...] = option(
        "--compare-threads LIST", default=(), help="comma-separated numbers of threads to compare (default: that of -t)"
    )
    prompts: tuple[int, ...] = option(
        "--prompts LIST", default=(), help="comma-separated prompt lengths in tokens to time as well (default: none)"
    )
    gguf: Path | None = option("--gguf FILE", default=None, help="GGUF file to measure llama.cpp on")
    repeats: int = option("-r", "--repetitions N", default=9, help="number of measurements per size")

    def __post_init__(self) -> None:
        depths = self.depths or (-1,)
        least = min((*self.sizes, *self.compare_threads, *self.prompts, self.repeats))
        if not self.sizes or least < 1 or min(depths) < 0:
            message = f"Sizes {self.sizes} after {self.depths} tokens, {self.repeats} times, cannot be measured."
            raise UsageError(message, "Give sizes, threads, prompts and repeats of at least 1.")
        for unknown in [kv for kv in self.kv_types if kv not in KV_TYPES]:
            raise UsageError(f"There is no cache {unknown!r}.", f"Choose of {', '.join(KV_TYPES)}.")
        object.__setattr__(self, "sizes", tuple(sorted({1, *self.sizes})))
        object.__setattr__(self, "depths", tuple(sorted(set(depths))))

    @property
    def context(self) -> int:
        """Tokens of context that all passes need."""
        return max(max(self.depths) + max(self.sizes), *self.prompts, 0) + 1


class Contender(ABC):
    """An engine with one type of cache (`kv`, after another engine's name) and a number of threads."""

    kv: str
    threads: int

    @abstractmethod
    def passes(self, sizes: Sequence[int], depth: int) -> dict[int, float]:
        """Milliseconds of a pass over each number of new tokens, with all their logits, after `depth` others."""

    @abstractmethod
    def prompt(self, tokens: int) -> float:
        """Milliseconds from an empty cache to the logits after a prompt."""

    def pass_floor(self, size: int, depth: int, limits: DeviceLimits | None) -> Floor:
        """The shortest milliseconds for reading and for multiplying, if known."""
        return None, None

    def prompt_floor(self, tokens: int, limits: DeviceLimits | None) -> float | None:
        """The shortest milliseconds for a prompt, if known."""
        return None


class Ours(Contender):
    """A loaded model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.kv: str = model.plan.configuration.kv
        self.threads = model.threads

    def passes(self, sizes: Sequence[int], depth: int) -> dict[int, float]:
        # The cache keeps the past for the next visit.
        times = edgeinfer.tools.measure_passes(self._model, sizes, past=depth, repeats=_BURST)
        return {size: statistics.median(taken) for size, taken in times.items()}

    def prompt(self, tokens: int) -> float:
        return edgeinfer.tools.measure_prefill(self._model, tokens, repeats=1)[0]

    def pass_floor(self, size: int, depth: int, limits: DeviceLimits | None) -> Floor:
        if limits is None:
            return None, None
        try:
            return limits.floor_ms(edgeinfer.tools.pass_work(self._model, size, size, past=depth))
        except UsageError:  # a bundle that does not list its weights
            return None, None

    def prompt_floor(self, tokens: int, limits: DeviceLimits | None) -> float | None:
        floor = floor_ns(self._model, SpeedTest(tokens, 0), limits)
        return None if floor is None else floor / 1e6


class LlamaCpp(Contender):
    """llama.cpp on a GGUF file, with a cache in float16, in a process of its own."""

    kv = "llama.cpp float16"

    def __init__(self, path: Path, threads: int, context: int) -> None:
        self.threads = threads
        self._worker = Worker("llamacpp", {"path": str(path), "threads": threads, "context": context + _MARGIN})
        self.close = self._worker.close

    def passes(self, sizes: Sequence[int], depth: int) -> dict[int, float]:
        past = token_ids(depth)
        ask = self._worker.ask
        times = {size: ask("pass_times", tokens=token_ids(size), past=past, count=_BURST) for size in sizes}
        return {size: statistics.median(taken) for size, taken in times.items()}

    def prompt(self, tokens: int) -> float:
        (taken,) = self._worker.ask("prefill_times", prompt=token_ids(tokens))
        return float(taken)


def run_curve(
    models: Sequence[Model],
    config: CurveConfig,
    progress: StageProgress,
    command: str = "",
    peers: Sequence[Contender] = (),
) -> dict[str, Any]:
    """Measure prompts, then all sizes at each depth, with the contenders taking turns. `growth` is c(m) / c(1), and
    `peer` how many times longer llama.cpp takes with as many threads, each formed within visits; `limit_ms` is the
    shortest possible time."""
    contenders: list[Contender] = [*(Ours(model) for model in models), *peers]
    limits: dict[int, list[DeviceLimits]] = {contender.threads: [] for contender in contenders}
    visits: dict[tuple[int, int, int], list[dict[int, float]]] = {}
    done, total = 0, (len(config.depths) + len(config.prompts)) * config.repeats
    # Prompts empty the cache; depths ascend, so that its content is used again.
    for depth, prompt in [*((0, tokens) for tokens in config.prompts), *((depth, 0) for depth in config.depths)]:
        for visit in range(config.repeats):
            progress(done, total)
            for number in rotated(range(len(contenders)), visit):
                one = contenders[number]
                times = {prompt: one.prompt(prompt)} if prompt else one.passes(config.sizes, depth)
                visits.setdefault((depth, prompt, number), []).append(times)
            for threads, found in limits.items():
                found += device_limits(threads)
            done += 1
    progress(total, total)
    best = {threads: median_limits(found) for threads, found in limits.items()}
    rivals = {peer.threads: len(models) + number for number, peer in enumerate(peers)}
    points, prompts = [], []
    for (depth, prompt, number), taken in visits.items():
        one = contenders[number]
        theirs = visits.get((depth, prompt, rivals.get(one.threads, -1)))
        for size in taken[0]:
            ms = [visit[size] for visit in taken]
            peer = _ratio([visit[size] for visit in theirs], ms) if theirs else None
            point: dict[str, Any] = {"kv": one.kv, "threads": one.threads, "ms": asdict(Spread.of(ms)), "peer": peer}
            if prompt:
                prompts.append(point | {"tokens": size, "limit_ms": one.prompt_floor(size, best[one.threads])})
                continue
            read, multiply = one.pass_floor(size, depth, best[one.threads])
            limit = None if read is None else max(read, multiply or 0.0)
            point |= {"size": size, "n_depth": depth, "growth": _ratio(ms, [visit[1] for visit in taken])}
            points.append(point | {"read_ms": read, "multiply_ms": multiply, "limit_ms": limit})
    own = best[models[0].threads]
    figures = {"limits": None if own is None else asdict(own), "points": points, "prompts": prompts}
    return describe_run(models[0], command) | {"n_depth": config.depths[0]} | figures


def _ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    return asdict(Spread.of([a / b for a, b in zip(above, below, strict=True)]))


def _series(data: Mapping[str, Any]) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    """Points by cache, with the threads where these differ, and by tokens before."""
    series: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    several = len({point["threads"] for point in data["points"]}) > 1
    for point in data["points"]:
        kv = point["kv"] + (f", {_threads(point['threads'])}" if several else "")
        series.setdefault((kv, point["n_depth"]), []).append(point)
    return series


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def curve_section(data: Mapping[str, Any]) -> Section:
    """Passes over several tokens with their limits."""
    series = _series(data)
    several, compared = len(series) > 1, any(point["peer"] for point in data["points"])
    firsts = {(kv, p["size"]): p["ms"]["median"] for (kv, _), points in reversed(series.items()) for p in points}
    rows, times = [], []
    for (kv, depth), points in series.items():
        for point in points:
            size, ms, limit = str(point["size"]), point["ms"], point["limit_ms"]
            named = (kv, str(depth), size) if several else (size,)
            deeper = (f"{ms['median'] / firsts[kv, point['size']]:.2f}",) if several else ()
            quartiles, growth = f"{ms['p25']:.2f} to {ms['p75']:.2f}", f"{point['growth']['median']:.2f}"
            figures = (f"{ms['median']:.2f}", quartiles, growth, *deeper, "" if limit is None else f"{limit:.2f}")
            rows.append((*named, *figures, *_peer(point, compared)))
            times += [] if limit is None else [(*named, f"{ms['median'] / limit:.2f}")]
    columns = ("cache", "tokens before", "m") if several else ("m",)
    deeper = (f"to {min(depth for _, depth in series)} before",) if several else ()
    peer = ("llama.cpp to it",) if compared else ()
    header = (*columns, "median", "25% to 75%", "c(m)/c(1)", *deeper, "limit", *peer)
    last: Part = Paragraph(
        "The machine's limits are unknown: the native kernel, which measures them, is not installed."
    )
    if times:
        last = Table("Times as multiples of these limits", (*columns, "times the limit"), tuple(times))
    depths = ", ".join(str(depth) for depth in dict.fromkeys(depth for _, depth in series))
    parts: tuple[Part, ...] = (
        Table("Milliseconds of a pass over m new tokens, and the machine's limit", header, tuple(rows)),
        last,
        *_prompt_table(data["prompts"], compared),
    )
    facts = (*run_facts(data), ("Tokens before", depths))
    return Section("What verifying several tokens costs", facts, parts, commands(data))


def _peer(point: Mapping[str, Any], compared: bool) -> tuple[str, ...]:
    if not compared:
        return ()
    return (f"{point['peer']['median']:.2f}" if point["peer"] else "",)


def _prompt_table(points: Sequence[Mapping[str, Any]], compared: bool) -> list[Table]:
    rows = []
    for each in points:
        limit = "" if each["limit_ms"] is None else f"{each['limit_ms']:.0f}"
        figures = (str(each["tokens"]), f"{each['ms']['median']:.0f}", limit)
        rows.append((each["kv"], _threads(each["threads"]), *figures, *_peer(each, compared)))
    header = ("cache", "threads", "tokens", "median", "limit", *(["llama.cpp to it"] if compared else []))
    return [Table("Milliseconds of a prompt", header, tuple(rows))] if rows else []


def _run(config: CurveConfig, context: BenchContext) -> BenchResult:
    chosen: list[dict[str, Any]] = [
        kv | threads
        for kv in [{"kv": kv} for kv in config.kv_types] or [{}]
        for threads in [{"threads": count} for count in config.compare_threads] or [{}]
    ]
    with ExitStack() as opened:
        models = [
            opened.enter_context(context.open_model(context.model, {"context": config.context} | context.load | each))
            for each in chosen
        ]
        peers: list[LlamaCpp] = []
        if config.gguf is not None:
            for threads in sorted({model.threads for model in models}):
                peers.append(LlamaCpp(config.gguf, threads, config.context))
                opened.callback(peers[-1].close)
        return BenchResult(run_curve(models, config, context.stage("measuring"), context.command, peers))


CURVE = Benchmark(
    "curve",
    "what a pass over several tokens costs",
    _DESCRIPTION,
    CurveConfig,
    _run,
    curve_section,
    loads=True,
)
