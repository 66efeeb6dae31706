"""`edgeinfer bench memory`: the speed that budgets cost."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, StageProgress, option, rotated
from edgeinfer.apps.bench.jobs import random_words
from edgeinfer.apps.bench.memory_plans import PLANS, run_enclosed
from edgeinfer.apps.bench.processes import run_job
from edgeinfer.apps.bench.render import Paragraph, Part, Section, Table, commands, run_facts
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import format_size

# Help and description of `edgeinfer bench memory` itself.
GROUP = (
    "memory: plans against what is measured, and what budgets cost",
    """\
Measure the memory of models, each in a process of its own, inside limits that the system enforces.

examples:
  edgeinfer bench memory plans --runs 200 --json plans.json
  edgeinfer bench memory smallest -m BUNDLE -c 2048 -t 1
""",
)
# The share of the best speed that still counts as fast.
BEST_SHARE = 0.95
# A short chat, and one that has nearly filled the context: tokens of their prompts, and of each reply.
_SHORT_PROMPT, _REPLY, _MARGIN = 200, 96, 24
# The largest budget over the plan without one: a process grows a little between planning and loading.
_AMPLE = 1.02
_CHATS = (("short", "short_speed"), ("deep", "deep_speed"))
Point = dict[str, Any]


@dataclass(frozen=True)
class SmallestOptions:
    """Budgets to run a model in."""

    steps: int = option("--steps N", default=8, group="budgets", help="number of budgets, evenly spaced")
    rounds: int = option("--rounds N", default=3, help="number of processes per budget, whose medians are reported")
    halvings: int = option(
        "--halvings N",
        default=4,
        help="number of further budgets, halving towards the smallest one that keeps the speed",
    )
    no_limits: bool = option("--no-limits", default=False, help="do not have the system enforce the budgets")

    def __post_init__(self) -> None:
        if self.steps < 2 or self.rounds < 1 or self.halvings < 0:
            raise UsageError("There is nothing to compare.", "Give --steps 2 or more and --rounds 1 or more.")


class Smallest:
    """A model that runs two chats inside budgets, every run in a process of its own."""

    def __init__(self, model: str, load: Mapping[str, Any], options: SmallestOptions) -> None:
        self._model, self._options = model, options
        with edgeinfer.load(model, **load) as loaded:
            self.context, self.name = loaded.context, loaded.info.name
            words = loaded.tokenize(random_words(self.context))
        deep = self.context - _REPLY - _MARGIN
        if deep <= _SHORT_PROMPT:
            message = f"A context of {self.context} tokens has no room for chats of different length."
            raise UsageError(message, f"Take one of at least {_SHORT_PROMPT + _REPLY + _MARGIN + 1} tokens (-c).")
        self._prompts = [words[:_SHORT_PROMPT], words[:deep]]
        self._load = {**load, "context": self.context}

    def measure(self, progress: StageProgress) -> list[Point]:
        """Figures of every budget, the largest first, which is ample."""
        sizes = run_job("plan", {"model": self._model, **self._load})
        least, steps = sizes["minimum"], self._options.steps
        largest = round(_AMPLE * max(sizes["planned"], least))
        budgets = [round(largest - (largest - least) * step / (steps - 1)) for step in range(steps)]
        runs = self._runs(budgets, progress)
        points = [_point(budget, runs[budget], runs[largest]) for budget in budgets]
        for _ in range(self._options.halvings):
            kept = min((each["budget"] for each in points if keeps(each)), default=0)
            lower = max((each["budget"] for each in points if each["budget"] < kept), default=0)
            if not lower:
                break
            middle = (kept + lower) // 2
            # Compared with runs of the largest budget in the same minutes.
            runs = self._runs([largest, middle], progress)
            points.append(_point(middle, runs[middle], runs[largest]))
        return sorted(points, key=lambda each: int(each["budget"]), reverse=True)

    def _runs(self, budgets: Sequence[int], progress: StageProgress) -> dict[int, list[dict[str, Any]]]:
        """Runs of every budget, once per round and in another order each time."""
        found: dict[int, list[dict[str, Any]]] = {budget: [] for budget in budgets}
        turns = [budget for turn in range(self._options.rounds) for budget in rotated(budgets, turn)]
        for done, budget in enumerate(turns):
            progress(done, len(turns))
            found[budget].append(self._run(budget))
        return found

    def _run(self, budget: int) -> dict[str, Any]:
        asked = {"model": self._model, "prompts": self._prompts, "max_tokens": _REPLY, "memory": budget, **self._load}
        ended, limits = run_enclosed("replies", asked, enforce=not self._options.no_limits)
        found = json.loads(ended.stdout) if ended.returncode == 0 else {"refused": ended.reason}
        if "refused" in found:
            return limits | {"reason": found["refused"]}
        peak = max(ended.peak_rss, found["peak_rss_bytes"])
        return limits | {"reason": "", "peak_rss": peak, "peak_anonymous": ended.peak_anonymous, "found": found}


def keeps(point: Point) -> bool:
    """Whether a budget keeps `BEST_SHARE` of the best speed in both chats."""
    return not point["reason"] and min(point["short_share"], point["deep_share"]) >= BEST_SHARE


def _point(budget: int, runs: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> Point:
    """Figures of a budget; shares are of the speed of reference runs in the same minutes."""
    reason = next((run["reason"] for run in runs if run["reason"]), "")
    point: Point = {"budget": budget, "reason": reason, "runs": list(runs)}
    for place, (name, key) in enumerate(_CHATS):
        speed, best = (_speed(each, place) for each in (runs, reference))
        point |= {key: speed, f"{name}_share": speed / best if best else 0.0}
    return point


def _speed(runs: Sequence[dict[str, Any]], place: int) -> float:
    """Median tokens per second after the first one; 0 if a run gave no reply."""
    if any(run["reason"] for run in runs):
        return 0.0
    return float(statistics.median(1e3 / run["found"]["ms_per_token"][place] for run in runs))


def _run_smallest(options: SmallestOptions, context: BenchContext) -> BenchResult:
    smallest = Smallest(str(context.resolve(context.model)), context.load, options)
    points = smallest.measure(context.stage("processes"))
    return BenchResult({"model": smallest.name, "context": smallest.context, "points": points})


def smallest_section(data: Any) -> Section:
    """Speed against budget: a row for each chat, a column for each budget."""
    points = data["points"]
    ran = [point for point in points if not point["reason"]]
    header = ("model, chat", *(format_size(point["budget"]) for point in points))
    rows = [
        (f"{data['model']}, {name}", *("-" if point["reason"] else f"{point[key]:.1f}" for point in points))
        for name, key in _CHATS
    ]
    parts: tuple[Part, ...] = (
        Table("Tokens per second inside an enforced budget", header, tuple(rows)),
        _budget_table(points),
        *_smallest_budgets(ran),
    )
    facts = (("Model", data["model"]), ("Context", f"{data['context']} tokens"), *run_facts(data))
    return Section("What a budget costs", facts, parts, commands(data))


def _budget_table(points: Sequence[Point]) -> Table:
    rows: list[tuple[str, ...]] = []
    for point in points:
        budget, runs = format_size(point["budget"]), point["runs"]
        if point["reason"]:
            rows.append((budget, "", "", "", "", "", point["reason"]))
            continue
        found = runs[0]["found"]
        peaks = [statistics.median(run[key] for run in runs) for key in ("peak_rss", "peak_anonymous")]
        spared = "; ".join((*found["plan_given_up"], *(f"while running: {name}" for name in found["given_up"])))
        sizes = (format_size(found["planned"]), *(format_size(round(peak)) for peak in peaks))
        shares = (f"{point[key]:.0%}" for key in ("short_share", "deep_share"))
        rows.append((budget, *sizes, *shares, spared or "nothing"))
    measured = ("measured peak", "of it anonymous", "short chat's speed", "deep chat's speed")
    header = ("budget", "planned", *measured, "given up")
    return Table("Planned and measured", header, tuple(rows), words=("given up",))


def _smallest_budgets(ran: Sequence[Point]) -> Iterator[Paragraph]:
    fast = [point["budget"] for point in ran if keeps(point)]
    if fast:
        least = min(point["budget"] for point in ran)
        words = f"Smallest budget with {BEST_SHARE:.0%} of the best speed: {format_size(min(fast))}"
        yield Paragraph(f"{words}; at all: {format_size(least)}.")


SMALLEST = Benchmark(
    "memory smallest",
    "speed against budget",
    """\
Measure speed against budget, from all that a model takes down to the smallest budget in which it runs.

example:
  edgeinfer bench memory smallest -m BUNDLE -c 2048 -t 1
""",
    SmallestOptions,
    _run_smallest,
    smallest_section,
    loads=True,
)
MEMORY = (PLANS, SMALLEST)
