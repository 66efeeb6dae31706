"""What passes and guesses cost on this device, measured once; knows nothing of what is drafted or decided by them.

c(m) is the time of one pass of the target over m new tokens with the logits of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any, Self

import numpy as np

from edgeinfer.errors import BackendError, StorageError
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.speculation.contracts import Context, Drafter

__all__ = ["Costs", "DraftCosts", "PassCosts", "filler_tokens", "measure_guesses", "measure_passes", "sizes_to_measure"]

# Every size that short drafts have, then steps that show where the cost turns steep.
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
# Sizes that tell anything at all; they are measured even where that takes longer than the budget.
_FEWEST = 2
# Visits to a size at most: on the smallest model the budget would allow hundreds.
_MOST_VISITS = 12
# Passes of one size that tell what it costs, and how far one reply's passes move what is believed.
_ENOUGH, _PULL = 3, 0.4
# Chains asked of a drafter at most, and guesses in each.
_CHAINS = 8
_CHAIN = 4
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
    """Measured c(m).

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
        """Milliseconds of a pass: never less than a smaller one's, between measured sizes a straight line.

        Raises:
            BackendError: no rows.
        """
        if rows < 1:
            raise BackendError(f"There is no pass of {rows} rows.")
        table = self._table
        if rows < len(table):
            return table[rows]
        padded = -(-rows // self.step) * self.step
        return table[-1] + (padded - self.largest) * self._slope

    def following(self, observed: Mapping[int, Sequence[float]]) -> PassCosts:
        """Costs moved towards those of passes that ran in earnest: what one busy second made dear corrects itself.

        Sizes that did not run move in the proportion in which the others did, as most of what changes, other work on
        the machine and the length of the context, changes all.

        Args:
            observed: milliseconds of passes by their rows.
        """
        seen = {rows: median(ms) for rows, ms in observed.items() if len(ms) >= _ENOUGH and rows <= self.largest}
        if not seen:
            return self
        ratios = {rows: ms / self.ms(rows) for rows, ms in seen.items()}
        common = median(ratios.values())
        points = []
        for rows, ms in self.points:
            near = [ratios[m] for m in seen if -(-m // self.step) * self.step == -(-rows // self.step) * self.step]
            points.append((rows, ms * (median(near) if near else common) ** _PULL))
        return PassCosts(tuple(points), self.step)

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
        """As JSON's types."""
        return {"points": [list(point) for point in self.points], "step": self.step}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Takes back what `to_dict` gave.

        Raises:
            StorageError: anything is unknown, missing or impossible.
        """
        fields = _fields(data, ("points", "step"))
        points = fields["points"]
        pairs = isinstance(points, list) and all(isinstance(p, list) and len(p) == 2 for p in points)
        _require(pairs, "points must be pairs")
        return cls(tuple((rows, ms) for rows, ms in points), fields["step"])


@dataclass(frozen=True)
class DraftCosts:
    """What drafting costs.

    Attributes:
        guess_ms: milliseconds of one guess, by the drafter's name.
        round_ms: milliseconds of a round besides its pass and its guesses.

    Raises:
        StorageError: impossible values.
    """

    guess_ms: Mapping[str, float]
    round_ms: float

    def __post_init__(self) -> None:
        named = all(isinstance(name, str) and _is_time(ms) for name, ms in self.guess_ms.items())
        _require(named, "a guess's cost is impossible")
        _require(_is_time(self.round_ms), f"a round of {self.round_ms} ms")

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types."""
        return {"guess_ms": dict(self.guess_ms), "round_ms": self.round_ms}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Takes back what `to_dict` gave; errors as `PassCosts.from_dict`."""
        fields = _fields(data, ("guess_ms", "round_ms"))
        _require(isinstance(fields["guess_ms"], dict), "guess_ms must be an object")
        return cls(fields["guess_ms"], fields["round_ms"])


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

    def pass_ms(self, rows: int) -> float:
        """One pass of the target over so many new tokens with all their logits."""
        return self.passes.ms(rows)

    def guess_ms(self, drafter: str) -> float:
        """One guess; KeyError for a drafter that was not measured."""
        return self.drafts.guess_ms[drafter]

    @property
    def round_ms(self) -> float:
        """What a round costs besides its pass and its guesses."""
        return self.drafts.round_ms

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types."""
        parts = {"passes": self.passes.to_dict(), "drafts": self.drafts.to_dict()}
        return parts | {"processor": self.processor, "measured": self.measured}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Takes back what `to_dict` gave; errors as `PassCosts.from_dict`."""
        fields = dict(_fields(data, ("passes", "drafts", "processor", "measured")))
        fields["passes"] = PassCosts.from_dict(fields["passes"])
        fields["drafts"] = DraftCosts.from_dict(fields["drafts"])
        return cls(**fields)


def filler_tokens(backend: Backend, count: int, skip: int = 0) -> Ints:  # (count,)
    """Token ids that look different; the same for the same `skip`.

    Their values change what a pass costs where they choose experts, which may be in memory or not, so passes that are
    timed are given others each time.
    """
    tokens: Ints = ((np.arange(count) + skip) * 7919 + 11) % backend.geometry.vocab_size
    return tokens


def sizes_to_measure(step: int, most: int) -> tuple[int, ...]:
    """Rows of the passes that `measure_passes` times where cache and time suffice; arguments as it takes them."""
    return tuple(m for m in _SIZES if (m == 1 or m % step == 0) and m <= max(most, step))


def measure_passes(
    backend: Backend, budget_s: float = 0.6, past: int = 64, step: int = 1, most: int = _SIZES[-1]
) -> PassCosts:
    """Times passes of 1 to 32 rows with all their logits; leaves the cache empty.

    The best of a few visits counts, as what else runs on the machine only ever adds, and the few visits that fit the
    budget are too few for a median. All sizes take turns, ascending; later turns leave out those that have had their
    share of the budget, so large passes run once where they are slow. What does not fit the budget is not measured.

    Args:
        backend: the target, whose cache is given up.
        budget_s: seconds; two sizes are measured even where that takes longer.
        past: rows in the cache before each pass, fewer where it is small.
        step: passes are padded to a multiple of so many rows; of larger passes only those multiples are measured.
        most: rows of the largest pass, for whose logits there is memory.
    """
    capacity = backend.cache.capacity
    past = min(past, max(0, capacity - _SIZES[-1]))
    sizes = [m for m in sizes_to_measure(step, most) if past + m <= capacity] or [1]
    backend.cache.trim(0)
    _fill(backend, past)
    deadline = time.perf_counter() + budget_s
    _timed_pass(backend, past, 1, 0)  # reads the weights' pages in, and is no measure
    skip = 1
    best: dict[int, float] = {}
    spent = dict.fromkeys(sizes, 0.0)
    for visit in range(_MOST_VISITS):
        for size in sizes:
            expected = best.get(size) or max(best.values(), default=0.0)
            late = time.perf_counter() + expected > deadline
            if late and len(best) >= _FEWEST:
                break
            if visit and spent[size] >= budget_s / len(sizes):
                continue
            seconds = _timed_pass(backend, past, size, skip)
            skip += size
            spent[size] += seconds
            best[size] = min(seconds, best.get(size, seconds))
    backend.cache.trim(0)
    return PassCosts(tuple((size, best[size] * 1e3) for size in sizes if size in best), step)


def _timed_pass(backend: Backend, past: int, size: int, skip: int) -> float:
    tokens, rows = filler_tokens(backend, size, skip), np.arange(size)
    begun = time.perf_counter()
    backend.forward(ForwardInput(tokens, rows + past, rows))
    seconds = time.perf_counter() - begun
    backend.cache.trim(past)
    return seconds


def _fill(backend: Backend, length: int) -> None:
    """Puts rows into an empty cache, for passes to attend to."""
    if backend.cache.copyable:
        backend.cache.restore(_blank(backend, length))
    elif length:
        backend.forward(ForwardInput(filler_tokens(backend, length), np.arange(length), np.zeros(0, np.int64)))


def _blank(backend: Backend, length: int) -> CacheSnapshot:
    """A cache of zeros, which costs nothing to make and as much as any other to attend to."""
    empty = backend.cache.snapshot(0, 0)
    heads, _, width = empty.keys[0].shape
    zeros = (np.zeros((heads, length, width), empty.keys[0].dtype),) * backend.geometry.num_layers
    return replace(empty, length=length, keys=zeros, values=zeros)


def measure_guesses(drafter: Drafter, context: Context, budget_s: float = 0.05) -> float:
    """Milliseconds of one guess: the median over chains of guesses after different first tokens.

    The first chain is not counted: it takes in the context. Where the drafter works on the target's cache, its rows are
    left there.

    Args:
        drafter: which has begun with this context.
        budget_s: seconds, beyond which no further chain is begun.
    """
    deadline = time.perf_counter() + budget_s
    # Different tokens, so that no chain finds what the one before it left in a cache.
    starts = list(dict.fromkeys(reversed(context.tokens)))
    _chain_ms(drafter, context, [starts[0]])
    each: list[float] = []
    while not each or (len(each) < _CHAINS and time.perf_counter() < deadline):
        number = len(each) + 1
        start = starts[number % len(starts)]
        each.append(_chain_ms(drafter, context, [start] * (1 + number // len(starts))))
    return median(each)


def _chain_ms(drafter: Drafter, context: Context, drafted: Sequence[int]) -> float:
    """Milliseconds per guess of a chain that goes on after these tokens; a drafter with none to give ends it."""
    path, given = list(drafted), 0
    begun = time.perf_counter()
    while given < _CHAIN and (guesses := drafter.guesses(context, path, 1)):
        given += 1
        path.append(guesses[0].token)
    # Where heads come to an end, having none to give costs nothing and would make the others look cheaper.
    return (time.perf_counter() - begun) * 1e3 / max(1, given)
