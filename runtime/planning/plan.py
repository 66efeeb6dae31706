"""The memory plan: what will run, what every part of it takes, what was given up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from edgeinfer.bundle.layouts import Layout
from edgeinfer.core.errors import BudgetError
from edgeinfer.core.options import format_size
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.planning.facts import Configuration, Footprint
from edgeinfer.runtime.planning.memory_model import OUTSIDE
from edgeinfer.runtime.planning.speed_model import DiskReads, Speed

# Of the best speed, what counts as keeping it.
BEST_SHARE = 0.95


@dataclass(frozen=True)
class BudgetPoint:
    """The plan of budgets from `budget_bytes` on, and the speed of the best plan without drafting; None if none was
    wanted."""

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
        way = self.configuration
        layers = "layer" if way.window_layers == 1 else "layers"
        window = f", {way.window_layers} {layers} at a time" if way.window_layers else ""
        window += f", {way.kept_layers} of them kept in memory" if way.kept_layers else ""
        drafts = f"drafts of up to {way.draft_max}" if way.draft_max else "no drafting"
        return f"{way.weights} weights{window}, {way.kv} cache, {drafts}"

    def to_dict(self) -> dict[str, Any]:
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
    """Speed against budget for one context: points by ascending budget, each valid up to the next."""

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


# Name of the alternative without any concession.
NOTHING_GIVEN_UP = "nothing given up"


@dataclass(frozen=True)
class Alternative:
    """Another way to run the same model; `planned_bytes` are of the pages that count."""

    name: str
    configuration: Configuration
    planned_bytes: int
    fits: bool
    speed: Speed

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "planned_bytes": self.planned_bytes,
            "fits": self.fits,
            "tokens_per_second": self.speed.tokens_per_second,
            "plain_tokens_per_second": self.speed.plain_tokens_per_second,
            "choice": _choice(self.configuration),
        }


@dataclass(frozen=True)
class MemoryPlan:
    """What a model will take in memory, and how it will run.

    Attributes:
        configuration: what will run.
        layout: the layout of weights that runs.
        overflow: what happens when the context is full, one of OVERFLOWS.
        prefix_cache: bytes kept of other conversations at most, which replies side by side take for theirs.
        parallel: replies side by side that there is memory for.
        budget_bytes: the user's budget; None when there is none.
        counted: which pages count against it, one of COUNTED.
        footprint: bytes by term and kind of page.
        speed: predicted of a text that was never seen; no less than in any smaller budget.
        minimum_bytes: the smallest budget that the same request fits, whatever the budget of this plan.
        given_up: what a larger budget would give.
        not_chosen: types of the KV cache that are for those who ask for them, and why.
        hints: what the caller fixed that, left open, would need less.
        alternatives: other ways to run, the fastest first, where they were asked for.
        curve: speed against budget for this context, where alternatives were asked for.
        threads: of the linear algebra.
        tuned: names of the settings that differ from the usual ones because they were measured to be faster here.
        device: that runs the model, as users write it.
        device_note: why it is not the one that was asked for; empty where it is.
        disk: what passes read from the disk; None where all weights stay in memory.
    """

    configuration: Configuration
    layout: Layout
    overflow: str
    prefix_cache: int
    budget_bytes: int | None
    counted: str
    footprint: Footprint
    speed: Speed
    minimum_bytes: int
    given_up: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    curve: SpeedCurve | None = None
    threads: int = 1
    tuned: tuple[str, ...] = ()
    device: str = "cpu"
    device_note: str = ""
    parallel: int = 1
    disk: DiskReads | None = None
    not_chosen: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        needs, c, speed = format_size(self.planned_bytes, up=True), self.configuration, self.speed
        budget = "" if self.budget_bytes is None else f" of {format_size(self.budget_bytes)}"
        fits = "" if self.fits else ", does not fit"
        lost = f", given up: {'; '.join(self.given_up)}" if self.given_up else ""
        pace = f"{speed.plain_tokens_per_second:.1f} tokens/s plain, {speed.tokens_per_second:.1f} expected with drafts"
        return (
            f"<MemoryPlan {needs}{budget}{fits}: context {c.context}, {c.kv} cache, {c.weights} weights, {pace}{lost}>"
        )

    @property
    def context(self) -> int:
        """Tokens of prompt plus reply the cache may hold."""
        return self.configuration.context

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens per pass."""
        return self.configuration.prefill_chunk

    @property
    def draft_max(self) -> int:
        """Tokens in a draft at most; 0 is no speculation."""
        return self.configuration.draft_max

    @property
    def room(self) -> int | None:
        """Bytes of weights that the system can keep in memory; None where it keeps all."""
        return None if self.disk is None else self.disk.room

    @property
    def terms(self) -> dict[str, int]:
        """Bytes by term, of both kinds of pages."""
        return self.footprint.terms

    @property
    def planned_bytes(self) -> int:
        """Upper bound of the pages that count against the budget."""
        return self.footprint.total(self.counted)

    @property
    def fits(self) -> bool:
        """Whether the plan is within the budget, or there is none."""
        return self.budget_bytes is None or self.planned_bytes <= self.budget_bytes

    @property
    def spare_bytes(self) -> int | None:
        """What of the budget nothing is planned for, or only kept prefixes, which give way; None without a budget."""
        return None if self.budget_bytes is None else self.budget_bytes - self.planned_bytes + self.prefix_cache

    @property
    def useful_alternatives(self) -> tuple[Alternative, ...]:
        """Alternatives without those that need as much and give nothing for it; where nothing fits, all that need more,
        which a larger budget would make possible."""
        mine = self.planned_bytes

        def useful(way: Alternative) -> bool:
            if not self.fits:
                return way.planned_bytes > mine
            faster = way.speed.tokens_per_second > self.speed.tokens_per_second
            return way.planned_bytes < mine or faster or way.name == NOTHING_GIVEN_UP

        return tuple(way for way in self.alternatives if useful(way))

    def require_fit(self) -> None:
        """Refuses a plan over its budget.

        Raises:
            BudgetError: carries the terms and the smallest budget that would fit.
        """
        if self.fits:
            return
        assert self.budget_bytes is not None
        raise BudgetError(
            f"The model needs {format_size(self.minimum_bytes, up=True)}, the budget is "
            f"{format_size(self.budget_bytes)}.",
            f"{self._why()} Give at least {format_size(self.minimum_bytes, up=True)}{self._ways()}.",
            terms=self.terms,
            minimum_bytes=self.minimum_bytes,
        )

    def _why(self) -> str:
        outside = sum(self.terms.get(name, 0) for name in OUTSIDE)
        if self.budget_bytes is not None and self.budget_bytes <= outside:
            return f"This program takes {format_size(outside)} without a model."
        largest = max(self.terms, key=lambda name: self.terms[name])
        return f"The largest part is {largest.replace('_', ' ')} with {format_size(self.terms[largest])}."

    def _ways(self) -> str:
        ways = [*self.hints, "use a model with fewer bits"]
        return "".join(f", or {way}" for way in ways)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that `edgeinfer plan --json` prints."""
        choice = _choice(self.configuration) | {"layout": self.layout, "overflow": self.overflow}
        return {
            "fits": self.fits,
            "budget_bytes": self.budget_bytes,
            "counted": self.counted,
            "minimum_bytes": self.minimum_bytes,
            "planned_bytes": self.planned_bytes,
            "anonymous_bytes": self.footprint.total("anonymous"),
            "terms": self.terms,
            "choice": choice
            | {"prefix_cache": self.prefix_cache, "parallel": self.parallel}
            | {"threads": self.threads, "tuned": list(self.tuned)},
            "device": {"name": self.device, "note": self.device_note, "terms": dict(self.footprint.device)},
            "speed": dataclasses.asdict(self.speed)
            | {"disk_bytes_per_second": None if self.disk is None else self.disk.rate},
            "given_up": list(self.given_up),
            "not_chosen": dict(self.not_chosen),
            "alternatives": [alternative.to_dict() for alternative in self.alternatives],
            "speculation_bytes": None if self.curve is None else self.curve.speculation_bytes,
            "best_speed_bytes": None if self.curve is None else self.curve.best_speed_bytes,
            "curve": [] if self.curve is None else [point.to_dict() for point in self.curve.points],
        }


def _choice(configuration: Configuration) -> dict[str, Any]:
    return dataclasses.asdict(configuration) | {"drafters": list(configuration.drafters)}
