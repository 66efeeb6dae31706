"""`edgeinfer bench compute`: what replies lose and gain by computing less than the whole model.

Quality is read: stories, token by token in the way in which replies are made, against the whole model's predictions.
Speed and exact answers are those of replies, with the policies taking turns prompt by prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import edgeinfer
from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, option
from edgeinfer.apps.bench.render import Chart, Paragraph, Part, Section, Table, commands, divergence_chart, run_facts
from edgeinfer.apps.bench.texts import BUILTIN_STORIES, STORIES_FILE, Material, all_stories, exact_prompts, story_ids
from edgeinfer.core.errors import EdgeInferError, UsageError
from edgeinfer.core.results import ComputeUse

# Tokens of a story that stand for a prompt, and tokens that are read after them at most.
_PROMPT, _READ = 32, 96
# Tokens of a continuation by a model that answers no questions, and tokens beyond the answer to a question.
_WRITTEN, _BEYOND = 48, 4
# Stories that such a model continues.
_CONTINUED = 8
# Options of replies by policy, each with its values, and how a value is written.
LEVELS: dict[str, tuple[str, tuple[float, ...], str]] = {
    "entropy": ("compute_share", (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9), "share {:.2f}"),
    "calibrated": ("compute_speedup", (1.2, 1.5, 2.0, 3.0), "{:.2f}x"),
    "exit": ("exit_confidence", (0.99, 0.95, 0.9, 0.8, 0.6, 0.4), "p {:.2f}"),
}
_FLOORS = (0.03, 0.1, 0.3, 1.0)
_DESCRIPTION = """\
Compute less by every policy at several levels, and measure how far predictions diverge from the whole model's, how many
answers are still right, and how much faster replies are. Quality floors are tried as well.

examples:
  edgeinfer bench compute --data DATA --quick
  edgeinfer bench compute -m BUNDLE --draft-model SMALL-BUNDLE --data DATA --json compute.json
