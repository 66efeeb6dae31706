"""What replies lose and gain by taking less compute: every policy is measured at several levels.

Quality is read: given stories, token by token in the very way in which replies are made, against the whole model's
predictions. Speed and exact answers are replies in earnest, policy after policy in turns, prompt by prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

import edgeinfer
from edgeinfer.apps.bench.benchmark import Progress
from edgeinfer.apps.bench.prompts import Prompt
from edgeinfer.apps.bench.texts import story_ids
from edgeinfer.errors import EdgeInferError, UsageError

# Tokens of a story that stand for a prompt, and of it that are read at most after them.
_PROMPT, _READ = 32, 96
# Tokens of a continuation, by a model that answers no questions, and beyond the answer to a question.
_WRITTEN, _BEYOND = 48, 4
# Stories that are continued by such a model.
_CONTINUED = 8


@dataclass(frozen=True)
class Levels:
    """How far policies are taken.

    Attributes:
        shares: of the large model's tokens.
        speedups: of evenly spaced layers; the other sets are as fast as these.
        confidences: of early exits.
        floors: in nats.
    """

    shares: tuple[float, ...]
    speedups: tuple[float, ...]
    confidences: tuple[float, ...]
    floors: tuple[float, ...]


LEVELS = Levels(
    (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9), (1.2, 1.5, 2.0, 3.0), (0.99, 0.95, 0.9, 0.8, 0.6, 0.4),
    (0.03, 0.1, 0.3, 1.0),
)  # fmt: skip
QUICK = Levels((0.0, 0.25, 0.5, 0.75), (1.2, 1.5, 2.0), (0.95, 0.8, 0.5), (0.1, 0.5))


@dataclass(frozen=True)
class ComputeMaterial:
    """What models read and answer.

    Attributes:
        stories: to read; none of them was calibrated with.
        calibration: stories whose beginnings are continued to calibrate with.
        questions: with answers; only the speed is measured by them where a model does not chat.
        text: name of the stories.
    """

    stories: tuple[str, ...]
    calibration: tuple[str, ...]
    questions: tuple[Prompt, ...]
    text: str


@dataclass(frozen=True)
class Point:
    """One policy at one level.

    Attributes:
        options: of generation.
        divergence: nats from the whole model, mean over the tokens read; `divergence_error` is its standard error.
        reduced: share of the tokens made with less than the whole model.
        skipped: share of blocks that did not run.
        predicted_speedup: of a reduced pass, by costs of blocks.
        right, questions: exact answers; no questions where the model does not chat.
        per_token_ms: of replies in earnest, after the first token; None before they were made.
        speedup: over the whole model's in the same turns.
    """

    policy: str
    options: dict[str, Any]
    tokens: int = 0
    perplexity: float = 0.0
    divergence: float = 0.0
    divergence_error: float = 0.0
    reduced: float = 0.0
    skipped: float = 0.0
    predicted_speedup: float | None = None
    right: int = 0
    questions: int = 0
    per_token_ms: float | None = None
    speedup: float | None = None

    @property
    def large_share(self) -> float:
        """The share of the tokens that the whole model made."""
        return 1 - self.reduced


@dataclass(frozen=True)
class Floored:
    """A policy with a floor, on texts that nothing was calibrated with.

    Attributes:
        divergence: nats, mean over all tokens.
        worst: the story's mean that is largest.
        above, stories: stories whose mean is above the floor, of how many.
        reduced: share of the tokens that were made with less all the same.
    """

    policy: str
    options: dict[str, Any]
    floor: float
    divergence: float
    worst: float
    above: int
    stories: int
    reduced: float


@dataclass(frozen=True)
class ComputeResults:
    """Everything that was measured of one model, and of its draft model if it has one."""

    model: str
    drafter: str | None
    text: str
    points: tuple[Point, ...]
    floored: tuple[Floored, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "model": self.model,
            "drafter": self.drafter,
            "text": self.text,
            "points": [asdict(point) for point in self.points],
            "floors": [asdict(each) for each in self.floored],
            "skipped": self.skipped,
            "dominance": {"entropy": self.against_random(), "calibrated": self.against_even()},
        }

    def of(self, policy: str) -> list[Point]:
        """The points of a policy."""
        return [point for point in self.points if point.policy == policy]

    def against_random(self) -> list[dict[str, float]]:
        """Divergence by entropy, and what random turns are expected to give at the same share of the large model: of
        what the small model alone diverges, the share that it makes. Points of random turns scatter around that."""
        alone = [each.divergence for each in self.of("random") if each.reduced == 1]
        return [
            {"share": each.large_share, "entropy": each.divergence, "random": each.reduced * alone[0]}
            for each in self.of("entropy")
            if alone and 0 < each.large_share < 1
        ]

    def against_even(self) -> list[dict[str, float]]:
        """Divergence of evenly spaced layers, and of the calibrated set that is at least as fast."""
        pairs = zip(self.of("unified"), self.of("calibrated"), strict=False)
        return [
            {"speedup": even.predicted_speedup or 0.0, "unified": even.divergence, "calibrated": found.divergence}
            for even, found in pairs
        ]


@dataclass
class _Bench:
    model: edgeinfer.Model
    material: ComputeMaterial
    progress: Callable[[str], None]

    def texts(self) -> list[tuple[list[int], list[int]]]:
        """Each story's beginning and what follows."""
        ids = [story_ids(self.model, story)[: _PROMPT + _READ] for story in self.material.stories]
        found = [(each[:_PROMPT], each[_PROMPT:]) for each in ids if len(each) >= _PROMPT + 8]
        if not found:
            raise UsageError("There is no story of some length to read.", "Give longer ones.")
        return found

    def read(self, point: Point) -> Point:
        """The point with its quality."""
        readings = [edgeinfer.tools.read_reply(self.model, *text, **point.options) for text in self.texts()]
        self.progress("reading")
        values = np.concatenate([each.divergences for each in readings])
        uses = [each.use for each in readings if each.use is not None]
        tokens = max(sum(use.tokens for use in uses), 1)
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

    def floored(self, policy: str, options: Mapping[str, Any], floor: float) -> Floored:
        """How a floor is kept, story by story."""
        given = {**options, "quality_floor": floor}
        readings = [edgeinfer.tools.read_reply(self.model, *text, **given) for text in self.texts()]
        self.progress("floors")
        means = [float(each.divergences.mean()) for each in readings]
        uses = [each.use for each in readings if each.use is not None]
        return Floored(
            policy, dict(given), floor,
            divergence=float(np.concatenate([each.divergences for each in readings]).mean()),
            worst=max(means),
            above=sum(mean > floor for mean in means),
            stories=len(means),
            reduced=sum(use.reduced for use in uses) / max(sum(use.tokens for use in uses), 1),
        )  # fmt: skip

    def answer(self, points: Sequence[Point], repeats: int) -> list[Point]:
        """The points with their speed and, of a model that chats, its right answers; they take turns."""
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
                point, right=int(right[row]), questions=questions,
                per_token_ms=float(each[row]), speedup=float(each[0] / each[row]),
            )
            for row, point in enumerate(points)
        ]  # fmt: skip

    def _tasks(self) -> Iterator[tuple[list[int], str | None, int]]:
        """Prompts, the only right replies, and how long replies may be."""
        chats = self.model.chat_template_text is not None
        if not (chats and self.material.questions):
            yield from ((beginning, None, _WRITTEN) for beginning, _ in self.texts()[:_CONTINUED])
            return
        for prompt in self.material.questions:
            assert prompt.answer is not None, "only prompts with answers are asked"
            ids = self.model.tokenize_chat(prompt.messages)
            most = len(self.model.tokenize(prompt.answer, parse_special=False)) + _BEYOND
            if len(ids) + most <= self.model.context:
                yield ids, prompt.answer.strip(), most


