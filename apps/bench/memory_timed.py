"""Ways to load one model, timed in turns, every turn in a process of its own; and chats there for many turns."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.benchmark import StageProgress
from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.apps.bench.enforced import drop_cached, enclosure
from edgeinfer.apps.bench.timing import rotated
from edgeinfer.apps.bench.watch import run_watched, watch
from edgeinfer.errors import UsageError

# Of a process that generates nothing: what any model costs once it is loaded, and the reserve.
_AROUND = frozenset({"interpreter", "libraries", "objects", "reserve", "loading", "session", "code"})
_AROUND |= {"tokenizer", "tokenizer_mapped"}
_WEIGHTS = ("weights_packed", "weights_mapped", "experts")
# The largest budget, over what is planned without one: a process grows a little between planning and loading.
_AMPLE = 1.02


@dataclass(frozen=True)
class LoadSetup:
    """A way to load a model: options of `edgeinfer.load`; a budget among them is enforced by the system."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def budget(self) -> int | None:
        """Bytes."""
        return self.options.get("memory")


@dataclass(frozen=True)
class ReplyRequest:
    """What every process is asked for: replies of so many tokens to these prompts, of token ids."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True)
class TimedRun:
    """One process.

    Attributes:
        reason: why it gave no replies; empty where it did.
        found: what `memory_jobs.time_replies` says.
        times_full: how often the enforced limit was reached.
    """

    reason: str = ""
    peak_rss: int = 0
    peak_anonymous: int = 0
    times_full: int = 0
    found: Mapping[str, Any] = field(default_factory=dict)

    def speed(self, prompts: Sequence[int], *, clock: str = "ms_per_token") -> float:
        """Tokens a second over all replies to these prompts, their first tokens aside.

        Args:
            clock: "processor_ms_per_token" is the processor's time, which tells on a machine that others use too.
        """
        later = [self.found["tokens"][index] - 1 for index in prompts]
        ms = sum(self.found[clock][index] * count for index, count in zip(prompts, later, strict=True))
        return sum(later) / ms * 1e3 if ms else 0.0

    def generation_bytes(self, *, planned: bool, alone: bool) -> int:
        """Everything beyond the weights."""
        if alone and not planned:
            return int(self.found["generation"])
        terms = self.found["terms"]
        # While weights are streamed, those at the end are not those at the peak.
        by_plan = planned or self.found["choice"]["weights"] == "streamed"
        weights = sum(terms.get(name, 0) for name in _WEIGHTS) if by_plan else self.found["weights_resident"]
        size = (self.found["planned"] if planned else self.peak_rss) - weights
        if not alone:
            return int(size)
        return int(size - sum(terms.get(name, 0) for name in _AROUND))


@dataclass(frozen=True)
class Timed:
    """All processes of one setup.

    Attributes:
        beside: processes of the setup it is compared with that took turns with these; empty where all setups did.
    """

    setup: LoadSetup
    runs: tuple[TimedRun, ...]
    beside: tuple[TimedRun, ...] = ()

    @property
    def reason(self) -> str:
        """Why one of them gave no replies; empty where all did."""
        return next((run.reason for run in self.runs if run.reason), "")

    def speed(self, prompts: Sequence[int]) -> float:
        """The median tokens a second; 0 where one gave no replies."""
        return 0.0 if self.reason else statistics.median(run.speed(prompts) for run in self.runs)

    def share(self, reference: Timed, prompts: Sequence[int]) -> float:
        """The share of another setup's speed, by its runs that lie nearest in time."""
        other = Timed(reference.setup, self.beside or reference.runs).speed(prompts)
        return self.speed(prompts) / other if other else 0.0

    def median(self, value: Callable[[TimedRun], float]) -> float:
        """The median of something of every process."""
        return statistics.median(value(run) for run in self.runs)


def time_setups(
    model: str,
    setups: Sequence[LoadSetup],
    replies: ReplyRequest,
    rounds: int,
    *,
    enforce: bool = True,
    progress: StageProgress | None = None,
) -> list[Timed]:
    """Every setup once per round, in another order each time.

    Args:
        progress: called with the processes done and their number.
    """
    runs: dict[str, list[TimedRun]] = {setup.name: [] for setup in setups}
    done = 0
    for turn in range(rounds):
        for setup in rotated(setups, turn):
            if progress:
                progress(done, rounds * len(setups))
            runs[setup.name].append(_run(model, setup, replies, enforce))
            done += 1
    return [Timed(setup, tuple(runs[setup.name])) for setup in setups]