"""


@dataclass(frozen=True)
class ComputeBenchOptions:
    """Texts to read and questions to answer."""

    data: Path | None = option(
        "--data PATH",
        default=None,
        group="texts and questions (default: a few that are built in)",
        help=f"folder with {STORIES_FILE} to read and tales_dialogues/ to answer",
    )
    stories: int = option("--stories N", rare=True, default=24, help="number of stories to read")
    questions: int = option("--questions N", rare=True, default=6, help="number of questions of each kind")
    quick: bool = option("--quick", default=False, help="use a third of the stories and questions, and fewer levels")

    def __post_init__(self) -> None:
        if min(self.stories, self.questions) < 1:
            message = "There must be something to read and to answer."
            raise UsageError(message, "Give --stories and --questions from 1 on.")

    def material(self) -> Material:
        """Texts and questions."""
        part = 3 if self.quick else 1
        stories, questions = max(2, self.stories // part), max(1, self.questions // part)
        asked = tuple(exact_prompts(self.data, questions))
        if self.data is None:
            texts = tuple(story.text for story in BUILTIN_STORIES)
            half = len(texts) // 2
            return Material(texts[half:][:stories], texts[:half], asked, "built-in stories")
        found = all_stories(self.data / STORIES_FILE)
        if len(found) < stories + 8:
            raise UsageError(f"{self.data / STORIES_FILE} has too few stories.", "Read fewer (--stories).")
        text = f"{stories} stories of {Path(STORIES_FILE).name}"
        return Material(tuple(found[-stories:]), tuple(found[:8]), asked, text)


@dataclass(frozen=True)
class Point:
    """One policy at one level."""

    policy: str
    options: dict[str, Any]  # of generation
    level: str = ""  # in words
    tokens: int = 0
    perplexity: float = 0.0
    # Nats from the whole model, mean over the tokens read; `divergence_error` is its standard error.
    divergence: float = 0.0
    divergence_error: float = 0.0
    reduced: float = 0.0  # share of the tokens made with less than the whole model
    skipped: float = 0.0  # share of blocks that did not run
    predicted_speedup: float | None = None  # of a reduced pass, by costs of blocks
    # `right`, `questions`: exact answers; no questions if the model does not chat.
    right: int = 0
    questions: int = 0
    per_token_ms: float | None = None  # of replies, after the first token; None before they were made
    speedup: float | None = None  # over the whole model's in the same turns


@dataclass
class ComputeBench:
    """A model with its material."""

    model: edgeinfer.Model
    material: Material
    progress: Callable[[str], None]

    def texts(self) -> list[tuple[list[int], list[int]]]:
        """The beginning of each story, and what follows."""
        ids = [story_ids(self.model, story)[: _PROMPT + _READ] for story in self.material.stories]
        found = [(each[:_PROMPT], each[_PROMPT:]) for each in ids if len(each) >= _PROMPT + 8]
        if not found:
            raise UsageError("There is no story of some length to read.", "Give longer ones.")
        return found

    def read(self, point: Point) -> Point:
        """The point with its quality."""
        readings, uses, tokens = self._readings("reading", point.options)
        values = np.concatenate([each.divergences for each in readings])
        return replace(
            point,
            tokens=len(values),
            perplexity=float(np.exp(-np.concatenate([each.logprobs for each in readings]).mean())),
            divergence=float(values.mean()),
            divergence_error=float(values.std() / np.sqrt(len(values))),
            reduced=sum(use.reduced for use in uses) / tokens,
            skipped=sum(use.skipped_share * use.tokens for use in uses) / tokens,
            predicted_speedup=uses[0].predicted_speedup if uses else None,
        )

    def read_all(self, points: Iterable[Point], skipped: dict[str, str]) -> list[Point]:
        """The points that can be read; `skipped` gets the reason of a policy that cannot."""
        read: list[Point] = []
        for point in points:
            try:
                read += [] if point.policy in skipped else [self.read(point)]
            except EdgeInferError as error:
                skipped[point.policy] = str(error)
        return read

    def floored(self, point: Point, floor: float) -> dict[str, Any]:
        """How a quality floor is kept, story by story."""
        readings, uses, tokens = self._readings("floors", {**point.options, "quality_floor": floor})
        means = [float(each.divergences.mean()) for each in readings]
        return {
            "policy": point.policy,
            "level": point.level,
            "floor": floor,
            "divergence": float(np.concatenate([each.divergences for each in readings]).mean()),
            "worst": max(means),
            "above": sum(mean > floor for mean in means),
            "stories": len(means),
            "reduced": sum(use.reduced for use in uses) / tokens,
        }

    def _readings(
        self, stage: str, options: dict[str, Any]
    ) -> tuple[list[edgeinfer.tools.ReplyReading], list[ComputeUse], int]:
        """Every story read, where less was computed, and the tokens read there (at least 1)."""
        readings = [edgeinfer.tools.read_reply(self.model, *text, **options) for text in self.texts()]
        self.progress(stage)
        uses = [each.use for each in readings if each.use is not None]
        return readings, uses, max(sum(use.tokens for use in uses), 1)

    def answer(self, points: Sequence[Point], repeats: int) -> list[Point]:
        """The points with their speed and, of a model that chats, right answers; they take turns."""
        ms, counts, right = np.zeros(len(points)), np.zeros(len(points)), np.zeros(len(points), np.int64)
        tasks = list(self._tasks())
        questions = sum(answer is not None for _, answer, _ in tasks)
        for (ids, answer, most), repeat in itertools.product(tasks, range(repeats)):
            for row, point in enumerate(points):
                result = self.model.generate(ids, max_tokens=most, speculation="off", **point.options)
                later = result.usage.completion_tokens - 1
                ms[row] += result.timings.per_token_ms * later
                counts[row] += later
                right[row] += answer is not None and repeat == 0 and result.text.strip() == answer
            self.progress("replies")
        each = ms / np.maximum(counts, 1)
        return [
            replace(
                point,
                right=int(right[row]),
                questions=questions,
                per_token_ms=float(each[row]),
                speedup=float(each[0] / each[row]),
            )
            for row, point in enumerate(points)
        ]

    def _tasks(self) -> Iterator[tuple[list[int], str | None, int]]:
        """Prompts, the only right replies, and the maximum lengths of replies."""
        if self.model.chat_template_text is None or not self.material.questions:
            yield from ((beginning, None, _WRITTEN) for beginning, _ in self.texts()[:_CONTINUED])
            return
        for prompt in self.material.questions:
            assert prompt.answer is not None, "only prompts with answers are asked"
            ids = self.model.tokenize_chat(prompt.messages)
            most = len(self.model.tokenize(prompt.answer, parse_special=False)) + _BEYOND
            if len(ids) + most <= self.model.context:
                yield ids, prompt.answer.strip(), most


def measure_compute(bench: ComputeBench, *, drafter: str | None = None, quick: bool = False) -> dict[str, Any]:
    """Calibrate, read and answer; `quick` takes every other level and floor. `drafter` names a given draft model, if
    any."""
    model, skipped = bench.model, dict[str, str]()
    beginnings = [story_ids(model, story)[:_PROMPT] for story in bench.material.calibration]
    calibrations: tuple[Callable[[], object], ...] = (
        lambda: edgeinfer.tools.tune_entropy(model, beginnings),
        lambda: edgeinfer.tools.tune_skips(model, beginnings, evaluations=250 if quick else 400),
    )
    for policy, calibrate in zip(LEVELS, calibrations, strict=False):
        try:
            calibrate()
        except EdgeInferError as error:
            skipped[policy] = str(error)
    points = [bench.read(Point("full", {}))]
    step = 2 if quick else 1
    for policy, (name, values, words) in LEVELS.items():
        levels = [Point(policy, {"compute": policy, name: each}, words.format(each)) for each in values[::step]]
        points += bench.read_all(levels, skipped)
    floors = [bench.floored(point, floor) for point in _ends(points) for floor in _FLOORS[::step]]
    points = bench.answer(points, 1 if quick else 2)
    found = {"model": model.info.name, "drafter": drafter, "text": bench.material.name, "skipped": skipped}
    return found | {"points": [asdict(point) for point in points], "floors": floors}


def _ends(points: Sequence[Point]) -> Iterator[Point]:
    """The points of each policy that diverge least and most."""
    for policy in LEVELS:
        found = [point for point in points if point.policy == policy and point.divergence > 0]
        ordered = sorted(found, key=lambda point: point.divergence)
        yield from (*ordered[:1], *ordered[1:][-1:])


def _run(options: ComputeBenchOptions, context: BenchContext) -> BenchResult:
    load, material = {"remember": False} | context.load, options.material()
    steps = itertools.count(1)

    def progress(stage: str) -> None:  # how many steps there will be is not known before
        done = next(steps)
        context.progress(stage, done, done + 1)

    with context.open_model(context.model, load) as model:
        drafter = load.get("draft_model")
        own = "its own drafter" if "draft_model" in model.plan.terms else None
        bench = ComputeBench(model, material, progress)
        name = Path(drafter).name if drafter else own
        return BenchResult(measure_compute(bench, drafter=name, quick=options.quick))


def compute_chart(data: Mapping[str, Any]) -> Chart:
    """Divergence against speed, a line for each policy."""
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for each in data["points"]:
        # The whole model diverges by nothing, which a logarithmic axis cannot show.
        if each["divergence"] > 0 and each["speedup"] is not None:
            lines.setdefault(each["policy"], []).append((each["speedup"], each["divergence"], each["level"]))
    return divergence_chart(f"{data['model']}: less compute", "times faster", lines)


def compute_section(data: Any) -> Section:
    """Quality against speed where less than the whole model is computed."""
    rows = tuple(
        (
            each["policy"],
            each["level"],
            f"{each['divergence']:.4f}",
            f"{each['perplexity']:.3f}",
            f"{1 - each['reduced']:.0%}",
            f"{each['skipped']:.0%}",
            _times(each["predicted_speedup"]),
            "" if each["per_token_ms"] is None else f"{each['per_token_ms']:.3f}",
            _times(each["speedup"]),
            f"{each['right']}/{each['questions']}" if each["questions"] else "",
        )
        for each in data["points"]
    )
    quality = ("policy", "level", "nats", "perplexity", "large share", "skipped")
    header = (*quality, "predicted", "ms/token", "faster", "right")
    notes = [Paragraph(f"{policy}: skipped: {reason}") for policy, reason in data["skipped"].items()]
    drafter = (("Draft model", data["drafter"]),) if data["drafter"] else ()
    facts = (("Model", data["model"]), *drafter, ("Text", data["text"]), *run_facts(data))
    table = Table("Every policy at several levels", header, rows)
    parts: tuple[Part, ...] = (compute_chart(data), table, *_floors(data["floors"]), *notes)
    return Section("What less compute costs", facts, parts, commands(data))


def _floors(floors: Sequence[Mapping[str, Any]]) -> list[Table]:
    rows = [
        (
            each["policy"],
            each["level"],
            f"{each['floor']:g}",
            f"{each['divergence']:.4f}",
            f"{each['worst']:.4f}",
            f"{each['above']} of {each['stories']}",
            f"{each['reduced']:.0%}",
        )
        for each in floors
    ]
    header = ("policy", "level", "floor", "nats", "worst story", "above the floor", "still reduced")
    return [Table("Floors, on texts that nothing was calibrated with", header, tuple(rows))] if rows else []


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}x"


COMPUTE = Benchmark(
    "compute",
    "quality against speed where less is computed",
    _DESCRIPTION,
    ComputeBenchOptions,
    _run,
    compute_section,
    loads=True,
    chart=compute_chart,
)