def measure_compute(
    model: edgeinfer.Model,
    material: ComputeMaterial,
    levels: Levels = LEVELS,
    *,
    drafter: str | None = None,
    granularity: int = 1,
    evaluations: int = 400,
    repeats: int = 2,
    progress: Progress | None = None,
) -> ComputeResults:
    """Calibrates, reads and answers.

    Args:
        drafter: name of the draft model that the model was loaded with; None where there is none.
        granularity: consecutive layers that are skipped together; above 1 sets of single layers are left out.
        progress: called with a stage, steps done and to do; how many there will be is not known before.
    """
    steps = itertools.count(1)
    bench = _Bench(model, material, lambda stage: None if progress is None else _tell(progress, stage, next(steps)))
    skipped: dict[str, str] = {}
    beginnings = [story_ids(model, story)[:_PROMPT] for story in material.calibration]
    points = [bench.read(Point("full", {}))]
    if drafter is not None:
        edgeinfer.tools.tune_entropy(model, beginnings)
        points += _tried(bench, _turns(levels), skipped)
    points += _sets(bench, levels, beginnings, granularity, evaluations, skipped)
    exits = (Point("exit", {"compute": "exit", "exit_confidence": each}) for each in levels.confidences)
    points += _tried(bench, exits, skipped)
    tried = itertools.product(_ends(points), levels.floors)
    floored = [bench.floored(point.policy, point.options, floor) for point, floor in tried]
    points = bench.answer(points, repeats)
    return ComputeResults(model.info.name, drafter, material.text, tuple(points), tuple(floored), skipped)


