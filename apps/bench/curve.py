"""`edgeinfer bench curve`: c(m), the time of a pass over m new tokens behind some others, by the type of the KV cache,
beside the least that the machine needs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, StageProgress, names, option
from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.apps.bench.render import Paragraph, Part, Section, Table, commands, run_facts
from edgeinfer.apps.bench.speed import describe_run, device_limits, median_limits
from edgeinfer.apps.bench.timing import Spread, rotated
from edgeinfer.config import KV_TYPES
from edgeinfer.errors import UsageError
from edgeinfer.results import DeviceLimits

if TYPE_CHECKING:
    from edgeinfer import Model

__all__ = ["CURVE", "Curve", "CurveConfig", "CurvePoint", "curve_chart", "curve_section", "run_curve"]

# Passes over each size at one visit, whose median counts.
_BURST = 3


_DESCRIPTION = """\
Measure c(m): the time of a pass over m new tokens, which is what verifying a draft of m - 1 costs, beside the least
that reading weights and cache and multiplying take on this machine, measured in the same minutes. With several depths
and types of KV caches, what long conversations cost: models of all types take turns at each depth.

examples:
  edgeinfer bench curve -m BUNDLE -t 1 --svg curve.svg
  edgeinfer bench curve -m BUNDLE -t 1 --sizes 1,4 -d 128,2048,8192 --kv-types float32,int8
"""


@dataclass(frozen=True)
class CurveConfig:
    """What to measure.

    Attributes:
        sizes: numbers of tokens.
        depths: tokens before them.
        kv_types: of caches, each of a model of its own; none is the one that the model is loaded with.
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
    repeats: int = option("-r", "--repetitions N", default=9, help="number of measurements per size")

    def __post_init__(self) -> None:
        depths = self.depths or (-1,)
        if not self.sizes or min(self.sizes) < 1 or min(depths) < 0 or self.repeats < 1:
            message = f"Sizes {self.sizes} after {self.depths} tokens, {self.repeats} times, cannot be measured."
            raise UsageError(message, "Give sizes and repeats of at least 1.")
        for unknown in [kv for kv in self.kv_types if kv not in KV_TYPES]:
            raise UsageError(f"There is no cache {unknown!r}.", f"Choose of {', '.join(KV_TYPES)}.")
        object.__setattr__(self, "sizes", tuple(sorted({1, *self.sizes})))
        object.__setattr__(self, "depths", tuple(sorted(set(depths))))

    @property
    def context(self) -> int:
        """The context that it needs."""
        return max(self.depths) + max(self.sizes) + 1


