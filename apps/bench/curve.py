"""`edgeinfer bench curve`: c(m), the time of a pass over m new tokens behind some others, by the type of the KV cache
and the number of threads, beside the least that the machine needs, and beside llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, StageProgress, names, option
from edgeinfer.apps.bench.curve_contenders import Contender, LlamaCpp, Ours
from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.apps.bench.render import Paragraph, Part, Section, Table, commands, run_facts
from edgeinfer.apps.bench.speed import describe_run, device_limits, median_limits
from edgeinfer.apps.bench.timing import Spread, rotated
from edgeinfer.config import KV_TYPES
from edgeinfer.errors import UsageError
from edgeinfer.results import DeviceLimits

if TYPE_CHECKING:
    from edgeinfer import Model


_DESCRIPTION = """\
Measure c(m): the time of a pass over m new tokens, which is what verifying a draft of m - 1 costs, beside the least
that reading weights and cache and multiplying take on this machine, measured in the same minutes. With several depths
and types of KV caches, what long conversations cost: models of all types and numbers of threads take turns at each
depth, and so does llama.cpp with --gguf. Its file is to hold the same weights; its cache is of float16.

examples:
  edgeinfer bench curve -m BUNDLE -t 1 --svg curve.svg
  edgeinfer bench curve -m BUNDLE -t 1 --sizes 1,4 -d 128,2048,8192 --kv-types float32,int8
  edgeinfer bench curve -m BUNDLE --gguf FILE --compare-threads 1,2 --sizes 1,4,8 -d 128,2048 --prompts 512
