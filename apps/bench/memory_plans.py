"""Random plans, each kept or broken by a process of its own: subjects, what is drawn, run and found."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import edgeinfer
from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.apps.bench.enforced import drop_cached, enclosure
from edgeinfer.apps.bench.memory_timed import in_child
from edgeinfer.apps.bench.model_files import LAYOUTS, Artifacts, BundleKind
from edgeinfer.apps.bench.synthetic import find_shape
from edgeinfer.apps.bench.timing import Spread
from edgeinfer.apps.bench.watch import watch
from edgeinfer.config import ONNX_KV_TYPES, OVERFLOWS, WEIGHTS_MODES
from edgeinfer.errors import UsageError

SIZES = ("tiny", "15m", "60m", "qwen2.5-0.5b")
# A draft model as large as its target is slow; beyond this it is not worth a benchmark's time.
_LARGEST_DRAFTER = 70e6


@dataclass(frozen=True)
class PlannedModel:
    """A bundle that plans are drawn for.

    Attributes:
        model: its folder.
        longest: tokens it can hold.
        vocabulary: tokens of its tokenizer; the random ones have the same if they have as many.
        mates: bundles that could draft for it, itself perhaps.
    """

    name: str
    model: str
    parameters: int
    longest: int
    vocabulary: str
    mates: tuple[str, ...] = ()


def find_subjects(
    built_in: Path, work: Path, shapes: Sequence[str] = SIZES, progress: Callable[[int, int], None] | None = None
) -> list[PlannedModel]:
    """The built-in model, and a native and a portable bundle of each shape, which are made where they are missing.

    Args:
        work: where the others are kept.
        progress: called with the bundles done and their number.
    """
    manifest = json.loads((built_in / "edgeinfer.json").read_text("utf-8"))
    longest = int(manifest["geometry"]["max_positions"])
    found = [PlannedModel("built-in", str(built_in), int(manifest["parameters"]), longest, "built-in")]
    found += _random(work, shapes, progress)
    return [replace(subject, mates=_mates(subject, found)) for subject in found]


def _random(work: Path, shapes: Sequence[str], progress: Callable[[int, int], None] | None) -> Iterator[PlannedModel]:
    for number, name in enumerate(shapes):
        shape = find_shape(name)
        artifacts = Artifacts(work, shape)
        for turn, layout in enumerate(LAYOUTS):
            if progress:
                progress(number * len(LAYOUTS) + turn, len(shapes) * len(LAYOUTS))
            bundle = artifacts.bundle(BundleKind(layout))
            entries = str(shape.vocab_entries)
            yield PlannedModel(f"{name} {layout}", str(bundle), shape.parameters, shape.max_position, entries)


def _mates(subject: PlannedModel, others: Sequence[PlannedModel]) -> tuple[str, ...]:
    return tuple(
        other.model
        for other in others
        if other.vocabulary == subject.vocabulary and other.parameters <= min(subject.parameters, _LARGEST_DRAFTER)
    )


PlanOutcome = Literal["kept", "exceeded", "refused", "failed", "killed"]

# Budgets in multiples of the smallest that would do.
_SLACK = (1.0, 1.6)
# Larger models and longer contexts are drawn less often, as they take longer: half as often from these sizes on.
_HALF_PARAMETERS, _HALF_WORK = 150e6, 2e11
_CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096)
_SPECULATION = ("off", "auto", "auto", "copy", "copy,recycle", "model")
_MOST_DRAFTED = (None, None, 3, 7, 31)
_CHUNKS = (None, None, 16, 32, 128)
_COUNTED = ("resident", "resident", "anonymous")
# How often each of the rarer options is drawn.
_SELDOM = 0.15
_PREFIX_BYTES = 4_000_000
# Draws of which none can be had, before the request is taken to be hopeless.
_MOST_REFUSALS = 50


@dataclass(frozen=True)
class PlanCase:
    """What one process is asked to do.

    Attributes:
        slack: the budget over the smallest.
        cold: with nothing in the user's cache, so that what is made once for a device has to be made.
        options: of `edgeinfer.load`, less the budget.
    """

    number: int
    subject: PlannedModel
    slack: float
    seed: int
    draft_width: int
    cold: bool
    options: dict[str, Any]


@dataclass(frozen=True)
class PlanRun:
    """What became of a case.

    Attributes:
        reason: the last thing that a process said that did not finish.
        planned, budget: bytes that count; of them, those of the plan and those allowed.
        peak_rss, peak_anonymous: bytes of the process at their largest.
        times_full: how often the enforced limit was reached; pages of files may have been dropped then.
        details: what the process found: its configuration, terms, speed.
    """

    case: PlanCase
    enforced: str
    ended: Literal["ran", "refused", "failed", "killed"]
    reason: str = ""
    planned: int = 0
    budget: int = 0
    peak_rss: int = 0
    peak_anonymous: int = 0
    times_full: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def counted(self) -> str:
        """Which pages count."""
        return str(self.case.options["counted"])

    @property
    def measured(self) -> int:
        """Bytes that count, at their largest."""
        return self.peak_rss if self.counted == "resident" else self.peak_anonymous

    @property
    def outcome(self) -> PlanOutcome:
        """Whether the plan was kept, and what happened otherwise."""
        if self.ended != "ran":
            return self.ended
        return "kept" if self.measured <= self.planned else "exceeded"

    @property
    def gap(self) -> float:
        """Planned but never taken, as a share of the budget."""
        return (self.planned - self.measured) / self.budget


@dataclass(frozen=True)
class PlansResults:
    """All runs of a benchmark."""

    seed: int
    runs: tuple[PlanRun, ...]

    def of(self, outcome: PlanOutcome) -> list[PlanRun]:
        """Those that ended like this."""
        return [run for run in self.runs if run.outcome == outcome]

    @property
    def finished(self) -> list[PlanRun]:
        """Those whose plan can be compared with what was measured."""
        return [run for run in self.runs if run.ended == "ran"]

    def groups(self, key: Callable[[PlanRun], str]) -> dict[str, list[PlanRun]]:
        """Finished runs by what a key says, in its order."""
        names = sorted({key(run) for run in self.finished})
        return {name: [run for run in self.finished if key(run) == name] for name in names}

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types."""
        gaps = [run.gap for run in self.finished]
        return {
            "seed": self.seed,
            "outcomes": {name: len(self.of(name)) for name in ("kept", "exceeded", "refused", "failed", "killed")},
            "gap": asdict(Spread.of(gaps)) if gaps else None,
            "runs": [
                asdict(run) | {"outcome": run.outcome, "measured": run.measured, "counted": run.counted}
                for run in self.runs
            ],
        }


