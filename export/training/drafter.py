"""Trains a tiny drafter for a target, of the size that pays most: on given text, then on the target's probabilities.

FastDraft's recipe (Zafrir et al. 2024): a shallow decoder with the target's tokens reads text, then learns from what
the target itself writes, token by token and with the target's distribution at each (sequence and logit level).

The size follows from measured costs. A round with g drafted tokens takes g passes of the drafter and one of the target
over g + 1 tokens, and commits (1 - a^(g+1)) / (1 - a) tokens where each is accepted with probability a. What a larger
drafter gains in a it loses in passes: wide and shallow ones win, as a layer costs a fixed time besides its weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from edgeinfer.core.errors import UsageError
from edgeinfer.core.results import Progress
from edgeinfer.export.training.distill import VALIDATION_SHARE, DistillOptions, saved_schedule, step_seconds
from edgeinfer.export.training.losses import (
    TeacherProbabilities,
    cross_entropy,
    taught_divergence,
    teacher_probabilities,
)
from edgeinfer.export.training.models import Target, hidden_states, layer_states, save_checkpoint
from edgeinfer.export.training.samples import Replier, SampleOptions, TorchReplier, TrainingText, open_text, sample
from edgeinfer.export.training.text import TextSource, TokenFile
from edgeinfer.export.training.trainer import Trained, Trainer

# Windows that are read at a time, so that few logits are in memory.
_ROWS = 4
_DRAFTED = 4
# Shares of the minutes: reading text, drawing replies and reading them with the target, learning from them.
_SHARES = (0.25, 0.3, 0.45)
# Windows for measuring.
_WINDOWS = 48
# Windows of samples at least, and share of the read tokens that is sampled by default.
_LEAST_WINDOWS, _SAMPLED = 40, 10

_HEAD_DIM = 32
_WIDTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
_LAYERS = (1, 2)
_MOST_DRAFTED = 15
# Acceptance rates by share of the target's weights: FastDraft's and other published pairs lie between 0.4 at a
# thousandth and 0.8 at a third. A second layer helps as much as doubling the weights.
_AT_EQUAL, _PER_HALVING, _LEAST = 0.86, 0.045, 0.2


@dataclass(frozen=True)
class StudentSize:
    """Sizes of a Llama with tied embeddings."""

    width: int  # hidden size, a multiple of 32
    layers: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int = _HEAD_DIM

    def __post_init__(self) -> None:
        fits = self.width > 0 and self.width % 32 == 0 and self.layers > 0 and self.inner > 0
        fits = fits and self.heads > 0 and self.kv_heads > 0 and self.heads % self.kv_heads == 0
        if not fits:
            hint = "Use a width that is a multiple of 32 and at least 1 layer, such as 128x1."
            raise UsageError(f"A drafter of width {self.width} with {self.layers} layers is not supported.", hint)

    @classmethod
    def of(cls, width: int, layers: int) -> StudentSize:
        """The usual proportions: heads of 32, two per key head where possible, an MLP three times as wide."""
        heads = max(1, width // _HEAD_DIM)
        return cls(width, layers, 3 * width, heads, heads // 2 if heads % 2 == 0 else heads)

    @classmethod
    def parse(cls, text: str) -> StudentSize:
        width, _, layers = text.partition("x")
        if not (width.isdecimal() and layers.isdecimal()):
            raise UsageError(f"{text!r} is not a drafter size.", "Write width and layers like 128x1.")
        return cls.of(int(width), int(layers))

    def weights(self, vocabulary: int) -> int:
        """Parameters that a pass reads."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return vocabulary * self.width + self.layers * (attention + 3 * self.width * self.inner)


