"""Trains heads that draft from a target's states: Medusa's residual blocks, and Hydra's, which also read tokens.

The state at token t predicts the root, t + 1; head i, counted from 0, predicts the token at t + 2 + i, as the target
would predict it after the tokens before that place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from edgeinfer.bundle.additions import STATE_EPS, Heads
from edgeinfer.errors import UsageError
from edgeinfer.export.training.losses import divergence
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.tasks import Batches
from edgeinfer.export.training.text import TokenFile, frequent_tokens
from edgeinfer.options import require

# A later place is reached less often, and counts so much less (Medusa).
_FADING = 0.8
# Windows that agreement is measured on.
_WINDOWS = 24
# Tokens that Hydra's heads guess unless told otherwise.
_HYDRA_TOKENS = 1024


@dataclass(frozen=True)
class HeadsShape:
    """How many heads there are, and which tokens they guess.

    Attributes:
        count: places that are guessed.
        tokens: that may be guessed, the most frequent ones; None is all of them by Medusa's heads, 1024 by Hydra's.
    """

    count: int = 3
    tokens: int | None = None

    def __post_init__(self) -> None:
        require(1 <= self.count <= 8, "count", self.count, "between 1 and 8")
        require(self.tokens is None or self.tokens >= 1, "tokens", self.tokens, "1 or more")


@torch.no_grad()
def final_states(model: Any, ids: torch.Tensor) -> torch.Tensor:  # (B, S) -> (B, S, D)
    """States after the final norm, as the model's head sees them."""
    states: torch.Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return states


def unit(states: torch.Tensor) -> torch.Tensor:  # (..., D) -> (..., D)
    """States divided by their root mean square."""
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + STATE_EPS)


def half(tensor: torch.Tensor) -> NDArray[np.float16]:
    """A tensor in the type that heads are stored in."""
    stored: NDArray[np.float16] = tensor.detach().cpu().numpy().astype(np.float16)
    return stored


def _ids(tokens: torch.Tensor) -> NDArray[np.int32]:  # (K,)
    stored: NDArray[np.int32] = tokens.cpu().numpy().astype(np.int32)
    return stored