def draw_cases(subjects: Sequence[PlannedModel], count: int, seed: int) -> Iterator[PlanCase]:
    """So many requests that a plan can be made for; what a bundle does not have is drawn again."""
    drawing = random.Random(seed)
    weights = [1 / (1 + subject.parameters / _HALF_PARAMETERS) for subject in subjects]
    number = refused = 0
    while number < count:
        (subject,) = drawing.choices(subjects, weights)
        case = PlanCase(
            number=number,
            subject=subject,
            slack=drawing.uniform(*_SLACK),
            seed=drawing.randrange(2**31),
            draft_width=drawing.choice((1, 1, 1, 2)),
            cold=drawing.random() < _SELDOM,
            options=_draw_options(subject, drawing),
        )
        try:
            edgeinfer.plan(subject.model, **case.options)
        except UsageError:
            refused += 1
            if refused > _MOST_REFUSALS * (number + 1):
                raise
            continue
        yield case
        number += 1


def _draw_options(subject: PlannedModel, drawing: random.Random) -> dict[str, Any]:
    def seldom(values: Sequence[Any], otherwise: Any) -> Any:
        return drawing.choice(values) if drawing.random() < _SELDOM else otherwise

    contexts = [size for size in _CONTEXTS if size <= subject.longest]
    (context,) = drawing.choices(contexts, [1 / (1 + size * subject.parameters / _HALF_WORK) for size in contexts])
    options = {
        # Left open, the planner shrinks the context itself.
        "context": seldom((None,), context) if subject.parameters < _HALF_PARAMETERS else context,
        "kv": drawing.choice((None, *ONNX_KV_TYPES)),
        "weights": seldom(WEIGHTS_MODES, None),
        "counted": drawing.choice(_COUNTED),
        "prefill_chunk": drawing.choice(_CHUNKS),
        "overflow": seldom(OVERFLOWS, "stop"),
        "prefix_cache": seldom((_PREFIX_BYTES,), 0),
        "threads": drawing.choice((1, 2)),
        "speculation": drawing.choice(_SPECULATION),
        "draft_max": drawing.choice(_MOST_DRAFTED),
        "structured": seldom((True,), False),
        "remember": False,
    }
    if options["speculation"] == "model":
        if not subject.mates:
            options["speculation"] = "auto"
        else:
            options["draft_model"] = drawing.choice(subject.mates)
    if options["speculation"] == "off":
        options["draft_max"] = None
    return options


def run_cases(cases: Iterable[PlanCase], *, enforce: bool = True) -> Iterator[PlanRun]:
    """Runs each in a process of its own, under a limit of its budget that the system enforces."""
    for case in cases:
        yield _run(case, enforce)


def _run(case: PlanCase, enforce: bool) -> PlanRun:
    if enforce:
        drop_cached(Path(case.subject.model))
    with enclosure(wanted=enforce) as place, tempfile.TemporaryDirectory() as empty:
        env = child_environment() | ({"XDG_CACHE_HOME": empty} if case.cold else {})
        arguments = {"model": case.subject.model, "slack": case.slack, "limit": place.limit, "seed": case.seed}
        command = in_child("planned", arguments | {"draft_width": case.draft_width} | case.options)
        ended = watch(place.command(command), env)
        full, killed = place.times_full(), place.killed()
    if ended.returncode != 0 or ended.watched is None:
        gone = killed or ended.returncode < 0
        return PlanRun(case, place.kind, "killed" if gone else "failed", ended.reason, times_full=full)
    details = json.loads(ended.watched.stdout)
    return PlanRun(
        case=case,
        enforced=place.kind,
        ended="refused" if "refused" in details else "ran",
        reason=details.pop("refused", ""),
        planned=details.get("planned", 0),
        budget=details["budget"],
        # What the process saw last is not missed between two samples.
        peak_rss=max(ended.watched.peak_rss_bytes, details.get("peak_rss_bytes", 0)),
        peak_anonymous=ended.watched.peak_anonymous_bytes,
        times_full=full,
        details=details,
    )