@dataclass(frozen=True)
class TargetCosts:
    """Costs of passes of the target on a device."""

    target_ms: Mapping[int, float]  # milliseconds of a pass by its rows, 1 among them
    target_weights: int  # parameters that a pass reads
    target_layers: int
    call_ms: float = 0.06  # of any pass of any model, before its first layer
    layer_ms: float = 0.025  # of any layer, besides its weights

    def __post_init__(self) -> None:
        if 1 not in self.target_ms or not all(0 < ms < math.inf for ms in self.target_ms.values()):
            raise UsageError(
                "The costs of the target's passes were not measured.", "Measure a pass of one row at least."
            )

    def verify_ms(self, rows: int) -> float:
        """Milliseconds of a pass over a number of rows, interpolated."""
        known = sorted(self.target_ms)
        if rows >= known[-1]:
            return self.target_ms[known[-1]] * rows / known[-1]
        above = next(m for m in known if m >= rows)
        below = max(m for m in known if m <= rows)
        share = 0.0 if above == below else (rows - below) / (above - below)
        return self.target_ms[below] * (1 - share) + self.target_ms[above] * share

    def draft_ms(self, size: StudentSize, vocabulary: int) -> float:
        """Milliseconds of a pass of a drafter, whose weights are read as fast as the target's."""
        fixed = self.call_ms + self.layer_ms * self.target_layers
        reading = max(self.target_ms[1] - fixed, 0.1 * self.target_ms[1]) / self.target_weights
        return self.call_ms + self.layer_ms * size.layers + reading * size.weights(vocabulary)


