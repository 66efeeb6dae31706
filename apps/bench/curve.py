"""`edgeinfer bench curve`: c(m), the time of a pass over m new tokens, beside the least that the machine needs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, StageProgress, option
from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.apps.bench.render import Paragraph, Part, Section, Table, commands, run_facts
from edgeinfer.apps.bench.speed import describe_run
from edgeinfer.apps.bench.timing import Spread
from edgeinfer.errors import NativeUnavailableError, UsageError
from edgeinfer.results import DeviceLimits

if TYPE_CHECKING:
    from edgeinfer import Model

__all__ = ["CURVE", "Curve", "CurveConfig", "CurvePoint", "curve_chart", "curve_section", "run_curve"]

# Passes over each size at one visit, whose median counts.
_BURST = 3


_DESCRIPTION = """\
Measure c(m): the time of a pass over m new tokens, which is what verifying a draft of m - 1 costs, beside the least
that reading the weights and multiplying take on this machine, measured in the same minutes.

example:
  edgeinfer bench curve -m BUNDLE -t 1 --svg curve.svg
"""


@dataclass(frozen=True)
class CurveConfig:
    """What to measure.

    Attributes:
        sizes: numbers of tokens.
        past: tokens before them.
        repeats: visits, each with a look at the machine's limits beside it.
    """

    sizes: tuple[int, ...] = option(
        "--sizes LIST",
        default=(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16),
        group="passes",
        help="comma-separated numbers of tokens per pass",
    )
    past: int = option("-d", "--n-depth N", default=64, help="number of tokens in the KV cache before the pass")
    repeats: int = option("-r", "--repetitions N", default=9, help="number of measurements per size")

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1 or self.past < 0 or self.repeats < 1:
            message = f"Sizes {tuple(self.sizes)} after {self.past} tokens, {self.repeats} times, cannot be measured."
            raise UsageError(message, "Give sizes and repeats of at least 1.")
        object.__setattr__(self, "sizes", tuple(sorted({1, *self.sizes})))

    @property
    def context(self) -> int:
        """The context that it needs."""
        return self.past + max(self.sizes) + 1


@dataclass(frozen=True)
class CurvePoint:
    """A pass over so many tokens, all with logits.

    Attributes:
        ms: of the visits' medians.
        growth: c(m) / c(1), formed within each visit.
        read_ms, multiply_ms: the least that reading the weights and multiplying take; None where that is not known.
    """

    size: int
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


def run_curve(model: Model, config: CurveConfig, progress: StageProgress, command: str = "") -> Curve:
    """Measures all sizes in turns.

    Args:
        command: kept with the figures, to have them again.
        progress: visits done and to do.

    Raises:
        UsageError: the model's context is too small.
    """
    visits: list[dict[int, float]] = []
    limits: list[DeviceLimits] = []
    for done in range(config.repeats):
        progress(done, config.repeats)
        times = edgeinfer.tools.measure_passes(model, config.sizes, past=config.past, repeats=_BURST)
        visits.append({size: statistics.median(taken) for size, taken in times.items()})
        limits += _limits(model.threads)
    progress(config.repeats, config.repeats)
    best = _median(limits)
    points = tuple(_point(model, size, visits, best) for size in config.sizes)
    return Curve(points, best, describe_run(model, command) | {"n_depth": config.past})


def _point(model: Model, size: int, visits: Sequence[Mapping[int, float]], limits: DeviceLimits | None) -> CurvePoint:
    read = multiply = None
    if limits is not None:
        try:
            read, multiply = limits.floor_ms(edgeinfer.tools.pass_work(model, size, size))
        except UsageError:  # a bundle that does not list its weights
            read = multiply = None
    ms = Spread.of([visit[size] for visit in visits])
    return CurvePoint(size, ms, Spread.of([visit[size] / visit[1] for visit in visits]), read, multiply)


def _limits(threads: int) -> list[DeviceLimits]:
    try:
        return [edgeinfer.tools.measure_device(threads)]
    except NativeUnavailableError:
        return []


def _median(limits: Sequence[DeviceLimits]) -> DeviceLimits | None:
    """The machine at its usual."""
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


def curve_chart(data: Mapping[str, Any]) -> Chart:
    """Milliseconds against tokens, with the machine's limits below where they are known."""
    points = data["points"]
    lines = {
        "measured": [(point["size"], point["ms"]["median"]) for point in points],
        "reading the weights": [(p["size"], p["read_ms"]) for p in points if p["read_ms"] is not None],
        "multiplying": [(p["size"], p["multiply_ms"]) for p in points if p["multiply_ms"] is not None],
    }
    drawn = tuple(Line(name, tuple(found)) for name, found in lines.items() if found)
    threads = "1 thread" if data["n_threads"] == 1 else f"{data['n_threads']} threads"
    title = f"A pass over m tokens: {data['model_type']}, {threads}"
    return Chart(title, "m, new tokens in a pass", "ms", drawn)


def curve_section(data: Mapping[str, Any]) -> Section:
    """A pass over several tokens beside the least it can take."""
    rows, times = [], []
    for point in data["points"]:
        size, ms, least = str(point["size"]), point["ms"], point["limit_ms"]
        growth, limit = f"{point['growth']['median']:.2f}", "" if least is None else f"{least:.2f}"
        rows.append((size, f"{ms['median']:.2f}", f"{ms['p25']:.2f} to {ms['p75']:.2f}", growth, limit))
        times += [] if least is None else [(size, f"{ms['median'] / least:.2f}")]
    header = ("m", "median", "25% to 75%", "c(m)/c(1)", "least")
    table = Table("Milliseconds of a pass over m new tokens, and the least the machine needs", header, tuple(rows))
    facts = (*run_facts(data), ("Tokens before", str(data.get("n_depth", 0))))
    unknown = "The machine's limits are not known: the native kernel, which measures them, is not installed."
    last: Part = Paragraph(unknown)
    if times:
        last = Table("How near passes are to these limits", ("m", "times the least"), tuple(times))
    parts: tuple[Part, ...] = (curve_chart(data), table, last)
    return Section("What verifying several tokens costs", facts, parts, commands(data))


def _run(config: CurveConfig, context: BenchContext) -> BenchResult:
    with context.open_model(context.model, {"context": config.context} | context.load) as model:
        return BenchResult(run_curve(model, config, context.stage("measuring"), context.command).to_dict())


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
