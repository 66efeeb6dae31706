"""Trains an EAGLE-3 head for a target by training-time test: on states of its own, as it drafts (Li et al. 2025).

The row of a token reads its embedding and the state before it: the target's in the first of some steps, the head's own
of the step before in each further one, in which every row goes one token on. So all drafts of a window, one behind each
of its tokens, are learnt from together. The loss is the divergence from the target's probabilities among the tokens
that the head can draft, where the target's likeliest is one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from edgeinfer.bundle.writing import storage_errors
from edgeinfer.errors import UsageError
from edgeinfer.export.training.eagle_head import EagleHead, HeadShape, default_taps
from edgeinfer.export.training.losses import divergence_from_logits
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.options import TrainOptions, require
from edgeinfer.export.training.samples import Replier, SampleOptions, TorchReplier, sample
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TextSource, TokenFile, frequent_tokens
from edgeinfer.export.training.trainer import Task, Trained, Trainer, kept_schedule, step_seconds
from edgeinfer.results import Progress

__all__ = ["EagleOptions", "EagleTask", "EagleTraining", "train_eagle"]

# What a later step counts less than the one before (eagle/traineagle3/main.py).
_FADING = 0.8
_MOST_TOKENS = 32_000
# Of text and replies, what is kept for measuring; windows that are read for it.
_VALIDATION, _WINDOWS = 0.04, 24
_PROMPTS = 4000
# Share of the minutes in which the target writes replies, and how many of them tell what a token takes.
_SAMPLING, _FEW = 0.2, 6


@dataclass(frozen=True)
class EagleOptions:
    """How a head is trained.

    Attributes:
        steps: of the optimizer; None goes by `minutes`.
        minutes: that all may take, where `steps` is None.
        samples: tokens that the target writes; None goes by `minutes`, or is none where there are steps.
        depth: steps of drafting that a window is unrolled over.
        tokens: that the head can draft, the most frequent ones; None is 32,000, or half of a smaller vocabulary.
        taps: layers of the target before which states are read; None is `default_taps`.
        rows, length: windows of a step and their tokens.
        learning_rate: at its highest.
        device, threads: as TrainOptions.
    """

    steps: int | None = None
    minutes: float | None = 30.0
    samples: int | None = None
    depth: int = 5
    tokens: int | None = None
    taps: tuple[int, ...] | None = None
    rows: int = 8
    length: int = 256
    learning_rate: float = 2e-3
    seed: int = 0
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        require(self.steps is None or self.steps >= 1, "steps", self.steps, "1 or more")
        if self.steps is None:
            fits = self.minutes is not None and 0 < self.minutes <= 100_000
            require(fits, "minutes", self.minutes, "more than 0")
        require(self.samples is None or self.samples >= 0, "samples", self.samples, "0 or more")
        require(1 <= self.depth <= 16, "depth", self.depth, "from 1 to 16")
        require(self.tokens is None or self.tokens >= 1, "tokens", self.tokens, "1 or more")
        require(self.rows >= 1, "rows", self.rows, "1 or more")
        require(self.length >= 2 * self.depth, "length", self.length, f"{2 * self.depth} or more")

    def training(self, steps: int) -> TrainOptions:
        """The trainer's options."""
        warmup = min(50, max(1, steps // 10))
        rate = self.learning_rate
        return TrainOptions(steps, rate, warmup=warmup, seed=self.seed, device=self.device, threads=self.threads)

    def shape(self, target: Target) -> HeadShape:
        """The sizes of a head for a target, whose own layers it resembles."""
        config = target.config.get_text_config()
        heads, layers, vocabulary = config.num_attention_heads, config.num_hidden_layers, config.vocab_size
        wide = getattr(config, "head_dim", None) or config.hidden_size // heads
        return HeadShape(
            width=config.hidden_size,
            inner=config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=wide,
            vocabulary=vocabulary,
            drafted=self.tokens or min(_MOST_TOKENS, vocabulary // 2),
            taps=self.taps or default_taps(layers),
        )


@dataclass(frozen=True)
class _Taught:
    """What a target says of windows.

    Attributes:
        tapped: states that enter the tapped layers. (B, S, W)
        logits: of the tokens that can be drafted. (B, S, Vd)
        known: whether the likeliest token of all is one of them. (B, S)
    """

    tapped: Tensor
    logits: Tensor
    known: Tensor


class EagleTask:
    """A head over a frozen target. Implements `trainer.Task`.

    Args:
        sources: what the target said and other text; they take turns.

    Raises:
        UsageError: there is too little text.
    """

    name = "EAGLE-3"

    def __init__(
        self, target: Target, sources: tuple[TokenFile, ...], batches: Batches, shape: HeadShape, depth: int
    ) -> None:
        for tokens in sources:
            tokens.require(batches.length, "The text")
        self._target, self._sources, self._batches, self._depth = target, sources, batches, depth
        self.tokens = torch.from_numpy(frequent_tokens(sources, shape.drafted)).to(target.device)  # (Vd,)
        self._embedding = target.model.get_input_embeddings().weight.detach()  # (V, D)
        head = target.model.get_output_embeddings().weight.detach()[self.tokens]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(batches.seed)
            self.head = EagleHead(shape, head.cpu()).to(target.device)

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        digests = {"target": self._target.digest, "sources": [tokens.digest for tokens in self._sources]}
        sizes = asdict(self.head.shape) | {"taps": list(self.head.shape.taps), "depth": self._depth}
        return digests | self._batches.facts | sizes

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """All parameters of the head."""
        return dict(self.head.named_parameters())

    def loss(self, step: int) -> Tensor:
        """Mean divergence of every step from the target, later steps counting less."""
        batch = self._batches.draw(self._sources[step % len(self._sources)], step, 0, self._target.device)
        taught = self._read(batch)
        total, weights = torch.zeros((), device=batch.device), 0.0
        for place, states in enumerate(self._unrolled(batch, taught)):
            wanted, known = self._at(taught, place)
            if known.any():
                weight = _FADING**place
                lost = divergence_from_logits(states[known], self.head.lm_head.weight, wanted[known])
                total, weights = total + weight * lost, weights + weight
        if not weights:
            raise UsageError("The head can draft none of the tokens that the model says.", "Give more text.")
        return total / weights

    @torch.no_grad()
    def agreement(self, validation: TokenFile) -> tuple[float, ...]:
        """How often the likeliest token is the target's at each step of a draft that was right so far."""
        right, reached = np.zeros(self._depth), np.zeros(self._depth)
        for window in validation.windows(self._batches.length, _WINDOWS):
            batch = torch.from_numpy(window)[None].to(self._target.device)
            taught = self._read(batch)
            going: Tensor | None = None
            for place, states in enumerate(self._unrolled(batch, taught)):
                wanted, known = self._at(taught, place)
                same = known & ((states @ self.head.lm_head.weight.T).argmax(-1) == wanted.argmax(-1))
                # The text went on as the target would have.
                going = torch.ones_like(same) if going is None else going
                right[place] += float((same & going).sum())
                reached[place] += float(going.sum())
                said = self.tokens[wanted.argmax(-1)] == batch[:, 2 + place :][:, : same.shape[1]]
                going = going & same & said
        return tuple((right / np.maximum(reached, 1)).tolist())

    @torch.no_grad()
    def _read(self, batch: Tensor) -> _Taught:  # (B, S)
        """A window at a time, so that few logits are in memory."""
        found = []
        for window in batch[:, None]:  # (1, S)
            output = self._target.model(window, output_hidden_states=True, use_cache=False)
            states = [output.hidden_states[tap].float() for tap in self.head.shape.taps]
            logits = output.logits.float()
            chosen = logits[..., self.tokens]
            found.append((torch.cat(states, -1), chosen, chosen.amax(-1) == logits.amax(-1)))
        return _Taught(*(torch.cat(part) for part in zip(*found, strict=True)))

    def _unrolled(self, batch: Tensor, taught: _Taught) -> list[Tensor]:
        """The normed states of each step, from which the head draws its logits. depth of (B, R, D)"""
        rows = batch.shape[1] - self._depth - 1
        states, past = self.head.states(taught.tapped[:, :rows]), list[tuple[Tensor, Tensor]]()
        found = []
        for place in range(self._depth):
            embedded = F.embedding(batch[:, 1 + place : 1 + place + rows], self._embedding)
            states = self.head.step(states, embedded, past)
            found.append(self.head.norm(states))
        return found

    def _at(self, taught: _Taught, place: int) -> tuple[Tensor, Tensor]:  # (B, R, Vd), (B, R)
        """What the target says after the tokens that a step's rows read."""
        rows = slice(1 + place, taught.known.shape[1] - self._depth + place)
        return taught.logits[:, rows], taught.known[:, rows]


@dataclass(frozen=True)
class EagleTraining:
    """A trained head.

    Attributes:
        checkpoint: its folder, in the published layout.
        before, after: how often its likeliest token is the target's, by step of a draft that was right so far, on text
            that was kept for measuring.
        seconds: in all, since it was last started.
        prompts: that were not sampled from, for measuring on an engine. (n,) each
    """

    checkpoint: Path
    shape: HeadShape
    before: tuple[float, ...]
    after: tuple[float, ...]
    trained: Trained
    seconds: float
    prompts: Sequence[NDArray[Any]]

    def facts(self) -> dict[str, Any]:
        """The facts of a report."""
        return {
            "shape": asdict(self.shape),
            "before": list(self.before),
            "after": list(self.after),
            "steps": len(self.trained.losses),
            "resumed_at": self.trained.resumed_at,
            "final_loss": self.trained.final_loss,
            "seconds": round(self.seconds, 1),
            "losses": list(self.trained.losses),
        }


def train_eagle(
    target: Target,
    text: TextSource,
    options: EagleOptions,
    work: Path,
    replier: Replier | None = None,
    progress: Progress | None = None,
) -> EagleTraining:
    """Trains a head in a working folder, or resumes the training that was interrupted there.

    Args:
        replier: draws the target's replies; None draws them in torch.

    Raises:
        UsageError: there is too little text, or the folder holds a training of another configuration.
        StorageError: the folder cannot be written, or the disk is full.
    """
    started = time.monotonic()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with storage_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    tokens = text.tokens(work)
    tokens.require(4 * options.length, "The text")
    prompts = text.prompts(_PROMPTS)
    asked, kept = [p for i, p in enumerate(prompts) if i % 20], prompts[::20]
    drawer: Replier = replier or TorchReplier(target)
    batches, shape = Batches(options.seed, options.rows, options.length), options.shape(target)
    tried = partial(EagleTask, target, (tokens,), batches, shape, options.depth)
    schedule = _schedule(options, work, tried, drawer, asked)
    sources = [tokens]
    if schedule["samples"]:
        drawn = SampleOptions(max(schedule["samples"], 8 * options.length), seed=options.seed)
        sources.insert(0, sample(drawer, asked, drawn, work / "samples", target.digest, progress))
    halves = [each.split(_VALIDATION) for each in sources]
    validation = halves[0][1]
    validation.require(options.length, "What is kept for measuring")
    task = EagleTask(target, tuple(most for most, _ in halves), batches, shape, options.depth)
    before = task.agreement(validation)
    trained = Trainer(task, options.training(schedule["steps"]), work / "eagle").run(progress)
    after = task.agreement(validation)
    checkpoint = work / "head"
    task.head.save(checkpoint, task.tokens)
    return EagleTraining(checkpoint, shape, before, after, trained, time.monotonic() - started, kept or prompts)


def _schedule(
    options: EagleOptions, work: Path, tried: Callable[[], Task], replier: Replier, prompts: Sequence[Any]
) -> dict[str, int]:
    """Steps, and tokens that are sampled: as the options say, or what fits the minutes by what a few take here."""
    if options.steps is not None:
        return {"steps": options.steps, "samples": options.samples or 0}
    assert options.minutes is not None, "there are steps otherwise"
    seconds, samples = 60 * options.minutes, options.samples

    def measured() -> dict[str, int]:
        drawn = int(_SAMPLING * seconds / _token_seconds(replier, prompts[:_FEW])) if samples is None else samples
        steps = max(1, int((1 - _SAMPLING) * seconds / step_seconds(tried(), time.perf_counter)))
        return {"steps": steps, "samples": drawn}

    return kept_schedule(work, options.minutes, measured)


def _token_seconds(replier: Replier, prompts: Sequence[NDArray[np.int64]]) -> float:
    """Seconds that a token of a reply takes."""
    started = time.perf_counter()
    replies = replier.replies(prompts, [0.0] * len(prompts), SampleOptions(1).length, 0)
    return (time.perf_counter() - started) / max(1, sum(map(len, replies)))
