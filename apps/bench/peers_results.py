"""What a comparison with other engines found, as objects and as JSON; knows nothing of how it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from edgeinfer.apps.bench.timing import Spread

__all__ = ["BudgetFigures", "EngineFigures", "ModelFigures"]


@dataclass(frozen=True)
class BudgetFigures:
    """A reply inside an enforced limit.

    Attributes:
        tokens_per_second: after its first token, the median of its processes; None where there is no such figure.
        reason: why not.
        peak_rss_bytes: of the process; the system charges its limit for pages that it was the first to touch, so this
            may be more than the limit.
    """

    tokens_per_second: float | None
    reason: str = ""
    peak_rss_bytes: int = 0


@dataclass(frozen=True)
class EngineFigures:
    """One engine on one model.

    Attributes:
        engine: its label.
        weights: what it loads.
        size: of that on disk, in bytes.
        skipped: why nothing was measured; empty where something was.
        load_ms: from the start of its process until it could be asked.
        rates: tokens per second, by "pp512" and "tg128".
        passes: milliseconds of a pass over so many new tokens.
        peak_rss_bytes: of a process that did all of that.
        agreement: share of its replies' tokens that the reference would have chosen, too; None where it was not asked.
        checked: number of these tokens.
        same_tokens: whether that is enough; speeds are left out where it is not.
        budgets: replies within limits, by bytes.
        note: what readers of these figures should know.
    """

    engine: str
    version: str = ""
    weights: str = ""
    size: int = 0
    skipped: str = ""
    load_ms: Spread | None = None
    rates: Mapping[str, Spread] = field(default_factory=dict)
    passes: Mapping[int, Spread] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    agreement: float | None = None
    checked: int = 0
    same_tokens: bool | None = None
    budgets: Mapping[int, BudgetFigures] = field(default_factory=dict)
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types; medians stand under the names of what they are of."""
        spreads = {"load_ms": self.load_ms, **self.rates, **{f"c({m})": each for m, each in self.passes.items()}}
        return {
            "engine": self.engine,
            "version": self.version,
            "weights": self.weights,
            "bytes": self.size,
            "skipped": self.skipped or None,
            "load_ms": self.load_ms.median if self.load_ms else None,
            **{name: rate.median for name, rate in self.rates.items()},
            "c": {str(size): each.median for size, each in self.passes.items()},
            "peak_rss_bytes": self.peak_rss_bytes or None,
            "same_tokens": self.same_tokens,
            "agreement": self.agreement,
            "checked_tokens": self.checked,
            "budgets": {str(budget): asdict(figures) for budget, figures in self.budgets.items()},
            "note": self.note,
            "spreads": {name: asdict(each) for name, each in spreads.items() if each},
        }


@dataclass(frozen=True)
class ModelFigures:
    """All engines on one model.

    Attributes:
        check: how replies were checked, in words.
        limits: why no limit was enforced; empty where they were, or where there were no budgets.
        tests: names of the rates.
    """

    model: str
    context: int
    check: str
    limits: str
    tests: tuple[str, ...]
    sizes: tuple[int, ...]
    budgets: tuple[int, ...]
    engines: tuple[EngineFigures, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types."""
        return {
            "model": self.model,
            "context": self.context,
            "check": self.check,
            "limits": self.limits,
            "tests": list(self.tests),
            "engines": [each.to_dict() for each in self.engines],
        }
