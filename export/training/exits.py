"""Trains a model so that its first layers predict what the whole model does. LayerSkip (Elhoushi et al. 2024): layers
are left out in training, later ones more often, and each step one exit in turn learns as well. The last layer's
distribution stays close to the original one, which guards the quality."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from edgeinfer.bundle.writing import storage_errors
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import require
from edgeinfer.core.results import Progress
from edgeinfer.export.training.distill import VALIDATION_SHARE, StepOptions
from edgeinfer.export.training.losses import TeacherProbabilities, taught_divergence, teacher_probabilities
from edgeinfer.export.training.models import Target, layer_states, require_plain, save_checkpoint
from edgeinfer.export.training.text import TextSource
from edgeinfer.export.training.trainer import Trained, Trainer

# Windows for measuring.
_WINDOWS = 32
# Windows that are read at a time, so that few logits are in memory.
_ROWS = 4

DepthFigures = dict[int, float]


@dataclass(frozen=True)
class ExitsOptions(StepOptions):
    weight_decay = 0.0  # the model shall forget nothing
    most_warmup = 30

    learning_rate: float = 5e-4
    steps: int = 300
    # Rate at which the last layer is left out; it is lower for earlier layers, and 0 for the first.
    dropout: float = 0.1
    exit_weight: float = 1.0  # of an exit's loss relative to the whole model's
    guard: float = 1.0  # weight of the whole model's divergence from its original predictions

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.dropout < 1, "dropout", self.dropout, "from 0 to less than 1")
        for name in ("exit_weight", "guard"):
            require(0 <= getattr(self, name) <= 100, name, getattr(self, name), "from 0 to 100")
        self.training(self.steps)


@dataclass(frozen=True)
class ExitsTraining:
    checkpoint: Path
    # `before`, `after`: by layers run, how often an exit finds the whole model's likeliest token, which is the
    # acceptance of greedy self-speculation.
    before: DepthFigures
    after: DepthFigures
    # `perplexity_before`, `perplexity_after`: of the whole model, on validation text.
    perplexity_before: float
    perplexity_after: float
    trained: Trained
    seconds: float

    def facts(self) -> dict[str, Any]:
        facts = {name: value for name, value in asdict(self).items() if name != "trained"}
        losses = list(self.trained.losses)
        steps = {"steps": len(losses), "resumed_at": self.trained.resumed_at}
        return facts | {"checkpoint": str(self.checkpoint)} | steps | {"losses": losses}


@torch.inference_mode()
def measure_depths(model: Any, windows: NDArray[np.int64]) -> tuple[DepthFigures, float]:  # (n, S)
    """How often each depth finds the whole model's likeliest token, and the whole model's perplexity."""
    layers = len(model.model.layers)
    agreed: dict[int, int] = dict.fromkeys(range(1, layers), 0)
    loss, count = 0.0, 0
    for start in range(0, len(windows), _ROWS):
        tokens = torch.from_numpy(windows[start : start + _ROWS]).to(model.device)  # (b, S)
        states = layer_states(model, tokens)
        logits = model.lm_head(states[-1]).float()  # (b * S, V)
        whole = logits.argmax(-1)
        for depth in range(1, layers):
            agreed[depth] += int((model.lm_head(states[depth - 1]).argmax(-1) == whole).sum())
        count += whole.numel()
        following = logits.unflatten(0, tokens.shape)[:, :-1].flatten(0, 1)
        loss += float(F.cross_entropy(following, tokens[:, 1:].flatten())) * len(tokens)
    return {depth: hits / count for depth, hits in agreed.items()}, math.exp(loss / len(windows))


def layer_dropout(layer: int, layers: int, most: float) -> float:
    """How often a layer is left out: nothing at the first, `most` at the last, exponentially between."""
    return 0.0 if layers == 1 else most * (math.exp(layer * math.log(2) / (layers - 1)) - 1)


def exit_weight(depth: int, layers: int) -> float:
    """The weight of the exit after so many layers: in proportion to 1 + 2 + ... of them, so later ones count more."""
    return depth * (depth + 1) / (layers * (layers - 1))


class ExitsTask:
    """The exits of a model, and the whole model. Implements `trainer.Task`."""

    name = "tuning exits"

    def __init__(self, model: Any, taught: TeacherProbabilities, options: ExitsOptions, target: str) -> None:
        self._model, self._taught, self._options = model, taught, options
        self._layers = len(model.model.layers)
        if self._layers < 2:
            raise UsageError("A model of one layer has no early exit.", "Give one of two layers or more.")
        names = ("rows", "length", "dropout", "exit_weight", "guard")
        self.configuration = {name: getattr(options, name) for name in names}
        self.configuration |= {"probabilities": taught.digest, "target": target}

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return dict(self._model.named_parameters())

    def loss(self, step: int) -> torch.Tensor:
        """The losses of this step's exit and of the whole model against the original predictions."""
        options, model, layers = self._options, self._model, self._layers
        tokens, likeliest, logs = (
            part.to(model.device) for part in self._taught.batch(options.seed, step, options.rows)
        )
        uniform = np.random.default_rng((options.seed, step, 1)).random(layers)
        dropped = {layer for layer in range(layers) if uniform[layer] < layer_dropout(layer, layers, options.dropout)}
        states, depth = layer_states(model, tokens, dropped), 1 + step % (layers - 1)
        exit_loss = states[depth - 1], options.exit_weight * exit_weight(depth, layers)
        total = torch.zeros((), device=model.device)
        for each, weight in (exit_loss, (states[-1], options.guard)):
            if weight:
                distribution = likeliest.flatten(0, 1), logs.flatten(0, 1)
                total = total + weight * taught_divergence(each, model.lm_head.weight, *distribution)
        return total


def tune_exits(
    target: Target, text: TextSource, options: ExitsOptions, out: Path, work: Path, progress: Progress | None = None
) -> ExitsTraining:
    """Tunes a model's exits and writes it as a checkpoint; resumes an interrupted training."""
    started = time.monotonic()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    require_plain(target.model)
    with storage_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    tokens = text.tokens(work)
    seen, validation = tokens.split(VALIDATION_SHARE)
    validation.require(options.length, "The validation part of the text")
    windows = validation.windows(options.length, _WINDOWS)
    # Windows enough that none has to be seen often.
    seen = seen.first(options.steps * options.rows * options.length)
    taught = teacher_probabilities(target, seen, options.length, work, progress)
    before, perplexity = measure_depths(target.model, windows)
    target.model.requires_grad_(True)
    task = ExitsTask(target.model, taught, options, target.digest)
    trained = Trainer(task, options.training(options.steps), work / "exits").run(progress)
    target.model.requires_grad_(False)
    after, perplexity_after = measure_depths(target.model, windows)
    save_checkpoint(target.model, target, out)
    seconds = time.monotonic() - started
    return ExitsTraining(out, before, after, perplexity, perplexity_after, trained, seconds)