"""


@dataclass(frozen=True)
class CurveConfig:
    """What to measure.

    Attributes:
        sizes: numbers of tokens.
        depths: tokens before them.
        kv_types: of caches, each of a model of its own; none is the one that the model is loaded with.
        compare_threads: numbers of them, each of a model of its own; none is the one that the model is loaded with.
        prompts: lengths of prompts that are timed from an empty cache.
        gguf: file for llama.cpp, which is measured beside where it is given.
        repeats: visits, each with a look at the machine's limits beside it.
    """

    sizes: tuple[int, ...] = option(
        "--sizes LIST",
        default=(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16),
        group="passes",
        help="comma-separated numbers of tokens per pass",
    )
    depths: tuple[int, ...] = option(
        "-d",
        "--n-depth LIST",
        default=(64,),
        help="comma-separated numbers of tokens in the KV cache before the pass",
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
    gguf: Path | None = option("--gguf FILE", default=None, help="GGUF file that llama.cpp is measured on beside")
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
        """The context that it needs."""
        return max(max(self.depths) + max(self.sizes), *self.prompts, 0) + 1


@dataclass(frozen=True)
class CurvePoint:
    """A pass over so many tokens, all with logits.

    Attributes:
        n_depth: tokens before them.
        kv: type of the cache; of llama.cpp with its name before it.
        ms: of the visits' medians.
        growth: c(m) / c(1), formed within each visit.
        peer: llama.cpp's time over this one's with as many threads, formed within each visit; None where it was not
            measured.
        read_ms, multiply_ms: the least that reading weights and cache and multiplying take; None where that is not
            known.
    """

    size: int
    n_depth: int
    kv: str
    ms: Spread
    growth: Spread
    read_ms: float | None
    multiply_ms: float | None
    threads: int = 1
    peer: Spread | None = None

    @property
    def limit_ms(self) -> float | None:
        """The least a pass can take."""
        return None if self.read_ms is None else max(self.read_ms, self.multiply_ms or 0.0)


@dataclass(frozen=True)
class PromptPoint:
    """A prompt from an empty cache to the logits after it; `ms` and `peer` as of `CurvePoint`."""

    tokens: int
    kv: str
    threads: int
    ms: Spread
    limit_ms: float | None
    peer: Spread | None


@dataclass(frozen=True)
class Curve:
    """All points, and of what."""

    points: tuple[CurvePoint, ...]
    prompts: tuple[PromptPoint, ...]
    limits: DeviceLimits | None
    facts: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        points = [asdict(point) | {"limit_ms": point.limit_ms} for point in self.points]
        prompts = [asdict(point) for point in self.prompts]
        limits = None if self.limits is None else asdict(self.limits)
        return {**self.facts, "limits": limits, "points": points, "prompts": prompts}


def run_curve(
    models: Sequence[Model],
    config: CurveConfig,
    progress: StageProgress,
    command: str = "",
    peers: Sequence[Contender] = (),
) -> Curve:
    """Measures prompts, then all sizes at each depth, everybody in turns."""
    contenders: list[Contender] = [*(Ours(model) for model in models), *peers]
    limits: dict[int, list[DeviceLimits]] = {}
    passes: dict[tuple[int, int], list[dict[int, float]]] = {}
    prompts: dict[tuple[int, int], list[float]] = {}
    done, total = 0, (len(config.depths) + len(config.prompts)) * config.repeats
    # Prompts empty the cache; depths ascend, so that what it holds is used again.
    for depth, prompt in [*((0, tokens) for tokens in config.prompts), *((depth, 0) for depth in config.depths)]:
        for visit in range(config.repeats):
            progress(done, total)
            for number in rotated(range(len(contenders)), visit):
                if prompt:
                    prompts.setdefault((prompt, number), []).append(contenders[number].prompt(prompt))
                else:
                    found = contenders[number].passes(config.sizes, depth)
                    passes.setdefault((depth, number), []).append(found)
            for threads in {contender.threads for contender in contenders}:
                limits.setdefault(threads, []).extend(device_limits(threads))
            done += 1
    progress(total, total)
    best = {threads: median_limits(found) for threads, found in limits.items()}
    rivals = {peer.threads: len(models) + number for number, peer in enumerate(peers)}
    points = []
    for (depth, number), visits in passes.items():
        one = contenders[number]
        rival = passes.get((depth, rivals.get(one.threads, -1)))
        points += [_point(one, size, depth, visits, best[one.threads], rival) for size in config.sizes]
    begun = []
    for (tokens, number), times in prompts.items():
        one = contenders[number]
        floor = one.prompt_floor(tokens, best[one.threads])
        theirs = _ratio(prompts.get((tokens, rivals.get(one.threads, -1))), times)
        begun.append(PromptPoint(tokens, one.kv, one.threads, Spread.of(times), floor, theirs))
    facts = describe_run(models[0], command) | {"n_depth": config.depths[0]}
    return Curve(tuple(points), tuple(begun), best[models[0].threads], facts)


def _point(
    one: Contender,
    size: int,
    depth: int,
    visits: Sequence[Mapping[int, float]],
    limits: DeviceLimits | None,
    rival: Sequence[Mapping[int, float]] | None,
) -> CurvePoint:
    read, multiply = one.pass_floor(size, depth, limits)
    taken = [visit[size] for visit in visits]
    growth = Spread.of([visit[size] / visit[1] for visit in visits])
    peer = _ratio(None if rival is None else [visit[size] for visit in rival], taken)
    return CurvePoint(size, depth, one.kv, Spread.of(taken), growth, read, multiply, one.threads, peer)


def _ratio(above: Sequence[float] | None, below: Sequence[float]) -> Spread | None:
    """How many times longer one takes than the other, formed within each visit."""
    return None if above is None else Spread.of([a / b for a, b in zip(above, below, strict=True)])


def _series(data: Mapping[str, Any]) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    """Points by type of cache, with the threads where these differ, and by tokens before; results of
    before there were several have one of these."""
    series: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    several = len({point.get("threads") for point in data["points"]}) > 1
    for point in data["points"]:
        kv = point.get("kv", data.get("type_k", "")) + (f", {_threads(point['threads'])}" if several else "")
        series.setdefault((kv, point.get("n_depth", data.get("n_depth", 0))), []).append(point)
    return series


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def curve_chart(data: Mapping[str, Any]) -> Chart:
    """Milliseconds against tokens, with the machine's limits below where they are known; against the tokens before,
    where there are several depths."""
    series = _series(data)
    threads = _threads(data["n_threads"])
    if len({depth for _, depth in series}) > 1:
        title = f"A pass behind a longer past: {data['model_type']}, {threads}"
        return Chart(title, "tokens before", "ms", tuple(_depth_lines(series)))
    lines: dict[str, list[tuple[float, float]]] = {}
    for (kv, _), points in series.items():
        of = f", {kv}" if len(series) > 1 else ""
        lines[f"measured{of}"] = [(point["size"], point["ms"]["median"]) for point in points]
        read = [(p["size"], p["read_ms"]) for p in points if p["read_ms"] is not None]
        multiply = [(p["size"], p["multiply_ms"]) for p in points if p["multiply_ms"] is not None]
        lines |= {f"reading weights and cache{of}": read, f"multiplying{of}": multiply}
    drawn = tuple(Line(name, tuple(found)) for name, found in lines.items() if found)
    return Chart(f"A pass over m tokens: {data['model_type']}, {threads}", "m, new tokens in a pass", "ms", drawn)


def _depth_lines(series: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]) -> list[Line]:
    measured: dict[str, list[tuple[float, float]]] = {}
    least: dict[str, list[tuple[float, float]]] = {}
    for (kv, depth), points in series.items():
        for point in points:
            name = f"{kv}, m = {point['size']}"
            measured.setdefault(name, []).append((depth, point["ms"]["median"]))
            if point["limit_ms"] is not None and point["size"] == 1:
                least.setdefault(f"least, {name}", []).append((depth, point["limit_ms"]))
    lines = [Line(name, tuple(points)) for name, points in measured.items()]
    return lines + [Line(name, tuple(points), dashed=True) for name, points in least.items()]


def curve_section(data: Mapping[str, Any]) -> Section:
    """A pass over several tokens beside the least it can take."""
    series = _series(data)
    several = len(series) > 1
    firsts = {(kv, p["size"]): p["ms"]["median"] for (kv, _), points in reversed(series.items()) for p in points}
    compared = any(point.get("peer") for point in data["points"])
    rows, times = [], []
    for (kv, depth), points in series.items():
        for point in points:
            size, ms, least = str(point["size"]), point["ms"], point["limit_ms"]
            of = (kv, str(depth)) if several else ()
            deeper = (f"{ms['median'] / firsts[kv, point['size']]:.2f}",) if several else ()
            growth, limit = f"{point['growth']['median']:.2f}", "" if least is None else f"{least:.2f}"
            quartiles = f"{ms['p25']:.2f} to {ms['p75']:.2f}"
            beside = (_beside(point),) if compared else ()
            rows.append((*of, size, f"{ms['median']:.2f}", quartiles, growth, *deeper, limit, *beside))
            times += [] if least is None else [(*of, size, f"{ms['median'] / least:.2f}")]
    named = ("cache", "tokens before", "m") if several else ("m",)
    deeper = (f"to {min(depth for _, depth in series)} before",) if several else ()
    beside = ("llama.cpp to it",) if compared else ()
    header = (*named, "median", "25% to 75%", "c(m)/c(1)", *deeper, "least", *beside)
    table = Table("Milliseconds of a pass over m new tokens, and the least the machine needs", header, tuple(rows))
    depths = ", ".join(str(depth) for depth in dict.fromkeys(depth for _, depth in series))
    facts = (*run_facts(data), ("Tokens before", depths))
    unknown = "The machine's limits are not known: the native kernel, which measures them, is not installed."
    last: Part = Paragraph(unknown)
    if times:
        last = Table("How near passes are to these limits", (*named, "times the least"), tuple(times))
    parts: tuple[Part, ...] = (curve_chart(data), table, last, *_prompt_table(data.get("prompts", ()), compared))
    return Section("What verifying several tokens costs", facts, parts, commands(data))


def _beside(point: Mapping[str, Any]) -> str:
    return f"{point['peer']['median']:.2f}" if point.get("peer") else ""


def _prompt_table(points: Sequence[Mapping[str, Any]], compared: bool) -> list[Table]:
    rows = tuple(
        (
            point["kv"],
            _threads(point["threads"]),
            str(point["tokens"]),
            f"{point['ms']['median']:.0f}",
            "" if point["limit_ms"] is None else f"{point['limit_ms']:.0f}",
            *([_beside(point)] if compared else []),
        )
        for point in points
    )
    header = ("cache", "threads", "tokens", "median", "least", *(["llama.cpp to it"] if compared else []))
    return [Table("Milliseconds of a prompt", header, rows)] if rows else []


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
        curve = run_curve(models, config, context.stage("measuring"), context.command, peers)
    return BenchResult(curve.to_dict())


CURVE = Benchmark(
    "curve",
    "what a pass over several tokens costs",
    _DESCRIPTION,
    CurveConfig,
    _run,
    curve_section,
    loads=True,
    chart=curve_chart,
)
