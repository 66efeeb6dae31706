"""What passes and guesses cost on this device, as numbers that were measured once.

c(m) is the time of one pass of the target over m new tokens with the logits of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np

from edgeinfer.errors import BackendError, StorageError
from edgeinfer.records import dataclass

# A day: no pass takes longer.
_LONGEST_MS = 86_400_000.0
_AGAIN = "Measure the costs again."


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise StorageError(f"Costs: {what}.", _AGAIN)


def _is_time(value: object) -> bool:
    # Compared, not converted: an integer may be too large for a float. NaN compares as false.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LONGEST_MS


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _fields(data: object, names: Iterable[str]) -> dict[str, Any]:
    """The object, if it has exactly these fields."""
    wanted = set(names)
    _require(isinstance(data, dict) and set(data) == wanted, f"expected the fields {', '.join(sorted(wanted))}")
    assert isinstance(data, dict)
    return data


@dataclass(frozen=True)
class PassCosts:
    """c(m) as it was measured.

    Attributes:
        points: rows of a pass and its milliseconds, by ascending rows.
        step: passes run over a multiple of so many rows, padded up to it; 1 where that is not known.

    Raises:
        StorageError: impossible values.
    """

    points: tuple[tuple[int, float], ...]
    step: int = 1

    def __post_init__(self) -> None:
        _require(len(self.points) > 0, "no pass was measured")
        for rows, ms in self.points:
            _require(_is_count(rows, 4096), f"a pass of {rows} rows")
            _require(_is_time(ms) and ms > 0, f"a pass of {ms} ms")
        _require(all(a[0] < b[0] for a, b in pairwise(self.points)), "sizes must ascend")
        _require(_is_count(self.step, 64), f"a step of {self.step} rows")

    @property
    def largest(self) -> int:
        """Rows of the largest pass that was measured."""
        return self.points[-1][0]

    def ms(self, rows: int) -> float:
        """Milliseconds of a pass: never less than a smaller one's, between measured sizes a straight line."""
        if rows < 1:
            raise BackendError(f"There is no pass of {rows} rows.")
        table = self._table
        if rows < len(table):
            return table[rows]
        padded = -(-rows // self.step) * self.step
        return table[-1] + (padded - self.largest) * self._slope

    @cached_property
    def _table(self) -> list[float]:  # (largest + 1,), index 0 is not used
        # What disturbs a measurement only adds to it, so a larger pass that took less shows what the smaller one takes.
        envelope = np.minimum.accumulate([ms for _, ms in self.points][::-1])[::-1]
        sizes = np.array([rows for rows, _ in self.points])
        wanted = np.arange(self.largest + 1)
        after = sizes[np.searchsorted(sizes, wanted)]  # the size itself, or the next one measured
        padded = np.minimum(-(-wanted // self.step) * self.step, after)
        ms: list[float] = np.interp(np.where(wanted == after, wanted, padded), sizes, envelope).tolist()
        return ms

    @cached_property
    def _slope(self) -> float:
        """Milliseconds that a row adds beyond the largest measured pass."""
        # Over the last half, as the last two sizes may lie on one step of a staircase. A few rows tell no slope: there
        # each row is taken to cost as much as all before it, which stops drafts from growing into the unknown.
        halves = [rows for rows, _ in self.points if 2 * rows <= self.largest]
        if self.largest < 4 or not halves:
            return self._table[-1] / self.largest
        return (self._table[-1] - self._table[halves[-1]]) / (self.largest - halves[-1])

    def to_dict(self) -> dict[str, Any]:
        """Converts it to JSON's types."""
        return {"points": [list(point) for point in self.points], "step": self.step}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Takes back what `to_dict` gave."""
        fields = _fields(data, ("points", "step"))
        points = fields["points"]
        pairs = isinstance(points, list) and all(isinstance(p, list) and len(p) == 2 for p in points)
        _require(pairs, "points must be pairs")
        return cls(tuple((rows, ms) for rows, ms in points), fields["step"])


@dataclass(frozen=True)
class DraftCosts:
    """What drafting costs, and tokens besides.

    Attributes:
        guess_ms: milliseconds of one guess, by the drafter's name.
        round_ms: milliseconds of a round besides its pass, its guesses and what its tokens take.
        token_ms: milliseconds of a token besides its round: choosing it, its text and its figures; None until a reply
            told.
        read_ms: milliseconds of a token of the text that is read before a guess, by the name of a drafter that reads.

    Raises:
        StorageError: impossible values.
    """

    guess_ms: Mapping[str, float]
    round_ms: float
    token_ms: float | None = None
    read_ms: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        times = (*self.guess_ms.items(), *self.read_ms.items())
        named = all(isinstance(name, str) and _is_time(ms) for name, ms in times)
        _require(named, "what a guess or reading costs is impossible")
        _require(_is_time(self.round_ms), f"a round of {self.round_ms} ms")
        _require(self.token_ms is None or _is_time(self.token_ms), f"a token of {self.token_ms} ms")

    def to_dict(self) -> dict[str, Any]:
        """Converts it to JSON's types."""
        times: dict[str, Any] = {"guess_ms": dict(self.guess_ms), "read_ms": dict(self.read_ms)}
        return times | {"round_ms": self.round_ms, "token_ms": self.token_ms}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Takes back what `to_dict` gave; errors as `PassCosts.from_dict`."""
        fields = _fields(data, ("guess_ms", "round_ms", "token_ms", "read_ms"))
        objects = all(isinstance(fields[name], dict) for name in ("guess_ms", "read_ms"))
        _require(objects, "guess_ms and read_ms must be objects")
        return cls(**fields)


@dataclass(frozen=True)
class Costs:
    """All that the governor reckons with, and where and when it was measured.

    Attributes:
        processor: its name; costs of another are not this device's.
        measured: time of the measurement, UTC, ISO 8601.
    """

    passes: PassCosts
    drafts: DraftCosts
    processor: str
    measured: str

    def __post_init__(self) -> None:
        texts = (self.processor, self.measured)
        _require(all(isinstance(text, str) for text in texts), "processor and measured must be texts")

    @property
    def round_ms(self) -> float:
        """What a round costs besides its pass and its guesses."""
        return self.drafts.round_ms

    def to_dict(self) -> dict[str, Any]:
        """Converts it to JSON's types."""
        parts = {"passes": self.passes.to_dict(), "drafts": self.drafts.to_dict()}
        return parts | {"processor": self.processor, "measured": self.measured}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Takes back what `to_dict` gave; errors as `PassCosts.from_dict`."""
        fields = dict(_fields(data, ("passes", "drafts", "processor", "measured")))
        fields["passes"] = PassCosts.from_dict(fields["passes"])
        fields["drafts"] = DraftCosts.from_dict(fields["drafts"])
        return cls(**fields)
