"""`edgeinfer bench memory plans`: random plans, each run by a process of its own inside an enforced limit."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, Spread, option
from edgeinfer.apps.bench.processes import (
    Finished,
    child_environment,
    drop_cached,
    enclosure,
    files_in,
    job_command,
    watch,
)
from edgeinfer.apps.bench.render import Paragraph, Part, Section, Table, commands, run_facts
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import format_size
from edgeinfer.core.options.load import ONNX_KV_TYPES, OVERFLOWS, WEIGHTS_MODES

Run = Mapping[str, Any]
_OUTCOMES = ("kept", "exceeded", "refused", "failed", "killed")
# A draft model as large as its target is slow; larger ones are not worth a benchmark's time.
_LARGEST_DRAFTER = 70e6
# Budgets in multiples of the smallest one.
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
# Failed draws after which the request is taken to be hopeless.
_MOST_REFUSALS = 50


@dataclass(frozen=True)
class PlansOptions:
    """Plans to draw."""

    models: tuple[str, ...] = option(
        "-m",
        "--model MODEL",
        default=(),
        action="append",
        help="bundle to draw plans for; can be repeated (default: the small built-in story model)",
    )
    runs: int = option("--runs N", default=200, help="number of plans, each in its own process")
    seed: int = option("--seed N", default=0, help="random seed")
    no_limits: bool = option("--no-limits", default=False, help="do not have the system enforce the budgets")

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise UsageError("There are no such plans.", "Give --runs 1 or more.")


@dataclass(frozen=True)
class PlannedModel:
    """A bundle that plans are drawn for; `mates` are bundles that can draft for it, itself perhaps."""

    name: str
    model: str
    parameters: int
    longest: int
    tokenizer: str
    mates: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanCase:
    """The request of one process."""

    number: int
    subject: PlannedModel
    slack: float  # the budget over the smallest one
    seed: int
    draft_width: int
    cold: bool  # the user's cache is empty, so that files made once for a device have to be made
    options: dict[str, Any]  # of `edgeinfer.load`, without the budget


def find_subjects(models: Sequence[Path]) -> list[PlannedModel]:
    """The bundles in these folders."""
    found = []
    for path in models:
        manifest = open_bundle(path).manifest
        tokenizer = manifest.files["tokenizer.json"].sha256 if "tokenizer.json" in manifest.files else ""
        longest = manifest.geometry.max_positions
        found.append(PlannedModel(path.name, str(path), manifest.parameters, longest, tokenizer))
    subjects = []
    for each in found:
        most = min(each.parameters, _LARGEST_DRAFTER)
        mates = [other.model for other in found if other.tokenizer == each.tokenizer and other.parameters <= most]
        subjects.append(PlannedModel(**{**asdict(each), "mates": tuple(mates)}))
    return subjects


def draw_cases(subjects: Sequence[PlannedModel], count: int, seed: int) -> Iterator[PlanCase]:
    """Random requests that can be planned; options that a bundle does not support are drawn again."""
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
        # None lets the planner shrink the context itself.
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


def run_enclosed(
    job: str, arguments: Mapping[str, Any], *, enforce: bool, env: Mapping[str, str] | None = None
) -> tuple[Finished, dict[str, Any]]:
    """Run a job on a bundle, read from the disk, inside a limit that it sets itself if `enforce`; also return how the
    limit was enforced ("enforced", "times_full", "killed")."""
    if enforce:
        drop_cached(files_in(Path(arguments["model"])))
    with enclosure(wanted=enforce) as place:
        command = place.command(job_command(job, {"limit": place.limit, **arguments}))
        ended = watch(command, child_environment() | dict(env or {}))
        return ended, {"enforced": place.kind, "times_full": place.times_full(), "killed": place.killed()}


def run_case(case: PlanCase, *, enforce: bool = True) -> Run:
    """The outcome of a case and the figures of its process."""
    arguments = {"model": case.subject.model, "slack": case.slack, "seed": case.seed, "draft_width": case.draft_width}
    with tempfile.TemporaryDirectory() as empty:
        env = {"XDG_CACHE_HOME": empty} if case.cold else {}
        ended, limits = run_enclosed("planned", arguments | case.options, enforce=enforce, env=env)
    killed, counted = limits.pop("killed"), str(case.options.get("counted", "resident"))
    run: dict[str, Any] = {"case": asdict(case), "counted": counted, **limits, "details": {}}
    if ended.returncode != 0:
        gone = killed or ended.returncode < 0
        sizes = dict.fromkeys(("planned", "budget", "peak_rss", "peak_anonymous", "measured"), 0)
        return run | sizes | {"outcome": "killed" if gone else "failed", "reason": ended.reason}
    details = json.loads(ended.stdout)
    refused = details.pop("refused", "")
    run |= {"reason": refused, "planned": details.get("planned", 0), "budget": details["budget"], "details": details}
    # The process itself has seen its last peak, which may lie between two samples.
    run["peak_rss"] = max(ended.peak_rss, details.get("peak_rss_bytes", 0))
    run["peak_anonymous"] = ended.peak_anonymous
    run["measured"] = run["peak_rss"] if counted == "resident" else run["peak_anonymous"]
    kept = "kept" if run["measured"] <= run["planned"] else "exceeded"
    return run | {"outcome": "refused" if refused else kept}


def plans_json(seed: int, runs: Sequence[Run]) -> dict[str, Any]:
    """The figures of all runs."""
    gaps = [_gap(run) for run in _ran(runs)]
    outcomes = {name: sum(run["outcome"] == name for run in runs) for name in _OUTCOMES}
    return {"seed": seed, "outcomes": outcomes, "gap": asdict(Spread.of(gaps)) if gaps else None, "runs": list(runs)}


def _ran(runs: Sequence[Run]) -> list[Run]:
    """Runs whose plan can be compared with measured memory."""
    return [run for run in runs if run["outcome"] in ("kept", "exceeded")]


def _gap(run: Run) -> float:
    """Planned but not taken, as a share of the budget."""
    return float((run["planned"] - run["measured"]) / run["budget"])


def _run(options: PlansOptions, context: BenchContext) -> BenchResult:
    subjects = find_subjects([context.resolve(model) for model in options.models or (None,)])
    runs: list[Run] = []
    finished, progress = True, context.stage("plans")
    try:
        for case in draw_cases(subjects, options.runs, options.seed):
            runs.append(run_case(case, enforce=not options.no_limits))
            progress(len(runs), options.runs)
    except KeyboardInterrupt:
        finished = False
    data = plans_json(options.seed, runs)
    return BenchResult(data, finished, passed=data["outcomes"]["kept"] == len(runs))


def plans_section(data: Any) -> Section:
    """Whether random plans were kept, and how close they were to measured memory."""
    runs, outcomes, gap = data["runs"], data["outcomes"], data["gap"]
    ran = _ran(runs)
    counts = (str(len(runs)), *(str(count) for count in outcomes.values()))
    parts: list[Part] = [Table("Random plans, each in a process of its own", ("plans", *outcomes), (counts,))]
    if ran:
        quartiles = f"{gap['median']:.1%} [{gap['p25']:.1%} to {gap['p75']:.1%}]"
        parts.append(Paragraph(f"Planned but not taken, of the budget: median {quartiles}."))
    parts += [Paragraph(_broken(run)) for run in runs if run["outcome"] != "kept"]
    full = sum(run["times_full"] > 0 for run in runs)
    parts.append(Paragraph(f"The enforced limit was reached in {full} of {len(runs)} runs."))
    enforced = ", ".join(sorted({run["enforced"] for run in runs}))
    facts = (("Plans", str(len(runs))), ("Seed", str(data["seed"])), ("Limits enforced by", enforced))
    return Section("Are plans kept?", (*facts, *run_facts(data)), tuple(parts), commands(data))


def _broken(run: Run) -> str:
    """A plan that was not kept, in words."""
    case = run["case"]
    planned, measured, budget = (format_size(run[name]) for name in ("planned", "measured", "budget"))
    sizes = f"planned {planned}, measured {measured}, budget {budget}"
    words = f"{case['number']} {run['outcome']}: {case['subject']['name']}, {sizes}."
    return f"{words} {run['reason']} {case['options']}"


PLANS = Benchmark(
    "memory plans",
    "random plans against what is measured",
    "Make random plans, and check whether they are kept and how close they are to measured "
    "memory.\n\nexample:\n  edgeinfer bench memory plans --runs 20\n",
    PlansOptions,
    _run,
    plans_section,
)
