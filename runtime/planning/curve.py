"""Speed against budget: the plan that each budget would get, and from which budget on drafting pays.

The latter is SpecMemo's lower bound (algorithms.md B1), for one context.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from edgeinfer.records import dataclass
from edgeinfer.runtime.planning.configuration import Configuration

# Of the best speed, what counts as keeping it.
BEST_SHARE = 0.95


@dataclass(frozen=True)
class WayToRun:
    """A configuration, what it takes of a budget, and how it runs.

    Attributes:
        worth: by which plans are chosen; more is better.
    """

    configuration: Configuration
    bytes: int
    tokens_per_second: float
    worth: float


@dataclass(frozen=True)
class BudgetPoint:
    """The plan from a budget on.

    Attributes:
        budget_bytes: the smallest that gets this plan.
        plain_tokens_per_second: of the best plan without drafting in the same budget; None where none was asked for.
    """

    budget_bytes: int
    configuration: Configuration
    tokens_per_second: float
    plain_tokens_per_second: float | None

    @property
    def drafting_pays(self) -> bool:
        """Whether it drafts, and is faster so than the best plan that does not."""
        plain = self.plain_tokens_per_second
        return self.configuration.draft_max > 0 and plain is not None and self.tokens_per_second > plain

    @property
    def summary(self) -> str:
        """How it runs, for people."""
        way = self.configuration
        layers = "layer" if way.window_layers == 1 else "layers"
        window = f", {way.window_layers} {layers} at a time" if way.window_layers else ""
        window += f", {way.kept_layers} of them kept in memory" if way.kept_layers else ""
        drafts = f"drafts of up to {way.draft_max}" if way.draft_max else "no drafting"
        return f"{way.weights} weights{window}, {way.kv} cache, {drafts}"

    def to_dict(self) -> dict[str, Any]:
        """Converts it to JSON's types."""
        return {
            "budget_bytes": self.budget_bytes,
            "tokens_per_second": self.tokens_per_second,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "context": self.configuration.context,
            "draft_max": self.configuration.draft_max,
            "drafters": list(self.configuration.drafters),
            "weights": self.configuration.weights,
            "kv": self.configuration.kv,
        }


@dataclass(frozen=True)
class SpeedCurve:
    """Speed against budget for one context.

    Attributes:
        points: by ascending budget; each holds up to the next one.
    """

    points: tuple[BudgetPoint, ...]

    @property
    def speculation_bytes(self) -> int | None:
        """The smallest budget in which drafting beats plain decoding; None where it never does."""
        return next((point.budget_bytes for point in self.points if point.drafting_pays), None)

    @property
    def best_speed_bytes(self) -> int:
        """The smallest budget that keeps 95% of the best speed."""
        best = max(point.tokens_per_second for point in self.points)
        return next(p.budget_bytes for p in self.points if p.tokens_per_second >= BEST_SHARE * best)

    def at(self, budget: int) -> BudgetPoint | None:
        """The plan of a budget; None where it is too small for any."""
        return next((point for point in reversed(self.points) if point.budget_bytes <= budget), None)


def speed_curve(first: WayToRun, others: Iterable[WayToRun]) -> SpeedCurve:
    """The curve of these ways to run.

    Args:
        first: the one without concessions, which every budget gets that it fits.
    """
    ways = [first, *others]
    points = [*_changes(sorted(ways, key=lambda way: way.bytes), first)]
    # What is promised of a budget is no more than what a larger one gives.
    least, plain = points[-1].tokens_per_second, points[-1].plain_tokens_per_second or math.inf
    for place, point in reversed([*enumerate(points)]):
        least = min(least, point.tokens_per_second)
        if point.plain_tokens_per_second is not None:
            plain = min(plain, point.plain_tokens_per_second)
            point = dataclasses.replace(point, plain_tokens_per_second=plain)
        points[place] = dataclasses.replace(point, tokens_per_second=least)
    return SpeedCurve(tuple(points))


def _changes(ways: Iterable[WayToRun], first: WayToRun) -> Iterator[BudgetPoint]:
    """A point where the speed of the chosen plan, or of the best without drafting, becomes another."""
    best: WayToRun | None = None
    plain: WayToRun | None = None
    last: BudgetPoint | None = None
    for budget, fitting in itertools.groupby(ways, key=lambda way: way.bytes):
        for way in fitting:
            if best is None or way is first or (best is not first and way.worth > best.worth):
                best = way
            if way.configuration.draft_max == 0 and (plain is None or way.worth > plain.worth):
                plain = way
        assert best is not None, "there are ways in a group"
        without = None if plain is None else plain.tokens_per_second
        point = BudgetPoint(budget, best.configuration, best.tokens_per_second, without)
        if last is None or _speeds(point) != _speeds(last):
            last = point
            yield point


def _speeds(point: BudgetPoint) -> tuple[float, float | None]:
    return point.tokens_per_second, point.plain_tokens_per_second