def narrow(
    model: str,
    timed: Sequence[Timed],
    replies: ReplyRequest,
    rounds: int,
    halvings: int,
    keeps: Callable[[Timed], bool],
    *,
    enforce: bool = True,
) -> list[Timed]:
    """The same with budgets between the smallest that keeps something and the next below it, by halving."""
    reference, found = timed[0], list(timed)
    for _ in range(halvings):
        kept = min((each for each in found if each.setup.budget and keeps(each)), key=_budget, default=None)
        lower = max((each for each in found if kept and 0 < _budget(each) < _budget(kept)), key=_budget, default=None)
        if kept is None or lower is None:
            break
        middle = (_budget(kept) + _budget(lower)) // 2
        setup = LoadSetup(str(middle), {**kept.setup.options, "memory": middle})
        again, new = time_setups(model, [reference.setup, setup], replies, rounds, enforce=enforce)
        found.append(replace(new, beside=again.runs))
    free = [each for each in found if not each.setup.budget]
    return free + sorted((each for each in found if each.setup.budget), key=_budget, reverse=True)


def _budget(timed: Timed) -> int:
    return timed.setup.budget or 0


def in_child(job: str, arguments: dict[str, Any]) -> list[str]:
    """The command line of a job of memory_jobs."""
    return [sys.executable, "-m", "edgeinfer.apps.bench.memory_jobs", job, json.dumps(arguments)]


def run_job(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a job of memory_jobs finds in a process of its own."""
    found: dict[str, Any] = json.loads(run_watched(in_child(name, arguments), child_environment()).stdout)
    return found


def budgets_between(model: str, options: Mapping[str, Any], steps: int) -> list[int]:
    """Budgets in even steps, from more than the model takes without one down to the smallest that would do."""
    sizes = run_job("plan", {"model": model, **options})
    least = sizes["minimum"]
    largest = round(_AMPLE * max(sizes["planned"], least))
    return [round(largest - (largest - least) * step / (steps - 1)) for step in range(steps)]


def _run(model: str, setup: LoadSetup, replies: ReplyRequest, enforce: bool) -> TimedRun:
    enforced = enforce and setup.budget is not None
    if enforced:
        drop_cached(Path(model))
    asked = {"prompts": replies.prompts, "max_tokens": replies.max_tokens, "ignore_eos": replies.ignore_eos}
    with enclosure(wanted=enforced) as place:
        limit = {"limit": place.limit} if enforced else {}
        command = in_child("replies", {"model": model, **asked, **limit, **setup.options})
        ended = watch(place.command(command), child_environment())
        full = place.times_full()
    if ended.returncode != 0 or ended.watched is None:
        return TimedRun(ended.reason, times_full=full)
    found = json.loads(ended.watched.stdout)
    if "refused" in found:
        return TimedRun(found["refused"], times_full=full)
    peak = max(ended.watched.peak_rss_bytes, found["peak_rss_bytes"])
    return TimedRun("", peak, ended.watched.peak_anonymous_bytes, full, found)


# Turns in which everything is used for the first time, and the share by which the peak may grow afterwards.
WARM_TURNS, FLAT_SHARE = 10, 0.01


@dataclass(frozen=True)
class ChatResults:
    """A loop of turns.

    Attributes:
        peaks: bytes of peak RSS after each turn.
        planned: bytes.
    """

    peaks: tuple[int, ...]
    planned: int
    context: int

    @property
    def growth(self) -> float:
        """The growth of the peak, from the warm turns to the end."""
        return max(self.peaks) / max(self.peaks[:WARM_TURNS]) - 1

    @property
    def flat(self) -> bool:
        """Whether the peak grew by less than `FLAT_SHARE`."""
        return self.growth < FLAT_SHARE

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types."""
        return asdict(self) | {"growth": self.growth, "flat": self.flat}


def measure_chat(model: str | None, options: Mapping[str, Any], turns: int, reply_tokens: int) -> ChatResults:
    """Chats in a process of its own: two conversations in turns, started again whenever the context is nearly full."""
    if turns <= WARM_TURNS:
        raise UsageError(f"{turns} turns tell nothing: the first {WARM_TURNS} are a warm-up.", "Ask for more.")
    found = run_job("chat", {"model": model, "turns": turns, "reply_tokens": reply_tokens, **options})
    return ChatResults(tuple(found["peaks"]), found["planned"], found["context"])
