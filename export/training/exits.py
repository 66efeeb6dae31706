"""Trains a model to predict with its first layers, or with evenly spaced ones, what the whole of it does.

LayerSkip (Elhoushi et al. 2024): layers are left out in training, later ones more often, and each step one exit in turn
learns as well. The last layer's distribution is kept close to what it was before, which guards the quality.
Unified Layer Skipping (Liu et al. 2024): every other step, the layers that `--compute unified` keeps for one of the
wanted speed-ups learn as exits do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from edgeinfer.adaptive import kept_layers
from edgeinfer.bundle.writing import storage_errors
from edgeinfer.errors import UsageError
from edgeinfer.export.training.losses import taught_divergence
from edgeinfer.export.training.models import Target, layer_states, require_plain, save_checkpoint
from edgeinfer.export.training.options import TrainOptions
from edgeinfer.export.training.tasks import TeacherProbabilities, teacher_probabilities
from edgeinfer.export.training.text import TextSource
from edgeinfer.export.training.trainer import Trained, Trainer
from edgeinfer.options import require
from edgeinfer.results import Progress

_VALIDATION, _WINDOWS = 0.04, 32
# Windows that are read at a time, so that few logits are in memory.
_ROWS = 4

DepthFigures = dict[float, float]


@dataclass(frozen=True)
class ExitsOptions:
    """How exits are tuned.

    Attributes:
        dropout: how often the last layer is left out; earlier ones are less, the first never.
        exit_weight: of an exit's loss beside the whole model's.
        guard: of the whole model's divergence from what it was.
        speedups: of passes that skip layers evenly, which are tuned as well.
    """

    steps: int = 300
    rows: int = 8
    length: int = 256
    learning_rate: float = 5e-4
    dropout: float = 0.1
    exit_weight: float = 1.0
    guard: float = 1.0
    speedups: tuple[float, ...] = ()
    seed: int = 0
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("length", 8)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"{least} or more")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "from 0 to less than 1")
        for name in ("exit_weight", "guard"):
            require(0 <= getattr(self, name) <= 100, name, getattr(self, name), "from 0 to 100")
        for speedup in self.speedups:
            require(1 < speedup <= 1000, "speedups", speedup, "above 1 and at most 1000")
        self.training()

    def training(self) -> TrainOptions:
        """The trainer's options."""
        warmup = min(30, max(1, self.steps // 10))
        return TrainOptions(
            self.steps,
            self.learning_rate,
            # What the model knows is not to be forgotten.
            weight_decay=0.0,
            warmup=warmup,
            seed=self.seed,
            device=self.device,
            threads=self.threads,
        )


@dataclass(frozen=True)
class ExitsTraining:
    """A model whose exits were tuned.

    Attributes:
        before, after: by layers run, how often an exit finds the whole model's likeliest token: what greedy
            self-speculation accepts.
        skipped_before, skipped_after: the same by speed-up, of the passes that skip layers evenly.
        perplexity_before, perplexity_after: of the whole model, on text kept for measuring.
    """

    checkpoint: Path
    before: DepthFigures
    after: DepthFigures
    skipped_before: DepthFigures
    skipped_after: DepthFigures
    perplexity_before: float
    perplexity_after: float
    trained: Trained
    seconds: float

    def facts(self) -> dict[str, Any]:
        """The facts of a report."""
        facts = {name: value for name, value in asdict(self).items() if name != "trained"}
        losses = list(self.trained.losses)
        steps = {"steps": len(losses), "resumed_at": self.trained.resumed_at}
        return facts | {"checkpoint": str(self.checkpoint)} | steps | {"losses": losses}


def skipped_layers(layers: int, speedup: float) -> set[int]:
    """Layers that unified skipping leaves out."""
    return set(range(layers)) - set(kept_layers(layers, speedup))


@torch.inference_mode()
def measure_depths(
    model: Any, windows: NDArray[np.int64], speedups: Sequence[float] = ()
) -> tuple[DepthFigures, DepthFigures, float]:  # (n, S)
    """How often each depth and speed-up finds the whole model's likeliest token, and the whole model's perplexity."""
    layers = len(model.model.layers)
    agreed: dict[float, int] = dict.fromkeys(range(1, layers), 0)
    evenly, loss, count = dict.fromkeys(speedups, 0), 0.0, 0
    for start in range(0, len(windows), _ROWS):
        tokens = torch.from_numpy(windows[start : start + _ROWS]).to(model.device)  # (b, S)
        states = layer_states(model, tokens)
        logits = model.lm_head(states[-1]).float()  # (b * S, V)
        whole = logits.argmax(-1)
        for depth in range(1, layers):
            agreed[depth] += int((model.lm_head(states[depth - 1]).argmax(-1) == whole).sum())
        for speedup in evenly:
            skipping = layer_states(model, tokens, skipped_layers(layers, speedup))[-1]
            evenly[speedup] += int((model.lm_head(skipping).argmax(-1) == whole).sum())
        count += whole.numel()
        following = logits.unflatten(0, tokens.shape)[:, :-1].flatten(0, 1)
        loss += float(F.cross_entropy(following, tokens[:, 1:].flatten())) * len(tokens)
    shares = [{key: hits / count for key, hits in found.items()} for found in (agreed, evenly)]
    return shares[0], shares[1], float(np.exp(loss / len(windows)))


def layer_dropout(layer: int, layers: int, most: float) -> float:
    """How often a layer is left out: nothing at the first, `most` at the last, exponentially between."""
    return 0.0 if layers == 1 else most * (math.exp(layer * math.log(2) / (layers - 1)) - 1)


def exit_weight(depth: int, layers: int) -> float:
    """The weight of the exit after so many layers: in proportion to 1 + 2 + ... of them, so later ones count more."""
    return depth * (depth + 1) / (layers * (layers - 1))


class ExitsTask:
    """The exits of a model beside the whole of it. Implements `trainer.Task`."""

    name = "tuning exits"

    def __init__(
        self, model: Any, taught: TeacherProbabilities, options: ExitsOptions, facts: Mapping[str, Any]
    ) -> None:
        self._model, self._taught, self._options = model, taught, options
        self._layers = len(model.model.layers)
        if self._layers < 2:
            raise UsageError("A model of one layer has no early exit.", "Give one of two layers or more.")
        names = ("rows", "length", "dropout", "exit_weight", "guard", "speedups")
        chosen = {name: getattr(options, name) for name in names} | {"speedups": list(options.speedups)}
        self._facts = taught.facts | chosen | dict(facts)

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        return self._facts

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """All parameters of the model."""
        return dict(self._model.named_parameters())

    def loss(self, step: int) -> torch.Tensor:
        """The losses of this step's exit, or set of layers, and of the whole model, against its predictions before."""
        options, model, layers = self._options, self._model, self._layers
        tokens, likeliest, logs = (
            part.to(model.device) for part in self._taught.batch(options.seed, step, options.rows)
        )
        uniform = np.random.default_rng((options.seed, step, 1)).random(layers)
        dropped = {layer for layer in range(layers) if uniform[layer] < layer_dropout(layer, layers, options.dropout)}
        states, turn = layer_states(model, tokens, dropped), step // 2
        if options.speedups and step % 2:
            skipped = skipped_layers(layers, options.speedups[turn % len(options.speedups)])
            part = layer_states(model, tokens, skipped)[-1], options.exit_weight
        else:
            depth = 1 + (turn if options.speedups else step) % (layers - 1)
            part = states[depth - 1], options.exit_weight * exit_weight(depth, layers)
        parts = (part, (states[-1], options.guard))
        total = torch.zeros((), device=model.device)
        for each, weight in parts:
            if weight:
                distribution = likeliest.flatten(0, 1), logs.flatten(0, 1)
                total = total + weight * taught_divergence(each, model.lm_head.weight, *distribution)
        return total


def tune_exits(
    target: Target, text: TextSource, options: ExitsOptions, out: Path, work: Path, progress: Progress | None = None
) -> ExitsTraining:
    """Tunes a model's exits and writes it as a checkpoint folder; resumes an interrupted training."""
    started = time.monotonic()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    require_plain(target.model)
    with storage_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    tokens = text.tokens(work)
    seen, validation = tokens.split(_VALIDATION)
    validation.require(options.length, "What is kept for measuring")
    windows = validation.windows(options.length, _WINDOWS)
    # Windows enough that none has to be seen often.
    seen = seen.first(options.steps * options.rows * options.length)
    taught = teacher_probabilities(target, seen, options.length, work, progress)
    before, skipped, perplexity = measure_depths(target.model, windows, options.speedups)
    target.model.requires_grad_(True)
    task = ExitsTask(target.model, taught, options, {"target": target.digest})
    trained = Trainer(task, options.training(), work / "exits").run(progress)
    target.model.requires_grad_(False)
    after, skipped_after, perplexity_after = measure_depths(target.model, windows, options.speedups)
    save_checkpoint(target.model, target, out)
    return ExitsTraining(
        out, before, after, skipped, skipped_after, perplexity, perplexity_after, trained, time.monotonic() - started
    )
