"""Trains a tiny drafter for a target: on given text, then on the target's probabilities.

FastDraft's recipe (Zafrir et al. 2024): a shallow decoder with the target's tokens reads text, then learns from what
the target itself writes, token by token and with the target's distribution at each (sequence and logit level).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.errors import UsageError
from edgeinfer.export.training.models import Target, hidden_states, layer_states, make_student, save_checkpoint
from edgeinfer.export.training.options import DraftTrainOptions
from edgeinfer.export.training.samples import Replier, SampleOptions, TorchReplier, open_text, sample
from edgeinfer.export.training.sizing import StudentSize
from edgeinfer.export.training.tasks import Batches, TeacherTask, TextTask, teacher_probabilities
from edgeinfer.export.training.text import TextSource, TokenFile
from edgeinfer.export.training.trainer import Trained, Trainer, kept_schedule, step_seconds
from edgeinfer.results import Progress

# Windows that are read at a time, so that few logits are in memory.
_ROWS = 4
_DRAFTED = 4
# Shares of the minutes: reading text, drawing replies and reading them with the target, learning from them.
_SHARES = (0.25, 0.3, 0.45)
# Of the samples, what is kept for measuring; and windows that are read for it.
_VALIDATION, _WINDOWS = 0.04, 48


@dataclass(frozen=True)
class AcceptanceRates:
    """How often a target accepts a student's tokens.

    Attributes:
        agreement: share of tokens at which both find the same token likeliest: the acceptance of greedy drafts.
        overlap: sum over tokens of the lesser of the two probabilities: the acceptance of drawn drafts.
        mean_accepted_length: tokens per round with four drafted, by runs of agreement.
        divergence: mean Kullback-Leibler divergence from the target, in nats.
    """

    agreement: float
    overlap: float
    mean_accepted_length: float
    divergence: float


@torch.inference_mode()
def measure_acceptance(
    student: Any, target: Any, windows: NDArray[np.int64], depth: int | None = None
) -> AcceptanceRates:  # (n, S)
    """Compares the two on windows of text, with all layers of the student or with the first `depth`."""
    device = target.device
    agreed: list[NDArray[np.bool_]] = []
    overlaps, divergences = [], []
    for start in range(0, len(windows), _ROWS):
        tokens = torch.from_numpy(windows[start : start + _ROWS]).to(device)  # (b, S)
        theirs = torch.log_softmax(target.lm_head(hidden_states(target, tokens)).float(), -1)  # (b * S, V)
        states = hidden_states(student, tokens) if depth is None else layer_states(student, tokens)[depth - 1]
        ours = torch.log_softmax(student.lm_head(states).float(), -1)
        agreed.append((ours.argmax(-1) == theirs.argmax(-1)).reshape(tokens.shape).cpu().numpy())
        overlaps.append(float(torch.minimum(ours, theirs).exp().sum(-1).mean()))
        divergences.append(float((theirs.exp() * (theirs - ours)).sum(-1).mean()))
    matches = np.concatenate(agreed)  # (n, S)
    lengths = [1 + length for row in matches for length in run_lengths(row, _DRAFTED)]
    return AcceptanceRates(
        float(matches.mean()), float(np.mean(overlaps)), float(np.mean(lengths)), float(np.mean(divergences))
    )


def run_lengths(matches: NDArray[np.bool_], drafted: int) -> list[int]:  # (S,)
    """Accepted tokens of each round, where rounds follow one another and draft so many tokens."""
    found, at = [], 0
    while at + drafted < len(matches):
        run = 0
        while run < drafted and matches[at + run]:
            run += 1
        found.append(run)
        at += run + 1
    return found


@dataclass(frozen=True, kw_only=True)
class DrafterOptions(DraftTrainOptions):
    """How a drafter is made: a third of the steps read text, the others learn from the target.

    Attributes:
        size: of the drafter.
        nested: every depth learns to guess, for a drafter that goes as deep as a token needs (S2D).
        sampling: how the target's replies are drawn, but for how many and by which seed: by default 16 windows' worth
            for each ten steps, or as the minutes allow.
    """

    least_steps: ClassVar[int] = 2
    least_samples: ClassVar[int] = 1

    size: StudentSize
    minutes: float | None = 20.0
    rows: int = 16
    learning_rate: float = 4e-3
    nested: bool = False
    sampling: SampleOptions = field(default_factory=lambda: SampleOptions(tokens=1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nested and self.size.layers < 2:
            raise UsageError(
                "A drafter of one layer cannot stop earlier.", "Use a size of at least two layers, such as 128x3."
            )


@dataclass(frozen=True)
class DrafterTraining:
    """A trained drafter.

    Attributes:
        checkpoint: its folder.
        untrained, read, distilled: acceptance before anything, after reading text, and at the end, on replies of the
            target that were kept for measuring.
        depths: acceptance after so many layers, of a nested drafter.
        reading, distilling: losses and times.
        seconds: in all, since it was last started.
        prompts: that were not sampled from, for measuring. (n,) each
    """

    checkpoint: Path
    size: StudentSize
    untrained: AcceptanceRates
    read: AcceptanceRates
    distilled: AcceptanceRates
    depths: dict[int, AcceptanceRates]
    reading: Trained
    distilling: Trained
    seconds: float
    prompts: Sequence[NDArray[Any]]

    def facts(self) -> dict[str, Any]:
        """The facts of a report."""
        curves = {"reading": self.reading.losses, "distilling": self.distilling.losses}
        stages = {"untrained": self.untrained, "after_reading": self.read, "after_distilling": self.distilled}
        stages |= {f"after_{depth}_layers": each for depth, each in self.depths.items()}
        return {
            "size": asdict(self.size),
            "acceptance": {name: asdict(each) for name, each in stages.items()},
            "steps": {name: len(losses) for name, losses in curves.items()},
            "resumed_at": {"reading": self.reading.resumed_at, "distilling": self.distilling.resumed_at},
            "seconds": round(self.seconds, 1),
            "losses": {name: list(losses) for name, losses in curves.items()},
        }


@dataclass(frozen=True)
class Schedule:
    """Steps and tokens of the stages, which a resumed run keeps."""

    reading: int
    distilling: int
    samples: int


def train_drafter(
    target: Target,
    text: TextSource,
    options: DrafterOptions,
    work: Path,
    replier: Replier | None = None,
    progress: Progress | None = None,
) -> DrafterTraining:
    """Trains a drafter in a working folder, or resumes the training that was interrupted there.

    Args:
        replier: draws the target's replies; None draws them in torch.
    """
    started = time.monotonic()
    material = open_text(text, work, options.length, options.threads)
    tokens, asked = material.tokens, material.asked
    drawer: Replier = replier or TorchReplier(target)
    student = make_student(options.size, target, options.seed)
    batches, facts = Batches.of(options), {"size": asdict(options.size), "nested": options.nested}
    reading = TextTask(student, tokens, batches, facts, nested=options.nested)
    schedule = _schedule(options, work, lambda: _measured(target, tokens, batches, options, drawer, asked))
    sampling = {"tokens": schedule.samples, "seed": options.seed}
    drawn = SampleOptions(**asdict(options.sampling) | sampling)
    samples = sample(drawer, asked, drawn, work / "samples", target.digest, progress)
    learnt, validation = samples.split(_VALIDATION)
    validation.require(options.length, "What is kept for measuring")
    windows = validation.windows(options.length, _WINDOWS)
    untrained = measure_acceptance(student, target.model, windows)
    first = Trainer(reading, options.training(schedule.reading), work / "reading").run(progress)
    read = measure_acceptance(student, target.model, windows)
    taught = teacher_probabilities(target, learnt, options.length, work, progress)
    after = facts | {"after": schedule.reading}
    task = TeacherTask(student, taught, options.seed, options.rows, after, nested=options.nested)
    second = Trainer(task, options.training(schedule.distilling, options.seed + 1), work / "distilling").run(progress)
    distilled = measure_acceptance(student, target.model, windows)
    checkpoint = work / "checkpoint"
    save_checkpoint(student, target, checkpoint)
    stages = untrained, read, distilled
    depths = {n: measure_acceptance(student, target.model, windows, n) for n in _depths(options)}
    seconds = time.monotonic() - started
    return DrafterTraining(checkpoint, options.size, *stages, depths, first, second, seconds, material.kept)


def _depths(options: DrafterOptions) -> range:
    return range(1, options.size.layers) if options.nested else range(0)


def _schedule(options: DrafterOptions, work: Path, measure: Callable[[], Schedule]) -> Schedule:
    if options.steps is not None:
        reading = max(1, options.steps // 3)
        distilling = options.steps - reading
        samples = options.samples or distilling * options.rows * options.length // 10
        return Schedule(reading, distilling, max(samples, 40 * options.length))
    return Schedule(**kept_schedule(work, options.minutes, lambda: asdict(measure())))


def _measured(
    target: Target,
    tokens: TokenFile,
    batches: Batches,
    options: DrafterOptions,
    replier: Replier,
    prompts: Sequence[NDArray[Any]],
) -> Schedule:
    """The schedule that fits the minutes, by the time that a few steps and replies take here."""
    assert options.minutes is not None, "there are steps otherwise"
    # Learning from distributions takes what reading takes.
    task = TextTask(make_student(options.size, target, options.seed), tokens, batches, {})
    step = step_seconds(task, time.perf_counter)
    few = max(1, options.sampling.rows // 8)
    started = time.perf_counter()
    heat = [options.sampling.temperatures[i % len(options.sampling.temperatures)] for i in range(len(prompts[:few]))]
    replies = replier.replies(prompts[:few], heat, options.sampling.length, 0)
    drawn = sum(map(len, replies)) + sum(map(len, prompts[:few]))
    window = torch.from_numpy(tokens.windows(options.length, 4)).to(target.device)
    per_token = (time.perf_counter() - started) / drawn
    started = time.perf_counter()
    with torch.inference_mode():
        target.model.lm_head(hidden_states(target.model, window))
    per_token += (time.perf_counter() - started) / window.numel()
    seconds = [60 * options.minutes * share for share in _SHARES]
    samples = options.samples or int(seconds[1] / per_token)
    return Schedule(max(1, int(seconds[0] / step)), max(1, int(seconds[2] / step)), max(samples, 40 * options.length))