class HeadsTask(ABC):
    """Heads over the states of a frozen target. Implements `trainer.Task`.

    Args:
        sources: what the target said and other text; they take turns.

    Raises:
        UsageError: there is too little text.
    """

    kind: str
    most_tokens: int | None = None  # that are guessed unless told otherwise; None is all

    def __init__(self, target: Target, sources: tuple[TokenFile, ...], batches: Batches, shape: HeadsShape) -> None:
        for tokens in sources:
            tokens.require(batches.length, "The text")
        if batches.length < shape.count + 2:
            raise UsageError(
                f"Windows of {batches.length} tokens are too short for {shape.count} heads.", "Use longer windows."
            )
        self.name = f"{self.kind} heads"
        self.shape = shape
        self._target, self._sources, self._batches = target, sources, batches
        model = target.model
        vocabulary = len(model.lm_head.weight)
        chosen = frequent_tokens(sources, min(vocabulary, shape.tokens or self.most_tokens or vocabulary))
        self._tokens = torch.from_numpy(chosen).to(target.device)  # (K,)
        self._rows = model.lm_head.weight.detach()[self._tokens]  # (K, D)
        self._norm = model.model.norm
        self._all = len(chosen) == vocabulary
        self._modules = self._make(self._rows.shape[1]).to(target.device)

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        digests = {"target": self._target.digest, "sources": [tokens.digest for tokens in self._sources]}
        return digests | self._batches.facts | asdict(self.shape)

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters of all heads."""
        return dict(self._modules.named_parameters())

    def loss(self, step: int) -> torch.Tensor:
        """Mean divergence of every head from the target's prediction at its place, later places counting less."""
        batch = self._batches.draw(self._sources[step % len(self._sources)], step, 0, self._target.device)
        read, said = self._states(batch)  # (B, S, D) each
        places, total, weights = batch.shape[1] - 1 - self.shape.count, torch.zeros((), device=batch.device), 0.0
        for head in range(self.shape.count):
            guessed = self._guess(head, read[:, :places], batch[:, 1:])  # (B, n, D)
            taught = said[:, 1 + head : 1 + head + places]
            weight = _FADING**head
            total = total + weight * divergence(guessed.flatten(0, 1), self._rows, taught.flatten(0, 1), self._rows)
            weights += weight
        return total / weights

    def heads(self, notes: Mapping[str, str]) -> Heads:
        """The trained heads as a bundle keeps them."""
        return Heads(self.kind, self._arrays(), notes)

    @torch.no_grad()
    def agreement(self, validation: TokenFile) -> tuple[float, ...]:
        """How often each head's likeliest token is the target's, on held-out text."""
        right = torch.zeros(self.shape.count, dtype=torch.float64)
        seen = 0
        for window in validation.windows(self._batches.length, _WINDOWS):
            batch = torch.from_numpy(window)[None].to(self._target.device)
            read, states = self._states(batch)
            said = (states @ self._target.model.lm_head.weight.T).argmax(-1)  # (1, S)
            places = batch.shape[1] - 1 - self.shape.count
            for head in range(self.shape.count):
                guessed = self._guess(head, read[:, :places], batch[:, 1:]) @ self._rows.T
                chosen = self._tokens[guessed.argmax(-1)]
                right[head] += float((chosen == said[:, 1 + head : 1 + head + places]).sum())
            seen += places
        return tuple((right / max(1, seen)).tolist())

    def _states(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # (B, S) -> (B, S, D) each
        """What heads read of the target's states, and what its own head does."""
        states = final_states(self._target.model, ids)
        return states, states

    @abstractmethod
    def _make(self, size: int) -> torch.nn.Module:
        """Makes untrained heads."""

    @abstractmethod
    def _guess(self, head: int, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """A head's output, which the rows multiply; of the tokens that follow it may see the first n + i.

        states (B, n, D), following (B, ...) -> (B, n, D)
        """

    @abstractmethod
    def _arrays(self) -> dict[str, NDArray[Any]]:
        """The heads' arrays, by the names that bundles use."""


class MedusaTask(HeadsTask):
    """Head i is the target's final norm over n + SiLU(W n + b), n being a state divided by its root mean square.

    Before training it gives what the target's own head sees. Implements `trainer.Task`.
    """

    kind = "medusa"

    def _make(self, size: int) -> torch.nn.Module:
        blocks = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(self.shape.count))
        for parameter in blocks.parameters():
            torch.nn.init.zeros_(parameter)
        return blocks

    @torch.no_grad()
    def _states(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # (B, S) -> (B, S, D) each
        kept: list[torch.Tensor] = []
        hook = self._norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
        try:
            said = final_states(self._target.model, ids)
        finally:
            hook.remove()
        return unit(kept[0]), said

    def _guess(self, head: int, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._modules, torch.nn.ModuleList)
        guessed: torch.Tensor = self._norm(states + F.silu(self._modules[head](states)))
        return guessed

    def _arrays(self) -> dict[str, NDArray[Any]]:
        values = dict(self._modules.named_parameters())
        heads = range(self.shape.count)
        arrays: dict[str, NDArray[Any]] = {
            "weight": half(torch.stack([values[f"{head}.weight"] for head in heads])),
            "bias": half(torch.stack([values[f"{head}.bias"] for head in heads])),
        }
        if self._all:
            return arrays
        return arrays | {"tokens": _ids(self._tokens), "rows": half(self._rows * self._norm.weight.detach())}


class _Block(torch.nn.Module):
    """P z + SiLU(W z + b), which is the state alone before training."""

    def __init__(self, size: int, inputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, size, inputs * size))
        self.bias = torch.nn.Parameter(torch.zeros(size))
        with torch.no_grad():
            self.weight[0, :, :size] = torch.eye(size)

    def forward(self, z: torch.Tensor) -> torch.Tensor:  # (..., inputs * D) -> (..., D)
        """The block's output."""
        projected: torch.Tensor = F.linear(z, self.weight[0]) + F.silu(F.linear(z, self.weight[1], self.bias))
        return projected


class HydraTask(HeadsTask):
    """Head i reads the state, the root and i tokens behind it; tokens that are not guessed enter as zeros.

    Implements `trainer.Task`.
    """

    kind = "hydra"
    most_tokens = _HYDRA_TOKENS

    def _make(self, size: int) -> torch.nn.Module:
        embedding = self._target.model.model.embed_tokens.weight.detach()  # (V, D)
        kept = embedding[self._tokens]
        self._known = torch.zeros_like(embedding)
        # Of the scale of states, whatever the model's own is; rounded as they will be stored.
        self._known[self._tokens] = unit(kept).half().float()
        return torch.nn.ModuleList(_Block(size, 2 + head) for head in range(self.shape.count))

    def _guess(self, head: int, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._modules, torch.nn.ModuleList)
        count = states.shape[1]
        seen = [self._known[following[:, place : place + count]] for place in range(1 + head)]
        guessed: torch.Tensor = self._modules[head](torch.cat([states, *seen], -1))
        return guessed

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {
            "norm": self._norm.weight.detach().cpu().numpy().astype(np.float32),
            "tokens": _ids(self._tokens),
            "rows": half(self._rows),
            "embeddings": half(self._known[self._tokens]),
        }
        for name, value in self._modules.named_parameters():
            head, part = name.split(".")
            arrays[f"{part}.{head}"] = half(value)
        return arrays
