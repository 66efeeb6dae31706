"""What training heads over a target's states has in common: batches, teachers, frequent tokens, how well heads guess.

The state behind the token at place t predicts the root, t + 1; head i, counted from 0, is to guess the token at
t + 2 + i, as the target would say it behind the tokens before that place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.bundle.heads import Heads
from edgeinfer.errors import UsageError
from edgeinfer.export.training.losses import divergence
from edgeinfer.export.training.options import require
from edgeinfer.export.training.target import Target
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.tokens import TokenFile

__all__ = ["HeadsShape", "HeadsTask", "final_states", "half"]

# A later place is reached less often, and counts so much less (Medusa).
_FADING = 0.8
# Windows that agreement is measured on.
_WINDOWS = 24
_MOST_ROWS = 1024


@dataclass(frozen=True)
class HeadsShape:
    """What heads are.

    Attributes:
        count: places that are guessed.
        tokens: that may be guessed, the most frequent ones; None is 1024, or all of a smaller vocabulary.
    """

    count: int = 3
    tokens: int | None = None

    def __post_init__(self) -> None:
        require(1 <= self.count <= 8, "count", self.count, "between 1 and 8")
        require(self.tokens is None or self.tokens >= 1, "tokens", self.tokens, "1 or more")

    def rows(self, vocabulary: int) -> int:
        """Tokens that may be guessed, of so many."""
        return min(vocabulary, self.tokens or _MOST_ROWS)


@torch.no_grad()
def final_states(model: Any, ids: torch.Tensor) -> torch.Tensor:  # (B, S) -> (B, S, D)
    """States after the final norm, as the model's head sees them."""
    states: torch.Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return states


def half(tensor: torch.Tensor) -> NDArray[np.float16]:
    """As heads are stored."""
    stored: NDArray[np.float16] = tensor.detach().cpu().numpy().astype(np.float16)
    return stored


class HeadsTask(ABC):
    """Heads over the states of a frozen target. Implements `trainer.Task`.

    Args:
        sources: what the target said and other text; they take turns.

    Raises:
        UsageError: there is too little text.
    """

    kind: str

    def __init__(self, target: Target, sources: tuple[TokenFile, ...], batches: Batches, shape: HeadsShape) -> None:
        for tokens in sources:
            tokens.require(batches.length, "The text")
        if batches.length < shape.count + 2:
            raise UsageError(f"Windows of {batches.length} tokens are too short for {shape.count} heads.", "Use more.")
        self.name = f"{self.kind} heads"
        self.shape = shape
        self._target, self._sources, self._batches = target, sources, batches
        model = target.model
        self._tokens = _frequent(sources, shape.rows(model.lm_head.weight.shape[0]))  # (K,)
        self._rows = model.lm_head.weight.detach()[self._tokens]  # (K, D)
        self._norm = model.model.norm.weight.detach()
        self._modules = self._make(self._rows.shape[1]).to(target.device)

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        digests = {"target": self._target.digest, "sources": [tokens.digest for tokens in self._sources]}
        return digests | self._batches.facts | asdict(self.shape)

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Those of all heads."""
        return dict(self._modules.named_parameters())

    def loss(self, step: int) -> torch.Tensor:
        """Mean divergence of every head from what the target says at its place, later places counting less."""
        batch = self._batches.draw(self._sources[step % len(self._sources)], step, 0, self._target.device)
        states = final_states(self._target.model, batch)  # (B, S, D)
        places, total, weights = batch.shape[1] - 1 - self.shape.count, torch.zeros((), device=batch.device), 0.0
        for head in range(self.shape.count):
            guessed = self._guess(head, states[:, :places], batch[:, 1:])  # (B, n, D)
            taught = states[:, 1 + head : 1 + head + places]
            weight = _FADING**head
            total = total + weight * divergence(guessed.flatten(0, 1), self._rows, taught.flatten(0, 1), self._rows)
            weights += weight
        return total / weights

    def heads(self, notes: Mapping[str, str]) -> Heads:
        """What was trained, as a bundle keeps it."""
        shared = {
            "norm": self._norm.cpu().numpy().astype(np.float32),
            "tokens": self._tokens.cpu().numpy().astype(np.int32),
            "rows": half(self._rows),
        }
        return Heads(self.kind, shared | self._arrays(), notes)

    @torch.no_grad()
    def agreement(self, held_out: TokenFile) -> tuple[float, ...]:
        """How often each head's likeliest token is the target's, on text it was not trained on."""
        right = torch.zeros(self.shape.count, dtype=torch.float64)
        seen = 0
        for window in held_out.windows(self._batches.length, _WINDOWS):
            batch = torch.from_numpy(window)[None].to(self._target.device)
            states = final_states(self._target.model, batch)
            said = (states @ self._target.model.lm_head.weight.T).argmax(-1)  # (1, S)
            places = batch.shape[1] - 1 - self.shape.count
            for head in range(self.shape.count):
                guessed = self._guess(head, states[:, :places], batch[:, 1:]) @ self._rows.T
                chosen = self._tokens[guessed.argmax(-1)]
                right[head] += float((chosen == said[:, 1 + head : 1 + head + places]).sum())
            seen += places
        return tuple((right / max(1, seen)).tolist())

    @abstractmethod
    def _make(self, size: int) -> torch.nn.Module:
        """Heads that have learnt nothing."""

    @abstractmethod
    def _guess(self, head: int, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """What a head makes of states for the rows to multiply; of the tokens behind them it may see the first n + i.

        states (B, n, D), following (B, ...) -> (B, n, D)
        """

    @abstractmethod
    def _arrays(self) -> dict[str, NDArray[Any]]:
        """What the heads are, by the names that bundles know."""


def _frequent(sources: tuple[TokenFile, ...], count: int) -> torch.Tensor:  # (K,)
    """The most frequent tokens, ascending; of equals the lower ids."""
    most = max(int(tokens.ids.max()) for tokens in sources) + 1
    counts = sum(np.bincount(tokens.ids, minlength=max(most, count)) for tokens in sources)
    chosen = np.argsort(-np.asarray(counts), kind="stable")[:count]
    return torch.from_numpy(np.sort(chosen).astype(np.int64))
