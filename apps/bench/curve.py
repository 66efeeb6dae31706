"""c(m), what a pass over m new tokens takes, beside what the machine needs at least; knows no printing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.apps.bench.speed import describe_run
from edgeinfer.apps.bench.timing import Spread
from edgeinfer.errors import NativeUnavailableError, UsageError
from edgeinfer.results import DeviceLimits

if TYPE_CHECKING:
    from edgeinfer import Model

__all__ = ["Curve", "CurveConfig", "CurvePoint", "curve_chart", "lines_chart", "run_curve"]

Points = Sequence[tuple[float, float]]

# Passes over each size at one visit, whose median counts.
_BURST = 3


@dataclass(frozen=True)
class CurveConfig:
    """What to measure.

    Attributes:
        sizes: numbers of tokens.
        past: tokens before them.
        repeats: visits, each with a look at the machine's limits beside it.
    """

    sizes: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
    past: int = 64
    repeats: int = 9

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1 or self.past < 0 or self.repeats < 1:
            message = f"Sizes {tuple(self.sizes)} after {self.past} tokens, {self.repeats} times, cannot be measured."
            raise UsageError(message, "Give sizes and repeats of at least 1.")
        object.__setattr__(self, "sizes", tuple(sorted({1, *self.sizes})))

    @property
    def context(self) -> int:
        """That it needs."""
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


def run_curve(model: Model, config: CurveConfig, told: Callable[[int, int], None], command: str = "") -> Curve:
    """Measures all sizes in turns.

    Args:
        command: kept with the figures, to have them again.
        told: visits done and to do.

    Raises:
        UsageError: the model's context is too small.
    """
    visits: list[dict[int, float]] = []
    limits: list[DeviceLimits] = []
    for done in range(config.repeats):
        told(done, config.repeats)
        times = model.measure_passes(config.sizes, past=config.past, repeats=_BURST)
        visits.append({size: statistics.median(taken) for size, taken in times.items()})
        limits += _limits(model.threads)
    told(config.repeats, config.repeats)
    best = _median(limits)
    points = tuple(_point(model, size, visits, best) for size in config.sizes)
    return Curve(points, best, describe_run(model, command) | {"n_depth": config.past})


def _point(model: Model, size: int, visits: Sequence[Mapping[int, float]], limits: DeviceLimits | None) -> CurvePoint:
    read = multiply = None
    if limits is not None:
        try:
            read, multiply = limits.floor_ms(model.pass_work(size, size))
        except UsageError:  # a bundle that does not list its weights
            read = multiply = None
    ms = Spread.of([visit[size] for visit in visits])
    return CurvePoint(size, ms, Spread.of([visit[size] / visit[1] for visit in visits]), read, multiply)


def _limits(threads: int) -> list[DeviceLimits]:
    try:
        return [edgeinfer.measure_device(threads)]
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


def curve_chart(curve: Curve) -> Chart:
    """Milliseconds against tokens, with the machine's limits below."""
    threads = "1 thread" if curve.facts["n_threads"] == 1 else f"{curve.facts['n_threads']} threads"
    return lines_chart(
        f"A pass over m tokens: {curve.facts['model_type']}, {threads}",
        [(point.size, point.ms.median) for point in curve.points],
        [(point.size, point.read_ms) for point in curve.points if point.read_ms is not None],
        [(point.size, point.multiply_ms) for point in curve.points if point.multiply_ms is not None],
    )


def lines_chart(title: str, measured: Points, reading: Points, multiplying: Points) -> Chart:
    """The same of points (tokens, milliseconds); limits that are not known are empty."""
    lines = {"measured": measured, "reading the weights": reading, "multiplying": multiplying}
    drawn = tuple(Line(name, tuple(points)) for name, points in lines.items() if points)
    return Chart(title, "m, new tokens in a pass", "ms", drawn)
