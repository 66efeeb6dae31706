"""What passes and guesses cost on this device, as numbers that were measured, and what drafts are worth by them: c(m)
is the time of one pass of the target over m new tokens with the logits of all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np

from edgeinfer.bundle.strict_json import MisfitError, read_whole
from edgeinfer.core.errors import BackendError, StorageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints

# A day: no pass takes longer.
_LONGEST_MS = 86_400_000.0
_AGAIN = "Measure the costs again."


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise StorageError(f"Costs: {what}.", _AGAIN)


def _is_time(ms: float) -> bool:
    return 0 <= ms <= _LONGEST_MS


@dataclass(frozen=True)
class PassCosts:
    """c(m) as measured: rows and milliseconds by ascending rows; passes are padded to a multiple of `step`."""

    points: tuple[tuple[int, float], ...]
    step: int = 1

    def __post_init__(self) -> None:
        _require(len(self.points) > 0, "no pass was measured")
        for rows, ms in self.points:
            _require(1 <= rows <= 4096, f"a pass of {rows} rows")
            _require(_is_time(ms) and ms > 0, f"a pass of {ms} ms")
        _require(all(a[0] < b[0] for a, b in pairwise(self.points)), "sizes must ascend")
        _require(1 <= self.step <= 64, f"a step of {self.step} rows")

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


@dataclass(frozen=True)
class DraftCosts:
    """What drafting costs, and tokens besides."""

    guess_ms: Mapping[str, float]  # milliseconds of one guess, by the drafter's name
    round_ms: float  # milliseconds of a round besides its pass, its guesses and what its tokens take
    # Milliseconds of a token besides its round: choosing it, its text and its figures; None before it was measured.
    token_ms: float | None = None
    # Milliseconds of a token of the text that is read before a guess, by the name of a drafter that reads.
    read_ms: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        times = (*self.guess_ms.values(), *self.read_ms.values())
        _require(all(map(_is_time, times)), "what a guess or reading costs is impossible")
        _require(_is_time(self.round_ms), f"a round of {self.round_ms} ms")
        _require(self.token_ms is None or _is_time(self.token_ms), f"a token of {self.token_ms} ms")


@dataclass(frozen=True)
class Costs:
    """All costs that drafting is decided by, with the processor and the time (UTC, ISO 8601) of the measurement."""

    passes: PassCosts
    drafts: DraftCosts
    processor: str
    measured: str

    @property
    def round_ms(self) -> float:
        return self.drafts.round_ms

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Takes back what `dataclasses.asdict` gave."""
        try:
            return read_whole(cls, data)
        except MisfitError as misfit:
            raise StorageError(f"The fields of costs are not as expected: {misfit}.", _AGAIN) from misfit


# Rows of a pass, and its milliseconds.
TimedPass = tuple[int, float]
# Passes that tell anything at all.
_FEWEST = 3
# Passes apart that ran close together: a tenth of a second of a 0.5B.
_NEAR = 5
# What was believed counts as so many comparisons: one disturbed pass moves it little, twenty decide.
_BELIEVED = 2.0
# Passes of one size of which the least counts, as other work only adds to it; and sizes that tell what others take.
_KEPT, _SIZES = 8, 3
_LARGEST = 4096  # rows, as `PassCosts` takes them


class RanPasses:
    """Milliseconds of passes by their rows, from passes that ran while decoding."""

    def __init__(self) -> None:
        self._ms: dict[int, deque[float]] = {}
        self._least: dict[int, float] = {}
        self._costs: PassCosts | None = None
        self._measured: PassCosts | None = None  # what these go on from

    def observe(self, rows: int, ms: float) -> None:
        """Record the milliseconds of a pass."""
        if not 0 < rows <= _LARGEST or ms <= 0:
            return
        kept = self._ms.setdefault(rows, deque(maxlen=_KEPT))
        kept.append(ms)
        if self._least.get(rows) != (least := min(kept)):
            self._least[rows] = least
            self._costs = None

    def beyond(self, measured: PassCosts | None) -> PassCosts | None:
        """Measured costs extended by larger passes that ran; None if too little is known."""
        if measured is None and len(self._least) < _SIZES:
            return None
        if self._costs is None or self._measured is not measured:
            self._measured = measured
            points, step = ((), 1) if measured is None else (measured.points, measured.step)
            largest = points[-1][0] if points else 0
            further = sorted((rows, ms) for rows, ms in self._least.items() if rows > largest)
            self._costs = PassCosts((*points, *further), step)
        return self._costs


