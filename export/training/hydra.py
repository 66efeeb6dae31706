"""Trains a Hydra++ module for a target: heads over a prefix layer, each of which knows the tokens before its own.

Head i of a row reads the prefix of the text up to that row, the token behind it and i further ones, and learns what the
target says then: the teacher loss alone, as Ankner et al. 2024 found best, among the tokens that the module can draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from edgeinfer.bundle.spec import MOST_DRAFT_HEADS, MOST_HEAD_LAYERS
from edgeinfer.errors import UsageError
from edgeinfer.export.training.chain_task import ChainTask, Taught, drafted_tokens
from edgeinfer.export.training.hydra_heads import HydraModule, HydraShape
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.module_training import ModuleTraining, sizes_like, train_module
from edgeinfer.export.training.options import DraftTrainOptions
from edgeinfer.export.training.samples import Replier
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TextSource, TokenFile
from edgeinfer.options import require
from edgeinfer.results import Progress

_USUAL_EPS = 1e-5


@dataclass(frozen=True)
class HydraOptions(DraftTrainOptions):
    """How a module is trained.

    Attributes:
        count: heads, which are as many tokens as a draft has; the paper's are 4.
        layers: of each head; the paper's have 4.
        tokens: that can be drafted, the most frequent ones; None is 32,000, or half of a smaller vocabulary.
    """

    count: int = 4
    layers: int = 4
    tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.count <= MOST_DRAFT_HEADS, "count", self.count, f"from 1 to {MOST_DRAFT_HEADS}")
        require(1 <= self.layers <= MOST_HEAD_LAYERS, "layers", self.layers, f"from 1 to {MOST_HEAD_LAYERS}")
        require(self.tokens is None or self.tokens >= 1, "tokens", self.tokens, "1 or more")
        require(self.length >= 2 * self.count, "length", self.length, f"{2 * self.count} or more")

    def shape(self, target: Target) -> HydraShape:
        """The sizes of a module for a target, whose own layers its prefix layer resembles."""
        sizes, config = sizes_like(target), target.config.get_text_config()
        return HydraShape(
            **sizes,
            drafted=drafted_tokens(self.tokens, sizes["vocabulary"]),
            places=self.count,
            layers=self.layers,
            eps=float(getattr(config, "rms_norm_eps", _USUAL_EPS)),
        )


class HydraPlusTask(ChainTask):
    """A module over a frozen target; arguments as `ModuleTask`, and its shape.

    Raises:
        UsageError: there is too little text, or the target's last states are not normed as those of most models.
    """

    name = "Hydra++"
    module: HydraModule

    def __init__(self, target: Target, sources: tuple[TokenFile, ...], batches: Batches, shape: HydraShape) -> None:
        super().__init__(target, sources, batches, {}, shape.places, shape.drafted)
        self._state_norm = _final_norm(target, shape.width)
        self.module = self._draw(lambda: HydraModule(shape, self._first_head()))

    def save(self, folder: Path) -> None:
        """As `ModuleTask.save`."""
        self.module.save(folder, self.tokens, self._state_norm)

    def _read_states(self, output: Any) -> Tensor:  # (1, S, D)
        # transformers gives the last one behind the final norm.
        states: Tensor = output.hidden_states[-1].float()
        return states

    def _unrolled(self, batch: Tensor, taught: Taught) -> list[Tensor]:
        rows = self._rows(batch)
        prefix, embedded = self.module.prefix(taught.states[:, :rows]), F.embedding(batch, self._embedding)
        behind = [embedded[:, 1 + place : 1 + place + rows] for place in range(self._places)]
        return [self.module.at(place, prefix, behind[: 1 + place]) for place in range(self._places)]


@torch.no_grad()
def _final_norm(target: Target, width: int) -> Tensor:  # (D,)
    """The weight of a target's final norm, which is what that makes of ones."""
    norm, ones = getattr(target.model.model, "norm", None), torch.ones(width, device=target.device)
    weight: Tensor | None = None if norm is None else norm(ones).float()
    if norm is None or weight is None or not weight.any() or not torch.equal(norm(-ones).float(), -weight):
        message = f"{target.folder} norms its last states in a way of its own, which a Hydra++ module cannot read."
        raise UsageError(message, "Train another drafter: edgeinfer distill eagle.")
    return weight


def train_hydra(
    target: Target,
    text: TextSource,
    options: HydraOptions,
    work: Path,
    replier: Replier | None = None,
    progress: Progress | None = None,
) -> ModuleTraining:
    """Trains a module in a working folder, or resumes the training that was interrupted there; as `train_module`."""

    def make(sources: tuple[TokenFile, ...]) -> HydraPlusTask:
        return HydraPlusTask(target, sources, Batches.of(options), options.shape(target))

    return train_module("hydra", make, target, text, options, work, replier, progress)
