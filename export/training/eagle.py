"""Trains an EAGLE-3 head for a target by training-time test: on states of its own, as it drafts (Li et al. 2025).

The row of a token reads its embedding and the state before it: the target's in the first of some steps, the head's own
of the step before in each further one, in which every row goes one token on. So all drafts of a window, one behind each
of its tokens, are learnt from together. The loss is the divergence from the target's probabilities among the tokens
that the head can draft, where the target's likeliest is one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from edgeinfer.export.training.chain_task import ChainTask, Taught, drafted_tokens
from edgeinfer.export.training.eagle_head import EagleHead, HeadShape, default_taps
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.module_training import ModuleTraining, sizes_like, train_module
from edgeinfer.export.training.options import DraftTrainOptions
from edgeinfer.export.training.samples import Replier
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TextSource, TokenFile
from edgeinfer.options import require
from edgeinfer.results import Progress


@dataclass(frozen=True)
class EagleOptions(DraftTrainOptions):
    """How a head is trained.

    Attributes:
        depth: steps of drafting that a window is unrolled over.
        tokens: that the head can draft, the most frequent ones; None is 32,000, or half of a smaller vocabulary.
        taps: layers of the target before which states are read; None is `default_taps`.
    """

    depth: int = 5
    tokens: int | None = None
    taps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.depth <= 16, "depth", self.depth, "from 1 to 16")
        require(self.tokens is None or self.tokens >= 1, "tokens", self.tokens, "1 or more")
        require(self.length >= 2 * self.depth, "length", self.length, f"{2 * self.depth} or more")

    def shape(self, target: Target) -> HeadShape:
        """The sizes of a head for a target, whose own layers it resembles."""
        sizes, layers = sizes_like(target), target.config.get_text_config().num_hidden_layers
        drafted = drafted_tokens(self.tokens, sizes["vocabulary"])
        return HeadShape(**sizes, drafted=drafted, taps=self.taps or default_taps(layers))


class EagleTask(ChainTask):
    """A head over a frozen target; arguments as `ModuleTask`, and:

    Args:
        depth: as EagleOptions.
    """

    name = "EAGLE-3"
    module: EagleHead

    def __init__(
        self, target: Target, sources: tuple[TokenFile, ...], batches: Batches, shape: HeadShape, depth: int
    ) -> None:
        super().__init__(target, sources, batches, {"depth": depth}, depth, shape.drafted)
        self.module = self._draw(lambda: EagleHead(shape, self._first_head()))

    def save(self, folder: Path) -> None:
        """As `ModuleTask.save`."""
        self.module.save(folder, self.tokens)

    def _read_states(self, output: Any) -> Tensor:  # (1, S, W)
        return torch.cat([output.hidden_states[tap].float() for tap in self.module.shape.taps], -1)

    def _unrolled(self, batch: Tensor, taught: Taught) -> list[Tensor]:
        rows = self._rows(batch)
        states, past = self.module.states(taught.states[:, :rows]), list[tuple[Tensor, Tensor]]()
        found = []
        for place in range(self._places):
            embedded = F.embedding(batch[:, 1 + place : 1 + place + rows], self._embedding)
            states = self.module.step(states, embedded, past)
            found.append(self.module.norm(states))
        return found


def train_eagle(
    target: Target,
    text: TextSource,
    options: EagleOptions,
    work: Path,
    replier: Replier | None = None,
    progress: Progress | None = None,
) -> ModuleTraining:
    """Trains a head in a working folder, or resumes the training that was interrupted there; as `train_module`."""

    def make(sources: tuple[TokenFile, ...]) -> EagleTask:
        return EagleTask(target, sources, Batches.of(options), options.shape(target), options.depth)

    return train_module("eagle", make, target, text, options, work, replier, progress)