def following(costs: PassCosts, observed: Sequence[TimedPass]) -> PassCosts:
    """Move costs towards those of passes that ran while decoding. Sizes that did not run move as the nearest ones that
    did: beliefs that one busy moment spoiled are mostly spoiled alike, and where only small passes seemed to pay,
    larger ones have no other way to look better."""
    ran = _within(costs, observed)
    if len(ran) < _FEWEST:
        return costs
    off = np.log([ms / costs.ms(rows) for rows, ms in ran])  # (N,)
    padded = [-(-rows // costs.step) * costs.step if rows > 1 else rows for rows, _ in ran]
    sizes, places = np.unique(padded, return_inverse=True)
    relative = _differences(off, places, len(sizes))
    common = float(np.median(off - relative[places])) * len(ran) / (len(ran) + _BELIEVED)
    points = np.log([rows for rows, _ in costs.points])
    factors = np.exp(np.interp(points, np.log(sizes), relative) + common).tolist()
    return PassCosts(tuple((rows, ms * factors[i]) for i, (rows, ms) in enumerate(costs.points)), costs.step)


def pace(costs: PassCosts, observed: Sequence[TimedPass]) -> float | None:
    """Milliseconds of a pass over one row by observed passes; None if too few ran."""
    ran = _within(costs, observed)
    if len(ran) < _FEWEST:
        return None
    return costs.ms(1) * median(ms / costs.ms(rows) for rows, ms in ran)


def _within(costs: PassCosts, observed: Sequence[TimedPass]) -> list[TimedPass]:
    return [(rows, ms) for rows, ms in observed if rows <= costs.largest]


def _differences(off: Floats, sizes: Ints, count: int) -> Floats:  # (N,), (N,) -> (M,)
    """Estimate by how much the beliefs about sizes are off relative to each other."""
    near = range(1, min(_NEAR, len(off) - 1) + 1)
    first = np.concatenate([sizes[:-apart] for apart in near])
    second = np.concatenate([sizes[apart:] for apart in near])
    further = np.concatenate([off[apart:] - off[:-apart] for apart in near])
    further = np.where(first < second, further, -further)
    pairs = np.minimum(first, second) * count + np.maximum(first, second)
    # Least squares of all medians, weighted by the passes behind them, and of the beliefs.
    matrix, right = np.eye(count) * _BELIEVED, np.zeros(count)
    for pair in np.unique(pairs[first != second]):
        low, high = divmod(int(pair), count)
        differences = further[pairs == pair]
        weight = len(differences) / _NEAR
        matrix[[low, high], [low, high]] += weight
        matrix[[low, high], [high, low]] -= weight
        right[[low, high]] += np.array([-weight, weight]) * np.median(differences)
    solved: Floats = np.linalg.solve(matrix, right)
    return solved


# A drafter that costs less than this share of a pass is always asked; what it says also teaches its acceptance.
CHEAP = 0.02
# Where asking tables costs more than this share of a pass, "auto" decodes plainly: a model so small would have to be
# guessed right half of the time for drafts to pay for their own making.
_MOST_ASKING = 0.4
# Milliseconds of looking up a guess: asking three tables takes an eighth of one (docs/log/2026-11-21.md).
_LOOKUP_MS = 0.04
# The rate is a fixed point that a few steps reach from below, and steps smaller than this share end the search.
_STEPS, _STEP = 12, 1e-6


@dataclass(frozen=True)
class Prior:
    """Expectations of a drafter before anything was measured; fields as in `Prospect`. `share` is of a target's pass
    that a guess takes, 0 for tables; `model` says whether it is or runs the draft model."""

    covers: float
    accepted: float
    share: float = 0.0
    at_once: bool = False
    most: int = 0
    tables: bool = False
    model: bool = False


@dataclass(frozen=True)
class Prospect:
    """What a drafter is expected to do for a text."""

    drafter: str
    covers: float  # share of the rounds without a draft of those before it in which it drafts
    accepted: float  # rate at which a token of its drafts is accepted where those before it were
    guess_ms: float
    at_once: bool = False  # whether the first guess of a round pays for all of them
    most: int = 0  # tokens of its drafts at most; 0 is any number
    tables: bool = False  # whether it looks guesses up, so that asking costs time in every round
    model: bool = False  # whether it is the draft model, or runs it


@dataclass(frozen=True)
class DrafterRecord:
    """What one drafter did in the replies of this device."""

    share: float  # of the rounds, in which its draft was verified
    accepted: float  # rate at which a token was accepted where those before it were
    trust: float  # from 0 to 1, weight of the share against prior expectations; grows with the texts seen
    accepted_trust: float  # the same of the rate


class Ahead(NamedTuple):
    """Expected worth of further guesses in tokens, less what their time could decode otherwise (0 if none pays), and
    their tokens."""

    worth: float
    length: int
    tokens: float


def prospects_by(
    priors: Mapping[str, Prior],
    pass_ms: float,
    guess_ms: Mapping[str, float] = MappingProxyType({}),
    records: Mapping[str, DrafterRecord] = MappingProxyType({}),
) -> tuple[Prospect, ...]:
    """Combine expectations of drafters with what was measured of them."""
    found, left = [], 1.0
    for name, prior in priors.items():
        ms = guess_ms.get(name, _LOOKUP_MS if prior.tables else prior.share * pass_ms)
        covers, accepted = prior.covers, prior.accepted
        if name in guess_ms and name in records:
            record = records[name]
            seen = min(1.0, record.share / left) if left > 0 else 0.0
            left -= record.share
            covers += record.trust * (seen - covers)
            accepted += record.accepted_trust * (record.accepted - accepted)
        found.append(Prospect(name, covers, accepted, ms, prior.at_once, prior.most, prior.tables, prior.model))
    return tuple(found)


def asking_ms(prospects: Sequence[Prospect], round_ms: float) -> float:
    """Milliseconds of a round besides its pass, if only the tables are asked."""
    return round_ms + sum(each.guess_ms for each in prospects if each.tables)


def asking_pays(asking_ms: float, pass_ms: float) -> bool:
    """Whether tables are worth asking, compared with a pass over one row."""
    return asking_ms <= _MOST_ASKING * pass_ms


def look_ahead(
    pass_ms: Sequence[float],
    size: int,
    most: int,
    likely: float,
    accepted: float,
    rate: float,
    guess_ms: float,
    *,
    once: bool = False,
) -> Ahead:
    """Find the best worth of further guesses behind a path; `pass_ms` is by rows from 1 on, `rate` in tokens per
    millisecond."""
    worth, length, tokens = 0.0, 0, 0.0
    gained, now = 0.0, pass_ms[size]
    for further in range(1, most + 1):
        likely *= accepted
        gained += likely
        net = gained - rate * (pass_ms[size + further] - now + (1 if once else further) * guess_ms)
        if net > worth:
            worth, length, tokens = net, further, gained
    return Ahead(worth, length, tokens)


def decoding_rate(prospects: Sequence[Prospect], pass_ms: Sequence[float], round_ms: float) -> float:
    """Tokens per millisecond of decoding that drafts wherever that pays; `pass_ms` is by rows from 1 on."""
    plain = 1 / pass_ms[0]
    asking = asking_ms(prospects, round_ms)
    if not prospects or not asking_pays(asking, pass_ms[0]):
        return plain
    rate = plain
    for _ in range(_STEPS):
        tokens, ms, left = 1.0, pass_ms[0] + asking, 1.0
        for each in prospects:
            most = min(each.most or len(pass_ms), len(pass_ms) - 1)
            ahead = look_ahead(pass_ms, 0, most, 1.0, each.accepted, rate, each.guess_ms, once=each.at_once)
            share = left * each.covers if ahead.length else 0.0
            guesses = 1 if each.at_once else ahead.length
            tokens += share * ahead.tokens
            ms += share * (pass_ms[ahead.length] - pass_ms[0] + guesses * each.guess_ms)
            left -= share
        found = tokens / ms
        if found <= rate * (1 + _STEP):
            break
        rate = found
    return rate