@dataclass(frozen=True)
class CurvePoint:
    """A pass over so many tokens, all with logits.

    Attributes:
        n_depth: tokens before them.
        kv: type of the cache.
        ms: of the visits' medians.
        growth: c(m) / c(1), formed within each visit.
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

    @property
    def limit_ms(self) -> float | None:
        """The least a pass can take."""
        return None if self.read_ms is None else max(self.read_ms, self.multiply_ms or 0.0)


@dataclass(frozen=True)
class Curve:
    """All points, and of what."""

    points: tuple[CurvePoint, ...]
    limits: DeviceLimits | None
    facts: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        points = [asdict(point) | {"limit_ms": point.limit_ms} for point in self.points]
        return {**self.facts, "limits": None if self.limits is None else asdict(self.limits), "points": points}


def run_curve(models: Sequence[Model], config: CurveConfig, progress: StageProgress, command: str = "") -> Curve:
    """Measures all sizes in turns, at each depth with each model in turns.

    Args:
        models: the same one with each type of cache.
        command: kept with the figures, to have them again.
        progress: visits done and to do.

    Raises:
        UsageError: the context of a model is too small.
    """
    limits: list[DeviceLimits] = []
    visits: dict[tuple[int, int], list[dict[int, float]]] = {}
    done, total = 0, len(config.depths) * config.repeats
    for depth in config.depths:  # ascending, so that what the cache holds is used again
        for visit in range(config.repeats):
            progress(done, total)
            for number in rotated(range(len(models)), visit):
                times = edgeinfer.tools.measure_passes(models[number], config.sizes, past=depth, repeats=_BURST)
                found = {size: statistics.median(taken) for size, taken in times.items()}
                visits.setdefault((depth, number), []).append(found)
            limits += device_limits(models[0].threads)
            done += 1
    progress(total, total)
    best = median_limits(limits)
    points = tuple(
        _point(models[number], size, depth, found, best)
        for (depth, number), found in visits.items()
        for size in config.sizes
    )
    return Curve(points, best, describe_run(models[0], command) | {"n_depth": config.depths[0]})


def _point(
    model: Model, size: int, depth: int, visits: Sequence[Mapping[int, float]], limits: DeviceLimits | None
) -> CurvePoint:
    read = multiply = None
    if limits is not None:
        try:
            read, multiply = limits.floor_ms(edgeinfer.tools.pass_work(model, size, size, past=depth))
        except UsageError:  # a bundle that does not list its weights
            read = multiply = None
    ms = Spread.of([visit[size] for visit in visits])
    growth = Spread.of([visit[size] / visit[1] for visit in visits])
    return CurvePoint(size, depth, model.plan.configuration.kv, ms, growth, read, multiply)


def _series(data: Mapping[str, Any]) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    """Points by type of cache and tokens before; results made before there were several have one of these."""
    series: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for point in data["points"]:
        key = (point.get("kv", data.get("type_k", "")), point.get("n_depth", data.get("n_depth", 0)))
        series.setdefault(key, []).append(point)
    return series


def curve_chart(data: Mapping[str, Any]) -> Chart:
    """Milliseconds against tokens, with the machine's limits below where they are known; against the tokens before,
    where there are several depths."""
    series = _series(data)
    threads = "1 thread" if data["n_threads"] == 1 else f"{data['n_threads']} threads"
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
    rows, times = [], []
    for (kv, depth), points in series.items():
        for point in points:
            size, ms, least = str(point["size"]), point["ms"], point["limit_ms"]
            of = (kv, str(depth)) if several else ()
            deeper = (f"{ms['median'] / firsts[kv, point['size']]:.2f}",) if several else ()
            growth, limit = f"{point['growth']['median']:.2f}", "" if least is None else f"{least:.2f}"
            quartiles = f"{ms['p25']:.2f} to {ms['p75']:.2f}"
            rows.append((*of, size, f"{ms['median']:.2f}", quartiles, growth, *deeper, limit))
            times += [] if least is None else [(*of, size, f"{ms['median'] / least:.2f}")]
    named = ("cache", "tokens before", "m") if several else ("m",)
    deeper = (f"to {min(depth for _, depth in series)} before",) if several else ()
    header = (*named, "median", "25% to 75%", "c(m)/c(1)", *deeper, "least")
    table = Table("Milliseconds of a pass over m new tokens, and the least the machine needs", header, tuple(rows))
    depths = ", ".join(str(depth) for depth in dict.fromkeys(depth for _, depth in series))
    facts = (*run_facts(data), ("Tokens before", depths))
    unknown = "The machine's limits are not known: the native kernel, which measures them, is not installed."
    last: Part = Paragraph(unknown)
    if times:
        last = Table("How near passes are to these limits", (*named, "times the least"), tuple(times))
    parts: tuple[Part, ...] = (curve_chart(data), table, last)
    return Section("What verifying several tokens costs", facts, parts, commands(data))


def _run(config: CurveConfig, context: BenchContext) -> BenchResult:
    chosen: list[dict[str, Any]] = [{"kv": kv} for kv in config.kv_types] or [{}]
    with ExitStack() as opened:
        models = [
            opened.enter_context(context.open_model(context.model, {"context": config.context} | context.load | kv))
            for kv in chosen
        ]
        return BenchResult(run_curve(models, config, context.stage("measuring"), context.command).to_dict())


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
