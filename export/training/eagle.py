"""Trains an EAGLE-3 head for a target by training-time test: on states of its own, as it drafts (Li et al. 2025).

The row of a token reads its embedding and the state before it: the target's in the first of some steps, the head's own
of the step before in each further one, in which every row goes one token on. So all drafts of a window, one behind each
of its tokens, are learnt from together. The loss is the divergence from the target's probabilities among the tokens
that the head can draft, where the target's likeliest is one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from edgeinfer.errors import UsageError
from edgeinfer.export.training.eagle_head import EagleHead, HeadShape, default_taps
from edgeinfer.export.training.losses import divergence_from_logits
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.module_training import (
    MEASURED_WINDOWS,
    ModuleOptions,
    ModuleTraining,
    sizes_like,
    sizes_of,
    train_module,
)
from edgeinfer.export.training.options import require
from edgeinfer.export.training.samples import Replier
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TextSource, TokenFile, frequent_tokens
from edgeinfer.results import Progress

__all__ = ["EagleOptions", "EagleTask", "train_eagle"]

# What a later step counts less than the one before (eagle/traineagle3/main.py).
_FADING = 0.8
_MOST_TOKENS = 32_000


@dataclass(frozen=True)
class EagleOptions(ModuleOptions):
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
        drafted = self.tokens or min(_MOST_TOKENS, sizes["vocabulary"] // 2)
        return HeadShape(**sizes, drafted=drafted, taps=self.taps or default_taps(layers))


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
    """A head over a frozen target. Implements `ModuleTask`.

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
        return digests | self._batches.facts | self.sizes | {"depth": self._depth}

    @property
    def sizes(self) -> dict[str, Any]:
        """Of the head, for a report."""
        return sizes_of(self.head.shape)

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
        for window in validation.windows(self._batches.length, MEASURED_WINDOWS):
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

    def save(self, folder: Path) -> None:
        """As `ModuleTask.save`."""
        self.head.save(folder, self.tokens)

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
        return EagleTask(target, sources, options.batches, options.shape(target), options.depth)

    return train_module("eagle", make, target, text, options, work, replier, progress)