def _tell(progress: Progress, stage: str, done: int) -> None:
    progress(stage, done, done + 1)


def _turns(levels: Levels) -> Iterator[Point]:
    """Two models by turns, by entropy and at random."""
    for compute, share in itertools.product(("entropy", "random"), levels.shares):
        yield Point(compute, {"compute": compute, "compute_share": share})


def _sets(
    bench: _Bench,
    levels: Levels,
    beginnings: Sequence[Sequence[int]],
    granularity: int,
    evaluations: int,
    skipped: dict[str, str],
) -> list[Point]:
    """Skipped sets: evenly spaced ones, and for each the others that are at least as fast."""
    points: list[Point] = []
    speedups = levels.speedups
    if granularity == 1:
        even = (Point("unified", {"compute": "unified", "compute_speedup": each}) for each in levels.speedups)
        points = _tried(bench, even, skipped)
        # A hair less, as the speed-up that is asked for again is itself a sum of measured parts.
        speedups = tuple((point.predicted_speedup or 1.0) * (1 - 1e-9) for point in points)
    try:
        edgeinfer.tools.tune_skips(bench.model, beginnings, granularity=granularity, evaluations=evaluations)
    except EdgeInferError as error:
        skipped["calibrated"] = str(error)
        return points
    for policy in ("calibrated", "importance", "routers")[: 3 if granularity == 1 else 1]:
        each = (Point(policy, {"compute": policy, "compute_speedup": speedup}) for speedup in speedups)
        points += _tried(bench, each, skipped)
    return points


def _tried(bench: _Bench, points: Iterable[Point], skipped: dict[str, str]) -> list[Point]:
    """The points that can be read; of a policy that cannot, the reason."""
    read: list[Point] = []
    for point in points:
        if point.policy in skipped:
            continue
        try:
            read.append(bench.read(point))
        except EdgeInferError as error:
            skipped[point.policy] = str(error)
    return read


def _ends(points: Sequence[Point]) -> Iterator[Point]:
    """The points of each policy that users have that diverge least and most."""
    by_policy: dict[str, list[Point]] = {}
    for point in points:
        if point.policy not in ("full", "random") and point.divergence > 0:
            by_policy.setdefault(point.policy, []).append(point)
    for found in by_policy.values():
        ordered = sorted(found, key=lambda point: point.divergence)
        yield from (ordered[0], ordered[-1])[: len(ordered)]
