"""What trainings of modules share that draft token by token among the most frequent tokens: their loss and measure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgeinfer.errors import UsageError
from edgeinfer.export.training.layers import ChainModule
from edgeinfer.export.training.losses import divergence_from_logits
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.module_training import ModuleTask
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TokenFile, frequent_tokens

# What a later place counts less than the one before (eagle/traineagle3/main.py).
_FADING = 0.8
_MOST_TOKENS = 32_000


def drafted_tokens(asked: int | None, vocabulary: int) -> int:
    """How many tokens a module can draft: as many as asked for, or 32,000, or half of a smaller vocabulary."""
    return asked or min(_MOST_TOKENS, vocabulary // 2)


@dataclass(frozen=True)
class Taught:
    """What a target says of windows.

    Attributes:
        states: what the module reads of the target. (B, S, W)
        logits: of the tokens that can be drafted. (B, S, Vd)
        known: whether the likeliest token of all is one of them. (B, S)
    """

    states: Tensor
    logits: Tensor
    known: Tensor


class ChainTask(ModuleTask):
    """A module that drafts token by token, over a frozen target; arguments as its base, and:

    Args:
        places: tokens of a draft that are learnt from.
        drafted: tokens that it can draft, the most frequent ones.
    """

    module: ChainModule

    def __init__(
        self,
        target: Target,
        sources: tuple[TokenFile, ...],
        batches: Batches,
        settings: Mapping[str, Any],
        places: int,
        drafted: int,
    ) -> None:
        super().__init__(target, sources, batches, settings)
        self._places = places
        self.tokens = torch.from_numpy(frequent_tokens(sources, drafted)).to(target.device)  # (Vd,)
        self._embedding = target.model.get_input_embeddings().weight.detach()  # (V, D)

    @abstractmethod
    def _read_states(self, output: Any) -> Tensor:  # (1, S, W)
        """What the module reads of what the target's code gives."""

    @abstractmethod
    def _unrolled(self, batch: Tensor, taught: Taught) -> list[Tensor]:
        """What the head multiplies at each place of a draft, behind each row of windows (B, S). places of (B, R, D)"""

    def _first_head(self) -> Tensor:  # (Vd, D)
        """The target's rows of the tokens that can be drafted, with which a module's own begin."""
        rows: Tensor = self._target.model.get_output_embeddings().weight.detach()[self.tokens]
        return rows.cpu()

    def _rows(self, batch: Tensor) -> int:
        """R, the rows of windows (B, S) behind which a whole draft is known."""
        return batch.shape[1] - self._places - 1

    def loss(self, step: int) -> Tensor:
        """Mean divergence from the target at every place, later ones counting less."""
        batch = self._batch(step)
        taught = self._read(batch)
        total, weights = torch.zeros((), device=batch.device), 0.0
        for place, states in enumerate(self._unrolled(batch, taught)):
            wanted, known = self._at(taught, place)
            if known.any():
                weight = _FADING**place
                lost = divergence_from_logits(states[known], self.module.lm_head.weight, wanted[known])
                total, weights = total + weight * lost, weights + weight
        if not weights:
            raise UsageError("The drafter can draft none of the tokens that the model says.", "Give more text.")
        return total / weights

    @torch.no_grad()
    def agreement(self, validation: TokenFile) -> tuple[float, ...]:
        """How often the likeliest token is the target's at each place of a draft that was right so far."""
        right, reached = np.zeros(self._places), np.zeros(self._places)
        for batch in self._kept(validation):
            taught = self._read(batch)
            going: Tensor | None = None
            for place, states in enumerate(self._unrolled(batch, taught)):
                wanted, known = self._at(taught, place)
                same = known & ((states @ self.module.lm_head.weight.T).argmax(-1) == wanted.argmax(-1))
                # The text went on as the target would have.
                going = torch.ones_like(same) if going is None else going
                right[place] += float((same & going).sum())
                reached[place] += float(going.sum())
                said = self.tokens[wanted.argmax(-1)] == batch[:, 2 + place :][:, : same.shape[1]]
                going = going & same & said
        return tuple((right / np.maximum(reached, 1)).tolist())

    @torch.no_grad()
    def _read(self, batch: Tensor) -> Taught:  # (B, S)
        """A window at a time, so that few logits are in memory."""
        found = []
        for window in batch[:, None]:  # (1, S)
            output = self._target.model(window, output_hidden_states=True, use_cache=False)
            logits = output.logits.float()
            chosen = logits[..., self.tokens]
            found.append((self._read_states(output), chosen, chosen.amax(-1) == logits.amax(-1)))
        return Taught(*(torch.cat(part) for part in zip(*found, strict=True)))

    def _at(self, taught: Taught, place: int) -> tuple[Tensor, Tensor]:  # (B, R, Vd), (B, R)
        """What the target says after the tokens that are known at a place."""
        rows = slice(1 + place, taught.known.shape[1] - self._places + place)
        return taught.logits[:, rows], taught.known[:, rows]
