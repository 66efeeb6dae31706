"""Trains draft modules, which read a target's states: text, the target's replies, as many steps as fit.

What is specific to a kind of modules are its options and its task.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.export.training.layers import ShapedModule
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.options import DraftTrainOptions
from edgeinfer.export.training.samples import Replier, SampleOptions, TorchReplier, open_text, sample
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TextSource, TokenFile
from edgeinfer.export.training.trainer import Trained, Trainer, kept_schedule, step_seconds
from edgeinfer.results import Progress

# Of text and replies, what is kept for measuring; windows that are read for it.
_VALIDATION, _MEASURED_WINDOWS = 0.04, 24
# Share of the minutes in which the target writes replies, and how many of them tell what a token takes.
_SAMPLING, _FEW = 0.2, 6

M = TypeVar("M", bound=ShapedModule)


class ModuleTask(ABC):
    """A module over a frozen target. Implements `trainer.Task`.

    Args:
        sources: what the target said and other text; they take turns.
        settings: what the result depends on, besides the sizes of the module.

    Raises:
        UsageError: there is too little text.
    """

    name: str
    module: ShapedModule
    steps = 1  # of the whole training

    def __init__(
        self, target: Target, sources: tuple[TokenFile, ...], batches: Batches, settings: Mapping[str, Any]
    ) -> None:
        for tokens in sources:
            tokens.require(batches.length, "The text")
        self._target, self._sources, self._batches, self._settings = target, sources, batches, settings

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        digests = {"target": self._target.digest, "sources": [tokens.digest for tokens in self._sources]}
        return digests | self._batches.facts | self.sizes | dict(self._settings)

    @property
    def sizes(self) -> dict[str, Any]:
        """Of the module, for a report."""
        fields = asdict(self.module.shape).items()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields}

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """All parameters of the module."""
        return dict(self.module.named_parameters())

    @abstractmethod
    def loss(self, step: int) -> torch.Tensor:
        """As `Task.loss`."""

    @abstractmethod
    def agreement(self, validation: TokenFile) -> tuple[float, ...]:
        """How often its likeliest token is the target's, by place of a draft that was right so far."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the module in its published layout."""

    def _draw(self, make: Callable[[], M]) -> M:
        """A module whose initial values depend on the seed alone, where the target is."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._batches.seed)
            return make().to(self._target.device)

    def _batch(self, step: int) -> torch.Tensor:  # (B, S)
        """The windows of a step."""
        return self._batches.draw(self._sources[step % len(self._sources)], step, 0, self._target.device)

    def _kept(self, validation: TokenFile) -> Iterator[torch.Tensor]:  # (1, S) each
        """The windows that agreement is measured on."""
        for window in validation.windows(self._batches.length, _MEASURED_WINDOWS):
            yield torch.from_numpy(window)[None].to(self._target.device)


@dataclass(frozen=True)
class ModuleTraining:
    """A trained module.

    Attributes:
        checkpoint: its folder, in the published layout.
        before, after: as `ModuleTask.agreement`, on text that was kept for measuring.
        seconds: in all, since it was last started.
        prompts: that were not sampled from, for measuring on an engine. (n,) each
    """

    checkpoint: Path
    sizes: dict[str, Any]
    before: tuple[float, ...]
    after: tuple[float, ...]
    trained: Trained
    seconds: float
    prompts: Sequence[NDArray[Any]]

    def facts(self) -> dict[str, Any]:
        """The facts of a report."""
        return {
            "shape": self.sizes,
            "before": list(self.before),
            "after": list(self.after),
            "steps": len(self.trained.losses),
            "resumed_at": self.trained.resumed_at,
            "final_loss": self.trained.final_loss,
            "seconds": round(self.seconds, 1),
            "losses": list(self.trained.losses),
        }


def train_module(
    kind: str,
    make: Callable[[tuple[TokenFile, ...]], ModuleTask],
    target: Target,
    text: TextSource,
    options: DraftTrainOptions,
    work: Path,
    replier: Replier | None,
    progress: Progress | None,
) -> ModuleTraining:
    """Trains a module in a working folder, or resumes the training that was interrupted there.

    Args:
        replier: draws the target's replies; None draws them in torch.
    """
    started = time.monotonic()
    material = open_text(text, work, options.length, options.threads)
    drawer: Replier = replier or TorchReplier(target)
    schedule = _schedule(options, work, lambda: make((material.tokens,)), drawer, material.asked)
    sources = [material.tokens]
    if schedule["samples"]:
        drawn = SampleOptions(max(schedule["samples"], 8 * options.length), seed=options.seed)
        sources.insert(0, sample(drawer, material.asked, drawn, work / "samples", target.digest, progress))
    halves = [each.split(_VALIDATION) for each in sources]
    validation = halves[0][1]
    validation.require(options.length, "What is kept for measuring")
    task = make(tuple(most for most, _ in halves))
    task.steps = schedule["steps"]
    before = task.agreement(validation)
    trained = Trainer(task, options.training(schedule["steps"]), work / kind).run(progress)
    after = task.agreement(validation)
    checkpoint = work / "checkpoint"
    task.save(checkpoint)
    seconds = time.monotonic() - started
    return ModuleTraining(checkpoint, task.sizes, before, after, trained, seconds, material.kept)


def _schedule(
    options: DraftTrainOptions,
    work: Path,
    tried: Callable[[], ModuleTask],
    replier: Replier,
    prompts: Sequence[NDArray[np.int64]],
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


def sizes_like(target: Target) -> dict[str, int]:
    """The sizes of a module whose layers resemble its target's, by the names that shapes have for them."""
    config = target.config.get_text_config()
    heads = config.num_attention_heads
    return {
        "width": config.hidden_size,
        "inner": config.intermediate_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocabulary": config.vocab_size,
    }
