"""Finds settings that are better than the usual ones, and proves them. One setting after the other is tried, together
with those found before it, and the whole set once more against the usual settings with fresh timings: what is not
proved is not kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from edgeinfer.core.errors import BudgetError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.profile.settings import UNTUNED, TunedSettings
from edgeinfer.runtime.tuning.stopwatch import LOAD, LOADED, PREFILL, PROMPTS, TURN, TURNS, Times

# A gain that is worth a setting of one's own, and a loss that is not noticed.
GAIN, _LOSS = 0.03, 0.03
# Probability of taking a way for faster that is not, and for no slower that is, at each look at the timings.
_WRONGLY_FASTER, _WRONGLY_EQUAL = 0.01, 0.05


@dataclass(frozen=True)
class TimingVerdict:
    """The verdict of pairs of timings: whether to keep the second way, whether that is decided, and its time ratios
    (medians)."""

    better: bool
    decided: bool
    ratios: Mapping[str, float]
    slower: tuple[str, ...] = ()


def median_below(ratios: Sequence[float], error_rate: float) -> float:
    """A bound that the true median lies above with no more than this probability; infinite where they are too few."""
    count, below, rank = len(ratios), 0.0, 0
    while rank <= count and below + math.comb(count, rank) / 2**count <= error_rate:
        below += math.comb(count, rank) / 2**count
        rank += 1
    return sorted(ratios, reverse=True)[rank - 1] if rank else math.inf


def judge(ratios: Mapping[str, Sequence[float]], aims: Sequence[str]) -> TimingVerdict:
    """Judge whether the second way is better: faster in one of `aims`, and slower in nothing."""
    medians = {part: median(values) for part, values in ratios.items()}
    gained = [part for part in aims if medians[part] <= 1 - GAIN and median_below(ratios[part], _WRONGLY_FASTER) < 1]
    if gained and all(median_below(values, _WRONGLY_EQUAL) <= 1 + _LOSS for values in ratios.values()):
        return TimingVerdict(True, True, medians)
    # Turned round, the same bound says what is surely slower, and what surely gains too little.
    slower = tuple(part for part in ratios if _median_above(ratios[part]) > 1 + _LOSS)
    hopeless = all(_median_above(ratios[part]) > 1 - GAIN for part in aims)
    return TimingVerdict(False, bool(slower) or hopeless, medians, slower)


def _median_above(ratios: Sequence[float]) -> float:
    return -median_below([-ratio for ratio in ratios], _WRONGLY_FASTER)


@dataclass(frozen=True)
class Effort:
    """How long a comparison measures: the numbers of pairs after which it looks, and its limit in seconds."""

    looks: tuple[int, ...]
    seconds: float

    @property
    def visit_ms(self) -> float:
        """Milliseconds of one visit, so that the second look comes in time."""
        return self.seconds * 1e3 / (2 * self.looks[1])


FULL = Effort((7, 13, 25, 37), 45.0)
QUICK = Effort((7, 13), 8.0)


@dataclass(frozen=True)
class Trial:
    """The result of a comparison: median milliseconds by part of the two ways, and the pairs of visits."""

    verdict: TimingVerdict
    first: Times
    second: Times
    pairs: int


def compare(
    timed: Callable[[TunedSettings], Times],
    first: TunedSettings,
    second: TunedSettings,
    aims: Sequence[str],
    effort: Effort,
    clock: Callable[[], float],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Trial:
    """Compare two ways: the second must be faster in one of `aims`. The clock is in seconds; `report` gets pairs done
    and in all."""
    deadline = clock() + effort.seconds
    # What only a first pass does is no measure.
    timed(first), timed(second)
    mine: list[Times] = []
    theirs: list[Times] = []
    for count in range(1, effort.looks[-1] + 1):
        # Each begins every other pair: whatever the visit before leaves behind is shared.
        for way in (first, second) if count % 2 else (second, first):
            (mine if way == first else theirs).append(timed(way))
        report(count, effort.looks[-1])
        late = clock() > deadline
        if late or count in effort.looks:
            ratios = {part: [b[part] / a[part] for a, b in zip(mine, theirs, strict=True)] for part in mine[0]}
            verdict = judge(ratios, aims)
            if late or verdict.decided:
                break
    return Trial(verdict, _medians(mine), _medians(theirs), len(mine))


def _medians(visits: Sequence[Times]) -> Times:
    return {part: median(times[part] for times in visits) for part in visits[0]}


# Times a way once, at one of these tasks; BudgetError where there is no memory for it.
Timer = Callable[[TunedSettings, str], Times]
# Of more values than this, only those that look fastest are compared in full.
_COMPARED, _GLANCES = 3, 2
# Visits that tell how fast the usual settings are, where no comparison with them does.
_ENOUGH = 5


@dataclass(frozen=True)
class SettingChoices:
    """Settings that a model on this device has to choose from, besides the usual. `pinning` gives the processors of
    threads, "" where nothing can be pinned; `long_chunks` exceed any prompt timed."""

    threads: tuple[int, ...] = ()
    pinning: Callable[[int], str] = lambda threads: ""
    usual_threads: int = 1
    weights: tuple[str, ...] = ()
    chunks: tuple[int, ...] = ()
    long_chunks: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Knob:
    """A setting: its values given those found so far, the task that times it, and the times it may improve."""

    name: str
    values: Callable[[SettingChoices, TunedSettings], Sequence[Any]]
    task: str
    aims: tuple[str, ...]


def _pinnings(ways: SettingChoices, best: TunedSettings) -> Sequence[str]:
    text = ways.pinning(best.threads or ways.usual_threads)
    return (text,) if text else ()


_KNOBS = (
    _Knob("threads", lambda ways, best: ways.threads, TURNS, (TURN,)),
    _Knob("affinity", _pinnings, TURNS, (TURN,)),
    _Knob("weights", lambda ways, best: ways.weights, LOADED, (TURN, LOAD)),
    # A reply does not depend on how prompts are cut.
    _Knob("prefill_chunk", lambda ways, best: ways.chunks, PROMPTS, (PREFILL,)),
)


@dataclass(frozen=True)
class Attempt:
    """A value that was tried, and its time relative to the best before; None if it could not be timed. The outcome is
    "better", "not better", "slower", "unclear" as timings scattered, "no memory", or "too slow to try"."""

    name: str
    value: Any
    outcome: str
    ratio: float | None = None


@dataclass(frozen=True)
class SettingsFound:
    """The settings that a search found and proved, or UNTUNED, and the usual settings' median milliseconds by part.
    `proof` compares them with the usual settings; `rejected` are settings that were chosen and not proved."""

    settings: TunedSettings
    attempts: tuple[Attempt, ...]
    proof: Trial | None
    usual: Times
    rejected: TunedSettings | None = None


def search_settings(
    ways: SettingChoices,
    timer: Timer,
    effort: Effort,
    clock: Callable[[], float],
    report: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> SettingsFound:
    """Search one setting after the other, and prove the result; `report` gets the stage, pairs done and in all."""
    best = UNTUNED
    attempts = [Attempt("prefill_chunk", size, "too slow to try") for size in ways.long_chunks]
    for knob in _KNOBS:
        for value in _shortlist(knob, knob.values(ways, best), best, timer, attempts):
            candidate = dataclasses.replace(best, **{knob.name: value})
            stage = f"{knob.name.replace('_', ' ')} {value}"

            def timed(way: TunedSettings, task: str = knob.task) -> Times:
                return timer(way, task)

            def progress(done: int, total: int, stage: str = stage) -> None:
                report(stage, done, total)

            try:
                trial = compare(timed, best, candidate, knob.aims, effort, clock, progress)
            except BudgetError:
                attempts.append(Attempt(knob.name, value, "no memory"))
                continue
            attempts.append(_attempt(knob, value, trial))
            if trial.verdict.better:
                best = candidate
    if best == UNTUNED:
        return SettingsFound(UNTUNED, tuple(attempts), None, _usual(timer))
    proof = _prove(best, timer, effort, clock, report)
    if proof.verdict.better:
        return SettingsFound(best, tuple(attempts), proof, proof.first)
    return SettingsFound(UNTUNED, tuple(attempts), proof, proof.first, rejected=best)


def _usual(timer: Timer) -> Times:
    timer(UNTUNED, TURNS)
    visits = [timer(UNTUNED, TURNS) for _ in range(_ENOUGH)]
    return {part: median(times[part] for times in visits) for part in visits[0]}


def _prove(
    chosen: TunedSettings,
    timer: Timer,
    effort: Effort,
    clock: Callable[[], float],
    report: Callable[[str, int, int], None],
) -> Trial:
    """Compare everything chosen with the usual settings."""
    knobs = [knob for knob in _KNOBS if knob.name in chosen.names]
    aims = tuple(dict.fromkeys((TURN, *(aim for knob in knobs for aim in knob.aims))))
    task = LOADED if LOAD in aims else TURNS
    return compare(
        lambda way: timer(way, task),
        UNTUNED,
        chosen,
        aims,
        effort,
        clock,
        lambda done, total: report("against the usual settings", done, total),
    )


def _shortlist(
    knob: _Knob, values: Sequence[Any], best: TunedSettings, timer: Timer, attempts: list[Attempt]
) -> Sequence[Any]:
    """All values, or of many those that look fastest in a short timing."""
    if len(values) <= _COMPARED:
        return values
    glanced: dict[Any, float] = {}
    for value in values:
        try:
            visits = [timer(dataclasses.replace(best, **{knob.name: value}), knob.task) for _ in range(_GLANCES)]
        except BudgetError:
            attempts.append(Attempt(knob.name, value, "no memory"))
            continue
        glanced[value] = min(times[knob.aims[0]] for times in visits)
    ranked = sorted(glanced, key=lambda value: glanced[value])
    attempts += [Attempt(knob.name, value, "not better") for value in ranked[_COMPARED:]]
    return ranked[:_COMPARED]


def _attempt(knob: _Knob, value: Any, trial: Trial) -> Attempt:
    verdict = trial.verdict
    ratio = min(verdict.ratios[aim] for aim in knob.aims)
    if verdict.better:
        return Attempt(knob.name, value, "better", ratio)
    outcome = "slower" if verdict.slower else "not better" if verdict.decided else "unclear"
    return Attempt(knob.name, value, outcome, ratio)
