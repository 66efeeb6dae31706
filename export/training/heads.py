"""A whole training of heads: its text and replies, its task, its result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from edgeinfer.bundle.additions import JUDGED, TRUSTED, Heads
from edgeinfer.bundle.writing import storage_errors
from edgeinfer.errors import UsageError
from edgeinfer.export.training.acceptance_head import AcceptanceHeadTask
from edgeinfer.export.training.draft_heads import HeadsShape, HydraTask, MedusaTask
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.options import TrainOptions
from edgeinfer.export.training.prompt_tokens import PromptTask
from edgeinfer.export.training.routers import RoutersTask, SkipAdapterTask
from edgeinfer.export.training.samples import Replier, SampleOptions, TorchReplier, sample
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TextSource, TokenFile
from edgeinfer.export.training.trainer import Task, Trained, Trainer
from edgeinfer.options import require
from edgeinfer.results import Progress

# Of the text and of the replies, what is kept for measuring.
_VALIDATION = 0.05
_PROMPTS = 4000
# Windows of text at least, and of replies, so that one of them is kept for measuring.
_FEWEST_WINDOWS, _FEWEST_DRAWN = 4, int(1 / _VALIDATION)
_DRAFTING = ("medusa", "hydra", "prompt")
_KINDS = (*_DRAFTING, "acceptance", "routers")
# Embeddings of their own learn faster than matrices bear; routers are a handful of numbers.
_RATES = {"medusa": 2e-3, "hydra": 2e-3, "prompt": 1e-2, "acceptance": 2e-3, "routers": 2e-2, "adapter": 1e-3}


@dataclass(frozen=True)
class HeadsOptions:
    """How heads are trained.

    Attributes:
        kind: one of bundle.heads.HEADS but for "judge", which `edgeinfer tune --judge` teaches.
        steps: of the optimizer.
        samples: tokens that the target writes, which take turns with the text; 0 trains on the text alone. None is a
            tenth of what the training reads for heads that draft (Medusa's self-distillation), and none for others.
        rows, length: windows of a step and their tokens.
        learning_rate: at its highest; None is usual for the kind.
        count, tokens: as HeadsShape.
        keep: as RoutersTask.
        adapter_rank: of an adapter that is trained behind routers, for as many steps; 0 trains none.
        device, threads: as TrainOptions.
    """

    kind: str
    steps: int = 600
    samples: int | None = None
    rows: int = 8
    length: int = 128
    learning_rate: float | None = None
    count: int = 3
    tokens: int | None = None
    keep: float = 0.75
    adapter_rank: int = 0
    seed: int = 0
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        require(self.kind in _KINDS, "kind", self.kind, f"one of {', '.join(_KINDS)}")
        require(self.samples is None or self.samples >= 0, "samples", self.samples, "0 or more")
        require(0 <= self.adapter_rank <= 512, "adapter_rank", self.adapter_rank, "from 0 to 512")
        for name, least in (("rows", 1), ("length", 8)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"{least} or more")

    @property
    def drawn(self) -> int:
        """Tokens that the target writes."""
        if self.samples is None:
            return self.steps * self.rows * self.length // 10 if self.kind in _DRAFTING else 0
        return self.samples

    @property
    def training(self) -> TrainOptions:
        """The trainer's options."""
        return TrainOptions(
            self.steps,
            self.learning_rate or _RATES[self.kind],
            weight_decay=0.0,
            warmup=min(20, max(1, self.steps // 10)),
            seed=self.seed,
            device=self.device,
            threads=self.threads,
        )


class _HeadsTask(Task, Protocol):
    """A task that makes heads."""

    def heads(self, notes: dict[str, str]) -> Heads:
        """The trained heads."""


@dataclass(frozen=True)
class HeadsTraining:
    """Trained heads.

    Attributes:
        heads: as a bundle keeps them.
        before, after: how well they do on text that was kept for measuring, by name: of heads that draft, the share of
            their likeliest tokens that are the target's, by place.
        seconds: in all, since it was last started.
        prompts: for measuring on an engine. (n,) each
        adapter: that goes with routers; None where none was trained.
    """

    heads: Heads
    before: dict[str, float]
    after: dict[str, float]
    trained: Trained
    seconds: float
    prompts: Sequence[NDArray[Any]]
    adapter: SkipAdapterTask | None = None

    def facts(self) -> dict[str, Any]:
        """The facts of a report."""
        return {
            "kind": self.heads.kind,
            "bytes": len(self.heads.to_bytes()),
            "before": self.before,
            "after": self.after,
            "steps": len(self.trained.losses),
            "resumed_at": self.trained.resumed_at,
            "final_loss": self.trained.final_loss,
            "seconds": round(self.seconds, 1),
            "losses": list(self.trained.losses),
        }


def train_heads(
    target: Target,
    text: TextSource,
    options: HeadsOptions,
    work: Path,
    *,
    drafter: Target | None = None,
    replier: Replier | None = None,
    progress: Progress | None = None,
) -> HeadsTraining:
    """Trains heads in a working folder, or resumes the training that was interrupted there.

    Args:
        replier: draws the target's replies; None draws them in torch.
    """
    started = time.monotonic()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with storage_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    sources = [text.tokens(work)]
    sources[0].require(_FEWEST_WINDOWS * options.length, "The text")
    prompts = text.prompts(_PROMPTS)
    asked, kept = [p for i, p in enumerate(prompts) if i % 20], prompts[::20]
    if options.drawn:
        drawn = SampleOptions(max(options.drawn, _FEWEST_DRAWN * options.length), seed=options.seed)
        replies = sample(replier or TorchReplier(target), asked, drawn, work / "samples", target.digest, progress)
        sources.insert(0, replies)
    halves = [tokens.split(_VALIDATION) for tokens in sources]
    learnt, validation = tuple(most for most, _ in halves), halves[0][1]
    validation.require(options.length, "What is kept of the text for measuring")
    task = _make(target, drafter, learnt, options)
    before = _figures(task, validation)
    trained = Trainer(task, options.training, work / options.kind).run(progress)
    after = _figures(task, validation)
    adapter = None
    if isinstance(task, RoutersTask) and options.adapter_rank:
        adapter = SkipAdapterTask(task, options.adapter_rank)
        rate = replace(options, learning_rate=options.learning_rate or _RATES["adapter"])
        Trainer(adapter, rate.training, work / "adapter").run(progress)
        lost, layers = task.figures(validation, adapter)
        after |= {"divergence with the adapter": lost, "layers kept with the adapter": layers}
    notes = {name: f"{value:.4f}" for name, value in after.items()} | {"target": target.digest}
    seconds = time.monotonic() - started
    return HeadsTraining(task.heads(notes), before, after, trained, seconds, kept or prompts, adapter)


def _make(target: Target, drafter: Target | None, learnt: tuple[TokenFile, ...], options: HeadsOptions) -> _HeadsTask:
    batches, shape = Batches(options.seed, options.rows, options.length), HeadsShape(options.count, options.tokens)
    if options.kind == "acceptance":
        if drafter is None:
            raise UsageError("An acceptance predictor needs a drafter, but none was given.", "Name the drafter.")
        return AcceptanceHeadTask(drafter, target, learnt, batches)
    if options.kind == "routers":
        return RoutersTask(target, learnt, batches, options.keep)
    if options.kind == "prompt":
        return PromptTask(target, learnt, batches, shape)
    return (MedusaTask if options.kind == "medusa" else HydraTask)(target, learnt, batches, shape)


def _figures(task: _HeadsTask, validation: TokenFile) -> dict[str, float]:
    if isinstance(task, AcceptanceHeadTask):
        judged, trusted = task.curves(validation)
        return {JUDGED: judged, TRUSTED: trusted}
    if isinstance(task, RoutersTask):
        lost, kept = task.figures(validation)
        return {"divergence in nats": lost, "layers kept": kept}
    assert isinstance(task, MedusaTask | HydraTask | PromptTask)
    return {f"agreement at place {place + 1}": share for place, share in enumerate(task.agreement(validation))}