@dataclass(frozen=True)
class SizeChoice:
    """The chosen size, and why."""

    size: StudentSize
    acceptance: float  # assumed rate
    drafted: int  # best number of tokens of a draft
    draft_ms: float
    speedup: float  # predicted


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Tokens that a round commits: 1 + a + ... + a^g."""
    return sum(acceptance**i for i in range(drafted + 1))


def choose_size(costs: TargetCosts, vocabulary: int) -> SizeChoice:
    """The size with the highest predicted speed-up; of equals the smallest."""
    sizes = [StudentSize.of(width, layers) for width in _WIDTHS for layers in _LAYERS]
    choices = [_judge(size, costs, vocabulary) for size in sizes]
    return max(choices, key=lambda choice: (choice.speedup, -choice.size.weights(vocabulary)))


def _judge(size: StudentSize, costs: TargetCosts, vocabulary: int) -> SizeChoice:
    # The acceptance rate that a drafter of this size may reach after training.
    halvings = max(0.0, math.log2(costs.target_weights / size.weights(vocabulary)) + 1 - math.log2(size.layers + 1))
    acceptance = max(_LEAST, _AT_EQUAL - _PER_HALVING * halvings)
    draft_ms = costs.draft_ms(size, vocabulary)

    def speedup(drafted: int) -> float:
        round_ms = drafted * draft_ms + costs.verify_ms(drafted + 1)
        return expected_tokens(acceptance, drafted) * costs.target_ms[1] / round_ms

    best = max(range(1, _MOST_DRAFTED + 1), key=speedup)
    return SizeChoice(size, acceptance, best, draft_ms, speedup(best))


def make_student(size: StudentSize, target: Target, seed: int) -> Any:
    """A Llama of random weights for the target's tokens and contexts, whose embedding is its head too."""
    config = transformers.LlamaConfig(
        vocab_size=target.config.vocab_size,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=target.config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=target.begin,
        eos_token_id=target.ends[0] if target.ends else None,
        pad_token_id=None,
    )
    config.architectures = ["LlamaForCausalLM"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = transformers.LlamaForCausalLM(config)
    _inherit_embedding(model, target.model)
    return model.to(target.device)


@torch.no_grad()
def _inherit_embedding(student: Any, target: Any) -> None:
    """Copies the target's head to the student in the directions in which its tokens differ most. Which tokens are alike
    is most of what a tiny model has to learn."""
    head = target.lm_head.weight.detach().float().cpu()  # (V, T)
    directions = torch.linalg.eigh(head.T @ head).eigenvectors  # (T, T), ascending
    width = min(student.config.hidden_size, head.shape[1])
    student.lm_head.weight[:, :width] = head @ directions[:, -width:]
    # Logits of about one, so that nothing seems certain at first.
    student.model.norm.weight.fill_(1 / float(student.lm_head.weight.square().sum(-1).mean().sqrt()))


@dataclass(frozen=True)
class AcceptanceRates:
    """How often a target accepts a student's tokens."""

    agreement: float  # share of tokens at which both find the same token likeliest: the acceptance of greedy drafts
    overlap: float  # sum over tokens of the lesser of the two probabilities: the acceptance of drawn drafts
    mean_accepted_length: float  # tokens per round with four drafted, by runs of agreement
    divergence: float  # mean Kullback-Leibler divergence from the target, in nats


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
    """Accepted tokens of each of successive rounds with so many drafted tokens."""
    found, at = [], 0
    while at + drafted < len(matches):
        run = 0
        while run < drafted and matches[at + run]:
            run += 1
        found.append(run)
        at += run + 1
    return found


@dataclass(frozen=True, kw_only=True)
class DrafterOptions(DistillOptions):
    """How a drafter is made: a third of the steps read text, the others learn from the target."""

    least_steps: ClassVar[int] = 2
    least_samples: ClassVar[int] = 1

    size: StudentSize
    minutes: float | None = 20.0
    rows: int = 16
    learning_rate: float = 4e-3
    nested: bool = False  # every depth learns to predict, for a drafter that uses as many layers as a token needs (S2D)
    # How the target's replies are drawn; their number is 16 windows' worth for each ten steps, or as the minutes allow.
    sampling: SampleOptions = field(default_factory=lambda: SampleOptions(tokens=1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nested and self.size.layers < 2:
            raise UsageError(
                "A drafter of one layer cannot stop earlier.", "Use a size of at least two layers, such as 128x3."
            )


class _StudentTask:
    """A student that reads: the next tokens of text, or the target's probabilities. Implements `trainer.Task`."""

    def __init__(
        self, student: Any, options: DrafterOptions, text: TokenFile | None, taught: TeacherProbabilities | None = None
    ) -> None:
        self.name = "reading" if taught is None else "distilling"
        self._student, self._options, self._text, self._taught = student, options, text, taught
        if text is not None:
            text.require(options.length + 1, "The text")
        data = {} if text is None else {"text": text.digest, "length": options.length}
        data |= {} if taught is None else {"probabilities": taught.digest}
        self.configuration = data | {"rows": options.rows, "size": asdict(options.size), "nested": options.nested}

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return dict(self._student.named_parameters())

    def loss(self, step: int) -> torch.Tensor:
        """Mean of -log p of the tokens of a batch, or mean divergence from the target; of all depths where nested."""
        student, options, head = self._student, self._options, self._student.lm_head.weight
        if self._text is not None:
            batch = options.batch(self._text, step, student.device, 1)  # (B, S + 1)
            labels = batch[:, 1:].flatten()
            return torch.stack([cross_entropy(states, head, labels) for states in self._states(batch[:, :-1])]).mean()
        assert self._taught is not None, "there is text otherwise"
        drawn = self._taught.batch(options.seed, step, options.rows)
        tokens, likeliest, logs = (part.to(student.device) for part in drawn)
        taught = likeliest.flatten(0, 1), logs.flatten(0, 1)
        return torch.stack([taught_divergence(states, head, *taught) for states in self._states(tokens)]).mean()

    def _states(self, tokens: torch.Tensor) -> list[torch.Tensor]:  # (B, S) -> one or L of (B * S, D)
        nested = self._options.nested
        return layer_states(self._student, tokens) if nested else [hidden_states(self._student, tokens)]


@dataclass(frozen=True)
class DrafterTraining:
    checkpoint: Path
    size: StudentSize
    # `untrained`, `read`, `distilled`: acceptance before training, after reading text, and at the end, on replies of
    # the target that were not learned from.
    untrained: AcceptanceRates
    read: AcceptanceRates
    distilled: AcceptanceRates
    depths: dict[int, AcceptanceRates]  # acceptance of a nested drafter by number of layers
    reading: Trained
    distilling: Trained
    seconds: float  # in all, since it was last started
    prompts: Sequence[NDArray[Any]]  # for measuring; no replies to them were learned from. (n,) each

    def facts(self) -> dict[str, Any]:
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


def train_drafter(
    target: Target,
    text: TextSource,
    options: DrafterOptions,
    work: Path,
    replier: Replier | None = None,
    progress: Progress | None = None,
) -> DrafterTraining:
    """Trains a drafter in a working folder, or resumes there; torch draws the target's replies where no `replier`
    does."""
    started = time.monotonic()
    material = open_text(text, work, options.length, options.threads)
    drawer: Replier = replier or TorchReplier(target)
    student = make_student(options.size, target, options.seed)
    reading = _StudentTask(student, options, material.tokens)
    if options.steps is not None:
        steps = max(1, options.steps // 3)
        schedule = {"reading": steps, "distilling": options.steps - steps}
        sampled = options.samples or schedule["distilling"] * options.rows * options.length // _SAMPLED
        schedule["samples"] = max(sampled, _LEAST_WINDOWS * options.length)
    else:
        schedule = saved_schedule(work, options.minutes, lambda: _timed_schedule(target, options, material, drawer))
    drawn = SampleOptions(**asdict(options.sampling) | {"tokens": schedule["samples"], "seed": options.seed})
    samples = sample(drawer, material.asked, drawn, work / "samples", target.digest, progress)
    learned, validation = samples.split(VALIDATION_SHARE)
    validation.require(options.length, "The validation part of the replies")
    windows = validation.windows(options.length, _WINDOWS)

    def measured(depth: int | None = None) -> AcceptanceRates:
        return measure_acceptance(student, target.model, windows, depth)

    untrained = measured()
    first = Trainer(reading, options.training(schedule["reading"]), work / "reading").run(progress)
    read = measured()
    taught = teacher_probabilities(target, learned, options.length, work, progress)
    task = _StudentTask(student, options, None, taught)
    task.configuration |= {"after": schedule["reading"]}
    training = options.training(schedule["distilling"], options.seed + 1)
    second = Trainer(task, training, work / "distilling").run(progress)
    distilled = measured()
    save_checkpoint(student, target, work / "checkpoint")
    depths = {n: measured(n) for n in range(1, options.size.layers)} if options.nested else {}
    stages, seconds = (untrained, read, distilled, depths, first, second), time.monotonic() - started
    return DrafterTraining(work / "checkpoint", options.size, *stages, seconds, material.kept)


def _timed_schedule(
    target: Target, options: DrafterOptions, material: TrainingText, replier: Replier
) -> dict[str, int]:
    """Steps and tokens of the stages that fit the minutes, by the time of a few steps and replies."""
    assert options.minutes is not None, "there are steps otherwise"
    # Learning from distributions takes as long as reading.
    task = _StudentTask(make_student(options.size, target, options.seed), options, material.tokens)
    step = step_seconds(task, time.perf_counter)
    prompts, heats = material.asked[: max(1, options.sampling.rows // 8)], options.sampling.temperatures
    started = time.perf_counter()
    replies = replier.replies(prompts, [heats[i % len(heats)] for i in range(len(prompts))], options.sampling.length, 0)
    drawn = sum(map(len, replies)) + sum(map(len, prompts))
    window = torch.from_numpy(material.tokens.windows(options.length, 4)).to(target.device)
    per_token = (time.perf_counter() - started) / drawn
    started = time.perf_counter()
    with torch.inference_mode():
        target.model.lm_head(hidden_states(target.model, window))
    per_token += (time.perf_counter() - started) / window.numel()
    reading, sampling, distilling = (60 * options.minutes * share for share in _SHARES)
    samples = max(options.samples or int(sampling / per_token), _LEAST_WINDOWS * options.length)
    return {"reading": max(1, int(reading / step)), "distilling": max(1, int(distilling / step)), "samples": samples}
